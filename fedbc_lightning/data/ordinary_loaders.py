"""Checks whether an ordinary DataLoader can be federated, and the options that clients' loaders take over from it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data.datasets import num_items


def check_loader(loader: Any, name: str) -> DataLoader:
    """Return ``loader`` after checking that it is one plain DataLoader over a map-style data set.

    Args:
        loader: Object that a method of the user's data module returned.
        name: Name of that method, for the message.

    Raises:
        ConfigurationError: The loader cannot be federated.
    """
    reason = None
    if isinstance(loader, (list, tuple, dict)) or type(loader).__name__ == "CombinedLoader":
        reason = "returns several loaders; return one DataLoader, of a ConcatDataset at need"
    elif not isinstance(loader, DataLoader):
        reason = f"returns a {type(loader).__name__}; return one torch DataLoader"
    elif isinstance(loader.dataset, IterableDataset):
        reason = "reads an IterableDataset, whose samples cannot be split over clients; use a map-style Dataset"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        reason = f"returns a {type(loader).__name__} that makes batches in its own way; return a plain DataLoader"
    if reason:
        raise ConfigurationError(f"data: {name} {reason}")
    return loader


def check_sampler(loader: DataLoader, name: str) -> None:
    """Check that a loader makes batches of a fixed size of all samples, shuffled or in order.

    Args:
        loader: Loader that the user's data module returned.
        name: Name of the method that returned it, for the message.

    Raises:
        ConfigurationError: The loader draws batches or samples in another way.
    """
    sampler: Any = loader.sampler
    batch_sampler, reason = loader.batch_sampler, None
    if loader.batch_size is None or type(batch_sampler) is not BatchSampler:
        kind = "no batching" if batch_sampler is None else f"the batch_sampler {type(batch_sampler).__name__}"
        reason = f"uses {kind}, which says nothing about a client's batches; give a batch_size"
    elif type(sampler) not in (RandomSampler, SequentialSampler):
        reason = (
            f"uses the sampler {type(sampler).__name__}, which draws from all data and cannot be kept inside a client; "
            "use shuffle=True"
        )
    elif getattr(sampler, "replacement", False) or len(sampler) != num_items(loader.dataset):
        reason = "draws with replacement, or only a part; clients see each sample once per epoch: use shuffle=True"
    if reason:
        raise ConfigurationError(f"data: {name} {reason}")


def loader_options(loader: DataLoader) -> dict[str, Any]:
    """Return the arguments of a DataLoader that clients' loaders take over."""
    options: dict[str, Any] = {}
    if loader.collate_fn is not default_collate:
        options["collate_fn"] = loader.collate_fn
    if loader.pin_memory and torch.cuda.is_available():
        options["pin_memory"] = True
    if loader.num_workers:
        for name in ("num_workers", "worker_init_fn", "prefetch_factor", "multiprocessing_context", "timeout"):
            options[name] = getattr(loader, name)
    return options
