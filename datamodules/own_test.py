"""Use of the test images that a data set has of its own: pooled with the others, or kept for the global model."""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch.utils.data import Dataset

from fedbc_lightning.data import LoadedData
from fedbc_lightning.data.datasets import take

OwnTest = Literal["split", "shared"]


def keep_own_test(dataset: Dataset, labels: np.ndarray, is_test: np.ndarray) -> LoadedData:
    """Keep the samples where ``is_test``, bool ``(M,)``, is true for the global model, and give clients the others."""
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    return LoadedData(take(dataset, train), labels[train], shared_test=take(dataset, test))
