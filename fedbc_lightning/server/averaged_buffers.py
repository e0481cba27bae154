"""The mean of the clients' buffers, for rounds in which the algorithm's own parts staged z only."""

from __future__ import annotations

from torch import Tensor

from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState


class AveragedBuffers(ServerCallback):
    """Averages the clients' buffers, weighted by their samples, if z was staged and the buffers were not.

    A part that stages z only would otherwise leave BatchNorm with the mean 0 and the variance 1 of its initialisation.
    The federation adds this part after the algorithm's own parts.
    """

    _mean: Tensor | None = None

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sum of the weighted buffers and the sum of the weights."""
        sums.declare("own_buffers", server["buffers"].numel())
        sums.declare("own_buffers_weight")

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' buffers."""
        # By samples, whatever weights z has: statistics of a batch are estimates whose variance falls with their
        # number.
        weights = cohort.of_valid(cohort.num_samples)
        sums.add_rows("own_buffers", cohort.of_valid(cohort.buffers), weights)
        sums.add("own_buffers_weight", weights.sum().to(sums.device, sums.dtype))

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """Stage the mean, if nobody has staged buffers for this z."""
        mean, self._mean = self._mean, None  # it does not outlive the round
        if mean is not None and server.is_staged("z") and not server.is_staged("buffers"):
            server.stage("buffers", mean)

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Compute the mean, which :meth:`on_round_end` stages if it is needed."""
        self._mean = sums["own_buffers"] / sums["own_buffers_weight"]
