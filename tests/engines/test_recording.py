"""Recorded operations are called by the shortest way that calls these very operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedbc_lightning.engines.recorded import recording

OPERATIONS = {
    "addmm": (lambda x, y: functional.linear(x, y, y[:, 0]), torch.addmm),
    "view": (lambda x, y: x.view(15, 3), Tensor.view),
    "sum over a dimension": (lambda x, y: x.sum(dim=0), torch.sum),
    "a product of tensors": (lambda x, y: x * y[:, :1].sum(), torch.mul),
    "a product with a number, which as a function is one of tensors": (
        lambda x, y: torch.ops.aten.mul.Scalar(x, 2.5), torch.ops.aten.mul.Scalar._op,
    ),
    "a loss that only torch has as an operation": (
        lambda x, y: torch.ops.aten.mse_loss_backward(torch.ones(()), x, 2 * x, 1),
        torch.ops.aten.mse_loss_backward.default._op,
    ),
    "a cast": (lambda x, y: torch.ops.aten._to_copy(x, dtype=torch.float64), torch.ops.aten._to_copy.default._op),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_is_called_by(monkeypatch, name):
    function, expected = OPERATIONS[name]
    chosen = []
    quickest = recording.quickest
    monkeypatch.setattr(recording, "quickest", lambda node: chosen.append(quickest(node)) or chosen[-1])
    inputs = [torch.randn(5, 9), torch.randn(4, 9)]
    replay, _ = recording.record(lambda *tensors: (function(*tensors),), inputs)
    assert expected in chosen
    inputs = [torch.randn(5, 9), torch.randn(4, 9)]
    with torch.no_grad():
        assert torch.equal(replay(*inputs)[0], function(*inputs))
