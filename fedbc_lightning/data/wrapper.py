"""Data module that federates any ordinary LightningDataModule or Dataset without changes to it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core.hooks import DataHooks
from torch import Tensor
from torch.utils.data import Dataset

from fedbc_lightning.core import seeding
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import AnyDataModule, overrides
from fedbc_lightning.core.printing import shown_progress
from fedbc_lightning.core.private_lightning import HPARAMS
from fedbc_lightning.data.datamodule import TRANSFER_HOOKS
from fedbc_lightning.data.datasets import as_classes, class_names_of, join, labels_of, natural_clients, num_items
from fedbc_lightning.data.indexed import IndexedDataModule, LoadedData
from fedbc_lightning.data.inner_modules import (
    check_dataset,
    loader_of,
    loader_options,
    not_plain,
    only_loader,
    plain_dataset,
    way_of,
)
from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.data.own_batches import OwnBatches
from fedbc_lightning.partition import Partitioner


class PartitionedDataModule(IndexedDataModule):
    """Splits any LightningDataModule or Dataset over clients with a partitioner, without changes to it.

    The methods ``prepare_data``, ``setup("fit")`` and ``train_dataloader`` of a LightningDataModule are called once;
    data set, batch size, ``shuffle``, ``drop_last``, ``collate_fn`` and workers are taken from that loader, and the
    module's transfer hooks are kept. Labels for the partitioner are ``labels`` if given; otherwise ``.targets``,
    ``.labels`` or the last of ``.tensors`` of the training data; otherwise the second entries of its samples, which are
    read in one pass.

    Args:
        data: Data module or data set to federate.
        partitioner: Partitioner that assigns training samples to clients; None keeps the assignment of ``clients``.
        test: Which test data are used. With ``"shared"`` the module's own test data, or its validation data if it has
            none, evaluate the global model, and clients have no test data. With ``"split"`` each client's test data are
            ``test_fraction`` of its samples. The default is ``shared`` for a LightningDataModule and ``split`` for a
            Dataset.
        pool: Whether, with ``test="split"``, training and test data are joined before they are split over clients, as
            the FedBC paper does for CIFAR-10 and MNIST.
        labels: Class of each sample of the (pooled) training data, integers ``(M,)``.
        clients: Natural client of each sample of the (pooled) training data, numbers or strings ``(M,)``; the
            partitioner :class:`~fedbc_lightning.partition.Natural` keeps all or some of these clients.
        test_fraction: Fraction of each client's samples that are its test data with ``test="split"``, in (0, 1).
        batch_size: Number of samples per training batch; None is the training loader's, or 32 for a Dataset.
        eval_batch_size: Number of samples per evaluation batch; None is the test (or validation) loader's, or 512.
        **kwargs: Further arguments of :class:`~fedbc_lightning.data.IndexedDataModule`. The loader of a
            LightningDataModule determines ``num_workers``, ``pin_memory``, ``collate_fn`` and ``drop_last``.

    Raises:
        ConfigurationError: The data cannot be federated (an IterableDataset, several loaders, a sampler or batch
            sampler of its own), or an argument is impossible.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from fedbc_lightning.partition import IID
        >>> data = PartitionedDataModule(TensorDataset(torch.randn(50, 3), torch.arange(50) % 2), IID(5))
        >>> data.setup()
        >>> data.num_samples("train").tolist(), data.num_samples("test").tolist()
        ([8, 8, 8, 8, 8], [2, 2, 2, 2, 2])
    """

    def __init__(
        self,
        data: AnyDataModule | Dataset | Sized,  # the last: a data set of another library
        partitioner: Partitioner | None = None,
        *,
        test: Literal["shared", "split"] | None = None,
        pool: bool = False,
        labels: Sequence[int] | None = None,
        clients: Sequence[int | str] | None = None,
        test_fraction: float = 0.2,
        batch_size: int | None = None,
        eval_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        is_module = isinstance(data, AnyDataModule)
        test = test or ("shared" if is_module else "split")
        if not is_module:
            check_dataset(data, "data: got")
        takes_test_data = pool or test == "shared"
        if (takes_test_data and not is_module) or (pool and test == "shared"):
            raise ConfigurationError(
                f"data.test={test!r}, data.pool={pool}: give 'split', or, for a LightningDataModule with test data, "
                "'shared', or 'split' and pool"
            )
        own = [name for name in ("drop_last", "num_workers", "collate_fn", "pin_memory") if kwargs.get(name)]
        if is_module and own:
            raise ConfigurationError(
                f"data.{own[0]}: it is taken from the train_dataloader of {type(data).__name__}; leave it out here"
            )
        if partitioner is None and clients is None:
            raise ConfigurationError("data.partitioner: give one, e.g. Dirichlet, or clients, one per sample")
        super().__init__(
            partitioner,
            test_fraction=test_fraction if test == "split" else None,
            batch_size=32 if batch_size is None else batch_size,
            eval_batch_size=512 if eval_batch_size is None else eval_batch_size,
            **kwargs,
        )
        self.data, self.test, self.pool = data, test, pool
        self._given_labels, self._given_clients = labels, clients
        self._given_batch_size, self._given_eval_batch_size = batch_size, eval_batch_size
        # Data set of the module's own validation and test data, options of a loader, and batch size
        self._shared: dict[str, tuple[Dataset, dict[str, Any], int | None]] = {}
        self.inner_modules = [data] if isinstance(data, AnyDataModule) else []
        for name in TRANSFER_HOOKS:
            if is_module and overrides(data, name, DataHooks):  # the others, if handed on, would hide the model's hooks
                setattr(self, name, getattr(data, name))

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes in the wrapped module, so that ``self.trainer.datamodule.num_classes`` works."""
        # Looked up in __dict__, because copy and pickle ask for attributes before data has been set
        data = self.__dict__.get("data")
        if isinstance(data, AnyDataModule) and (not name.startswith("_") or name == HPARAMS):
            return getattr(data, name)
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    @property
    def users_module(self) -> LightningDataModule:
        """The wrapped module, if it is one."""
        return self.data if isinstance(self.data, AnyDataModule) else self

    @property
    def class_names(self) -> list[str] | None:
        """The attribute ``classes`` of the wrapped module or data set, or of the module's training data."""
        return class_names_of(self.data) or class_names_of(self.source)

    def load(self) -> LoadedData:
        """Return the training data, joined with the test data if ``pool`` is true."""
        source = self._find_source()
        data = LoadedData(source, self._find_labels(source))
        if self._given_clients is not None:
            if len(self._given_clients) != num_items(source):
                raise ConfigurationError(f"data.clients: give one client for each of the {num_items(source)} samples")
            data.clients, data.client_names = natural_clients(self._given_clients)
        return data

    def _find_source(self) -> Any:
        if not isinstance(self.data, AnyDataModule):
            return self.data
        self._set_up_inner()
        loader = only_loader(self.data.train_dataloader())
        source = plain_dataset(loader)
        if source is None:
            raise not_plain(loader, f"{type(self.data).__name__}.train_dataloader")
        vars(self).update(way_of(loader), loader_options=loader_options(loader))
        self.batch_size = self._given_batch_size or self.batch_size
        if self.test == "shared" or self.pool:
            self._take_eval_loaders(self.data)
        if self.pool:
            if "test" not in self._shared:
                raise ConfigurationError(f"data.pool: {type(self.data).__name__} has no test_dataloader to pool")
            source = join([source, self._shared.pop("test")[0]], is_training=True)
        return source

    def _take_eval_loaders(self, data: LightningDataModule) -> None:
        for split in ("test",) if self.pool else ("val", "test"):
            loader = loader_of(data, split)
            if loader is None:
                continue
            dataset = plain_dataset(loader)
            where = f"{type(data).__name__}.{split}_dataloader"
            if dataset is not None:
                self._shared[split] = dataset, loader_options(loader), loader.batch_size
            elif self.pool:
                raise not_plain(loader, where)
            else:
                self._shared[split] = OwnBatches(loader, f"data: {where}", is_training=False), {}, None
        if "val" in self._shared:
            self._shared.setdefault("test", self._shared["val"])
        if self.val_fraction:
            self._shared.pop("val", None)  # each client validates on a part of its own
        self._own_splits = {split for split, data in self._shared.items() if isinstance(data[0], OwnBatches)}
        if "test" in self._shared and self._given_eval_batch_size is None:
            self.eval_batch_size = self._shared["test"][2] or self.eval_batch_size

    # shared test data

    def pooled_dataset(self, split: str) -> Dataset | None:
        """Return the wrapped module's own test or validation data if they are shared, else all clients' data."""
        if split in self._shared and split not in self._pooled:
            self._pooled[split] = self._batched(self._shared[split][0])
        return super().pooled_dataset(split)

    def pooled_dataloader(self, split: str, *, device: torch.device | None = None) -> ClientLoader | None:
        """Return a loader of :meth:`pooled_dataset`; shared data are collated as by the wrapped module's loader."""
        options = self._shared[split][1] if split in self._shared else None
        return self._eval_loader(self.pooled_dataset(split), device, options=options)

    # labels

    def _find_labels(self, source: Dataset) -> np.ndarray | None:
        if self._given_labels is not None:
            labels = as_classes(self._given_labels, num_items(source))
            if labels is None:
                raise ConfigurationError(f"data.labels: give one integer for each of the {num_items(source)} samples")
            return labels
        # Stratified test and validation parts need classes, even if the partitioner does not.
        is_split = self.val_fraction or (self.test_fraction is not None and self.split_order == "shuffled")
        labels = labels_of(source)
        return read_labels(source) if labels is None and (self.partitioner.needs_labels or is_split) else labels


def read_labels(dataset: Dataset) -> np.ndarray | None:
    """Read the class of every sample, its second entry, in one pass; a terminal shows a progress bar.

    Returns:
        The classes, int64 ``(M,)``; None if a sample has no integer label.
    """
    labels = []
    # A data set may augment what it reads; its draws must not move those of the training.
    with seeding.preserved_globals(torch.device("cpu")):
        for position in shown_progress(range(num_items(dataset)), "reading labels"):
            sample = dataset[position]
            label = sample[1] if isinstance(sample, (tuple, list)) and len(sample) > 1 else None
            label = label.tolist() if isinstance(label, (Tensor, np.ndarray)) else label
            if not isinstance(label, (int, np.integer, np.bool_)):  # data without classes are not read to their end
                return None
            labels.append(label)
    return as_classes(labels, len(labels))
