"""Federates any ordinary LightningDataModule or Dataset, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core.hooks import DataHooks
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from fedbc_lightning.core import seeding
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.twins import AnyDataModule, overrides
from fedbc_lightning.data.datamodule import TRANSFER_HOOKS
from fedbc_lightning.data.datasets import join, num_items
from fedbc_lightning.data.indexed import IndexedDataModule, LoadedData
from fedbc_lightning.data.labels import as_classes, labels_of, natural_clients
from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.data.ordinary_loaders import check_loader, check_sampler, loader_options
from fedbc_lightning.data.splits import SplitOrder
from fedbc_lightning.partition import Partitioner


class PartitionedDataModule(IndexedDataModule):
    """Any LightningDataModule or Dataset, split over clients by a partitioner; neither needs a changed line.

    Of a LightningDataModule ``prepare_data``, ``setup("fit")`` and ``train_dataloader`` are called once; data set,
    batch size, ``shuffle``, ``drop_last``, ``collate_fn`` and workers are that loader's, and its transfer hooks are
    kept. Labels for the partitioner are ``labels``, else ``.targets``, ``.labels`` or the last of ``.tensors`` of the
    training data, else the second entries of its samples, read in one pass.

    Args:
        data: What is to be federated.
        partitioner: Which client has which training samples; None: ``clients`` say it.
        test: ``"shared"``: its own test data, or else its validation data, evaluate the global model; clients have
            none. ``"split"``: ``test_fraction`` of each client's samples. By default ``shared`` for a
            LightningDataModule and ``split`` for a Dataset.
        pool: Under ``split``, join its training and test data before they are split over clients, as the FedBC paper
            does for CIFAR-10 and MNIST.
        labels: Class of each sample of the (pooled) training data, integers ``(M,)``.
        clients: Natural client of each sample of the (pooled) training data, numbers or strings ``(M,)``; of them
            :class:`~fedbc_lightning.partition.Natural` takes all or a part.
        split_order: See :func:`~fedbc_lightning.data.splits.train_test_split`.
        test_fraction: Under ``split``, in (0, 1).
        seed: Of partition and splits; None: that of ``seed_everything``.
        batch_size: None: the training loader's, 32 for a Dataset.
        eval_batch_size: None: the test (or validation) loader's, else 512.
        val_fraction: Of each client's training samples that become its validation data.
        num_workers: For a Dataset; a LightningDataModule's loaders know it.
        collate_fn: For a Dataset; likewise.
        drop_last: For a Dataset; likewise.
        keep_on_device: See :class:`~fedbc_lightning.data.FederatedDataModule`.

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
        data: AnyDataModule | Dataset,
        partitioner: Partitioner | None = None,
        *,
        test: Literal["shared", "split"] | None = None,
        pool: bool = False,
        labels: Sequence[int] | None = None,
        clients: Sequence[int | str] | None = None,
        split_order: SplitOrder = "shuffled",
        test_fraction: float = 0.2,
        seed: int | None = None,
        batch_size: int | None = None,
        eval_batch_size: int | None = None,
        val_fraction: float = 0.0,
        num_workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
        drop_last: bool = False,
        keep_on_device: bool | None = None,
    ) -> None:
        is_module = isinstance(data, AnyDataModule)
        test = test or ("shared" if is_module else "split")
        _check_arguments(data, test, pool)
        loader = {"data.drop_last": drop_last, "data.num_workers": num_workers, "data.collate_fn": collate_fn}
        given = [name for name, value in loader.items() if value]
        if is_module and given:
            raise ConfigurationError(
                f"{given[0]}: the train_dataloader of {type(data).__name__} says it, as it is; leave it out here"
            )
        if partitioner is None and clients is None:
            raise ConfigurationError("data.partitioner: give one, e.g. Dirichlet, or clients, one per sample")
        super().__init__(
            partitioner,
            test_fraction=test_fraction if test == "split" else None,
            split_order=split_order,
            batch_size=32 if batch_size is None else batch_size,
            eval_batch_size=512 if eval_batch_size is None else eval_batch_size,
            val_fraction=val_fraction,
            num_workers=num_workers,
            collate_fn=collate_fn,
            drop_last=drop_last,
            keep_on_device=keep_on_device,
            seed=seed,
        )
        self.data = data
        self.test = test
        self.pool = pool
        self._given_labels = labels
        self._given_clients = clients
        self._given_batch_size = batch_size
        self._given_eval_batch_size = eval_batch_size
        self._shared: dict[str, DataLoader] = {}
        if isinstance(data, AnyDataModule):
            self._forward_transfer_hooks(data)

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped module has: ``self.trainer.datamodule.num_classes`` needs no changed line."""
        data = self.__dict__.get("data")
        if isinstance(data, AnyDataModule) and (not name.startswith("_") or name == "_hparams"):
            return getattr(data, name)
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    # the wrapped module's own life

    @property
    def users_module(self) -> LightningDataModule:
        """The wrapped module, if it is one."""
        return self.data if isinstance(self.data, AnyDataModule) else self

    def prepare_data(self) -> None:
        """The wrapped module's."""
        if isinstance(self.data, AnyDataModule):
            self.data.prepare_data()

    def teardown(self, stage: str) -> None:
        """The wrapped module's."""
        if isinstance(self.data, AnyDataModule):
            self.data.teardown(stage)

    def load(self) -> LoadedData:
        """The training data, with the test data if they are pooled."""
        source = self._find_source()
        data = LoadedData(source, self._find_labels(source))
        if self._given_clients is not None:
            if len(self._given_clients) != num_items(source):
                raise ConfigurationError(f"data.clients: give one client for each of the {num_items(source)} samples")
            data.clients, data.client_names = natural_clients(self._given_clients)
        return data

    def _find_source(self) -> Dataset:
        if not isinstance(self.data, AnyDataModule):
            return self.data
        self.data.trainer = self.trainer
        self.data.setup("fit")
        self._restore_state()  # before any loader is made, as under lightning.Trainer
        source = self._take_train_loader(self.data)
        if self.test == "shared" or self.pool:
            self._take_eval_loaders(self.data)
        if self.pool:
            if "test" not in self._shared:
                raise ConfigurationError(f"data.pool: {type(self.data).__name__} has no test_dataloader to pool")
            source = join([source, self._shared["test"].dataset], is_training=True)
            self._shared.clear()
        return source

    def _take_train_loader(self, data: LightningDataModule) -> Dataset:
        name = f"{type(data).__name__}.train_dataloader"
        loader = check_loader(data.train_dataloader(), name)
        check_sampler(loader, name)
        if self._given_batch_size is None:
            self.batch_size = loader.batch_size or 1
        self.drop_last = loader.drop_last
        self.shuffle = not isinstance(loader.sampler, SequentialSampler)
        self.loader_options = loader_options(loader)
        return loader.dataset

    def _take_eval_loaders(self, data: LightningDataModule) -> None:
        for split in ("val", "test"):
            if not overrides(data, f"{split}_dataloader", DataHooks):
                continue
            if split == "test":
                data.setup("test")
            loader = getattr(data, f"{split}_dataloader")()
            if isinstance(loader, (list, tuple)) and len(loader) <= 1:
                loader = loader[0] if loader else None
            if loader is not None:
                self._shared[split] = check_loader(loader, f"{type(data).__name__}.{split}_dataloader")
        if not self.pool and "val" in self._shared:
            self._shared.setdefault("test", self._shared["val"])
        if "test" in self._shared and self._given_eval_batch_size is None:
            self.eval_batch_size = self._shared["test"].batch_size or 1

    # shared test data

    def pooled_dataset(self, split: str) -> Dataset | None:
        """As of every federated data module; the wrapped module's own test and validation data if shared."""
        shared = self._shared_loader(split)
        if shared is None:
            return super().pooled_dataset(split)
        if split not in self._pooled:
            self._pooled[split] = self._batched(shared.dataset)
        return self._pooled[split]

    def pooled_dataloader(self, split: str, *, device: torch.device | None = None) -> ClientLoader | None:
        """Batches of :meth:`pooled_dataset`; those of shared data are collated as by the wrapped module's loader."""
        shared = self._shared_loader(split)
        options = None if shared is None else loader_options(shared)
        return self._eval_loader(self.pooled_dataset(split), device, options)

    def _shared_loader(self, split: str) -> DataLoader | None:
        return None if split == "val" and self.val_fraction else self._shared.get(split)

    # labels

    def _find_labels(self, source: Dataset) -> np.ndarray | None:
        if self._given_labels is not None:
            labels = as_classes(self._given_labels, num_items(source))
            if labels is None:
                raise ConfigurationError(f"data.labels: give one integer for each of the {num_items(source)} samples")
            return labels
        labels = labels_of(source)
        if labels is not None:
            return labels
        if self.partitioner.needs_labels:
            return read_labels(source)
        # Test and validation parts are drawn by class, whichever partitioner dealt.
        is_split = self.val_fraction or (self.test_fraction is not None and self.split_order == "shuffled")
        return _labels_if_any(source) if is_split else None

    # transfer hooks

    def _forward_transfer_hooks(self, data: LightningDataModule) -> None:
        """Only those that it overrides: else the model's own would be hidden."""
        for name in TRANSFER_HOOKS:
            if overrides(data, name, DataHooks):
                setattr(self, name, getattr(data, name))


def read_labels(dataset: Dataset) -> np.ndarray:
    """The classes ``(M,)``, as the second entry of every sample, in one pass with a progress bar (on a terminal)."""
    console = Console(stderr=True)
    positions = track(
        range(num_items(dataset)), "reading labels", console=console, disable=not console.is_terminal, transient=True
    )
    try:
        with seeding.preserved_globals(torch.device("cpu")):
            labels = as_classes([_as_number(dataset[position][1]) for position in positions], num_items(dataset))
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ConfigurationError(
            f"data.labels: a sample of {type(dataset).__name__} is not a pair (input, integer label) "
            f"({type(error).__name__}: {error}); give labels, one integer per sample"
        ) from error
    if labels is None:
        raise ConfigurationError(f"data.labels: the targets of {type(dataset).__name__} are not integers; give labels")
    return labels


def _labels_if_any(dataset: Dataset) -> np.ndarray | None:
    """As :func:`read_labels`; None where the first sample, or a later one, has no integer label."""
    with suppress(ConfigurationError):
        read_labels(Subset(dataset, [0]))
        return read_labels(dataset)
    return None


def _as_number(label: Any) -> Any:
    return label.tolist() if isinstance(label, (Tensor, np.ndarray)) else label


def _check_arguments(data: Any, test: str, pool: bool) -> None:
    name = type(data).__name__
    is_module = isinstance(data, AnyDataModule)
    if isinstance(data, IterableDataset):
        raise ConfigurationError(f"data: {name} is an IterableDataset, whose samples cannot be split over clients")
    if not is_module and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ConfigurationError(
            f"data: got {name}; give a LightningDataModule or a Dataset that has __getitem__ and __len__"
        )
    if test not in ("shared", "split"):
        raise ConfigurationError(f"data.test={test!r}: give 'shared' or 'split'")
    if test == "shared" and not is_module:
        raise ConfigurationError(f"data.test='shared': {name} brings no test data of its own; use 'split'")
    if pool and (test == "shared" or not is_module):
        raise ConfigurationError("data.pool: joins the test data of a LightningDataModule; it needs test='split'")
