"""Steps of SGD on flat rows: the bits and the state of torch's own."""

import inspect
import itertools
from collections import defaultdict
from functools import partial

import pytest
import torch
from helpers.boring import assert_equal_trees
from torch import nn
from torch.optim import SGD

from fedbc_lightning.module.client_optimizers import FlatSGD

SETTINGS = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov, "lr": lr}
    for momentum, dampening, decay, nesterov, lr in itertools.product(
        (0, 0.9), (0, 0.3), (0, 0.01), (False, True), (0.1, 1)
    )
    if not nesterov or (momentum and not dampening)
]


def never():
    raise AssertionError("these groups are the usual ones")


def stepped(settings, dtype, steps, *, is_flat):
    """The rows, gradients and states of two groups after some steps, between which settings change."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, generator=generator).to(dtype) for n in (1003, 7)]
    leaves = [(nn.Parameter(row), torch.zeros_like(row)) for row in rows]
    optimizer = SGD([{"params": [leaf]} for leaf, _ in leaves], foreach=False, **settings)
    step = FlatSGD(optimizer, leaves, never).step if is_flat else optimizer.step
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


def load_older_state(optimizer):
    """Replace groups and state, as a module does that keeps a client's momentum itself."""
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.05


def replace_gradient(optimizer):
    leaf = optimizer.param_groups[0]["params"][0]
    leaf.grad = leaf.grad.clone().fill_(3)


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        lambda optimizer: optimizer.param_groups[0].update(params=[]),
        lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.2)),
        lambda optimizer: optimizer.param_groups[0].update(foreach=True),
        lambda optimizer: optimizer.zero_grad(),
        replace_gradient,
        load_older_state,
    ],
)
def test_what_code_of_the_users_changes_in_the_optimizer_counts_as_in_torchs_own_step(change):
    found = []
    for is_flat in (True, False):
        leaf = nn.Parameter(torch.arange(5.0))
        grad = torch.ones(5)
        optimizer = SGD([leaf], 0.1, momentum=0.9, foreach=False)
        own = partial(inspect.unwrap(SGD.step), optimizer)
        step = FlatSGD(optimizer, [(leaf, grad)], own).step if is_flat else own
        leaf.grad = grad
        for before in (None, change, None):
            if before is not None:
                before(optimizer)
            with torch.no_grad():
                step()
        found.append([leaf.detach(), list(optimizer.state.values())])
    assert_equal_trees(*found)
