"""Recorded cross entropy over few classes: another kernel where it gives the same bits, torch's own elsewhere."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbc_lightning.engines import few_classes
from fedbc_lightning.engines.recording import record


def loss_and_gradient(x, y):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = cross_entropy(x.movedim(-1, 1) if x.ndim == 3 else x, y)
        return (*torch.autograd.grad(loss, x), loss.detach())


@pytest.fixture
def used(monkeypatch):
    """Which replacements the last recording calls."""
    found = []

    def counted(replacement):
        def call(*args):
            found.append(replacement.__name__)
            return replacement(*args)

        return call

    replacements = {target: counted(replacement) for target, replacement in few_classes.REPLACEMENTS.items()}
    monkeypatch.setattr(few_classes, "REPLACEMENTS", replacements)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_classes", [2, 3, 8, 10, 16, 20, 62])
def test_the_same_bits(num_classes, dtype):
    x, y = torch.randn(1003, num_classes, dtype=dtype), torch.randint(num_classes, (1003,))
    replay, _ = record(loss_and_gradient, [x, y])
    for scale in (1.0, 2.0, 5.0, 30.0) * 20:
        for value, expected in zip(replay(scale * x, y), loss_and_gradient(scale * x, y), strict=True):
            assert torch.equal(value, expected)
            assert value.stride() == expected.stride()


def test_three_classes_of_many_samples_are_worked_on_by_columns(used):
    x, y = torch.randn(1003, 3), torch.randint(3, (1003,))
    replay, _ = record(loss_and_gradient, [x, y])
    used.clear()
    replay(x, y)
    assert used == ["by_columns", "backward_by_columns"]


@pytest.mark.parametrize("shape", [(100, 3), (200, 10, 3)], ids=["few samples", "another dimension"])
def test_otherwise_they_are_not(used, shape):
    x, y = torch.randn(shape), torch.randint(3, shape[:-1])
    replay, _ = record(loss_and_gradient, [x, y])
    used.clear()
    for value, expected in zip(replay(x, y), loss_and_gradient(x, y), strict=True):
        assert torch.equal(value, expected)
    assert used == []
