"""What a method does to w after every step of the user's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fedbc_lightning.local.terms import rows_of


class AfterStep(Protocol):
    """A change of the iterate between two optimizer steps."""

    def apply(self, w: Tensor, step_size: Tensor) -> None:
        """Change ``w`` (K, d) in place; ``step_size`` (K, 1) or (K, d): the learning rates of the step just taken."""

    def rows(self, num_clients: int) -> Sequence[AfterStep]:
        """The change of each client alone, for ``w`` (1, d); K = ``num_clients``."""


class MixWith:
    """Fed+'s mixing after each step: w ← κ w + (1 − κ) target, κ = 1 / (1 + ησ) with the step's own η.

    Args:
        sigma: σ ≥ 0; 0 leaves w alone.
        target: z + θ_i, (d,) or (K, d).

    Example:
        >>> import torch
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
        """See :class:`AfterStep`."""
        kappa = 1 / (1 + step_size * self.sigma)
        w.mul_(kappa).add_((1 - kappa) * self.target)

    def rows(self, num_clients: int) -> list[MixWith]:
        """See :class:`AfterStep`."""
        return [MixWith(self.sigma, target) for target in rows_of(self.target, num_clients)]
