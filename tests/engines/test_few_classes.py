"""Recorded cross entropy over few classes: another kernel where it gives the same bits, torch's own elsewhere."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbc_lightning.engines.recorded.recording import record
from fedbc_lightning.engines.stacked import few_classes


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
@pytest.mark.parametrize("num_classes", [1, 3, 5, 8, 10, 16, 20, 62])
@pytest.mark.parametrize("num_samples", [1003, 1024, 5000])
def test_the_same_bits(num_samples, num_classes, dtype):
    def drawn(scale):
        x = scale * torch.randn(num_samples, num_classes, dtype=dtype)
        x[::50, 0], x[::70, -1], x[3] = -torch.inf, torch.inf, torch.nan
        return x, torch.randint(num_classes, (num_samples,))

    replay, _ = record(loss_and_gradient, [*drawn(1.0)])
    for scale in (0.01, 1.0, 5.0, 30.0) * 3:
        x, y = drawn(scale)
        for value, expected in zip(replay(x, y), loss_and_gradient(x, y), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
            assert value.stride() == expected.stride()


def test_five_classes_of_many_samples_are_worked_on_by_columns(used):
    x, y = torch.randn(1003, 5), torch.randint(5, (1003,))
    replay, _ = record(loss_and_gradient, [x, y])
    used.clear()
    replay(x, y)
    assert used == ["by_columns", "backward_by_columns"]


@pytest.mark.parametrize(
    "shape", [(100, 5), (2000, 3), (2000, 40), (200, 10, 5)], ids=["few samples", "fewer", "more", "another dimension"]
)
def test_otherwise_they_are_not(used, shape):
    x, y = torch.randn(shape), torch.randint(shape[-1], shape[:-1])
    replay, _ = record(loss_and_gradient, [x, y])
    used.clear()
    for value, expected in zip(replay(x, y), loss_and_gradient(x, y), strict=True):
        assert torch.equal(value, expected)
    assert used == []
