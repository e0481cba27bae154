"""Changes of w that a method makes after every step of the user's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fedbc_lightning.local.terms import rows_of


class AfterStep(Protocol):
    """Changes the iterate between two optimizer steps."""

    def apply(self, w: Tensor, step_size: Tensor) -> None:
        """Change ``w`` (K, d) in place; ``step_size`` (K, 1) or (K, d) holds the learning rates of the last step."""

    def rows(self, num_clients: int) -> Sequence[AfterStep]:
        """Return one change for each of the K = ``num_clients`` clients, which takes ``w`` (1, d)."""


class MixWith:
    """Mixes w with a target after each step, as Fed+ does: w ← κ w + (1 − κ) target with κ = 1 / (1 + ησ).

    η is the learning rate of that step.

    Args:
        sigma: Strength σ ≥ 0 of the pull; 0 leaves w unchanged.
        target: The target z + θ_i, (d,) or (K, d).

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
        """Mix ``w`` (K, d) with the target in place."""
        # The implicit step on σ/2 ‖w − target‖²: stable for any η and σ, where an explicit one needs ησ < 2.
        kappa = 1 / (1 + step_size * self.sigma)
        w.mul_(kappa).add_((1 - kappa) * self.target)

    def rows(self, num_clients: int) -> list[MixWith]:
        """Return the mixing of each client alone."""
        return [MixWith(self.sigma, target) for target in rows_of(self.target, num_clients)]
