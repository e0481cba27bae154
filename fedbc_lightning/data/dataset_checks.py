"""Checks of the data sets that a data module of the user's returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedbc_lightning.core.errors import ConfigurationError


def check_dataset(dataset: Any, where: str) -> None:
    """Raise unless a data set has numbered samples.

    Args:
        dataset: What a method of the data module returned.
        where: The method and its argument, with which the message begins.

    Raises:
        ConfigurationError: It is a DataLoader, a tuple of whole tensors, or has no length or no items.
    """
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(f"{where} returned a DataLoader; return its data set, batches are made here.")
    if type(dataset) is tuple and dataset and all(isinstance(part, Tensor) and part.ndim for part in dataset):
        if len({part.shape for part in dataset}) > 1 and len({len(part) for part in dataset}) == 1:
            raise ConfigurationError(f"{where} returned a tuple of tensors; return TensorDataset(*tensors).")
        return
    kind = type(dataset)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    if isinstance(dataset, IterableDataset) or missing:
        lacks = " and ".join(missing) or "__getitem__"
        raise ConfigurationError(
            f"{where} returned an object of {kind.__name__}, which has no {lacks}; return a map-style Dataset, which "
            "has both __len__ and __getitem__."
        )
