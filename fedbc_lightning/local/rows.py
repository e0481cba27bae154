"""Splitting of terms and after-steps for K clients into one part per client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def of_each(part: Any, num_clients: int) -> Sequence[Any]:
    """Split a term or an after-step into one for each of K clients, by its ``rows(K)`` or else by :class:`RowOf`."""
    if hasattr(part, "rows"):
        return part.rows(num_clients)
    return [RowOf(part, k, num_clients) for k in range(num_clients)]


class RowOf:
    """Client k's part of a user's term or after-step that has no ``rows`` and works on all K clients only.

    Row k of its result depends on row k of w alone. So it is called with K copies of the client's row, and row k of
    the result is taken.

    Args:
        part: The term or after-step.
        k: Position of the client among the K.
        num_clients: Number of clients of the part, K.
    """

    def __init__(self, part: Any, k: int, num_clients: int) -> None:
        self._part, self._k, self._num_clients = part, k, num_clients

    @property
    def is_zero(self) -> bool:
        """Whether the term of all K clients is zero."""
        return self._part.is_zero

    def add_gradient(self, grad: Tensor, w: Tensor) -> None:
        """Add the client's gradient at ``w`` (1, d) to ``grad`` (1, d), in place."""
        # K times the work of one row, but a user's term needs to know nothing about cohorts.
        grads = torch.zeros_like(grad).repeat(self._num_clients, 1)
        self._part.add_gradient(grads, w.repeat(self._num_clients, 1))
        grad += grads[self._k]

    def value(self, w: Tensor) -> Tensor:
        """Return the client's value of the term at ``w`` (1, d), shape (1,)."""
        return self._part.value(w.repeat(self._num_clients, 1))[self._k : self._k + 1]

    def apply(self, w: Tensor, step_size: Tensor) -> None:
        """Change the client's ``w`` (1, d) in place."""
        rows = w.repeat(self._num_clients, 1)
        self._part.apply(rows, step_size)
        w.copy_(rows[self._k])
