"""SCAFFOLD's control variates at the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ClientStore, ServerState, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class ControlVariates(ServerCallback):
    """Each client's new control variate c_i⁺, and the server's c ← c + (1/N) Σ_{S_t} (c_i⁺ − c_i).

    Args:
        gradient_mean: False: c_i⁺ = c_i − c + (z − w_i)/(K_i η) (SCAFFOLD, Algorithm 1, option II), exact
            for plain SGD, with η the mean step size of each parameter's group. True: the mean over the K_i steps of
            the raw mini-batch gradients, for any optimizer.
    """

    vectors_up = 1
    vectors_down = 1

    def __init__(self, gradient_mean: bool) -> None:
        self.gradient_mean = gradient_mean

    def check(self, engine: Engine, num_sampled: int) -> None:
        """The first form is exact for plain SGD only."""
        if not self.gradient_mean and not engine.is_plain_sgd:
            raise ConfigurationError(
                "algorithm.control: 'step_size' needs plain SGD (no momentum, weight decay or gradient clipping); "
                "use 'gradient_mean' or 'auto'."
            )

    def declare_state(self, state: StateDeclaration) -> None:
        """c_i and c, both ``control``."""
        state.client_vector("control")
        state.server_vector("control")

    def new_control(self, cohort: Cohort, server: ServerState) -> Tensor:
        """c_i⁺ of the cohort's clients, (K, d); c_i where no step was taken, or steps of size 0 say nothing."""
        num_steps = cohort.num_steps.to(cohort.w)[:, None]
        if self.gradient_mean:
            return torch.where(num_steps > 0, cohort.gradient_mean, cohort.control)
        moved = num_steps * cohort.step_size
        control = cohort.control - server["control"] + (server.z - cohort.w) / moved
        return torch.where(moved > 0, control, cohort.control)

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """The sum of the changes of the c_i."""
        sums.declare("control", server.z.numel())

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Stage c_i⁺ and add its change."""
        cohort.stage("control", self.new_control(cohort, server))
        sums.add_valid("control", cohort, cohort.change("control"))

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """C moves by the mean over all N clients."""
        server.stage("control", server["control"] + sums["control"] / clients.num_clients)
