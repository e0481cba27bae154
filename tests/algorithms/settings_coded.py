"""Settings with coded messages, which the battery runs resumed, on two processes and in both engines."""

from __future__ import annotations

from functools import partial
from typing import Any

from helpers import reference_codecs as loops

from algorithms.setting import Setting
from fedbc_lightning import Codecs
from fedbc_lightning.algorithms import FedAvg, FedBC
from fedbc_lightning.server import QSGD, BFloat16, Float8, Sign, TopK

CODERS: dict[str, tuple[Any, loops.Coder]] = {
    "TopK": (TopK(0.5), loops.top_k(2)),
    "TopK-alone": (TopK(0.5, error_feedback=False), loops.top_k(2)),
    "QSGD": (QSGD(3, bucket_size=3), loops.qsgd(3, 3)),
    "Sign": (Sign(), loops.sign),
    "BFloat16": (BFloat16(), loops.bfloat16),
    "Float8": (Float8(), loops.float8),
}


def coded(up: str, down: str | None = None, dual_lr: float | None = None) -> Setting:
    """FedAvg, or FedBC with a dual step, whose clients send by one codec and receive by another."""
    (codec, coder), (broadcast, its_coder) = CODERS[up], CODERS[down] if down else (None, None)
    memory = ("coding_error",) if codec.error_feedback else ()
    return Setting(
        f"{'fedavg' if dual_lr is None else 'fedbc'}-coded-{up}",
        FedAvg if dual_lr is None else partial(FedBC, dual_lr=dual_lr, dual_init=0.1),
        partial(loops.coded, up=coder, down=its_coder, has_memory=bool(memory), dual_lr=dual_lr),
        scalars=() if dual_lr is None else ("dual", "tolerance"),
        vectors=memory if dual_lr is None else ("local_model", *memory),
        options={"codec": Codecs(codec, broadcast)},
    )


SETTINGS_CODED = [coded("TopK", "QSGD"), coded("Sign", "Float8", dual_lr=0.05)]
