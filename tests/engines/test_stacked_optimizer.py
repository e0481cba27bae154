"""StackedOptimizer: the rows of K clients move as if each client had torch's optimizer, with the same bits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedbc_lightning.engines.stacked.stacked_bench import StackedOptimizer
from fedbc_lightning.module.schedulers import Configured

SLICES = [slice(0, 4), slice(4, 9)]


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
     {"maximize": True}, {"momentum": 0.5, "lr": torch.tensor(0.1)}],
)  # fmt: skip
def test_clients_that_finish_one_after_another(options):
    def make(first, second):
        groups = [{"params": [first]}, {"params": [second], "lr": 0.3}]
        return torch.optim.SGD(groups, **{"lr": 0.1, "foreach": False} | options)

    generator = torch.Generator().manual_seed(0)
    w, gradients = torch.randn(5, 9, generator=generator), torch.randn(6, 5, 9, generator=generator)
    grad, steps = torch.zeros(5, 9), [6, 6, 4, 4, 1]
    leaves = [[nn.Parameter(row[part].clone()) for part in SLICES] for row in w]
    configured = Configured(make(nn.Parameter(w[0, :4]), nn.Parameter(w[0, 4:])), [], [], False)
    stacked = StackedOptimizer(configured, SimpleNamespace(group_parts=[[part] for part in SLICES]))
    for _ in range(2):  # the second time with the momentum as new
        stacked.start(w, grad, None, 1.0)
        own = [make(*pair) for pair in leaves]
        for k, of_step in enumerate(gradients):
            active = sum(num > k for num in steps)
            grad[:active] = of_step[:active]
            with torch.no_grad():
                stacked.step(active)
            for row in range(active):
                for leaf, part in zip(leaves[row], SLICES, strict=True):
                    leaf.grad = of_step[row, part].clone()
                own[row].step()
        assert torch.equal(w, torch.stack([torch.cat([part.detach() for part in row]) for row in leaves]))
