"""Batches that loaders of the user's make by themselves: streams, several loaders at once, samplers of their own."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from inspect import isfunction
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedbc_lightning.core import seeding
from fedbc_lightning.core.described import GENERATORS
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import both
from fedbc_lightning.core.private_lightning import BatchFetcher, combination_mode, sizes_in
from fedbc_lightning.data.loading import ClientLoader, EpochSampler, check_workers, num_batches

# How the numbers of batches of several loaders become one, by the mode of CombinedLoader
NUMBERS: dict[str, Callable[[Sequence[int]], int]] = {
    "min_size": min, "max_size_cycle": max, "max_size": max, "sequential": sum,
}  # fmt: skip
# Time after which a stream is not counted further: an endless one would be read for ever
COUNT_SECONDS = 120.0
_cache = WarningCache()


class OwnBatches(Dataset):
    """A client's data behind loaders of the user's, which make its batches as they do under ``lightning.Trainer``.

    It stands where a client's map-style data set would. Its length is the number of samples of all of its loaders.

    Args:
        loaders: A loader, several of them in a list or dict, or Lightning's ``CombinedLoader``: what may be returned by
            a LightningDataModule.
        where: Where they come from, for messages.
        is_training: Whether they are for training: several loaders then give their batches together, until the longest
            ends. For evaluation they come one after another.
        num_samples: Number of samples of a stream, which is counted in one pass otherwise.

    Attributes:
        parts: The loaders; of several clients' joined data, one part each.

    Raises:
        ConfigurationError: They are no loaders, or come one after another in training, which Lightning does not allow.
    """

    def __init__(self, loaders: Any, where: str, *, is_training: bool, num_samples: int | None = None) -> None:
        mode: Any = "max_size_cycle" if is_training else "sequential"  # as lightning.Trainer does
        combined = loaders if isinstance(loaders, both(CombinedLoader)) else CombinedLoader(loaders, mode)
        if is_training and combination_mode(combined) == "sequential":
            raise ConfigurationError(f"{where}: a CombinedLoader with mode 'sequential' cannot train, as in Lightning.")
        for loader in combined.flattened:
            # Such as a generator; an iterator of the user's class may begin anew in its __iter__
            is_read_once = isinstance(loader, Iterator) and not isfunction(type(loader).__iter__)
            is_data = isinstance(loader, (Dataset, str, np.ndarray, torch.Tensor))
            is_data &= not isinstance(loader, IterableDataset)  # which Lightning takes for a loader, too
            if is_read_once or is_data or not hasattr(loader, "__iter__"):
                raise ConfigurationError(
                    f"{where}: {type(loader).__name__} {'can be read once, so it ' * is_read_once}is no loader of "
                    "batches; give a Dataset alone, such as TensorDataset(X, y), a DataLoader, or several "
                    "DataLoaders in a list or dict"
                )
        # As in Lightning, where a loader with fewer batches than its len() says ends earlier
        combined.limits = [float("inf") if (n := sized_len(each)) is None else n for each in combined.flattened]
        self.parts, self._given = [combined], [(where, num_samples)]

    @classmethod
    def joined(cls, parts: Sequence[OwnBatches]) -> OwnBatches:
        """Return the data of several clients, one after another."""
        data = cls([], "data", is_training=False)
        data.parts = [combined for part in parts for combined in part.parts]
        data._given = [given for part in parts for given in part._given]
        data.__dict__["_lengths"] = [lengths for part in parts for lengths in part._lengths]
        return data

    def __len__(self) -> int:
        return sum(samples for lengths in self._lengths for samples, _ in lengths)

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch."""
        batches = [[number for _, number in lengths] for lengths in self._lengths]
        return sum(NUMBERS[combination_mode(c)](n) for c, n in zip(self.parts, batches, strict=True))

    @property
    def has_numbers(self) -> bool:
        """Whether steps are told the number of the loader, ``dataloader_idx``: several come one after another."""
        return any(len(each.flattened) > 1 and combination_mode(each) == "sequential" for each in self.parts)

    @cached_property
    def shares(self) -> list[float]:
        """Share of the samples in each batch of an epoch, by one pass; they sum to 1."""
        sizes = _counted(self.parts[0], self._given[0][0])
        return [size / sum(sizes) for size in sizes]

    @cached_property
    def _lengths(self) -> list[list[tuple[int, int]]]:
        """Number of samples and of batches of each loader of each part."""
        parts = zip(self.parts, self._given, strict=True)
        return [[self._length(loader, *given) for loader in combined.flattened] for combined, given in parts]

    def check_number(self, part: int, found: int, *, is_last: bool) -> None:
        """Raise if the batches of an epoch of a stream are not as many as the given number of samples makes.

        Args:
            part: Number of the part.
            found: Number of its batches so far.
            is_last: Whether the epoch is over.
        """
        loader, *others = self.parts[part].flattened
        where, given = self._given[part]
        if given is None or others or sized_len(loader) is not None or not getattr(loader, "batch_size", None):
            return  # the number of batches was not computed from it
        promised = self._lengths[part][0][1]
        spare = max(loader.num_workers - 1, 0)  # each worker fills batches of its own, of which the last may be smaller
        if found > promised + spare or (is_last and found < promised - spare):
            raise ConfigurationError(
                f"{where}: data.sizes says {given} samples, which are {promised} batches, but an epoch has "
                f"{found if is_last else 'more'}; correct it, or leave data.sizes out to have samples counted"
            )

    def _length(self, loader: Any, where: str, given: int | None) -> tuple[int, int]:
        samples, batches = _num_samples(loader), sized_len(loader)
        samples = given if samples is None else samples
        batch_size = getattr(loader, "batch_size", None)
        if batches is None and samples is not None and batch_size:
            batches = num_batches(samples, batch_size, loader.drop_last)
        if samples is None or batches is None:
            _cache.info(f"{where} is read once to count its samples; where it is a stream, give data.sizes.")
            sizes = _counted(CombinedLoader([loader], "sequential"), where)
            samples, batches = sum(sizes), len(sizes)
        if not batches:
            raise ConfigurationError(f"{where}: a loader has no batch")
        return samples, batches


class OwnLoader(ClientLoader):
    """Iterates over the batches of :class:`OwnBatches` in the order of ``lightning.Trainer``.

    Everything that a pass draws or is told depends on (seed, round, client, epoch) alone: ``set_epoch`` of data set and
    sampler gets the number of the epoch over all rounds, and a generator of the loader's own is seeded anew.

    Args:
        data: The batches.
        sampler: Holds seed, round and client; None for evaluation.

    Attributes:
        first_epoch: Number of epochs in all rounds before this one.
        is_last: Whether the batch that came last is the last one of the epoch.
        may_go_on: Whether a stream may have more batches than its given size makes, as steps are counted, not epochs.
    """

    gathers = gathers_plainly = False

    def __init__(self, data: OwnBatches, sampler: EpochSampler | None = None) -> None:
        # The size of a batch without tensors is not known; this is the mean.
        super().__init__(data, -(-len(data) // data.num_batches), sampler)
        self.data, self.first_epoch, self.is_last, self.may_go_on = data, 0, False, False

    def __len__(self) -> int:
        return self.data.num_batches

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self.numbered())

    def numbered(self) -> Iterator[tuple[Any, int, int | None]]:
        """Yield each batch with its number within its loader, and the number of the loader if steps are told it."""
        sampler, has_numbers = self.sampler, self.data.has_numbers
        for k, combined in enumerate(self.data.parts):
            for number, loader in enumerate(combined.flattened):
                seed = None if sampler.seed is None else sampler.generator("loader", number).initial_seed()
                _prepare(loader, self.first_epoch + sampler.epoch, seed)
            fetcher = BatchFetcher()
            fetcher.setup(combined)
            try:
                for batch, batch_idx, dataloader_idx in fetcher:
                    self.is_last = fetcher.done and k + 1 == len(self.data.parts)
                    if fetcher.done or not self.may_go_on:
                        self.data.check_number(k, batch_idx + 1, is_last=fetcher.done)
                    yield batch, batch_idx, dataloader_idx if has_numbers else None
            finally:
                fetcher.teardown()  # ends the workers


def _prepare(loader: Any, epoch: int, seed: int | None) -> None:
    """Tell a loader's parts the epoch, and seed the generators that they hold."""
    check_workers(loader)
    parts = [loader, *(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    parts.append(getattr(parts[-1], "sampler", None))
    for part in {id(part): part for part in parts}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
        for name, value in getattr(part, "__dict__", {}).items():
            if name == "generator" and isinstance(value, torch.Generator):
                value.manual_seed(seed or 0)
            elif isinstance(value, GENERATORS):
                _cache.warn(
                    f"data: {type(part).__name__}.{name} goes on from pass to pass and is in no checkpoint, so resumed "
                    "runs and several processes read other samples; make it in __iter__, or give a torch.Generator the "
                    "name 'generator': each pass seeds it"
                )


def _counted(combined: CombinedLoader, where: str) -> list[int]:
    """Return the number of samples in each batch of an epoch."""
    containers = {id(each): each for each in combined.flattened if isinstance(each, Collection)}
    try:  # a stream may keep state from pass to pass, so that to read it here would change what training reads
        copied = copy.deepcopy(combined, containers)
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be copied to count it; give data.sizes and a batch_size") from error
    sizes, end = list[int](), time.monotonic() + COUNT_SECONDS
    with seeding.preserved_globals(torch.device("cpu")):
        for loader in copied.flattened:
            _prepare(loader, 0, None)
        for batch, _, _ in copied:
            sizes.append(next((size for size in sizes_in(batch) if size is not None), int(batch is not None)))
            if time.monotonic() > end:
                raise ConfigurationError(
                    f"{where}: {sum(sizes)} samples were counted in {COUNT_SECONDS:.0f} s, and more follow; give "
                    "data.sizes, by which clients weigh, and trainer.local_steps where the stream is endless"
                )
    return sizes


def _num_samples(loader: Any) -> int | None:
    """Return how many samples a loader yields in an epoch, as far as its parts tell."""
    if not isinstance(loader, DataLoader) or (loader.batch_size is None and loader.batch_sampler is None):
        return None
    return sized_len(loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler)
