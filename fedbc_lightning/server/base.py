"""What the server does in a round, in parts that run one after another in every hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ClientStore, ServerState, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


WIDE_BYTES = 2**20
"""Of clients' rows that are made float64 together for a sum."""

FEW_ROWS = 64
"""So many are added one after another."""


class Sums:
    """Running sums over the round's clients, in float64, one cohort after another; one all_reduce joins the ranks.

    Float32 sums of ten clients differ between one and two ranks in half of their elements, float64 sums in none.

    A rule that needs every client's vector instead of a sum keeps rows; they are gathered only where it does.

    Args:
        device: Where the sums live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = wide_dtype(device)
        self._sums: dict[str, Tensor] = {}
        self.kept: dict[str, dict[int, Tensor]] = {}

    def declare(self, name: str, size: int = 1) -> None:
        """Start a sum of vectors of ``size`` elements; on every rank, whether or not it trains a client."""
        self._sums[name] = torch.zeros(size, dtype=self.dtype, device=self.device)

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Add ``weight * value``."""
        self._sums[name].add_(value, alpha=weight)

    def add_rows(self, name: str, rows: Tensor, weights: Tensor) -> None:
        """Add the sum of the rows (n, d) times their weights (n,); the weights are on the CPU."""
        num_together = max(1, WIDE_BYTES // (rows.size(1) * self.dtype.itemsize + 1))
        if len(rows) <= FEW_ROWS or num_together == 1:  # bit for bit what cohorts of one give
            for k, weight in enumerate(weights.tolist()):
                if weight:
                    self.add(name, rows[k], weight)
            return
        for some, their_weights in zip(rows.split(num_together), weights.split(num_together), strict=True):
            self._sums[name] += their_weights.to(self.device, self.dtype) @ some.to(self.dtype)

    def add_valid(self, name: str, cohort: Cohort, rows: Tensor) -> None:
        """Add the rows (K, d) of the cohort's valid clients."""
        rows = cohort.of_valid(rows)
        self.add_rows(name, rows, torch.ones(len(rows)))

    def keep(self, name: str, position: int, row: Tensor) -> None:
        """Keep one client's vector; ``position``: the client's place in the round (``cohort.positions``)."""
        self.kept.setdefault(name, {})[position] = row.detach().clone()

    def rows(self, name: str) -> Tensor:
        """What was kept, (n, ...), in the order of the clients' turns, of all ranks; it is handed over, once."""
        kept = self.kept.pop(name)
        return torch.stack([kept[position].to(self.device) for position in sorted(kept)])

    def __getitem__(self, name: str) -> Tensor:
        """The sum so far; after the reduction, over all clients of the round."""
        return self._sums[name]

    def flat(self) -> Tensor:
        """All sums as one vector, for the reduction; :meth:`load` is the inverse."""
        return torch.cat(list(self._sums.values()) or [torch.zeros(0, dtype=self.dtype, device=self.device)])

    def load(self, flat: Tensor) -> None:
        """Take the reduced sums back."""
        parts = flat.split([s.numel() for s in self._sums.values()])
        self._sums = dict(zip(self._sums, parts, strict=True))


class ServerCallback:
    """A part of the server's half of an algorithm. Keeps no state but declared state (:meth:`declare_state`).

    Hooks of all parts run in the order of ``FederatedAlgorithm.server_callbacks``, in this order in a round:

    1. :meth:`on_round_start` before any client trains,
    2. :meth:`on_cohort_end` for each cohort, on the rank that trained it,
    3. :meth:`on_aggregate` once the sums of all ranks are joined, on every rank alike,
    4. :meth:`on_round_end` after that; then the round is committed.

    Attributes:
        reads: Client state that some part of the algorithm must declare.
        messages: What the algorithm's client half must put into ``cohort.messages``.
        vectors_up: Vectors that a client sends for it beside its model; ``vectors_down``: that it receives.
        vectors_down: See there.
        forms_z: Whether it makes z of the clients' models.
        follows_aggregation: Whether it works on the z that a part before it made.
    """

    reads: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    vectors_up: int = 0
    vectors_down: int = 0
    forms_z: bool = False
    follows_aggregation: bool = False

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare what outlives a round."""

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Raise a ConfigurationError if the part cannot work with this engine, or with S clients in a round."""

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sums that :meth:`on_cohort_end` adds to."""

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Take the messages (K, ...) of trained clients: stage their state, add to the sums. Skip invalid ones."""

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage the server's next state from the reduced sums."""

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """See the round as a whole: ``server.records`` of all clients, staged values; log."""
