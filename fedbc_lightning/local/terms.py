"""What a method adds to a client's local steps: gradient terms with a closed form, and moves of w after each step.

The engine adds a term's gradient once per optimizer step, after gradient accumulation and unscaling and before
clipping, for the trainable parameters only. Therefore a term works with any optimizer.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fedbc_lightning.core.devices import VALUES_AT_ONCE, pieces, upload
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState


class Term(Protocol):
    """Protocol of a summand of the local objective.

    A class may name in ``varying`` the attributes, tensors on the device, that are all that :meth:`add_gradient` reads
    beside its arguments: recorded steps with such terms are CUDA graphs on a GPU.
    """

    @property
    def is_zero(self) -> bool:
        """Whether the term is zero at every w."""

    def add_gradient(self, grad: Tensor, w: Tensor) -> None:
        """Add the term's gradient at ``w`` (K, d) to ``grad`` (K, d), in place."""

    def value(self, w: Tensor) -> Tensor:
        """Return the term's value at ``w`` (K, d), shape (K,); its autograd gradient equals :meth:`add_gradient`."""

    def part(self, clients: slice) -> Term:
        """Return the term of some of the K clients, which takes their rows of ``w`` alone."""


def part_of(values: Tensor, clients: slice) -> Tensor:
    """Return some clients' rows of values (K, n); values (n,) or (1, n) are those of every client."""
    return values[clients] if values.ndim > 1 and len(values) > 1 else values


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

    varying = ("_coefficient", "center")

    def __init__(self, coefficient: float | Tensor, center: Tensor) -> None:
        self.center = center
        self.coefficient = coefficient
        self._space: Tensor | None = None  # for w - z of a small model, kept from step to step

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

    @property
    def is_zero(self) -> bool:
        """Whether c is 0 for all clients of the cohort."""
        return not self._given.any().item()

    def add_gradient(self, grad: Tensor, w: Tensor) -> None:
        """Add ``c (w - z)`` to ``grad`` (K, d), in place."""
        if w.numel() > VALUES_AT_ONCE:
            for part, x, center, factor in pieces(grad, w, self.center.expand_as(w), self._coefficient.expand_as(w)):
                part.addcmul_(factor, x - center)
            return
        if self._space is None:
            self._space = torch.empty_like(w, dtype=self.center.dtype)
        # Two kernels and no new memory, because this runs in every step, which takes 100 us for a small model.
        torch.sub(w, self.center, out=self._space)
        grad.addcmul_(self._coefficient, self._space)

    def value(self, w: Tensor) -> Tensor:
        """Return ``c/2 ||w - z||^2``, (K,)."""
        return (self.coefficient / 2 * (w - self.center).square()).sum(dim=1)

    def part(self, clients: slice) -> Proximal:
        """Return the term of some clients."""
        return Proximal(part_of(self._given, clients), part_of(self.center, clients))


class Linear:
    """Adds the linear term ⟨v, w⟩ with the gradient v. SCAFFOLD has v = c − c_i.

    Args:
        vector: The vector v, (d,) or (K, d).

    Example:
        >>> Linear(torch.tensor([1.0, 2.0])).value(torch.tensor([[3.0, 4.0]]))
        tensor([11.])
    """

    varying = ("vector",)

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector

    @property
    def is_zero(self) -> bool:
        """Whether v is 0 for all clients of the cohort."""
        return not any(part.any() for (part,) in pieces(self.vector))  # which mostly ends with the first

    def add_gradient(self, grad: Tensor, w: Tensor) -> None:
        """Add v to ``grad`` (K, d), in place."""
        grad.add_(self.vector)

    def value(self, w: Tensor) -> Tensor:
        """Return ``<v, w>``, (K,)."""
        return (w * self.vector).sum(dim=1)

    def part(self, clients: slice) -> Linear:
        """Return the term of some clients."""
        return Linear(part_of(self.vector, clients))


class AfterStep(Protocol):
    """Changes the iterate between two optimizer steps."""

    def apply(self, w: Tensor, step_size: Tensor) -> None:
        """Change ``w`` (K, d) in place; ``step_size`` (K, 1) or (K, d) holds the learning rates of the last step."""

    def part(self, clients: slice) -> AfterStep:
        """Return the change of some of the K clients, which takes their rows of ``w`` alone."""


class MixWith:
    """Mixes w with a target after each step, as Fed+ does: w ← κ w + (1 − κ) target with κ = 1 / (1 + ησ).

    η is the learning rate of that step.

    Args:
        sigma: Strength σ ≥ 0 of the pull; 0 leaves w unchanged.
        target: The target z + θ_i, (d,) or (K, d).

    Example:
        >>> w = torch.tensor([[2.0]])
        >>> MixWith(1.0, torch.tensor([0.0])).apply(w, torch.tensor([[1.0]]))
        >>> w
        tensor([[1.]])

    References:
        Kundu et al., "Robustness and Personalization in Federated Learning" (Fed+), Algorithm 1.
    """

    def __init__(self, sigma: float, target: Tensor) -> None:
        self.sigma, self.target = sigma, target

    def apply(self, w: Tensor, step_size: Tensor) -> None:
        """Mix ``w`` (K, d) with the target in place."""
        # The implicit step on σ/2 ‖w − target‖²: stable for any η and σ, where an explicit one needs ησ < 2.
        kappa = 1 / (1 + step_size * self.sigma)
        w.mul_(kappa).add_((1 - kappa) * self.target)

    def part(self, clients: slice) -> MixWith:
        """Return the mixing of some clients."""
        return MixWith(self.sigma, part_of(self.target, clients))


class TermFactory:
    """Makes the term of one cohort in one round."""

    def bind(self, cohort: Cohort, server: ServerState) -> Term:
        """Return the term for the clients of this cohort in this round."""
        raise NotImplementedError


class ProximalTerm(TermFactory):
    """Makes the term c/2 ‖w − centre‖² with the gradient c (w − centre), where c = factor x coefficient.

    Args:
        coefficient: A number, or the name of a client scalar; ``dual`` with factor 2 gives FedBC's 2 λ_i (w − z).
        factor: Factor on the coefficient.
        center: The centre: ``z``, or the name of a client vector or model.
    """

    def __init__(self, coefficient: float | str, factor: float = 1.0, center: str = "z") -> None:
        self.coefficient, self.factor, self.center = coefficient, factor, center

    def bind(self, cohort: Cohort, server: ServerState) -> Term:
        """Return a :class:`~fedbc_lightning.local.Proximal` term for this cohort."""
        given = self.coefficient
        coefficient = cohort[given] if isinstance(given, str) else given
        # A client's model (d + b,) has buffers at its end, which have no gradient and so no place in a term.
        center = server.z if self.center == "z" else cohort[self.center][:, : server.z.numel()]
        return Proximal(self.factor * coefficient, center)


class LinearTerm(TermFactory):
    """Makes the term ⟨v, w⟩ with the gradient v = Σ factor x vector over named vectors.

    Args:
        client: Factors of the client vectors by name, e.g. ``{correction: -1.0}``.
        server: Factors of the server vectors by name, e.g. ``{control: 1.0}``.
    """

    def __init__(self, client: dict[str, float] | None = None, server: dict[str, float] | None = None) -> None:
        self.client, self.server = client or {}, server or {}

    def bind(self, cohort: Cohort, server: ServerState) -> Term:
        """Return a :class:`~fedbc_lightning.local.Linear` term for this cohort."""
        vector = torch.zeros_like(server.z)[None]
        for name, factor in self.client.items():
            vector = vector + factor * cohort[name]
        for name, factor in self.server.items():
            vector = vector + factor * server[name]
        return Linear(vector)
