"""The server's half of the ADMM methods: z is the mean of the clients' augmented models u_i = w_i + y_i / ρ."""

from __future__ import annotations

import torch

from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class AugmentedMean(ServerCallback):
    """FedADMM: z ← (1/N) Σ_N u_i over *all* clients, to which each sampled client sends the change u_i − u_i^old.

    The u_i of a client that was never sampled is z⁰. This part comes after the aggregation, whose buffers it keeps. It
    needs the client model ``local_model`` (x_i) and the client vector ``multiplier`` (y_i), staged.

    Args:
        rho: Penalty parameter ρ.

    References:
        Wang et al. 2022, "FedADMM: A Federated Primal-Dual Algorithm Allowing Partial Participation", Algorithm 1.
    """

    reads = ("local_model", "multiplier")
    follows_aggregation = True

    def __init__(self, rho: float) -> None:
        self.rho = rho

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the mean in float64, so that rounding errors do not add up over the rounds."""
        state.server_vector("augmented_mean", initial="z", dtype=torch.float64)

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sum of the changes of u_i."""
        sums.declare("augmented", server.z.numel())

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add u_i − u_i^old of the valid clients."""
        # The change of what the store keeps: in bfloat16, the sum of these over all rounds is that of the kept rows,
        # and rounding does not pile up.
        change = cohort.change("local_model")[:, : server.z.numel()] + cohort.change("multiplier") / self.rho
        sums.add_valid("augmented", cohort, change)

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Replace the staged z by the mean of the u_i."""
        mean = server["augmented_mean"] + sums["augmented"] / server.num_clients
        server.stage("augmented_mean", mean)
        # z is the mean over all N, so that clients who rest still count with their last u_i.
        server.stage("z", mean)


class CenterConsensus(ServerCallback):
    """FedPD: each client has its own centre z_i = w_i + y_i / ρ; an exchange sets z and all z_i to their mean.

    With probability p the exchange of a round is skipped: nothing is sent, and every client continues from its own z_i.
    This part needs the client vector ``center``, staged.

    Args:
        skip_probability: Probability p of skipping the exchange of a round.

    References:
        Zhang et al. 2021, "FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data", Algorithm 1.
    """

    reads = ("center",)
    forms_z = True

    def __init__(self, skip_probability: float) -> None:
        self.skip_probability = skip_probability

    def is_skipped(self, server: ServerState) -> bool:
        """Return whether this round has no exchange; it depends on (seed, round) only."""
        return bool(server.rng("skip").random() < self.skip_probability)

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sum of the centres, each followed by the client's buffers."""
        sums.declare("centers", server.model.numel())

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' centres and buffers, and record the weights."""
        centers = torch.cat([cohort.staged("center"), cohort.buffers.to(cohort.w)], dim=1)
        sums.add_valid("centers", cohort, centers)
        cohort.record("weight", torch.zeros(len(cohort)) if self.is_skipped(server) else cohort.valid.double())

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage the mean as z and as every client's centre, unless the exchange is skipped."""
        if self.is_skipped(server):
            return
        num_valid = len(server.valid_records)
        server.stage_model(sums["centers"] / num_valid)
        for record in server.records:
            record["weight"] /= num_valid
        # An exchange makes all centres equal; it happens here and not in the client half, since z is known only now.
        ids = [record["client"] for record in server.records]
        clients.stage("center", ids, server.staged("z").expand(len(ids), -1))
