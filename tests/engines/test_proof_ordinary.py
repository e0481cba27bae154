"""Ordinary ways to write a step are proven, with the numbers of the step as written; their stateful twins are not."""

import pytest
import torch
from helpers.boring import assert_equal_trees
from helpers.stateful_steps import Plain
from test_proof import proof_of
from test_proof_reach import run
from torch import nn

from fedbc_lightning.engines.recorded import step_recorder
from fedbc_lightning.engines.recorded.recording import NotRecordableError


def unpacked_maximum(module):
    values, indices = torch.max(module.net[0].weight, 1)
    return values.mean() + 0 * indices.float().mean()


def sorted_values(module):
    return sum(part.float().mean() for part in torch.sort(module.net[0].weight, dim=1))


def best(module):
    return module.net[0].weight.topk(2, dim=1)[0].mean()


def loss_in_the_step(module):
    return nn.SmoothL1Loss(beta=0.5)(module.net[0].weight, torch.zeros(8, 10))


def weighted_loss_in_the_step(module):
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0] * 9 + [2.0]), label_smoothing=0.1)
    return loss(module.net[0].weight, torch.arange(8))


def activation_in_the_step(module):
    return nn.Softplus()(module.net[0].weight).mean()


def kept_maximum(module):
    values, module.kept = torch.max(module.net[0].weight, 1)
    return values.mean()


def kept_loss(module):
    module.__dict__["loss"] = nn.SmoothL1Loss()
    return 1.0


def changed_loss(module):
    loss = nn.SmoothL1Loss()
    loss.beta = 0.5
    return loss(module.net[0].weight, torch.zeros(8, 10))


def layer_with_weights(module):
    return nn.PReLU()(module.net[0].weight).mean()


def drawing_layer(module):
    return nn.Linear(10, 1)(module.net[0].weight).mean()


ORDINARY = (
    unpacked_maximum, sorted_values, best, loss_in_the_step, weighted_loss_in_the_step, activation_in_the_step,
)  # fmt: skip
STATEFUL = (kept_maximum, kept_loss, changed_loss, layer_with_weights, drawing_layer)


class All(Plain):
    """All of them in one step."""

    def __init__(self):
        super().__init__(lambda module: sum(way(module) for way in ORDINARY))


@pytest.mark.parametrize("way", ORDINARY)
def test_ordinary_ways_are_proven(way):
    assert proof_of(Plain(way)).holds()


@pytest.mark.parametrize("way", STATEFUL)
def test_their_stateful_twins_are_not(way):
    module = Plain(way)
    fields = set(vars(module)) | {"_trainer", "log"}
    with pytest.raises(NotRecordableError):
        proof_of(module)
    assert set(vars(module)) <= fields


def test_their_numbers_are_those_as_written(tmp_path, monkeypatch):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 3, "mapped": 2})
    written = run(tmp_path / "written", All, record_steps=False)
    assert_equal_trees(run(tmp_path / "recorded", All), written)
    mapped = run(tmp_path / "mapped", All, engine="vectorized")[0]
    for name, value in written[0].items():
        torch.testing.assert_close(mapped[name], value)


def test_hooks_on_the_making_of_layers_are_not_overlooked():
    made = []
    hook = nn.modules.module.register_module_buffer_registration_hook(lambda *args: made.append(1))
    try:
        with pytest.raises(NotRecordableError, match="hooks"):
            proof_of(Plain(loss_in_the_step))
    finally:
        hook.remove()
    assert not made
