"""Data modules that the user wrote, inside a federated one, and what their loaders tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core.hooks import DataHooks
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.dataloader import default_collate
from torch.utils.data.sampler import RandomSampler, SequentialSampler, SubsetRandomSampler

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.data.datasets import num_items


class OuterDataModule(LightningDataModule):
    """A data module that hands Lightning's calls on to others inside it, and gives their states back.

    Attributes:
        inner_modules: The data modules inside this one.
    """

    inner_modules: Sequence[LightningDataModule] = ()
    _saved_state: dict[str, Any] | None = None

    @property
    def users_module(self) -> LightningDataModule:
        """The data module that the user wrote, whose ``state_dict``, ``on_exception`` and the like count."""
        return self

    def prepare_data(self) -> None:
        """Call ``prepare_data`` of the modules inside."""
        for module in self.inner_modules:
            module.prepare_data()

    def set_up(self, stage: str, checkpoint: dict[str, Any] | None) -> None:
        """Call ``setup`` for a run, and give the user's module its state back, under Lightning's key for it.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            checkpoint: What the run goes on from, or None.
        """
        self._saved_state = (checkpoint or {}).get(type(self.users_module).__qualname__)
        self.setup(stage)
        self._restore_state()

    def _set_up_inner(self) -> None:
        """Set up the modules inside for training, and give them their states back before any loader is made."""
        for module in self.inner_modules:
            module.trainer = self.trainer  # as under lightning.Trainer: setup may read it
            module.setup("fit")
        self._restore_state()

    def _restore_state(self) -> None:
        """Call ``load_state_dict`` of the user's module, unless that was done since :meth:`set_up` began."""
        state, self._saved_state = self._saved_state, None
        if state is not None:
            self.users_module.load_state_dict(state)

    def teardown(self, stage: str) -> None:
        """Call ``teardown`` of the modules inside."""
        for module in self.inner_modules:
            module.teardown(stage)


def check_dataset(dataset: Any, where: str) -> None:
    """Raise unless a data set that the user gave, or that a method of the user's returned, has numbered samples.

    Args:
        dataset: What was given.
        where: Where it comes from, such as the method and its argument, with which the message begins.

    Raises:
        ConfigurationError: It is a DataLoader, a tuple such as ``(inputs, targets)``, several data sets, or has no
            length or no items.
    """
    if isinstance(dataset, (list, tuple)) and any(isinstance(each, (Dataset, DataLoader)) for each in dataset):
        raise ConfigurationError(
            f"{where} {type(dataset).__name__} of data sets; where each client has one, give the list to "
            "fedbc_lightning.SitesDataModule; else join them, torch.utils.data.ConcatDataset(...)"
        )
    if not has_items(dataset) or isinstance(dataset, (tuple, DataLoader, IterableDataset)):
        raise ConfigurationError(
            f"{where} {type(dataset).__name__}; give a map-style Dataset with __len__ and __getitem__, such as "
            "TensorDataset(*tensors); batches are made here. Streams and loaders of your own can be "
            "the sites of fedbc_lightning.SitesDataModule"
        )


def has_items(dataset: Any) -> bool:
    """Return whether an object has a number of items and each of them, as data sets of any library have."""
    return hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")


def loader_of(module: LightningDataModule, split: str) -> Any:
    """Return what a module's method for the loaders of a split returns; None if it has no such method or no loader."""
    method = f"{split}_dataloader"
    if not overrides(module, method, DataHooks):
        return None
    if split == "test":
        module.setup("test")  # many modules make their test data for this stage alone
    return only_loader(getattr(module, method)())


def only_loader(loader: Any) -> Any:
    """Return the loader of a list of one, which Lightning takes for the loader itself, and None for an empty list."""
    if isinstance(loader, (list, tuple)) and len(loader) <= 1:
        return loader[0] if loader else None
    return loader


def plain_dataset(loader: Any) -> Dataset | None:
    """Return the map-style data set whose samples a loader yields, or None if its batches are made in a way of its own.

    A ``SubsetRandomSampler`` chooses samples, so its loader yields a subset.

    Args:
        loader: What a method of the user's data module returned.
    """
    # A subclass with its own __iter__ makes batches that the clients' loaders would not
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    # Without a batch_size there is no batch, or a batch sampler of the user's
    if not is_plain or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    dataset, sampler = loader.dataset, loader.sampler
    if type(sampler) is SubsetRandomSampler:
        return Subset(dataset, list(sampler.indices))
    # Exactly these classes, because a subclass may draw in a way of its own
    is_each_once = type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
    return dataset if is_each_once and len(sampler) == num_items(dataset) else None


def not_plain(loader: Any, name: str) -> ConfigurationError:
    """Return the error for training data that a partitioner cannot deal to clients, because of their loader.

    Args:
        loader: What the method returned.
        name: Name of the method.
    """
    kinds = ""
    if isinstance(loader, DataLoader):
        kinds = ", ".join(type(part).__name__ for part in (loader.dataset, loader.sampler, loader.batch_sampler))
    return ConfigurationError(
        f"data: {name} returns a {type(loader).__name__}{f' with {kinds}' * bool(kinds)}, whose samples cannot be "
        "dealt to clients; return one DataLoader of a map-style Dataset (a ConcatDataset at need) with a batch_size "
        "and shuffle=True or False, or give each client loaders of its own by fedbc_lightning.SitesDataModule"
    )


def way_of(loader: DataLoader) -> dict[str, Any]:
    """Return how a plain training loader makes batches, by the names of the attributes of a federated data module."""
    is_ordered = isinstance(loader.sampler, SequentialSampler)
    return {"batch_size": loader.batch_size, "shuffle": not is_ordered, "drop_last": loader.drop_last}


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
