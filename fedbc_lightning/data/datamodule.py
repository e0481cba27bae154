"""The data of N clients, as a LightningDataModule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from lightning.pytorch.core.hooks import DataHooks
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import Checked, Count, Fraction, Number
from fedbc_lightning.core.errors import ConfigurationError, locate
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.text import called, shorten
from fedbc_lightning.data.datasets import (
    as_arrays,
    augment_of,
    class_names_of,
    identify,
    join,
    labels_of,
    num_bytes,
    num_items,
    take,
)
from fedbc_lightning.data.inner_modules import OuterDataModule, check_dataset
from fedbc_lightning.data.loading import ClientLoader, ClientLoaders, EpochSampler, OwnLoaders, num_batches, stack
from fedbc_lightning.data.own_batches import OwnBatches, OwnLoader
from fedbc_lightning.data.splits import find_heldout, split_partition
from fedbc_lightning.partition import Partition
from fedbc_lightning.partition.dealing import count_labels

# Most bytes of clients' data sets that are kept between rounds; beyond that, the oldest are made again when needed.
# They are mostly index arrays of shared tensors: 128 MiB are those of 16 million samples.
KEPT_BYTES = 128 * 2**20

SPLITS = ("train", "val", "test")
# Number of the pseudo-client that holds all clients' training data
POOLED = -1
# A client's data, or that of all, of each split; None where there are none
BySplit = dict[str, Dataset | None]
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class FederatedDataModule(Checked, OuterDataModule):
    """Data of N clients. A subclass gives ``num_clients``, ``client_train_dataset`` and ``client_test_dataset``.

    ``num_clients`` may be a class attribute, a property, or set in ``__init__``.

    Lightning's ``prepare_data`` and ``setup(stage)`` are called as usual before any of these. Everything else is
    derived from them: loaders per client, pooled data, sizes, hash. Data sets of tensors
    (:class:`~fedbc_lightning.data.ArrayDataset`, torch's ``TensorDataset``, a ``Subset`` of one) are batched in memory,
    at a few microseconds per batch; all others are batched by torch's DataLoader. Batches and their order are the same
    either way. Each client's data set is asked for once and kept, as far as memory allows. The class also works with a
    plain :class:`lightning.pytorch.Trainer`, which sees the pooled data (on one device).

    Args:
        batch_size: Number of samples per training batch, at least 1; a client's last batch holds the rest.
        eval_batch_size: Number of samples per evaluation batch, at least 1.
        val_fraction: Fraction of each client's training samples held out for validation, in [0, 1); stratified by class
            where labels are known.
        heldout_clients: Clients that never train, for metrics such as ``accuracy/heldout``: a number of clients, a
            fraction of them in (0, 1), or a list of names or numbers; None: all clients train.
        num_workers: Number of worker processes per DataLoader; unused for data in memory.
        pin_memory: Whether DataLoaders use pinned memory; unused for data in memory, and without a GPU.
        drop_last: Whether to leave out a last training batch that is not full.
        collate_fn: Function that makes a batch of a list of samples; if given, all batches come from DataLoaders.
        keep_on_device: Whether in-memory data are copied to the device once, and batches gathered there. None does so
            if they fill at most a quarter of its free memory; False moves each batch.
        seed: Seed of what is drawn once for all rounds (partition, splits); None is the seed of ``seed_everything``.

    Attributes:
        shuffle: Whether training samples are shuffled in each epoch; if not, they keep the order of the data.
        stream_sizes: Number of training samples of each client's stream; None counts them in one pass.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> class Toy(FederatedDataModule):
        ...     num_clients = 2
        ...
        ...     def client_train_dataset(self, client):
        ...         return TensorDataset(torch.arange(5 * (client + 1)), torch.zeros(5 * (client + 1)))
        ...
        ...     def client_test_dataset(self, client):
        ...         return None
        >>> data = Toy(batch_size=4)
        >>> data.num_samples("train").tolist(), len(data.client_train_dataloader(1))
        ([5, 10], 3)
    """

    section = "data"
    num_clients: int = 0
    stream_sizes: Sequence[int] | None = None
    _heldout: np.ndarray | None = None

    def __init__(
        self,
        batch_size: Count = 32,
        *,
        eval_batch_size: Count = 512,
        val_fraction: Fraction = 0.0,
        heldout_clients: int | float | list[str | int] | None = None,
        num_workers: Number = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        collate_fn: Callable[[list], Any] | None = None,
        keep_on_device: bool | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size, self.val_fraction = batch_size, eval_batch_size, val_fraction
        self.heldout_clients = heldout_clients
        self.drop_last = drop_last
        self.shuffle = True
        self.keep_on_device = keep_on_device
        self.seed = seed
        self.loader_options: dict[str, Any] = {"num_workers": num_workers} if num_workers else {}
        if pin_memory and torch.cuda.is_available():
            self.loader_options["pin_memory"] = True
        if collate_fn is not None and collate_fn is not default_collate:
            self.loader_options["collate_fn"] = collate_fn
        self._datasets: dict[int, BySplit] = {}
        self._kept_bytes = 0
        self._split_sizes: dict[str, np.ndarray] = {}
        self._pooled: BySplit = {}
        self._has_transfer_hooks: bool | None = None
        self._own_splits: set[str] = set()  # splits in which a client's batches are made by loaders of the user's

    # to be defined by a subclass

    def client_train_dataset(self, client: int) -> Dataset:
        """Return the training data of client 0..N-1, map-style with validation data included, or a stream."""
        raise NotImplementedError(f"{type(self).__name__} must define client_train_dataset(client)")

    def client_test_dataset(self, client: int) -> Dataset | None:
        """Return the test data of client 0..N-1, map-style or a stream, or None if it has none."""
        raise NotImplementedError(f"{type(self).__name__} must define client_test_dataset(client)")

    @property
    def split_seed(self) -> int:
        """Seed of partition and splits: ``seed``, or the seed of ``seed_everything`` if that is None."""
        return seeding.global_seed() if self.seed is None else self.seed

    @property
    def client_names(self) -> list[str] | None:
        """Natural names of the clients, e.g. roles of plays; None if they have no names."""
        return None

    @property
    def class_names(self) -> list[str] | None:
        """Names of classes 0, 1, ..., for tables and pictures: the attribute ``classes``; None if there is none."""
        return class_names_of(self)

    # who trains

    @property
    def heldout(self) -> np.ndarray:
        """Numbers of the clients that are held out by ``heldout_clients``, int64, ascending; it needs ``setup``."""
        if self._heldout is None:
            self._heldout = find_heldout(self.heldout_clients, self.num_clients, self.client_names, self.split_seed)
        return self._heldout

    @property
    def training_clients(self) -> np.ndarray:
        """Numbers of the clients that are not held out, int64, ascending; it needs ``setup``."""
        return np.setdiff1d(np.arange(self.num_clients), self.heldout)

    # data sets

    def client_dataset(self, client: int, split: str) -> Dataset | None:
        """Return a client's data set, converted to the in-memory form where that is possible.

        Args:
            client: Client 0..N-1.
            split: Split of the data, ``"train"``, ``"val"`` (held out from the training data by ``val_fraction``) or
                ``"test"``.

        Returns:
            The data set, or None if the client has no such data.
        """
        kept = self._datasets.get(client, {})
        if split not in kept:
            if not 0 <= client < self.num_clients:
                raise IndexError(f"client {client} of {self.num_clients}")
            try:
                made = self._make_datasets(client, split)
            except Exception as error:
                locate(error, f"client {client}, its {'test' if split == 'test' else 'training'} data")
                raise
            self._keep(client, made)
            return made[split]
        return kept[split]

    def num_samples(self, split: str) -> np.ndarray:
        """Return the number of samples of each client in ``"train"``, ``"val"`` or ``"test"``, int64 ``(N,)``."""
        if split not in self._split_sizes:
            sizes = np.zeros((len(SPLITS), self.num_clients), dtype=np.int64)
            for client in range(self.num_clients):  # all splits of a client together, as its data may be made on demand
                found = [self.client_dataset(client, name) for name in SPLITS]
                sizes[:, client] = [0 if dataset is None else num_items(dataset) for dataset in found]
            self._split_sizes = dict(zip(SPLITS, sizes, strict=True))
        return self._split_sizes[split]

    def num_batches(self) -> np.ndarray:
        """Return the number of training batches per epoch of each client, int64 ``(N,)``."""
        found = num_batches(self.num_samples("train"), self.batch_size, self.drop_last)
        if self.has_own_batches:
            sets = (self.client_dataset(client, "train") for client in range(self.num_clients))
            own = {client: each.num_batches for client, each in enumerate(sets) if isinstance(each, OwnBatches)}
            found[list(own)] = list(own.values())
        return found

    @property
    def has_own_batches(self) -> bool:
        """Whether the training batches of a client are made by loaders of the user's, as of a stream."""
        self.num_samples("train")  # which asks for the data of all clients
        return "train" in self._own_splits

    def has_several_loaders(self, split: str) -> bool:
        """Return whether ``"val"`` or ``"test"`` data come from several loaders, whose numbers the steps are told."""
        pooled = self.pooled_dataset(split) if split in self._own_splits else None
        return isinstance(pooled, OwnBatches) and pooled.has_numbers

    def pooled_dataset(self, split: str) -> Dataset | None:
        """Join the data of a split of all clients that train, one after the other; None if there are none."""
        if split not in self._pooled:
            found = (self.client_dataset(client, split) for client in self.training_clients.tolist())
            parts = [dataset for dataset in found if dataset is not None and num_items(dataset)]
            if any(isinstance(part, OwnBatches) for part in parts):
                self._pooled[split] = OwnBatches.joined([self._own_batches(part, split) for part in parts])
            else:
                self._pooled[split] = self._batched(join(parts, is_training=split == "train")) if parts else None
        return self._pooled[split]

    # loaders

    def client_train_dataloader(
        self, client: int, round: int = 1, *, seed: int | None = None, device: torch.device | None = None
    ) -> ClientLoader:
        """Return a loader of a client's training batches for one round; creating it takes microseconds.

        The order in epoch e is ``torch.randperm(n, generator=seeding.generator(seed, "shuffle", round, client, e))``,
        unless ``shuffle`` is false.

        Args:
            client: Client 0..N-1, or -1 for the data of all clients.
            round: Round 1..T.
            seed: Seed of the run; None is the seed of ``seed_everything``.
            device: Device of in-memory batches; None is where the tensors lie.
        """
        dataset = self.pooled_dataset("train") if client == POOLED else self.client_dataset(client, "train")
        assert dataset is not None  # else client_dataset has raised
        return self._train_loader(dataset, round, client, seed, device)

    def client_dataloaders(
        self,
        clients: Sequence[int],
        split: str,
        round: int | None = None,
        *,
        seed: int | None = None,
        device: torch.device | None = None,
    ) -> ClientLoaders | None:
        """Return the loaders of many clients, each made when it is asked for.

        They are those of :meth:`client_train_dataloader`, or of :meth:`client_eval_dataloader` if ``round`` is None. If
        that method is a subclass's own, it is called for each client at once.

        Args:
            clients: Clients 0..N-1.
            split: Split of the data, ``"train"``, ``"val"`` or ``"test"``; ``"train"`` for training.
            round: Round 1..T in which the clients train; None if they are evaluated.
            seed: Seed of the run, for training.
            device: Device of in-memory batches; None is where the tensors lie.

        Returns:
            The loaders, or None if a client has no data.
        """
        is_eval = round is None
        name = "client_eval_dataloader" if is_eval else "client_train_dataloader"
        method = getattr(self, name)
        # A function that was set on the instance is the user's own, too: it has no __func__.
        is_own = getattr(method, "__func__", None) is not vars(FederatedDataModule)[name]
        found = [] if is_own else [self.client_dataset(client, split) for client in clients]
        if is_own or any(isinstance(dataset, OwnBatches) for dataset in found):
            what = {"split": split} if is_eval else {"round": round, "seed": seed}
            made = [loader for loader in (method(k, device=device, **what) for k in clients) if loader is not None]
            return OwnLoaders(made) if len(made) == len(clients) else None

        def make(dataset: Dataset, client: int) -> Any:
            if round is None:
                return self._eval_loader(dataset, device)
            return self._train_loader(dataset, round, client, seed, device)

        datasets = [dataset for dataset in found if dataset is not None and num_items(dataset)]
        return ClientLoaders(datasets, clients, make) if len(datasets) == len(found) else None

    def fixed_batches(
        self, client: int, split: str = "train", batch_size: int | None = None, *, device: torch.device | None = None
    ) -> Any:
        """Return a loader of a client's data in order, without augmentation or dropping; None if it has no data.

        Args:
            client: Client 0..N-1.
            split: Split of the data, ``"train"``, ``"val"`` or ``"test"``.
            batch_size: Number of samples per batch; None is that of training.
            device: Device of in-memory batches; None is where the tensors lie.
        """
        dataset = self.client_dataset(client, split)
        if isinstance(dataset, OwnBatches) and batch_size not in (None, self.batch_size):
            raise ConfigurationError(
                f"algorithm: batches of {batch_size} samples were asked for, but client {client}'s come from a stream "
                "or a loader of yours; let both have one batch size"
            )
        return self._eval_loader(dataset, device, batch_size or self.batch_size)

    def batch_shares(self, client: int) -> list[float]:
        """Return the share of the client's training samples in each batch of :meth:`fixed_batches`; they sum to 1."""
        dataset = self.client_dataset(client, "train")
        if isinstance(dataset, OwnBatches):
            return dataset.shares
        total = int(self.num_samples("train")[client])
        return [min(self.batch_size, total - start) / total for start in range(0, total, self.batch_size)]

    def client_eval_dataloader(
        self, client: int, split: str = "test", *, device: torch.device | None = None
    ) -> ClientLoader | None:
        """Return a loader of a client's data in order, without augmentation or dropping; None if it has no data."""
        return self._eval_loader(self.client_dataset(client, split), device)

    def pooled_dataloader(self, split: str, *, device: torch.device | None = None) -> ClientLoader | None:
        """Return a loader of :meth:`pooled_dataset` in order, without augmentation or dropping; None if it is None."""
        return self._eval_loader(self.pooled_dataset(split), device)

    def train_dataloader(self) -> ClientLoader:
        """Return a loader of the pooled training data, for a plain ``lightning.Trainer``.

        The data are shuffled as in round 1 of a single client. In the hooks of a federated run it is the loader of the
        client that trains, whose length a module may ask for; outside of clients that of the largest one.
        """
        of_client = getattr(self.trainer, "loader_of_client", lambda: None)()
        if of_client is not None:
            return of_client
        dataset = self.pooled_dataset("train")
        if dataset is None:
            raise ConfigurationError("data: no client has any training samples")
        return self._train_loader(dataset, round=1, client=0, seed=None, device=None)

    def val_dataloader(self) -> Any:
        """Return a loader of the pooled validation data, for a plain ``lightning.Trainer``."""
        return self.pooled_dataloader("val") or []

    def test_dataloader(self) -> Any:
        """Return a loader of the pooled test data, for a plain ``lightning.Trainer``."""
        return self.pooled_dataloader("test") or []

    # facts about the data

    def validate_clients(self) -> None:
        """Check, before training, that every client can train.

        Raises:
            ConfigurationError: There is no client, a client has no training sample or, by ``drop_last``, no batch, or
                ``heldout_clients`` is impossible.
        """
        if self.num_clients < 1:
            raise ConfigurationError(f"data: num_clients={self.num_clients}; give the number of clients, 1 or more")
        # The clients that are held out are asked for because of their checks alone.
        sizes, _ = self.num_samples("train"), self.heldout
        if not sizes.all():
            empty = [called(k, self.client_names) for k in np.flatnonzero(sizes == 0).tolist()]
            raise ConfigurationError(
                f"data: {shorten(empty, 1)} has no training samples; give it some, leave "
                "it out, or partition with a larger min_samples"
            )
        if self.drop_last and sizes.min() < self.batch_size:
            raise ConfigurationError(
                f"data.drop_last: client {sizes.argmin()} has {sizes.min()} training samples, so with batch_size="
                f"{self.batch_size} no batch is left; set drop_last to false or batch_size to at most {sizes.min()}"
            )

    def partition_hash(self) -> str:
        """Return a sha256 (hex) of the assignment of samples to clients.

        It is computed from the index arrays, or from the numbers of samples where there are no indices, and from the
        clients that are held out, if there are any.
        """
        digest = sha256(f"{self.num_clients} clients".encode() + self.heldout.tobytes())
        for client in range(self.num_clients):
            for split in SPLITS:
                digest.update(identify(self.client_dataset(client, split)))
        return digest.hexdigest()

    def label_histogram(self) -> np.ndarray | None:
        """Count the samples of each class at each client, over all splits, int64 ``(N, num_classes)``.

        The result is None if there are no labels, or if it would have more than
        :data:`~fedbc_lightning.partition.dealing.MAX_CELLS` entries.
        """
        known: dict = {}
        found: list[np.ndarray | None] = []
        sizes = sum(self.num_samples(split) for split in SPLITS)
        for client in range(self.num_clients):
            datasets = [self.client_dataset(client, split) for split in SPLITS]
            found += [labels_of(dataset, known) for dataset in datasets if dataset is not None]
        labels = [part for part in found if part is not None]
        if not labels or len(labels) < len(found):
            return None
        return count_labels(np.concatenate(labels), np.repeat(np.arange(self.num_clients), sizes), self.num_clients)

    # parts of the above

    def _make_datasets(self, client: int, split: str) -> BySplit:
        """Return a client's data set of a split, and those of other splits that are made together with it."""
        if split == "test":
            dataset = self.client_test_dataset(client)
            if dataset is None:
                return {"test": None}
            return {"test": self._checked_dataset(dataset, f"client_test_dataset({client})", "test", client)}
        train, val = self._cut_validation(client)
        return {"train": train, "val": val}

    def _keep(self, client: int, made: BySplit) -> None:
        """Keep a client's data sets, and drop the oldest ones beyond :data:`KEPT_BYTES`."""
        self._datasets.setdefault(client, {}).update(made)
        self._kept_bytes += sum(map(num_bytes, made.values()))
        while self._kept_bytes > KEPT_BYTES and len(self._datasets) > 1:
            # A dict keeps the order of insertion, so its first client is the one that was made first.
            oldest = self._datasets.pop(next(iter(self._datasets)))
            self._kept_bytes -= sum(map(num_bytes, oldest.values()))

    def _checked_dataset(self, dataset: Any, method: str, split: str, client: int) -> Dataset:
        """Return what a method of the user's has returned, in the form in which batches are made of it."""
        where = f"data: {type(self).__name__}.{method}"
        if isinstance(dataset, IterableDataset):
            dataset = self._own_batches(dataset, split, where, client)
        if isinstance(dataset, OwnBatches):
            self._own_splits.add(split)
            return dataset
        check_dataset(dataset, f"{where} returned a")
        return self._batched(dataset)

    def _own_batches(self, dataset: Dataset, split: str, where: str = "data", client: int | None = None) -> OwnBatches:
        """Return batches that torch's DataLoader makes of a data set, in the order in which it yields its samples."""
        if isinstance(dataset, OwnBatches):
            return dataset
        is_training = split == "train"
        size = self.batch_size if is_training else self.eval_batch_size
        options = {"collate_fn": stack, "drop_last": is_training and self.drop_last, **self.loader_options}
        return self._batches_of(DataLoader(dataset, batch_size=size, **options), split, where, client)

    def _batches_of(self, loaders: Any, split: str, where: str, client: int | None) -> OwnBatches:
        """Return the batches that loaders make; the size of a client's training stream may be known."""
        sizes, is_training = self.stream_sizes, split == "train"
        known = sizes[client] if sizes is not None and is_training and client is not None else None
        return OwnBatches(loaders, where, is_training=is_training, num_samples=known)

    def _batched(self, dataset: Dataset) -> Dataset:
        """Convert a data set to the in-memory form, if it has one."""
        arrays = as_arrays(dataset)
        if augment_of(dataset) is not None and (arrays is None or "collate_fn" in self.loader_options):
            raise ConfigurationError(
                "data: images are augmented in whole batches, but a collate_fn or a data set's own way of reading them "
                "makes batches of single ones; leave one of the two out"
            )
        if arrays is None:
            return dataset
        arrays.pool.keep_on_device = self.keep_on_device
        return arrays

    def _cut_validation(self, client: int) -> tuple[Dataset | None, Dataset | None]:
        """Split a client's training data into training and validation data."""
        dataset = self.client_train_dataset(client)
        read = self._checked_dataset(dataset, f"client_train_dataset({client})", "train", client)
        if not self.val_fraction:
            return read, None
        if isinstance(read, OwnBatches):
            raise ConfigurationError(
                f"data.val_fraction: nothing can be cut from client {client}'s data, which come from a stream or a "
                "loader of yours; give it validation data of its own"
            )
        train, val = self._cut(dataset, self.val_fraction, "val", client)
        return self._batched(train), None if val is None else self._batched(val)

    def _cut(self, dataset: Dataset, fraction: float, purpose: str, client: int) -> tuple[Dataset, Dataset | None]:
        """Split a client's data set into two; the second is None where the fraction is less than a sample."""
        # A generator for each client, because the data of clients are made on demand, in any order
        rng = seeding.numpy_generator(self.split_seed, purpose, client=client)
        everything = Partition.from_parts([np.arange(num_items(dataset))])
        parts = split_partition(everything, labels_of(dataset), fraction, "shuffled", rng)
        first, second = (part.indices for part in parts)
        return take(dataset, first), take(dataset, second) if len(second) else None

    def _train_loader(
        self, dataset: Dataset, round: int, client: int, seed: int | None, device: torch.device | None
    ) -> ClientLoader:
        seed = seeding.global_seed() if seed is None else seed
        sampler = EpochSampler(num_items(dataset), seed, round, client, shuffle=self.shuffle)
        if isinstance(dataset, OwnBatches):
            return OwnLoader(dataset, sampler)
        device, options = self._reachable(device), self.loader_options
        return ClientLoader(dataset, self.batch_size, sampler, drop_last=self.drop_last, device=device, options=options)

    def _eval_loader(
        self,
        dataset: Dataset | None,
        device: torch.device | None,
        batch_size: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> ClientLoader | None:
        if dataset is None or not num_items(dataset):
            return None
        if isinstance(dataset, OwnBatches):
            return OwnLoader(dataset)
        options = self.loader_options if options is None else options
        size = batch_size or self.eval_batch_size
        return ClientLoader(dataset, size, device=self._reachable(device), options=options)

    def _reachable(self, device: torch.device | None) -> torch.device | None:
        """Return the device, or None if this data module has transfer hooks, which move batches themselves."""
        if self._has_transfer_hooks is None:
            self._has_transfer_hooks = any(overrides(self, name, DataHooks) for name in TRANSFER_HOOKS)
        return None if self._has_transfer_hooks else device
