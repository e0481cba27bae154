"""Partitions that are given: by the data's own clients, by a file, or by a partitioner of Flower Datasets."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedbc_lightning.core.checks import Count, checked
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner, SavedPartition, check_enough_samples
from fedbc_lightning.partition.dealing import count_labels

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner as FlowerPartitioner


@checked("data.partitioner")
@dataclass(eq=False)
class Natural(Partitioner):
    """Keeps the natural clients of the data, or some of them.

    Clients stay in the order of their natural numbers 0..K-1, and each client's samples in the order of the data. The
    samples of clients that are left out are not used.

    Args:
        num_clients: Number of clients, drawn at random from those with at least ``min_samples``; None keeps all these.
        min_samples: Smallest number of samples of a client that is kept, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> clients = np.array([0, 1, 0, 2, 2, 2])
        >>> [indices.tolist() for indices in Natural(min_samples=2)(clients, seed=0)]
        [[0, 2], [3, 4, 5]]
    """

    needs_labels: ClassVar[bool] = False
    needs_clients: ClassVar[bool] = True
    complete: ClassVar[bool] = False

    num_clients: Count | None = None
    min_samples: Count = 1

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Keep the clients with at least ``min_samples`` samples, or ``num_clients`` of these.

        Args:
            values: Natural client of each sample, integers from 0, ``(M,)``.
            seed: Seed of the draw of clients.

        Raises:
            ConfigurationError: Fewer clients have ``min_samples`` than are asked for.
        """
        sizes = np.bincount(values)
        kept = np.flatnonzero(sizes >= self.min_samples)
        if len(kept) < (self.num_clients or 1):
            raise ConfigurationError(
                f"data.partitioner.num_clients={self.num_clients}: of the data's {np.count_nonzero(sizes)} natural "
                f"clients {len(kept)} have min_samples={self.min_samples} samples; lower one of the two"
            )
        if self.num_clients is not None:
            # Ascending, so that clients keep the order of the data whatever was drawn
            kept = np.sort(np.random.default_rng(seed).choice(kept, self.num_clients, replace=False))
        new_number = np.full(len(sizes), -1)
        new_number[kept] = np.arange(len(kept))
        return Partition.from_owners(new_number[values], len(kept))


class Explicit(Partitioner):
    """Uses the partition in a file: ``partition.npz`` from a run's folder, or lists written by hand.

    No client uses samples that the file leaves out, and the seed has no effect. An ``.npz`` file holds no names of
    clients.

    Args:
        path: Path of an ``.npz`` file that :meth:`Partition.save` wrote, or of a JSON file with a list of sample
            indices for each client: ``[[0, 5], [2]]``, or ``{"Romeo": [0, 5], "Juliet": [2]}``.

    Attributes:
        client_names: Names of the clients in the JSON file; None if the file has none.

    Raises:
        ConfigurationError: The file is missing or damaged.
    """

    num_clients: int
    needs_labels: ClassVar[bool] = False
    complete: ClassVar[bool] = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.client_names: list[str] | None = None
        self._saved = self._read_lists() if self.path.suffix == ".json" else Partition.load(self.path)
        self.num_clients = len(self._saved.partition)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Return the partition in the file, after checking that it fits the data.

        Args:
            values: Class of each sample, ``(M,)``; all 0 if there are no classes.
            seed: Unused, as nothing is drawn.

        Raises:
            ConfigurationError: The file was made for other data.
        """
        partition = self._saved.partition
        if not len(partition.indices):
            raise self._refuse("it gives no client a sample; give a list of sample indices for each")
        if not self._fits(values):
            raise self._refuse(
                f"it splits {self._saved.num_samples} samples of other data than these {len(values)}: their number or "
                "the clients' classes differ; use the data it was made for, in the same order"
            )
        try:
            partition.check(len(values), complete=False)
        except ConfigurationError as error:
            raise self._refuse(str(error)) from None
        return partition

    def _fits(self, values: np.ndarray) -> bool:
        """Return whether data have the number of samples, and each client the classes, for which the file was saved."""
        partition, histogram = self._saved.partition, self._saved.label_histogram
        is_long = self._saved.num_samples in (None, len(values))
        if not is_long or histogram is None or not values.any():  # values are all 0 if the data have no classes
            return is_long
        # Data of the same size in another order pass all other checks; only their classes give them away.
        found = count_labels(values[partition.indices], partition.client_of_each(), len(partition))
        return found is not None and np.array_equal(found, histogram)

    def _refuse(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"data.partitioner.path='{self.path}': {what}")

    def _read_lists(self) -> SavedPartition:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                self.client_names = list(content)
                content = content.values()
            return SavedPartition(Partition.from_parts([np.array(part) for part in content]))
        except (OSError, TypeError, ValueError, RecursionError) as error:
            what = "give a JSON file with a list of sample indices for each client, e.g. [[0, 5], [2]]"
            raise self._refuse(f"cannot be read ({error}); {what}") from None


SAMPLE_COLUMN = "sample number"


class Flower(Partitioner):
    """Uses a partitioner of flwr-datasets that splits by the class of samples, or by their number alone.

    As in ``FederatedDataset`` of flwr-datasets, the samples are shuffled first, here with the data module's seed. The
    partitioner's own draws depend on its own ``seed`` (42 unless given): another seed of the data module keeps, for
    example, the shares of a ``DirichletPartitioner`` and changes which samples a client gets. With ``seed: null`` the
    shares are drawn with the data module's seed, too. No client uses samples that the partitioner leaves out. Splitting
    takes about a millisecond per client.

    Args:
        partitioner: Partitioner of flwr-datasets; the column that its ``partition_by`` names holds the class.

    Raises:
        ConfigurationError: ``partitioner`` is not one of flwr-datasets.

    Example:
        In a configuration file::

            partitioner:
              class_path: fedbc_lightning.partition.Flower
              init_args:
                partitioner:
                  class_path: flwr_datasets.partitioner.DirichletPartitioner
                  init_args: {num_partitions: 10, partition_by: label, alpha: 0.5, seed: null}
    """

    complete: ClassVar[bool] = False

    def __init__(self, partitioner: FlowerPartitioner) -> None:
        if not hasattr(partitioner, "load_partition"):
            raise ConfigurationError(
                f"data.partitioner: Flower got {type(partitioner).__name__}; give a partitioner of "
                "flwr_datasets.partitioner (pip install 'fedbc-lightning[flower]')"
            )
        self.partitioner = partitioner
        self.num_clients = None

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples by letting the partitioner split a table of their classes."""
        from datasets import Dataset

        rng = np.random.default_rng(seed)
        order = rng.permutation(len(values))
        partitioner = copy.deepcopy(self.partitioner)  # an instance accepts a data set only once
        settings = vars(partitioner)
        if "_rng" in settings and settings.get("_seed") is None:
            settings["_rng"] = rng
        label_column = settings.get("_partition_by", "label")
        name = type(partitioner).__name__
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # pyarrow warns about the way `datasets` sorts
                partitioner.dataset = Dataset.from_dict({label_column: values[order], SAMPLE_COLUMN: order})
                num_clients = partitioner.num_partitions
                check_enough_samples(len(values), num_clients)
                parts = [partitioner.load_partition(client).with_format("numpy") for client in range(num_clients)]
                return Partition.from_parts([np.asarray(part[SAMPLE_COLUMN][:]) for part in parts])
        except (ValueError, KeyError) as error:  # KeyError: the partitioner splits columns in place of samples
            raise ConfigurationError(
                f"data.partitioner: {name} of flwr-datasets: {' '.join(str(error).split())}; give another partitioner"
            ) from None
