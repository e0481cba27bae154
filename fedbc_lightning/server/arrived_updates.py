"""What the server makes of clients that train asynchronously: their updates wait in the store until they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbc_lightning.core.checks import FiniteNotNegative
from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration

StalenessKind = Literal["constant", "polynomial", "hinge"]


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
    a: FiniteNotNegative = 0.5
    b: FiniteNotNegative = 4

    def __call__(self, staleness: int) -> float:
        """Return the weight of an update."""
        if self.kind == "polynomial":
            return (1.0 + staleness) ** -self.a
        if self.kind == "hinge" and staleness > self.b:
            return 1.0 / (self.a * (staleness - self.b) + 1.0)
        return 1.0


# In place of the version of an update that was lost on its way
LOST = -2.0


def forget_lost(server: ServerState, clients: ClientStore) -> None:
    """Let updates that were lost on their way never arrive: those of this round, and in it those of earlier ones."""
    lost, before = [client for client in server.sampled if client not in server.ids], clients.scalar("version")
    server.arrivals = [
        arrival
        for arrival in server.arrivals
        if (arrival.client not in lost if arrival.version == server.round - 1 else before[arrival.client] != LOST)
    ]
    if lost:
        clients.stage("version", lost, torch.full((len(lost),), LOST, dtype=torch.float64))


class ArrivedUpdates(ServerCallback):
    """Base of parts that take the updates that arrive in a round, in which other clients start.

    A client trains in the round in which it starts. Its message is then kept as declared state, ``in_flight``, with the
    version of z that it received, so that checkpoints hold it. In the round in which it arrives,
    ``server.arrivals`` names the client and that version.

    Args:
        staleness: Weight of a message by its staleness τ, the number of updates of z since the client received it.
    """

    forms_z = True
    needs_rows = True

    def __init__(self, staleness: Staleness) -> None:
        self.staleness = staleness

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the message of each client (d + b,), and its version of z; -1: none yet, -2: it was lost."""
        state.client_model("in_flight")
        state.client_scalar("version", -1.0)

    def message(self, cohort: Cohort, server: ServerState) -> Tensor:
        """Return what the clients send, (K, d + b)."""
        return cohort.model

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Stage the messages of the clients that have started; one that is not finite never arrives."""
        cohort.stage("in_flight", self.message(cohort, server))
        cohort.stage("version", torch.full((len(cohort),), server.round - 1, dtype=torch.float64))
        # Who starts in a round has no weight in its z, unless it also arrives in it.
        cohort.record("weight", torch.zeros(len(cohort)))

    def arrived(self, server: ServerState, clients: ClientStore) -> Iterator[tuple[int, int, Tensor]]:
        """Yield client, staleness τ and message (d + b,), in the wide dtype, of each arrival, in their order."""
        for client, version in server.arrivals:
            staleness = server.round - 1 - version
            # A client may arrive and start again in one round: its older message is then the committed one.
            versions = clients.scalar("version", staged=staleness == 0)
            if versions[client] == version:  # else its weights were not finite when it trained
                row = clients.vector("in_flight", client, staged=staleness == 0)
                yield client, staleness, row.to(server.z.device, wide_dtype(server.z.device), copy=True)

    def record_weight(self, server: ServerState, client: int, weight: float) -> None:
        """Add to the weight in a client's row of ``clients.csv``."""
        record = next(record for record in server.records if record["client"] == client)
        record["weight"] += weight


class BufferedUpdates(ArrivedUpdates):
    """Adds the mean of a full buffer of weighted updates: z ← z + η Σ s(τ_i) Δ_i / K, with Δ_i = w_i − z of its start.

    Buffers b such as BatchNorm's move towards those of the clients, b ← b + Σ s(τ_i) (b_i − b) / K, and stay between
    them: steps from older ones could add up to a negative variance. K is the number of updates in the buffer that are
    finite. The method says by its ``buffer_size`` how many end a round, as FedBuff does.

    Args:
        server_lr: Step size η of the server.
        staleness: Weight s(τ) of an update.

    References:
        Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1; it has no buffers.
    """

    def __init__(self, server_lr: float, staleness: Staleness) -> None:
        super().__init__(staleness)
        self.server_lr = server_lr

    def message(self, cohort: Cohort, server: ServerState) -> Tensor:
        """Return the updates Δ_i and the buffers b_i, (K, d + b)."""
        return torch.cat([cohort.w - server.z, cohort.buffers], dim=1)

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage z and the buffers."""
        d, buffers = server.z.numel(), server["buffers"]
        total, weights = torch.zeros_like(server.model, dtype=wide_dtype(server.z.device)), list[tuple[int, float]]()
        for client, staleness, message in self.arrived(server, clients):
            # Buffers are states, not updates: their distance from the present ones is taken when they arrive.
            message[d:] -= buffers
            weights.append((client, self.staleness(staleness)))
            total.add_(message, alpha=weights[-1][1])
        num_arrived = max(len(weights), 1)  # the buffer's size, without those that are not finite
        for client, weight in weights:
            self.record_weight(server, client, weight / num_arrived)
        # η moves the parameters alone; a variance that is moved beyond its mean could become negative.
        total[:d] *= self.server_lr
        server.stage_model(server.model + total / num_arrived)


class MixedModels(ArrivedUpdates):
    """Moves z towards each model that arrives: z ← (1 − α_t) z + α_t w_i, with α_t = α s(τ_i).

    Buffers such as BatchNorm's are mixed like the parameters. The method says by its ``buffer_size`` how many arrive
    in a round, as FedAsync does: one.

    Args:
        mixing: Weight α of a fresh model, in (0, 1].
        staleness: Factor s(τ) of the weight.

    References:
        Xie et al. 2019, "Asynchronous Federated Optimization", Algorithm 1.
    """

    def __init__(self, mixing: float, staleness: Staleness) -> None:
        super().__init__(staleness)
        self.mixing = mixing

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage z and the buffers."""
        model = server.model.to(wide_dtype(server.z.device))
        for client, staleness, arrived in self.arrived(server, clients):
            weight = self.mixing * self.staleness(staleness)
            # One after another, in the order of arrival: each mixes with the z that the one before has made.
            model = (1 - weight) * model + weight * arrived
            self.record_weight(server, client, weight)
        server.stage_model(model)
