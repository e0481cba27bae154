"""The server's half of Fed+: the centre of the clients' models under a penalty."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.local import Engine
from fedbc_lightning.local.penalties import Penalty
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState

log = logging.getLogger(__name__)

# Largest number of sweeps over the clients; then the last z is taken and a warning logged
MAX_SWEEPS = 1000


def smoothed_center(w: Tensor, penalty: Penalty) -> Tensor:
    """Return the z that minimises Σ_i min_θ Ψ(θ)/σ + ½ ‖w_i − z − θ‖², (d,), in float64.

    The iteration starts at z = mean(w_i) and repeats θ_i = prox(w_i − z), z ← z + Σ (w_i − z − θ_i) / Σ b_i, where b_i
    is the fraction (w_i − z − θ_i) / (w_i − z) of each coordinate. It stops when ‖step‖ ≤ 1e-8 max(1, ‖z‖), or after
    1,000 sweeps; the tolerance is 5e-7 on MPS, which has no float64.

    The paper has n in place of Σ b_i. The fixed points are the same, but such a sweep moves z by at most δ and takes
    thousands of sweeps if clients are much farther apart than δ.

    The result is the mean for :class:`~fedbc_lightning.local.penalties.SquaredNorm`, a smoothed geometric median for
    ``Norm``, and a smoothed coordinate median (Huber's location) for ``AbsoluteNorm``; the latter is some point of the
    median's interval if the number of clients is even and they are far apart. Source: Kundu et al., "Fed+".

    Args:
        w: The clients' vectors, (n, d); all have the same weight.
        penalty: The penalty Ψ, bound to the layout.

    Example:
        >>> from fedbc_lightning.local.penalties import AbsoluteNorm
        >>> w = torch.tensor([[0.0], [1.0], [50.0]])
        >>> smoothed_center(w, AbsoluteNorm(1.0)).round(decimals=6)
        tensor([1.], dtype=torch.float64)
    """
    w = w.to(wide_dtype(w.device))
    z = w.mean(dim=0)
    # In float32 (MPS) a step below 4 roundings of z can no longer be told from 0.
    tolerance = max(1e-8, 4 * torch.finfo(w.dtype).eps)
    for _ in range(MAX_SWEEPS):
        away = w - z
        pull = penalty.pull(away)
        # Each client counts by pull / distance, which is 1 near z and less beyond δ, in place of the plain mean of the
        # paper's sweep: the fixed points are the same, and fewer sweeps reach them.
        share = torch.where(away != 0, pull / away, 1.0).sum(dim=0)
        step = torch.where(share > 0, pull.sum(dim=0) / share, 0.0)
        z = z + step
        if torch.linalg.vector_norm(step) <= tolerance * torch.linalg.vector_norm(z).clamp(min=1):
            return z
    _warn_of_sweeps(penalty)
    return z


@functools.lru_cache(maxsize=16)  # warns once per penalty, and a penalty lives for one run
def _warn_of_sweeps(penalty: Penalty) -> None:
    rank_zero_only(log.warning)(
        f"The server's center under {type(penalty).__name__} still moves after {MAX_SWEEPS} sweeps and is taken as it "
        "is: the clients lie further apart than its delta reaches. Give a larger delta (said once)."
    )


class SmoothedAverage(ServerCallback):
    """Sets z to the smoothed centre of the w_i under a penalty, see :func:`smoothed_center` of this file.

    The buffers are the plain mean of the same models' buffers.

    Args:
        penalty: Penalty Ψ.
        over: ``"sampled"`` takes the clients of the round, ``"all"`` takes all N clients' stored ``local_model``.

    Attributes:
        bound: The penalty that :meth:`check` has bound to the layout of the parameters.
    """

    forms_z = True

    def __init__(self, penalty: Penalty, over: Literal["sampled", "all"] = "sampled") -> None:
        self.penalty, self.over = penalty, over
        self.reads = ("local_model",) if over == "all" else ()
        self.needs_rows = over == "all"

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Bind the penalty to the layout, by which it finds the parameters that it names."""
        self.bound = self.penalty.bind(engine.layout)

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
        models = clients.gather("local_model", staged=True).to(server.z.device) if of_all else sums.rows("model")
        z = smoothed_center(models[:, : server.z.numel()], self.bound)
        server.stage_model(torch.cat([z, models[:, server.z.numel() :].to(z.dtype).mean(dim=0)]))
        num_valid = len(server.valid_records)
        for record in server.records:
            record["weight"] /= num_valid
