"""The weight of an update by how often z has changed since the client received it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedbc_lightning.core.checks import FINITE, at_least

StalenessKind = Literal["constant", "polynomial", "hinge"]
StalenessNumber = Annotated[float, at_least(0), FINITE]


@dataclass(frozen=True)
class Staleness:
    """Weight s(τ) of an update with staleness τ ≥ 0; s(0) = 1, and s never grows.

    Attributes:
        kind: ``"constant"``: 1; ``"polynomial"``: (1 + τ)^−a; ``"hinge"``: 1 up to τ = b, then 1 / (a (τ − b) + 1).
        a: Exponent or slope a ≥ 0.
        b: Largest staleness b ≥ 0 that costs nothing under ``"hinge"``.

    References:
        Xie et al. 2019, "Asynchronous Federated Optimization", section 5.2.

    Example:
        >>> Staleness("polynomial", 0.5)(3), Staleness("hinge", 10, 4)(4), Staleness("hinge", 10, 4)(5)
        (0.5, 1.0, 0.09090909090909091)
    """

    kind: StalenessKind = "constant"
    a: StalenessNumber = 0.5
    b: StalenessNumber = 4

    def __call__(self, staleness: int) -> float:
        """Return the weight of an update."""
        if self.kind == "polynomial":
            return (1.0 + staleness) ** -self.a
        if self.kind == "hinge" and staleness > self.b:
            return 1.0 / (self.a * (staleness - self.b) + 1.0)
        return 1.0
