"""Fed+'s server rule: z in the middle of the clients, as the penalty understands it."""

from __future__ import annotations

import functools
import logging

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.local.penalties import Penalty

log = logging.getLogger(__name__)

MAX_SWEEPS = 1000


def smoothed_center(w: Tensor, penalty: Penalty) -> Tensor:
    """The z of least Σ_i min_θ Ψ(θ)/σ + ½ ‖w_i − z − θ‖², (d,) in float64; ``w`` (n, d), all of the same weight.

    From z = mean(w_i): θ_i = prox(w_i − z), z ← z + Σ (w_i − z − θ_i) / Σ b_i, until ‖step‖ ≤ 1e-8 max(1, ‖z‖) or after
    1,000 sweeps; on MPS, which has no float64, 5e-7. b_i is the share of w_i − z that θ_i leaves, by coordinate. With n
    in place of Σ b_i, as the paper has it, the sweeps have the same fixed points but move z by at most δ each, and need
    thousands where clients lie far beyond δ. It is the mean for
    :class:`~fedbc_lightning.local.penalties.SquaredNorm`, a smoothed geometric median for ``Norm``, a smoothed
    coordinate median (Huber's location) for ``AbsoluteNorm`` (some point of the median's interval, where the number of
    clients is even and they lie far apart). Kundu et al., "Fed+".

    Example:
        >>> from fedbc_lightning.local.penalties import AbsoluteNorm
        >>> w = torch.tensor([[0.0], [1.0], [50.0]])
        >>> smoothed_center(w, AbsoluteNorm(1.0)).round(decimals=6)
        tensor([1.], dtype=torch.float64)
    """
    w = w.to(wide_dtype(w.device))
    z = w.mean(dim=0)
    tolerance = max(1e-8, 4 * torch.finfo(w.dtype).eps)
    for _ in range(MAX_SWEEPS):
        away = w - z
        pull = penalty.pull(away)
        share = torch.where(away != 0, pull / away, 1.0).sum(dim=0)
        step = torch.where(share > 0, pull.sum(dim=0) / share, 0.0)
        z = z + step
        if torch.linalg.vector_norm(step) <= tolerance * torch.linalg.vector_norm(z).clamp(min=1):
            return z
    _warn_of_sweeps(penalty)
    return z


@functools.lru_cache(maxsize=16)  # once per penalty, which lives for one run
def _warn_of_sweeps(penalty: Penalty) -> None:
    rank_zero_only(log.warning)(
        f"The server's center under {type(penalty).__name__} still moves after {MAX_SWEEPS} sweeps and is taken as it "
        "is: the clients lie further apart than its delta reaches. Give a larger delta (said once)."
    )
