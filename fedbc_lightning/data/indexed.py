"""Data module that holds one data set and an index array per client, as partitioners return them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, ClassVar

import numpy as np
from torch.utils.data import Dataset

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import above, below
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data.datamodule import SPLITS, BySplit, FederatedDataModule
from fedbc_lightning.data.datasets import as_arrays, num_items, take
from fedbc_lightning.data.splits import SplitOrder, find_heldout, split_partition
from fedbc_lightning.partition import Natural, Partition, Partitioner
from fedbc_lightning.partition.dealing import count_labels


@dataclass
class LoadedData:
    """The samples of all clients, before a partitioner assigns them.

    Attributes:
        dataset: Map-style data set of M samples.
        labels: Class of each sample, integers ``(M,)``; None if there are no classes.
        clients: Natural client of each sample, 0..K-1, integers ``(M,)``; None if there are no natural clients.
        client_names: Names of the K natural clients.
        is_test: Whether the data themselves declare each sample test data, bool ``(M,)``; None if they do not, and
            ``test_fraction`` decides.
        is_val: Whether they declare it validation data, in the same way; where they do, ``val_fraction`` is not used.
        shared_test: Test data that belong to no client; the global model is evaluated on them, and clients have no test
            data.
    """

    dataset: Dataset
    labels: np.ndarray | None = None
    clients: np.ndarray | None = None
    client_names: list[str] | None = None
    is_test: np.ndarray | None = None
    is_val: np.ndarray | None = None
    shared_test: Dataset | None = None

    @property
    def has_test(self) -> bool:
        """Whether the data bring test samples of their own."""
        return self.is_test is not None or self.shared_test is not None

    def with_test(self, is_test: np.ndarray, *, is_shared: bool) -> LoadedData:
        """Return the data with the samples where ``is_test``, bool ``(M,)``, is true as test data.

        Args:
            is_test: Whether each sample is test data; nothing changes if none is.
            is_shared: Whether the test data belong to no client.
        """
        if not is_test.any():
            return self
        if not is_shared:
            self.is_test = is_test
            return self
        train, shared_test = np.flatnonzero(~is_test), take(self.dataset, np.flatnonzero(is_test))
        labels, clients = (None if values is None else values[train] for values in (self.labels, self.clients))
        return LoadedData(take(self.dataset, train), labels, clients, self.client_names, shared_test=shared_test)


class IndexedDataModule(FederatedDataModule):
    """One data set that a partitioner splits over clients; each client's part is split into train and test data.

    A subclass gives :meth:`load`. All bookkeeping is done in arrays, whatever the number of clients.

    Args:
        partitioner: Partitioner that assigns samples to clients; None keeps the natural clients of the data.
        test_fraction: Fraction of each client's samples that are its test data, in (0, 1). With None all samples train,
            except those that the data themselves declare test data.
        split_order: How test samples are chosen: ``"shuffled"`` (stratified) or ``"ordered"`` (as in FedBC's public
            code), see :func:`~fedbc_lightning.data.splits.split_partition`.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.FederatedDataModule`.

    Attributes:
        parts: Partition of all samples, over all splits; set by ``setup``, before it calls :meth:`alter`.
        splits: Partition of the samples of ``"train"``, ``"val"`` and ``"test"``; set by ``setup``, too.

    Raises:
        ConfigurationError: An argument is impossible, or the samples cannot be split as asked.
    """

    # Of subclasses whose data may bring test samples of their own: used if they do not, and none was asked for
    default_test_fraction: ClassVar[float | None] = None
    parts: Partition
    splits: dict[str, Partition]

    def __init__(
        self,
        partitioner: Partitioner | None,
        *,
        test_fraction: Annotated[float, above(0), below(1)] | None = 0.2,
        split_order: SplitOrder = "shuffled",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.partitioner: Partitioner = partitioner or Natural()
        self.test_fraction = test_fraction
        self.split_order: SplitOrder = split_order
        self._loaded: LoadedData | None = None

    @abstractmethod
    def load(self) -> LoadedData:
        """Return the samples of all clients."""

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Return the data set to use, which may depend on the partition; by default the one of :meth:`load`.

        Args:
            data: Data that :meth:`load` returned.
            partition: Partition of their samples, over all splits.
        """
        return data.dataset

    def setup(self, stage: str | None = None) -> None:
        """Load the data, partition them and split each client's part; further calls, for any stage, do nothing."""
        if self._loaded is not None:
            return
        data = self.load()
        data.dataset = as_arrays(data.dataset) or data.dataset  # converted once here, not once for every client
        self.parts = self._deal(data)
        # Before alter, whose statistics must not see the clients that are held out
        self._heldout = find_heldout(self.heldout_clients, len(self.parts), self._names(data), self.split_seed)
        self.splits = self._split(data, self.parts)
        if not self.shuffle:
            self.splits["train"] = self.splits["train"].ascending()
        data.dataset = self.alter(data, self.parts)
        self._loaded = data

    @property
    def source(self) -> Dataset:
        """Data set of all clients; available after ``setup``."""
        return self._ready().dataset

    @property
    def labels(self) -> np.ndarray | None:
        """Class of each sample of :attr:`source`, ``(M,)``; None if there are no classes."""
        return self._ready().labels

    @property
    def num_clients(self) -> int:  # type: ignore[override]
        """Number of clients N; if the partitioner does not know it, as with natural clients, it needs ``setup``."""
        if self._loaded is None and self.partitioner.num_clients is not None:
            return self.partitioner.num_clients
        self._ready()
        return len(self.parts)

    @property
    def client_names(self) -> list[str] | None:
        """Names of the natural clients, or the names in the file of :class:`~fedbc_lightning.partition.Explicit`."""
        return self._names(self._ready())

    def client_train_dataset(self, client: int) -> Dataset:
        """Return a client's training data, without the samples held out for validation."""
        return take(self.source, self.splits["train"][client])

    def client_test_dataset(self, client: int) -> Dataset | None:
        """Return a client's test data; None if it has none."""
        return self.client_dataset(client, "test")

    def _make_datasets(self, client: int, split: str) -> BySplit:
        indices = self.splits[split][client]
        return {split: self._batched(take(self.source, indices)) if len(indices) else None}

    def num_samples(self, split: str) -> np.ndarray:
        """Return the number of samples of each client in ``"train"``, ``"val"`` or ``"test"``, int64 ``(N,)``."""
        self._ready()
        return self.splits[split].sizes

    def pooled_dataset(self, split: str) -> Dataset | None:
        """Join a split of all clients that train, or return the shared test data; None if there are none."""
        data = self._ready()
        if split not in self._pooled:
            indices = self.indices_of_training_clients(split)
            if split == "train" and not self.shuffle:
                indices = np.sort(indices)
            if split == "test" and data.shared_test is not None:
                self._pooled[split] = self._batched(data.shared_test)
            elif len(indices):
                self._pooled[split] = self._batched(take(data.dataset, indices))
        return self._pooled.get(split)

    def partition_hash(self) -> str:
        """Return the sha256 (hex) of the index arrays of all splits and of the clients held out, if there are any."""
        self._ready()
        hashes = "".join(self.splits[split].hash() for split in SPLITS).encode()
        return sha256(hashes + self.heldout.tobytes()).hexdigest()

    def indices_of_training_clients(self, split: str) -> np.ndarray:
        """Return the samples of a split that belong to clients that train; :meth:`alter` may ask for them, too.

        Statistics of the training data, such as the mean of a column, are to be computed from these alone.
        """
        part = self.splits[split]
        assert self._heldout is not None  # set before alter is called
        if not len(self._heldout):
            return part.indices
        return part.indices[~np.isin(part.client_of_each(), self._heldout)]

    def label_histogram(self) -> np.ndarray | None:
        """Count the samples of each class at each client, int64 ``(N, num_classes)``.

        The result is None if there are no labels, or if it would have more than
        :data:`~fedbc_lightning.partition.dealing.MAX_CELLS` entries.
        """
        labels = self.labels
        if labels is None:
            return None
        return count_labels(labels[self.parts.indices], self.parts.client_of_each(), len(self.parts))

    # parts of setup

    def _ready(self) -> LoadedData:
        if self._loaded is None:
            raise RuntimeError(f"{type(self).__name__}: call prepare_data() and setup() before asking for data")
        return self._loaded

    def _names(self, data: LoadedData) -> list[str] | None:
        if not self.partitioner.needs_clients or data.clients is None or data.client_names is None:
            return getattr(self.partitioner, "client_names", None)
        # All samples of a part belong to one natural client, so the first one tells its name.
        return [data.client_names[data.clients[part[0]]] for part in self.parts]

    def _deal(self, data: LoadedData) -> Partition:
        partitioner, num_samples = self.partitioner, num_items(data.dataset)
        name = type(partitioner).__name__
        values = data.clients if partitioner.needs_clients else data.labels
        if values is None and (partitioner.needs_clients or partitioner.needs_labels):
            what = "natural client (data.clients)" if partitioner.needs_clients else "class, an integer (data.labels)"
            raise ConfigurationError(
                f"data.partitioner: {name} needs the {what} of each sample, which the data do not have; give it, or "
                "another partitioner, e.g. IID"
            )
        values = np.zeros(num_samples, dtype=np.int64) if values is None else values
        parts = Partition.from_parts(partitioner(values, seeding.derive(self.split_seed, "partition")))
        try:
            parts.check(num_samples, complete=partitioner.complete)
        except ConfigurationError as error:
            raise ConfigurationError(f"data.partitioner: {name}: {error}") from None
        return parts

    def _test_fraction_of(self, data: LoadedData) -> float | None:
        """Return the fraction of each client's samples that are test data; None if the data say which are."""
        is_default = self.test_fraction is None and not data.has_test
        return self.default_test_fraction if is_default else self.test_fraction

    def _split(self, data: LoadedData, parts: Partition) -> dict[str, Partition]:
        fraction = self._test_fraction_of(data)
        if data.has_test and fraction is not None:
            raise ConfigurationError(
                f"data.test_fraction={self.test_fraction}: the data have test samples of their own; leave it null"
            )

        def cut(
            part: Partition, declared: np.ndarray | None, fraction: float | None, order: SplitOrder, purpose: str
        ) -> tuple[Partition, Partition]:
            if declared is None and fraction:
                # By a generator for each purpose, so that another val_fraction leaves the test data as they are
                return split_partition(
                    part, data.labels, fraction, order, seeding.numpy_generator(self.split_seed, purpose)
                )
            is_second = np.zeros_like(part.indices, bool) if declared is None else declared[part.indices]
            return part.keep(~is_second), part.keep(is_second)

        rest, test = cut(parts, data.is_test, fraction, self.split_order, "split")
        train, val = cut(rest, data.is_val, self.val_fraction, "shuffled", "val")
        return {"train": train, "val": val, "test": test}
