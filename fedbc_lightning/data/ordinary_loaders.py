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
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        # A subclass with its own __iter__ makes batches that the clients' loaders would not
        or type(loader).__iter__ is not DataLoader.__iter__
    ):
        what = f" of a {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else ""
        raise ConfigurationError(
            f"data: {name} returns a {type(loader).__name__}{what}; return one plain DataLoader of a map-style Dataset "
            "(a ConcatDataset at need), whose samples can be split over clients"
        )
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
    is_batched = loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler
    # Exactly these classes, because a subclass may draw in a way of its own
    is_plain = type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
    if not is_batched or not is_plain or len(sampler) != num_items(loader.dataset):
        kinds = f"{type(sampler).__name__} and {type(loader.batch_sampler).__name__}"
        raise ConfigurationError(
            f"data: {name} draws with {kinds}, which cannot be kept inside a client: there each sample is seen once "
            "per epoch, in batches of one size; give a batch_size and shuffle=True or False"
        )


def loader_options(loader: DataLoader) -> dict[str, Any]:
    """Return the arguments of a DataLoader that clients' loaders take over."""
    options: dict[str, Any] = {}
    if loader.collate_fn is not default_collate:
        options["collate_fn"] = loader.collate_fn
    # torch warns about pinned memory where there is no GPU.
    if loader.pin_memory and torch.cuda.is_available():
        options["pin_memory"] = True
    # Without workers torch refuses prefetch_factor and multiprocessing_context. persistent_workers is left out, because
    # each client has a loader of its own in every round.
    if loader.num_workers:
        for name in ("num_workers", "worker_init_fn", "prefetch_factor", "multiprocessing_context", "timeout"):
            options[name] = getattr(loader, name)
    return options
