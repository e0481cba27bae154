"""Clients that do less than they were asked to, or vanish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbc_lightning.core.checks import check_choice, check_share
from fedbc_lightning.core.seeding import numpy_generator


@dataclass(frozen=True)
class Stragglers:
    """In every round a fraction of the sampled clients does less work, and another does not answer at all.

    Who does what is a function of (seed, round). There are round(fraction x S) stragglers and round(dropout x S) absent
    clients, halves rounded up, stragglers first.

    Attributes:
        fraction: Part of the sampled clients, in [0, 1), that are stragglers: each does a number of epochs drawn from
            1..E-1 (with E = 1, or counted in steps: of steps), as in FedProx and Fed+ (there 0.5 and 0.9).
        dropout: Part of the sampled clients, in [0, 1), that vanish after they were sampled: they received z, send
            nothing and keep their state (``status=absent`` in ``clients.csv``).
        partial_work: What becomes of a straggler's work: ``"method"``: what the method says (FedAvg drops it, as in the
            FedProx paper; the others use it). ``"used"`` or ``"dropped"`` (``status=straggler``) for any method.

    Raises:
        ConfigurationError: A part outside [0, 1), or both together take more than all clients.

    References:
        Li et al. 2020, "Federated Optimization in Heterogeneous Networks", section 5.2.
    """

    fraction: float = 0.0
    dropout: float = 0.0
    partial_work: Literal["method", "used", "dropped"] = "method"

    def __post_init__(self) -> None:
        """Check."""
        check_share("trainer.stragglers.fraction", self.fraction)
        check_share("trainer.stragglers.dropout", self.dropout)
        check_share("trainer.stragglers.fraction + dropout", self.fraction + self.dropout, closed=True)
        check_choice("trainer.stragglers.partial_work", self.partial_work, ("method", "used", "dropped"))

    def draw(self, ids: list[int], seed: int, round: int) -> tuple[set[int], set[int]]:
        """The stragglers and the absent among the sampled clients.

        Example:
            >>> late, absent = Stragglers(fraction=0.5, dropout=0.25).draw([3, 1, 4, 5], seed=0, round=1)
            >>> len(late), len(absent), late & absent
            (2, 1, set())
        """
        order = numpy_generator(seed, "stragglers", round).permutation(sorted(ids)).tolist()
        num_late, num_absent = (int(part * len(ids) + 0.5) for part in (self.fraction, self.dropout))
        return set(order[:num_late]), set(order[num_late : num_late + num_absent])
