"""Steps of SGD on flat rows: the bits and the state of torch's own."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim import SGD

from fedbc_lightning.module.flat_sgd import FlatSGD

SETTINGS = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov, "lr": lr}
    for momentum, dampening, decay, nesterov, lr in itertools.product(
        (0, 0.9), (0, 0.3), (0, 0.01), (False, True), (0.1, 1)
    )
    if not nesterov or (momentum and not dampening)
]


def stepped(settings, dtype, steps, *, is_flat):
    """The rows, gradients and states of two groups after some steps, between which settings change."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, generator=generator).to(dtype) for n in (1003, 7)]
    leaves = [(nn.Parameter(row), torch.zeros_like(row)) for row in rows]
    optimizer = SGD([{"params": [leaf]} for leaf, _ in leaves], foreach=False, **settings)
    assert FlatSGD.can_step(optimizer)
    step = FlatSGD(optimizer, leaves).step if is_flat else optimizer.step
    for _ in range(steps):
        for leaf, grad in leaves:
            leaf.grad = grad.copy_(torch.randn(len(grad), generator=generator))
        with torch.no_grad():
            step()
        optimizer.param_groups[1]["lr"] *= 0.7
        optimizer.param_groups[0]["maximize"] = not optimizer.param_groups[0]["maximize"]
    return leaves, [leaf.grad for leaf, _ in leaves], [dict(optimizer.state[leaf]) for leaf, _ in leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_bits_and_the_state_of_torch(dtype, steps):
    for settings in SETTINGS:
        flat, torchs = (stepped(settings, dtype, steps, is_flat=is_flat) for is_flat in (True, False))
        torch.testing.assert_close(flat, torchs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {}, {"fused": True}, {"differentiable": True, "foreach": False}, {"lr": torch.tensor(0.1)}],
)
def test_other_ways_are_left_to_torch(options):
    assert not FlatSGD.can_step(SGD([nn.Parameter(torch.zeros(3))], **{"lr": 0.1, **options}))
    assert not FlatSGD.can_step(torch.optim.Adam([nn.Parameter(torch.zeros(3))], foreach=False))
