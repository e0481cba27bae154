"""The server's half of Fed+: its aggregation."""

from __future__ import annotations

from typing import Literal

import torch

from fedbc_lightning.local import Engine
from fedbc_lightning.local.penalties import Penalty
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.server.smoothed_center import smoothed_center
from fedbc_lightning.state import ClientStore, Cohort, ServerState


class SmoothedAverage(ServerCallback):
    """Sets z to the smoothed centre of the w_i under a penalty (:func:`~fedbc_lightning.server.smoothed_center`).

    The buffers are the plain mean of the same models' buffers.

    Args:
        penalty: Penalty Ψ.
        over: ``"sampled"`` takes the clients of the round, ``"all"`` takes all N clients' stored ``local_model``.
    """

    forms_z = True

    def __init__(self, penalty: Penalty, over: Literal["sampled", "all"] = "sampled") -> None:
        self.penalty, self.over = penalty, over
        self.reads = ("local_model",) if over == "all" else ()

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Bind the penalty to the layout, by which it finds the parameters that it names."""
        self._bound = self.penalty.bind(engine.layout)

    @property
    def bound(self) -> Penalty:
        """The penalty that :meth:`check` has bound to the layout of the parameters."""
        return self._bound

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Keep the valid clients' models, unless all clients' models are taken from the store."""
        cohort.record("weight", cohort.valid.double())
        # A fixed point of all models needs every row, not a sum; the ranks gather them once.
        if self.over == "sampled":
            for position, row in zip(cohort.valid_positions, cohort.of_valid(cohort.model), strict=True):
                sums.keep("model", position, row)

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage z and the buffers."""
        of_all = self.over == "all"
        # Over all N, the w_i of clients who were not sampled are those of their last rounds (Algorithm 1, line 12).
        models = clients.staged_vectors("local_model").to(server.z.device) if of_all else sums.rows("model")
        z = smoothed_center(models[:, : server.z.numel()], self.bound)
        server.stage_model(torch.cat([z, models[:, server.z.numel() :].to(z.dtype).mean(dim=0)]))
        num_valid = len(server.valid_records)
        for record in server.records:
            record["weight"] /= num_valid
