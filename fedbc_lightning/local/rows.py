"""What a method gives for K clients at once, taken apart for one client after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def of_each(part: Any, num_clients: int) -> Sequence[Any]:
    """A term or an after-step for each of K clients alone: its own ``rows(K)``, or, where it has none, row by row."""
    if hasattr(part, "rows"):
        return part.rows(num_clients)
    return [RowOf(part, k, num_clients) for k in range(num_clients)]


class RowOf:
    """Client k's part of a term or an after-step of a user's own, which knows all K clients only.

    Row k of what it does depends on row k alone, so it is asked for K times the same row.

    Args:
        part: The term or after-step.
        k: Which client.
        num_clients: K.
    """

    def __init__(self, part: Any, k: int, num_clients: int) -> None:
        self._part, self._k, self._num_clients = part, k, num_clients

    @property
    def is_zero(self) -> bool:
        """Of all clients' term."""
        return self._part.is_zero

    def add_gradient(self, grad: Tensor, w: Tensor) -> None:
        """See :class:`~fedbc_lightning.local.Term`; K = 1."""
        grads = torch.zeros_like(grad).repeat(self._num_clients, 1)
        self._part.add_gradient(grads, w.repeat(self._num_clients, 1))
        grad += grads[self._k]

    def value(self, w: Tensor) -> Tensor:
        """See :class:`~fedbc_lightning.local.Term`; K = 1."""
        return self._part.value(w.repeat(self._num_clients, 1))[self._k : self._k + 1]

    def apply(self, w: Tensor, step_size: Tensor) -> None:
        """See :class:`~fedbc_lightning.local.AfterStep`; K = 1."""
        rows = w.repeat(self._num_clients, 1)
        self._part.apply(rows, step_size)
        w.copy_(rows[self._k])
