"""The base class of partitioners, and the partition that a partitioner returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedbc_lightning.core.checks import Checked, check_arguments
from fedbc_lightning.core.errors import ConfigurationError, in_one_line
from fedbc_lightning.core.files import check_unpacked, open_file, replacing


class Partition(Sequence[np.ndarray]):
    """Assignment of samples to clients: ``partition[i]`` is a view of client i's indices, ``len(partition)`` is N.

    It is stored in two arrays, whatever the number of clients.

    Args:
        indices: Sample indices of all clients, one client after the other, int64 ``(n,)``.
        offsets: Where each client's indices begin: client i has ``indices[offsets[i]:offsets[i + 1]]``, int64
            ``(N + 1,)``.

    Example:
        >>> partition = Partition.from_owners(np.array([1, 0, 1, -1]), num_clients=2)
        >>> [part.tolist() for part in partition], partition.sizes.tolist()
        ([[1], [0, 2]], [1, 2])
    """

    def __init__(self, indices: np.ndarray, offsets: np.ndarray) -> None:
        self.indices = indices
        self.offsets = offsets

    @classmethod
    def from_sizes(cls, indices: np.ndarray, sizes: np.ndarray) -> Partition:
        """Give the first ``sizes[0]`` of the indices to client 0, the next ``sizes[1]`` to client 1, and so on.

        Args:
            indices: Sample indices, int64 ``(n,)``.
            sizes: Number of samples of each client, ``(N,)``, with sum n.
        """
        return cls(indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @classmethod
    def from_parts(cls, parts: Sequence[np.ndarray]) -> Partition:
        """Make a partition from one array of sample indices per client; a :class:`Partition` is returned unchanged.

        Raises:
            ConfigurationError: A part is no one-dimensional array of integers.
        """
        if isinstance(parts, Partition):
            return parts
        arrays = [np.asarray(part) for part in parts]
        for client, array in enumerate(arrays):
            if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
                raise ConfigurationError(
                    f"data.partitioner: client {client} was given {array.dtype} of shape {array.shape}; give a "
                    "one-dimensional array of sample indices, integers, for each client"
                )
        sizes = np.array([len(array) for array in arrays], dtype=np.int64)
        arrays = [array for array in arrays if len(array)]
        return cls.from_sizes(np.concatenate(arrays).astype(np.int64) if arrays else np.empty(0, np.int64), sizes)

    @classmethod
    def from_owners(cls, owners: np.ndarray, num_clients: int, order: np.ndarray | None = None) -> Partition:
        """Make a partition from the client of each sample.

        Args:
            owners: Client of sample ``order[k]``, or -1 if no client gets it, integers ``(n,)``.
            num_clients: Number of clients N.
            order: Order of the samples, ``(n,)``, which each client keeps; None is ascending order.
        """
        by_client = np.argsort(owners, kind="stable")
        # bincount takes no negative numbers: place 0 counts the samples that nobody gets.
        sizes = np.bincount(owners + 1, minlength=num_clients + 1)
        by_client = by_client[sizes[0] :]
        return cls.from_sizes(by_client if order is None else order[by_client], sizes[1:])

    def __getitem__(self, client: int) -> np.ndarray:  # type: ignore[override]
        client = range(len(self))[client]  # raises IndexError behind the last one, and counts from the end below 0
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        for start, end in pairwise(self.offsets.tolist()):
            yield self.indices[start:end]

    def __repr__(self) -> str:
        return f"Partition({len(self)} clients, {len(self.indices)} samples)"

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client, int64 ``(N,)``."""
        return np.diff(self.offsets)

    def client_of_each(self) -> np.ndarray:
        """Return the client of each entry of ``indices``, int64 ``(n,)``."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def ascending(self) -> Partition:
        """Return the same partition with each client's samples in the order of the data."""
        return Partition(self.indices[np.lexsort((self.indices, self.client_of_each()))], self.offsets)

    def keep(self, mask: np.ndarray) -> Partition:
        """Keep the entries of ``indices`` where ``mask``, bool ``(n,)``, is true; a client may be left without any."""
        kept_before = np.concatenate([[0], np.cumsum(mask)])
        return Partition(self.indices[mask], kept_before[self.offsets])

    def check(self, num_samples: int, *, complete: bool) -> None:
        """Check that every index is a sample of the data, and that no sample is given twice.

        Args:
            num_samples: Number of samples M of the data.
            complete: Whether every sample must be given to a client.

        Raises:
            ConfigurationError: A check fails; the message names a sample.
        """
        wrong = self.indices[(self.indices < 0) | (self.indices >= num_samples)]
        if len(wrong):
            raise ConfigurationError(
                f"a client holds sample {wrong[0]}, but the data has {num_samples} samples, 0 to {num_samples - 1}; "
                "partition this data"
            )
        times = np.bincount(self.indices, minlength=num_samples)
        is_wrong = times != 1 if complete else times > 1
        if is_wrong.any():
            # A sample at two clients comes before one at none: it may be the reason why the other is missing.
            sample = int(times.argmax()) if times.max() > 1 else int(times.argmin())
            leave_out = "; say `complete = False` in the partitioner's class if some are meant to be left out"
            raise ConfigurationError(
                f"{is_wrong.sum()} of {num_samples} samples are not given {'exactly' if complete else 'at most'} once: "
                f"sample {sample} is given {times[sample]} times" + ("" if times[sample] else leave_out)
            )

    def hash(self) -> str:
        """Return the partition's sha256 (hex), equal if every client has the same samples in the same order."""
        # Little-endian on every machine, so that saved partitions can be exchanged
        digest = sha256(self.offsets.astype("<i8").tobytes())
        digest.update(self.indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: str | Path, *, num_samples: int, label_histogram: np.ndarray | None = None) -> None:
        """Write the partition to an ``.npz`` file, which :class:`~fedbc_lightning.partition.Explicit` reads.

        Args:
            path: Path of the file, which is replaced if it exists.
            num_samples: Number of samples M of the data.
            label_histogram: Number of samples of each class at each client, integers ``(N, num_classes)``.
        """
        known = {"num_samples": num_samples, "label_histogram": label_histogram, "hash": self.hash()}
        contents: Any = {name: np.asarray(value) for name, value in known.items() if value is not None}
        with replacing(Path(path)) as partial, open_file(partial, "wb") as file:
            np.savez_compressed(file, indices=self.indices, offsets=self.offsets, **contents)

    @classmethod
    def load(cls, path: str | Path) -> SavedPartition:
        """Read a file that :meth:`save` wrote.

        Raises:
            ConfigurationError: The file does not exist, is damaged, or was not written by :meth:`save`.
        """
        # NumPy raises exceptions of zipfile, zlib and ast, and nearly all of Python's, for damaged files
        with in_one_line(f"data.partitioner.path='{path}': cannot be read (", "); give the partition.npz of a run"):
            check_unpacked(path)
            # Without pickles, which could run code of whoever wrote the file
            with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
            partition = cls(found["indices"], found["offsets"])
            saved = SavedPartition(partition, int(found["num_samples"]), found.get("label_histogram"))
            if partition.hash() != str(found["hash"]):
                raise ValueError("its hash is another one")
        return saved


@dataclass
class SavedPartition:
    """Contents of a partition file.

    Args:
        partition: Assignment of samples to clients.
        num_samples: Number of samples M of the data; None if it is unknown.
        label_histogram: Number of samples of each class at each client, ``(N, num_classes)``; None if the data have no
            classes.
    """

    partition: Partition
    num_samples: int | None = None
    label_histogram: np.ndarray | None = None


class Partitioner(Checked, ABC):
    """Splits the samples of one data set over clients; subclass it for a scheme of your own.

    Attributes:
        num_clients: Number of clients N, at least 1; None if only the data tell.
        needs_labels: Whether the split depends on the classes; if not, data without labels can be split, too.
        needs_clients: Whether the partitioner is called with the natural client of each sample (0..K-1) in place of
            its class.
        complete: Whether every sample must be given to a client.
    """

    section = "data.partitioner"
    num_clients: int | None
    needs_labels: ClassVar[bool] = True
    needs_clients: ClassVar[bool] = False
    complete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the fields of a dataclass, also a user's."""
        check_arguments(type(self), vars(self), self.section)

    @abstractmethod
    def __call__(self, values: np.ndarray, seed: int) -> Sequence[np.ndarray]:
        """Split the samples over the clients.

        Args:
            values: Class of each sample (or its natural client, see ``needs_clients``), integers ``(M,)``.
            seed: Seed of all draws; equal seeds and values must give equal splits.

        Returns:
            Sample indices of each client, int64 ``(n_i,)``, as a :class:`Partition` or a list of arrays. They must be
            disjoint, and together be ``0..M-1`` if ``complete`` is true.

        Raises:
            ConfigurationError: The samples cannot be split as asked.
        """


def check_enough_samples(num_samples: int, num_clients: int, least: int = 1) -> None:
    """Check that there are ``least`` samples for every client.

    Args:
        num_samples: Number of samples M.
        num_clients: Number of clients N.
        least: Number of samples that each client needs.

    Raises:
        ConfigurationError: There are fewer samples.
    """
    if num_clients * least > num_samples:
        raise ConfigurationError(
            f"data.partitioner.num_clients={num_clients}: with {least} or more each, they need {num_clients * least} "
            f"samples, the data has {num_samples} samples; give at most {num_samples // least} clients"
        )
