"""Flat vectors: parameters and buffers as rows, and back."""

import pytest
import torch
from torch import nn

from fedbc_lightning import ConfigurationError
from fedbc_lightning.state.layout import ParameterLayout


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_row_and_the_module_share_memory():
    module = two_layers()
    layout = ParameterLayout(module, [list(module.parameters())])
    before = layout.read()
    row = before.clone()
    layout.attach(row)
    assert layout.is_attached(row)
    row.zero_()
    assert all(not p.any() for p in module.parameters())
    row.copy_(before)
    torch.testing.assert_close(layout.read(), before, rtol=0, atol=0)
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    assert not ParameterLayout(module).is_attached(row)


def test_groups_are_slices_and_ungrouped_parameters_stand_at_the_end():
    module = two_layers()
    groups = [[module[2].bias, module[2].weight], [module[0].weight]]
    layout = ParameterLayout(module, groups)
    assert [e.name for e in layout.entries] == ["2.weight", "2.bias", "0.weight", "0.bias", "1.weight", "1.bias"]
    assert layout.group_parts == [[slice(0, 10)], [slice(10, 22)]]
    assert layout.num_optimized == 22
    assert layout.num_parameters == 34


def test_gradients_are_gathered_and_a_missing_one_is_noticed():
    module = two_layers()
    layout = ParameterLayout(module, [list(module.parameters())])
    module(torch.randn(5, 3)).square().sum().backward()
    out = torch.empty(layout.num_optimized)
    assert layout.gather_gradients(out)
    expected = torch.cat([p.grad.reshape(-1) for p in layout.parameters])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    module[0].bias.grad = None
    assert not layout.gather_gradients(out)
    assert [layout.entries[k].name for k in layout.collect_gradients(out)] == ["0.bias"]
    bias = layout.entries[1]
    expected[bias.offset : bias.end] = 0
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_named_slices_are_clones_and_come_back_by_name():
    layout = ParameterLayout(two_layers())
    z = torch.arange(float(layout.num_parameters))
    named = layout.named_slices(z)
    assert named["0.weight"].untyped_storage().nbytes() == 12 * 4
    reordered = dict(reversed(named.items()))
    assert torch.equal(layout.vector_from(reordered), z)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_twice_in_a_group_is_refused():
    layer = nn.Linear(2, 2)
    groups = torch.optim.SGD([layer.weight, layer.bias, layer.weight], lr=0.1).param_groups
    with pytest.raises(ConfigurationError, match="a parameter stands twice in the groups of the optimizer"):
        ParameterLayout(layer, [group["params"] for group in groups])


def test_tied_weights_are_one_entry():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    layout = ParameterLayout(module)
    assert layout.num_parameters == 9 + 3 + 3
    layout.attach(layout.read().zero_())
    assert not module[1].weight.any()
