"""The server's half of SCAFFOLD: its control variates."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class ControlVariates(ServerCallback):
    """Updates each sampled client's control variate to c_i⁺, and the server's: c ← c + (1/N) Σ_{S_t} (c_i⁺ − c_i).

    Args:
        gradient_mean: False sets c_i⁺ = c_i − c + (z − w_i)/(K_i η) (SCAFFOLD, Algorithm 1, option II), which is exact
            for plain SGD; η is the mean step size of each parameter's group. True sets c_i⁺ to the mean of the raw
            mini-batch gradients over the K_i steps, which works with any optimizer.

    References:
        Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", Algorithm 1.
    """

    vectors_up = 1
    vectors_down = 1

    def __init__(self, gradient_mean: bool) -> None:
        self.gradient_mean = gradient_mean

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Raise a ConfigurationError for option II without plain SGD, for which alone it is exact."""
        if not self.gradient_mean and not engine.is_plain_sgd:
            raise ConfigurationError(
                "algorithm.control: 'step_size' needs plain SGD (no momentum, weight decay or gradient clipping); "
                "use 'gradient_mean' or 'auto'."
            )

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare c_i and c, both under the name ``control``."""
        state.client_vector("control")
        state.server_vector("control")

    def new_control(self, cohort: Cohort, server: ServerState) -> Tensor:
        """Return c_i⁺ of the cohort's clients, (K, d); c_i stays if no step was taken, or only steps of size 0."""
        num_steps = cohort.num_steps.to(cohort.w)[:, None]
        # Option I, in the form of every optimizer: the mean of the K_i raw gradients. Without a step there is none, and
        # c_i stays.
        if self.gradient_mean:
            return torch.where(num_steps > 0, cohort.gradient_mean, cohort["control"])
        # Option II: c_i⁺ = c_i − c + (z − w_i) / (K_i η). With a scheduler, η is the mean over the steps; where η is 0
        # (frozen groups) the quotient says nothing, and c_i stays.
        moved = num_steps * cohort.step_size
        control = cohort["control"] - server["control"] + (server.z - cohort.w) / moved
        return torch.where(moved > 0, control, cohort["control"])

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sum of the changes of the c_i."""
        sums.declare("control", server.z.numel())

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Stage c_i⁺ and add its change."""
        cohort.stage("control", self.new_control(cohort, server))
        sums.add_valid("control", cohort, cohort.change("control"))

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Add to c the sum of the changes divided by N."""
        # c ← c + (S/N) · mean of the changes: a sum over S_t, divided by all N clients.
        server.stage("control", server["control"] + sums["control"] / server.num_clients)
