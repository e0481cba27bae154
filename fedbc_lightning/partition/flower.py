"""Use of the partitioners of Flower Datasets (flwr-datasets)."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner, check_enough_samples

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner as FlowerPartitioner

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
                parts = [partitioner.load_partition(client) for client in range(num_clients)]
        except ValueError as error:
            raise ConfigurationError(
                f"data.partitioner: {name} of flwr-datasets: {' '.join(str(error).split())}"
            ) from None
        if any(SAMPLE_COLUMN not in part.column_names for part in parts):
            raise ConfigurationError(f"data.partitioner: {name} splits columns, not samples; give another partitioner")
        return Partition.from_parts([np.asarray(part.with_format("numpy")[SAMPLE_COLUMN][:]) for part in parts])
