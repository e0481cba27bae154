"""Gradient terms, which a method adds to the client's loss and whose gradients have a closed form.

The engine adds a term's gradient once per optimizer step, after gradient accumulation and unscaling and before
clipping, for the trainable parameters only. Therefore a term works with any optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload


class Term(Protocol):
    """Protocol of a summand of the local objective."""

    @property
    def is_zero(self) -> bool:
        """Whether the term is zero at every w."""

    def add_gradient(self, grad: Tensor, w: Tensor) -> None:
        """Add the term's gradient at ``w`` (K, d) to ``grad`` (K, d), in place."""

    def value(self, w: Tensor) -> Tensor:
        """Return the term's value at ``w`` (K, d), shape (K,); its autograd gradient equals :meth:`add_gradient`."""

    def rows(self, num_clients: int) -> Sequence[Term]:
        """Return one term for each of the K = ``num_clients`` clients, which takes ``w`` (1, d)."""


def rows_of(values: Tensor, num_clients: int) -> Sequence[Tensor]:
    """Split values (K, n) into (1, n) for each client; values (n,) or (1, n) are given to every client."""
    return values.split(1) if values.ndim > 1 and len(values) > 1 else [values] * num_clients


class Proximal:
    """Pulls w towards a centre by the term c/2 ‖w − z‖² with the gradient c (w − z).

    FedProx has c = μ, FedBC c = 2λ_i: "each client's step adds 2 λ_i (w − z)".

    Args:
        coefficient: Coefficient c: a number, (K,), or (K, d) by parameter. Assign a new one instead of changing it in
            place, which the term does not notice.
        center: Centre z, (d,) or (K, d).

    Example:
        >>> grad = torch.zeros(1, 2)
        >>> Proximal(2.0, torch.tensor([1.0, 0.0])).add_gradient(grad, torch.tensor([[2.0, 3.0]]))
        >>> grad
        tensor([[2., 6.]])
    """

    def __init__(self, coefficient: float | Tensor, center: Tensor) -> None:
        self.center = center
        self.coefficient = coefficient
        self._space: list[Tensor] = []  # memory for w - z, kept from step to step; a list, so that rows() can share it

    @property
    def coefficient(self) -> Tensor:
        """The coefficient c, (1, 1), (K, 1) or (K, d), on the device of the centre."""
        return self._coefficient

    @coefficient.setter
    def coefficient(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.center.dtype)
        # Kept where it was given, usually the CPU, so that is_zero need not wait for the device.
        self._given = value if value.ndim == 2 else value.reshape(-1, 1)
        self._coefficient = upload(self._given, self.center.device)
        self._is_zero: bool | None = None  # None: not known yet

    @property
    def is_zero(self) -> bool:
        """Whether c is 0 for all clients of the cohort."""
        return not self._given.any().item() if self._is_zero is None else self._is_zero

    def add_gradient(self, grad: Tensor, w: Tensor) -> None:
        """Add ``c (w - z)`` to ``grad`` (K, d), in place."""
        if not self._space:
            self._space.append(torch.empty_like(w, dtype=self.center.dtype))
        # Two kernels and no new memory, because this runs in every step, which takes 100 us for a small model.
        torch.sub(w, self.center, out=self._space[0])
        grad.addcmul_(self._coefficient, self._space[0])

    def value(self, w: Tensor) -> Tensor:
        """Return ``c/2 ||w - z||^2``, (K,)."""
        return (self.coefficient / 2 * (w - self.center).square()).sum(dim=1)

    def rows(self, num_clients: int) -> list[Proximal]:
        """Return the term of each client; since they are used one after another, they share memory for w - z."""
        coefficients, centers = rows_of(self._given, num_clients), rows_of(self.center, num_clients)
        found = [Proximal(coefficient, center) for coefficient, center in zip(coefficients, centers, strict=True)]
        # One look at all coefficients: on a GPU, each client's own is_zero would wait for the device.
        is_there, space = self._given.any(dim=1).expand(num_clients).tolist(), list[Tensor]()
        for term, is_more in zip(found, is_there, strict=True):
            term._is_zero, term._space = not is_more, space
        return found

    def first(self, num_rows: int) -> Proximal:
        """Return the term of the first `num_rows` clients."""
        coefficient = self.coefficient if len(self.coefficient) == 1 else self.coefficient[:num_rows]
        return Proximal(coefficient, self.center if self.center.ndim == 1 else self.center[:num_rows])


class Linear:
    """Adds the linear term ⟨v, w⟩ with the gradient v. SCAFFOLD has v = c − c_i.

    Args:
        vector: The vector v, (d,) or (K, d).

    Example:
        >>> Linear(torch.tensor([1.0, 2.0])).value(torch.tensor([[3.0, 4.0]]))
        tensor([11.])
    """

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector

    @property
    def is_zero(self) -> bool:
        """Whether v is 0 for all clients of the cohort."""
        return not bool(self.vector.any())

    def add_gradient(self, grad: Tensor, w: Tensor) -> None:
        """Add v to ``grad`` (K, d), in place."""
        grad.add_(self.vector)

    def value(self, w: Tensor) -> Tensor:
        """Return ``<v, w>``, (K,)."""
        return (w * self.vector).sum(dim=1)

    def rows(self, num_clients: int) -> list[Linear]:
        """Return the term of each client."""
        return [Linear(vector) for vector in rows_of(self.vector, num_clients)]

    def first(self, num_rows: int) -> Linear:
        """Return the term of the first `num_rows` clients."""
        return self if self.vector.ndim == 1 else Linear(self.vector[:num_rows])
