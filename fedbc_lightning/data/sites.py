"""Data module of clients that have data sets of their own, such as hospitals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from lightning.pytorch.core.hooks import DataHooks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedbc_lightning.core.checks import Count, Fraction
from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.lightning_names import AnyDataModule, overrides
from fedbc_lightning.core.text import shorten
from fedbc_lightning.data.datamodule import SPLITS, TRANSFER_HOOKS, BySplit, FederatedDataModule
from fedbc_lightning.data.datasets import class_names_of, refuse_splits
from fedbc_lightning.data.inner_modules import (
    check_dataset,
    has_items,
    loader_of,
    loader_options,
    only_loader,
    plain_dataset,
    way_of,
)

Site = AnyDataModule | Dataset | DataLoader  # what a config can name; in Python also what OwnBatches takes
NO_DATA = (list, tuple, dict, str, np.ndarray, Tensor)  # have items, but are loaders or no site; see OwnBatches
Sites = Sequence[Site | None] | Mapping[str, Site | None]
NO_CLIENTS = (
    "give fedbc_lightning.PartitionedDataModule(train_data, partitioner) if the data have no clients, or the clients' "
    "test data as data.test"
)


def is_data(site: Any) -> bool:
    """Return whether a site is a data set, of torch or of another library, and no loader."""
    return isinstance(site, Dataset) or (has_items(site) and not isinstance(site, NO_DATA))


class DataElsewhere(Dataset):
    """Stands for data of which only their numbers are known here.

    Args:
        counts: Number of samples of each class; a single number where there are no classes.

    Attributes:
        targets: The class of each sample, in order.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.targets = np.repeat(np.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        """Raise: the samples are elsewhere."""
        raise ConfigurationError(
            "data.train: this client's data are elsewhere; give trainer.backend, which asks the worker that has them"
        )


class SitesDataModule(FederatedDataModule):
    """One data set per client, as hospitals, devices or domains have them: a list, or a mapping from names.

    A site is a map-style Dataset, a stream (``IterableDataset``), a LightningDataModule, whose loaders give training,
    validation and test data, or what its ``train_dataloader`` may return: a loader, or several in a list, a dict or
    Lightning's ``CombinedLoader``. Batches of a loader that is more than shuffled samples of a Dataset are made by that
    loader, as under ``lightning.Trainer``.

    Args:
        train: Training data of each client; None where these are elsewhere, at a worker of ``trainer.backend``. The
            keys of a mapping are the clients' names; those of splits, such as ``test``, are refused.
        test: Test data of each client, None where a client has none, which a mapping may leave out; without this
            argument they are those of the sites' LightningDataModules, or ``test_fraction`` of the training data.
        val: Validation data of each client, in the same way; without this argument ``val_fraction`` cuts them.
        names: Name of each client; None takes the keys of ``train``, or no names for a list.
        sizes: Number of training samples of each client, where they are streams; None counts them in one pass.
        test_fraction: Fraction of each client's training samples that are its test data, in [0, 1); stratified by class
            where labels are known. It is for data without test data of their own.
        batch_size: Number of samples per training batch; None is that of the sites' loaders, or 32.
        eval_batch_size: Number of samples per evaluation batch; None is that of the sites' loaders, or 512.
        **kwargs: Further arguments of :class:`~fedbc_lightning.data.FederatedDataModule`.

    Raises:
        ConfigurationError: The lists have different lengths, a name is unknown or a split's, a site's data cannot be
            used, or sites differ in how their loaders make batches, or in the names of their classes.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = SitesDataModule({name: TensorDataset(torch.randn(n, 3)) for name, n in [("Bern", 20), ("Oslo", 30)]})
        >>> data.setup()
        >>> data.client_names, data.num_samples("train").tolist()
        (['Bern', 'Oslo'], [20, 30])
    """

    def __init__(
        self,
        train: Sites,
        test: Sites | None = None,
        val: Sites | None = None,
        *,
        names: Sequence[str] | None = None,
        sizes: Sequence[int] | Mapping[str, int] | None = None,
        test_fraction: Fraction = 0.0,
        batch_size: Count | None = None,
        eval_batch_size: Count | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(train, Mapping) and names is None:
            names = list(train)
        given = {"train": train, "test": test, "val": val, "names": names, "sizes": sizes}
        lists = {name: _in_order(value, names, f"data.{name}") for name, value in given.items()}
        if not len(train):
            raise ConfigurationError("data.train: no site; give one or more")
        for name, listed in lists.items():
            if listed is not None and len(listed) != len(train):
                raise ConfigurationError(f"data.{name}: {len(listed)} entries for {len(train)} sites; give one each")
        super().__init__(batch_size=batch_size or 32, eval_batch_size=eval_batch_size or 512, **kwargs)
        self.num_clients, self.test_fraction, self._names = len(train), test_fraction, names
        self.classes: list[str] | None = None
        self.elsewhere = [client for client, site in enumerate(lists["train"]) if site is None]
        self._facts: dict[int, dict[str, DataElsewhere]] = {}
        self._given, self._given_batch_sizes = lists, (batch_size, eval_batch_size)
        self._options: dict[str, dict[str, Any]] = {}  # of the first site's loader, with which the others must agree
        self._sites: list[BySplit] | None = None
        self.stream_sizes = lists["sizes"]
        texts = self.client_names or []
        if len(set(texts)) < len(texts):
            raise ConfigurationError("data.names: a name is given twice; give each site its own")
        refuse_splits(texts, "data.names", NO_CLIENTS)
        if test_fraction and test is not None:
            raise ConfigurationError("data.test_fraction: the sites have data.test; leave one of the two out")
        modules = [site for split in SPLITS for site in lists[split] or () if isinstance(site, AnyDataModule)]
        self.inner_modules = list({id(module): module for module in modules}.values())
        for module in self.inner_modules:
            hook = next((name for name in TRANSFER_HOOKS if overrides(module, name, DataHooks)), None)
            if hook is not None:
                raise ConfigurationError(
                    f"data: {type(module).__name__} has {hook}, which would see batches of all sites; define it in the "
                    "LightningModule"
                )

    @property
    def client_names(self) -> list[str] | None:
        """The argument ``names``, or the keys of ``train``."""
        return None if self._names is None else [str(name) for name in self._names]

    def take_facts(self, client: int, counts: Mapping[str, Sequence[int]]) -> None:
        """Take over how many samples a client has whose data are elsewhere.

        Args:
            client: The client.
            counts: Number of its samples of each class, by split; a single number where there are no classes.
        """
        self._facts[client] = {split: DataElsewhere(number) for split, number in counts.items()}

    def partition_hash(self) -> str:
        """Return a hash as every data module does; where data are elsewhere, one of number and names of clients."""
        if not self.elsewhere:
            return super().partition_hash()
        known = f"{self.num_clients} clients elsewhere: {self._names}, batches of {self._given_batch_sizes[0]}"
        return sha256(known.encode()).hexdigest()

    def pooled_dataset(self, split: str) -> Dataset | None:
        """Return the joined data of all clients that train; None where data are elsewhere."""
        return None if self.elsewhere else super().pooled_dataset(split)

    def setup(self, stage: str | None = None) -> None:
        """Set up the sites' data modules and ask them for their loaders; further calls, for any stage, do nothing."""
        if self._sites is not None:
            return
        self._set_up_inner()
        sites: list[BySplit] = [{} for _ in range(self.num_clients)]
        for split in SPLITS:  # the test data last, for which many modules are set up once more
            source = "train" if self._given[split] is None else split
            for k, site in enumerate(self._given[source] or ()):
                where = f"data.{source}[{(self._names or range(self.num_clients))[k]!r}]"
                if isinstance(site, AnyDataModule):
                    name = f"{where}: {type(site).__name__}.{split}_dataloader"
                    sites[k][split] = self._take(loader_of(site, split), split, name, k)
                elif source == split:
                    sites[k][split] = site if is_data(site) else self._take(site, split, where, k)
                self._agree_in_classes(sites[k].get(split), where)
        self._sites = sites

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sites' data modules."""
        return {str(k): module.state_dict() for k, module in enumerate(self.inner_modules)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the sites' data modules their states back."""
        for k, module in enumerate(self.inner_modules):
            module.load_state_dict(state_dict[str(k)])

    def on_exception(self, exception: BaseException) -> None:
        """Call ``on_exception`` of the sites' data modules."""
        for module in self.inner_modules:
            module.on_exception(exception)

    # the data of a client

    def client_train_dataset(self, client: int) -> Dataset:
        """Return a site's training data, validation data of ``val_fraction`` included."""
        return self._cut_test(client)[0]

    def client_test_dataset(self, client: int) -> Dataset | None:
        """Return a site's test data, or None if it has none."""
        return self._cut_test(client)[1] if self.test_fraction else self._site(client).get("test")

    def _site(self, client: int) -> BySplit:
        if self._sites is None:
            raise RuntimeError("SitesDataModule: call prepare_data() and setup() before asking for data")
        return self._sites[client]

    def _cut_test(self, client: int) -> tuple[Dataset, Dataset | None]:
        dataset: Any = self._site(client)["train"]
        if not self.test_fraction:
            return dataset, None
        check_dataset(dataset, f"data.test_fraction: data.train[{client}] is a")
        return self._cut(dataset, self.test_fraction, "split", client)

    def _make_datasets(self, client: int, split: str) -> BySplit:
        if client in self.elsewhere:
            # Whoever has not asked counts one sample, which nobody reads: a worker trains its own clients alone.
            unknown = {"train": DataElsewhere([1]), "val": None, "test": None}
            return {**self._facts.get(client, unknown)}
        made = super()._make_datasets(client, split)
        own = self._site(client).get("val")
        if split != "test" and own is not None:
            made["val"] = self._checked_dataset(own, f"val[{client}]", "val", client)
        return made

    def _agree_in_classes(self, dataset: Dataset | None, where: str) -> None:
        """Take over the names of the classes, or raise if another site means other classes by the same numbers."""
        found = class_names_of(dataset)
        self.classes = self.classes or found
        if found and self.classes and found != self.classes:
            raise ConfigurationError(
                f"{where}: its classes are {shorten(found)}, another site's {shorten(self.classes)}; give all the "
                "same, in one order"
            )

    def _take(self, loader: Any, split: str, where: str, client: int) -> Dataset | None:
        """Return the data set behind a plain loader, whose way to make batches all sites must share, or the loaders."""
        loader, is_training = only_loader(loader), split == "train"
        if loader is None:
            return None
        dataset = plain_dataset(loader)
        if dataset is None:
            return self._batches_of(loader, split, where, client)
        self._agree(loader, where, is_training=is_training)
        return dataset

    def _agree(self, loader: DataLoader, where: str, *, is_training: bool) -> None:
        """Take over how a loader makes batches, or raise if another site's loader makes them in another way."""
        way = way_of(loader) if is_training else {"batch_size": loader.batch_size}
        way["batch_size"] = self._given_batch_sizes[0 if is_training else 1] or way["batch_size"]
        options = loader_options(loader) if is_training else {}
        found = way | options
        known = self._options.setdefault("train" if is_training else "eval", found)
        differing = [name for name in {**known, **found} if known.get(name) != found.get(name)]
        if differing:
            raise ConfigurationError(
                f"{where}: its loader has {differing[0]}={found.get(differing[0])}, another site's "
                f"{known.get(differing[0])}; give all sites the same, or data.batch_size and data.eval_batch_size"
            )
        vars(self).update(way | {"loader_options": options} if is_training else {"eval_batch_size": way["batch_size"]})


def _in_order(given: Any, names: Sequence[str] | None, where: str) -> Any:
    """Return what sites are given as a list in the order of their names; a mapping may leave sites out.

    Raises:
        ConfigurationError: It is neither a list nor a mapping, or a name is unknown.
    """
    if isinstance(given, Mapping):
        known = list(names or ())
        for name in given:
            if name not in known:
                hint = did_you_mean(str(name), map(str, known), f"data.train has {known}, a mapping or names")
                raise ConfigurationError(f"{where}: no site {name!r}; {hint}")
        return [given.get(name) for name in known]
    if not isinstance(given, (list, tuple, np.ndarray, type(None))):
        kind = type(given).__name__
        raise ConfigurationError(f"{where}: got {kind}; give a list of the sites, or a mapping from their names")
    return given
