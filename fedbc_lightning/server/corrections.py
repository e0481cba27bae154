"""Vectors that the server keeps beside z and corrects in every round: c, h, and means of messages and models."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbc_lightning.core.devices import pieces
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class MessageSum(ServerCallback):
    """Base class of parts that add the valid clients' messages, with weight 1.

    Attributes:
        name: Name of the message and of its sum.
    """

    name: str

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the messages of the valid clients."""
        sums.add_valid(self.name, cohort, cohort.messages[self.name])


class ControlVariates(MessageSum):
    """Updates each sampled client's control variate to c_i⁺, and the server's: c ← c + (1/N) Σ_{S_t} (c_i⁺ − c_i).

    Args:
        gradient_mean: False sets c_i⁺ = c_i − c + (z − w_i)/(K_i η) (SCAFFOLD, Algorithm 1, option II), which is exact
            for plain SGD; η is the mean step size of each parameter's group. True sets c_i⁺ to the mean of the raw
            mini-batch gradients over the K_i steps, which works with any optimizer. K_i is counted by layer: steps in
            which a layer was frozen, or another optimizer stepped, are none of its own.

    References:
        Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", Algorithm 1.
    """

    vectors_up = 1
    name = "control"

    def __init__(self, gradient_mean: bool) -> None:
        self.gradient_mean = gradient_mean

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Raise a ConfigurationError for option II without plain SGD, for which alone it is exact."""
        if not self.gradient_mean and not engine.is_plain_sgd:
            raise ConfigurationError(
                "algorithm.control: 'step_size' needs plain SGD (no momentum, weight decay, gradient clipping "
                "or manual optimization); use 'gradient_mean' or 'auto'."
            )

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare c_i, c and what is sent of c_i, all under the name ``control``."""
        state.client_vector("control")
        state.server_vector("control")
        state.client_message("control")

    def new_control(self, cohort: Cohort, server: ServerState) -> Tensor:
        """Return c_i⁺ of the cohort's clients, (K, d); c_i stays where no step was taken, or only steps of size 0."""
        # Option I, in the form of every optimizer: the mean of the K_i raw gradients. Without a step there is none, and
        # c_i stays.
        if self.gradient_mean:
            return torch.where(cohort.num_gradients > 0, cohort.gradient_mean, cohort["control"])
        # Option II: c_i⁺ = c_i − c + (z − w_i) / (K_i η). With a scheduler, η is the mean over the steps; where it is 0
        # (groups of rate 0, layers that no step moved) the quotient says nothing, and c_i stays.
        moved = cohort.num_steps.to(cohort.w)[:, None] * cohort.step_size
        control = torch.empty_like(cohort.w)
        for new, own, c, z, w, factor in pieces(
            control, cohort["control"], server["control"], server.z, cohort.w, moved.expand_as(control)
        ):
            torch.where(factor > 0, own - c + (z - w) / factor, own, out=new)
        return control

    def on_client_end(self, cohort: Cohort, server: ServerState) -> None:
        """Stage c_i⁺, and send its change."""
        cohort.stage("control", self.new_control(cohort, server))
        cohort.messages["control"] = cohort.change("control")

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Add to c the sum of the changes divided by N."""
        # c ← c + (S/N) · mean of the changes: a sum over S_t, divided by all N clients.
        server.stage("control", sums["control"].div_(server.num_clients).add_(server["control"]))


class DynamicRegularization(MessageSum):
    """Updates h ← h + (1/N) Σ_{S_t} (h_i⁺ − h_i), and corrects the aggregate: z ← aggregate − h/α.

    This part comes after the aggregation. It needs the client vector ``correction`` (h_i), staged as
    h_i⁺ = h_i − α (w_i − z).

    Args:
        alpha: Regularization parameter α.

    References:
        Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", Algorithm 1.
    """

    reads = ("correction",)
    name = "correction"
    follows_aggregation = True

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the correction h, which starts at 0, and what is sent of h_i."""
        state.server_vector("correction", for_clients=False)
        state.client_message("correction")

    def on_client_end(self, cohort: Cohort, server: ServerState) -> None:
        """Send the change of h_i."""
        # h is the mean of all h_i; only those of this round change, so their changes suffice.
        cohort.messages["correction"] = cohort.change("correction")

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Update h, then correct the staged z."""
        correction = server["correction"] + sums["correction"] / server.num_clients
        server.stage("correction", correction)
        # z ← mean(w_i) − h/α with the new h, as in Algorithm 1: the state corrects z itself, not the next gradients.
        server.stage("z", server.staged("z") - correction / self.alpha)


class MeanMessage(MessageSum):
    """Sets a server vector (d,) to the mean of the clients' message of the same name, over the round's clients.

    Every client has the weight 1, since such messages are estimates of gradients, which the methods average uniformly.

    Args:
        name: Name of the client message and of its mean on the server.
    """

    vectors_up = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages = (name,)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the server vector, which starts at 0, and the message."""
        state.server_vector(self.name)
        state.client_message(self.name)

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage the mean."""
        server.stage(self.name, sums[self.name] / len(server.valid_records))


class AugmentedMean(MessageSum):
    """FedADMM: z ← (1/N) Σ_N u_i over *all* clients, to which each sampled client sends the change u_i − u_i^old.

    The u_i of a client that was never sampled is z⁰. This part comes after the aggregation, whose buffers it keeps. It
    needs the client model ``local_model`` (x_i) and the client vector ``multiplier`` (y_i), staged.

    Args:
        rho: Penalty parameter ρ.

    References:
        Wang et al. 2022, "FedADMM: A Federated Primal-Dual Algorithm Allowing Partial Participation", Algorithm 1.
    """

    reads = ("local_model", "multiplier")
    name = "augmented"
    follows_aggregation = True

    def __init__(self, rho: float) -> None:
        self.rho = rho

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the mean in float64, so that rounding errors do not add up over the rounds."""
        state.server_vector("augmented_mean", initial="z", dtype=torch.float64, for_clients=False)
        state.client_message("augmented")

    def on_client_end(self, cohort: Cohort, server: ServerState) -> None:
        """Send u_i − u_i^old."""
        # The change of what the store keeps: in bfloat16, the sum of these over all rounds is that of the kept rows,
        # and rounding does not pile up.
        change = cohort.change("local_model")[:, : server.z.numel()] + cohort.change("multiplier") / self.rho
        cohort.messages["augmented"] = change

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
    needs_rows = True

    def __init__(self, skip_probability: float) -> None:
        self.skip_probability = skip_probability

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare what is sent."""
        state.client_message("center")

    def is_skipped(self, server: ServerState) -> bool:
        """Return whether this round has no exchange; it depends on (seed, round) only."""
        return bool(server.rng("skip").random() < self.skip_probability)

    def on_client_end(self, cohort: Cohort, server: ServerState) -> None:
        """Send the centre."""
        cohort.messages["center"] = cohort.staged("center")

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' centres and buffers, and record the weights."""
        centers = torch.cat([cohort.messages["center"], cohort.buffers], dim=1)
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
