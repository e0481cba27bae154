"""FedAvg (McMahan et al. 2017)."""

from __future__ import annotations

from fedbc_lightning.algorithms.base import FederatedAlgorithm, PartialWork
from fedbc_lightning.local import Engine
from fedbc_lightning.server import RobustRule, ServerCallback, WeightedAverage
from fedbc_lightning.server.aggregation import Weighting


class FedAvg(FederatedAlgorithm):
    """FedAvg: clients train from z, and the server takes the mean of their models.

    Problem:
        min_w Σ (n_i / n) f_i(w): one model for all clients.

    Update::

        client    w_i ← E epochs of the user's optimizer from z
        server    z ← Σ p_i w_i,    p_i = n_i / Σ_{j ∈ S_t} n_j

    State:
        The method keeps no state.
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is dropped, as in the FedProx paper's comparison.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        With one client it is plain training.
    Departures:
        Buffers such as BatchNorm's are averaged like the parameters, or treated as ``trainer.buffers`` says.

    References:
        McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1.

    Args:
        weighting: Weights of the mean: ``"samples"`` takes p_i = n_i / Σ n_j, ``"uniform"`` takes p_i = 1 / S.
        robust_rule: Robust rule by which the server aggregates the w_i, e.g. ``CoordinateMedian``; None takes the mean.
            The published rules are those with ``weighting="uniform"``.

    Raises:
        ConfigurationError: The weighting is unknown.
    """

    # As in the FedProx paper, whose FedAvg drops stragglers; McMahan et al. 2017 know none.
    partial_work: PartialWork = "dropped"

    def __init__(self, weighting: Weighting = "samples", robust_rule: RobustRule | None = None) -> None:
        self.weighting, self.robust_rule = weighting, robust_rule
        self.scalars_up = int(weighting == "samples")  # n_i

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the weighted mean, or the robust rule in its place."""
        return [WeightedAverage(by=self.weighting, rule=self.robust_rule)]
