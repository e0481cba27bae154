"""Stragglers, which train less than they were asked to, and absent clients, which send nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbc_lightning.core.checks import check_choice, check_share
from fedbc_lightning.core.seeding import numpy_generator


@dataclass(frozen=True)
class Stragglers:
    """Lets a fraction of the sampled clients do less work in every round, and another fraction not answer at all.

    The choice is a function of (seed, round). There are round(fraction x S) stragglers and round(dropout x S) absent
    clients; halves are rounded up, and stragglers are drawn first.

    Attributes:
        fraction: Fraction of the sampled clients, in [0, 1), that are stragglers. Each trains a number of epochs drawn
            from 1..E-1, or a number of steps if E = 1 or training is counted in steps. FedProx takes 0.5, Fed+ 0.9.
        dropout: Fraction of the sampled clients, in [0, 1), that vanish after they were sampled. They receive z, send
            nothing and keep their state (``status=absent`` in ``clients.csv``).
        partial_work: Treatment of a straggler's work. ``"method"`` leaves it to the method (FedAvg drops it, as in the
            FedProx paper; the others use it); ``"used"`` and ``"dropped"`` (``status=straggler``) hold for any method.

    Raises:
        ConfigurationError: A fraction is not in [0, 1), or both together take more than all clients.

    References:
        Li et al. 2020, "Federated Optimization in Heterogeneous Networks", section 5.2.
    """

    fraction: float = 0.0
    dropout: float = 0.0
    partial_work: Literal["method", "used", "dropped"] = "method"

    def __post_init__(self) -> None:
        """Check the values."""
        check_share("trainer.stragglers.fraction", self.fraction)
        check_share("trainer.stragglers.dropout", self.dropout)
        check_share("trainer.stragglers.fraction + dropout", self.fraction + self.dropout, closed=True)
        check_choice("trainer.stragglers.partial_work", self.partial_work, ("method", "used", "dropped"))

    def draw(self, ids: list[int], seed: int, round: int) -> tuple[set[int], set[int]]:
        """Return the stragglers and the absent clients among the sampled clients.

        Example:
            >>> late, absent = Stragglers(fraction=0.5, dropout=0.25).draw([3, 1, 4, 5], seed=0, round=1)
            >>> len(late), len(absent), late & absent
            (2, 1, set())
        """
        order = numpy_generator(seed, "stragglers", round).permutation(sorted(ids)).tolist()
        num_late, num_absent = (int(part * len(ids) + 0.5) for part in (self.fraction, self.dropout))
        return set(order[:num_late]), set(order[num_late : num_late + num_absent])
