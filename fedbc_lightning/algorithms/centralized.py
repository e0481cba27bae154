"""Training without federation on all data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.server import ServerCallback, WeightedAverage
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class Centralized(FederatedAlgorithm):
    """Centralized: one model trained on all clients' data; the ceiling for a global model.

    Problem:
        min_w Σ (n_i / n) f_i(w), with the data in one place.

    Update::

        z ← E epochs of the user's optimizer over the pooled data, from z

    State:
        None.
    Communication:
        None.
    Partial work:
        None: stragglers are refused.
    Local model:
        None; ``fairness/*`` tells how z serves each client.
    Degenerate cases:
        One round is ``lightning.Trainer.fit`` for E epochs on the pooled data.
    Departures:
        A round is E epochs over *all* data, so it does N/S times the steps of a round of FedAvg; the optimizer starts
        anew in each. In ``clients.csv`` it is client -1.

    References:
        None.
    """

    trains_pooled = True
    partial_work = "refused"

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Default local training of the pseudo-client."""
        engine.solve(cohort, start=server.model)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Its result."""
        return [WeightedAverage(by="uniform")]
