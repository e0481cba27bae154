"""Training on all clients' data in one place, without federation."""

from __future__ import annotations

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.local import Engine
from fedbc_lightning.server import ServerCallback, WeightedAverage


class Centralized(FederatedAlgorithm):
    """Centralized: one model is trained on all clients' data, as an upper bound for a global model.

    Problem:
        min_w Σ (n_i / n) f_i(w), with the data in one place.

    Update::

        z ← E epochs of the user's optimizer over the pooled data, from z

    State:
        The method keeps no state.
    Communication:
        Nothing is sent.
    Partial work:
        Stragglers are refused.
    Local model:
        Clients have no model of their own; ``accuracy/worst10`` and the like show how well z serves each client.
    Degenerate cases:
        One round is ``lightning.Trainer.fit`` for E epochs on the pooled data.
    Departures:
        A round is E epochs over *all* data, so it takes N/S times the steps of a round of FedAvg. The optimizer starts
        anew in each round. In ``clients.csv`` the pooled data is client -1.

    References:
        This is plain training, so no paper is cited.
    """

    trains_pooled = True
    takes_local_parameters = False
    partial_work = "refused"

    # One pseudo-client holds all data, so its w is z: the server has nothing to average.
    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, which is the pseudo-client's model."""
        return [WeightedAverage(by="uniform")]
