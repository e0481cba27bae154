"""Settings of the methods in which each client keeps a part of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from helpers import reference_partial as loops

from algorithms.setting import Setting
from fedbc_lightning.algorithms import FedBABU, FedRep

IS_HEAD = np.array([False, True, True, True])
KEEPS_TAIL = {"local_parameters": ["tail"]}


def _fedrep(name: str, head_epochs: int, **options: Any) -> Setting:
    return Setting(
        f"fedrep-{name}",
        partial(FedRep, head_epochs, **options),
        partial(loops.fedrep, head_epochs=head_epochs, is_head=IS_HEAD, **options),
        vectors=("local_parameters",),
        options=KEEPS_TAIL,
    )


SETTINGS_PARTIAL = [
    _fedrep("samples", 2),
    _fedrep("uniform", 3, weighting="uniform"),
    Setting(
        "fedbabu",
        FedBABU,
        partial(loops.fedrep, head_epochs=0, is_head=IS_HEAD),
        vectors=("local_parameters",),
        options=KEEPS_TAIL,
    ),
]
