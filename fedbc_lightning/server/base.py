"""Server callbacks, the parts of what the server does in a round, and the sums that they reduce over clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbc_lightning.core.checks import Checked
from fedbc_lightning.core.devices import pieces, wide_dtype
from fedbc_lightning.local import Engine
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration

# Largest number of bytes of rows that are converted to float64 together for a sum
WIDE_BYTES = 2**20

# Largest number of rows that are added one after another instead of by a matrix product
FEW_ROWS = 64


class Sums:
    """Accumulates sums over the round's clients in float64, one cohort after another; one all_reduce joins the ranks.

    Float32 sums of ten clients differ between one and two ranks in half of their elements, float64 sums in none.

    A rule that needs every client's vector instead of a sum keeps rows; the ranks gather rows only for such a rule.

    Args:
        device: The device on which the sums are stored.

    Attributes:
        totals: The sums by name; each begins with the first value that is added to it.
        kept: The kept rows by name and by their client's place in the round.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = wide_dtype(device)
        self.totals: dict[str, Tensor] = {}
        self.kept: dict[str, dict[int, Tensor]] = {}

    def total(self, name: str, size: int) -> Tensor:
        """Return the sum `name` of vectors of ``size`` elements, which is 0 before the first is added."""
        # A rank that trains no client has no sums until the ranks join theirs.
        if name not in self.totals:
            self.totals[name] = torch.zeros(size, dtype=self.dtype, device=self.device)
        return self.totals[name]

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Add ``weight * value`` to the sum `name`."""
        self.total(name, value.numel()).add_(value, alpha=weight)

    def add_rows(self, name: str, rows: Tensor, weights: Tensor) -> None:
        """Add the sum of the rows (n, d) times their weights (n,) on the CPU to the sum `name`."""
        total = self.total(name, rows.size(1))
        num_together = max(1, WIDE_BYTES // (rows.size(1) * self.dtype.itemsize + 1))
        # One addition for each row gives the same bits as cohorts of one, so up to 64 clients no number depends on how
        # they are grouped; above that a matrix product is several times faster.
        if len(rows) <= FEW_ROWS or num_together == 1:  # then equal bit for bit to cohorts of one
            for k, weight in enumerate(weights.tolist()):
                for part, row in pieces(total, rows[k]) if weight else ():
                    part.add_(row.to(part), alpha=weight)
            return
        for some, their_weights in zip(rows.split(num_together), weights.split(num_together), strict=True):
            total += their_weights.to(self.device, self.dtype) @ some.to(self.dtype)

    def add_valid(self, name: str, cohort: Cohort, rows: Tensor) -> None:
        """Add the rows (K, d) of the cohort's valid clients to the sum `name`, with weight 1."""
        rows = cohort.of_valid(rows)
        self.add_rows(name, rows, torch.ones(len(rows)))

    def keep(self, name: str, position: int, row: Tensor) -> None:
        """Keep a copy of one client's vector; ``position`` is its place in the round (``cohort.positions``)."""
        self.kept.setdefault(name, {})[position] = row.detach().clone()

    def rows(self, name: str) -> Tensor:
        """Return the kept rows (n, ...) of all ranks in the round's order of clients, and no longer keep them."""
        kept = self.kept.pop(name)
        return torch.stack([kept[position].to(self.device) for position in sorted(kept)])

    def __getitem__(self, name: str) -> Tensor:
        """Return the sum so far; after the reduction it is over all clients of the round."""
        return self.totals[name]


class ServerCallback(Checked):
    """Base class of the parts of the server's half of an algorithm; a part keeps declared state only.

    Each hook runs for all parts in the order of ``FederatedAlgorithm.server_callbacks``. A round calls the hooks in
    this order:

    1. :meth:`on_client_end` for each cohort, where its clients are,
    2. :meth:`on_cohort_end` for each cohort, on the rank that trained it or at the server of clients elsewhere,
    3. :meth:`on_aggregate` on every rank, once the sums of all ranks are reduced,
    4. :meth:`on_round_end` on every rank; then the round is committed.

    Attributes:
        reads: Names of the client state that some part of the algorithm must declare.
        messages: Names of the messages that the algorithm's client half must put into ``cohort.messages``.
        needs_rows: Whether the server's half reads or writes clients' vectors, so that these cannot stay with clients
            elsewhere.
        vectors_up: Number of vectors that a client sends for this part in addition to its model.
        forms_z: Whether this part computes z from the clients' models.
        follows_aggregation: Whether this part changes the z that a part before it has staged.
    """

    section = "algorithm"
    reads: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    needs_rows: bool = False
    vectors_up: int = 0
    forms_z: bool = False
    follows_aggregation: bool = False

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the state that this part keeps between rounds."""

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Raise a ConfigurationError if the part cannot work with this engine, or with S clients in a round."""

    def on_client_end(self, cohort: Cohort, server: ServerState) -> None:
        """Stage vectors of clients that have trained, and put into ``cohort.messages`` what the server reads of them.

        ``server.z`` is the z that the clients have received.
        """

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Stage scalars of clients that have trained, and add their messages to the sums; skip invalid clients.

        It reads the clients' w, buffers, steps, losses, scalars and ``cohort.messages``.
        """

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage the server's next state from the reduced sums.

        In an asynchronous round nobody may have started: then ``sums[name]`` is a KeyError and
        ``sums.total(name, size)`` is 0.
        """

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """Inspect the whole round, i.e. ``server.records`` of all clients and the staged values, and log numbers."""
