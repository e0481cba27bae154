"""Partitioners, which split the samples of one data set over clients, reproducibly for a given seed."""

from fedbc_lightning.partition.base import Partition, Partitioner, SavedPartition
from fedbc_lightning.partition.classes_per_client import ClassesPerClient
from fedbc_lightning.partition.dirichlet import Dirichlet
from fedbc_lightning.partition.explicit import Explicit
from fedbc_lightning.partition.flower import Flower
from fedbc_lightning.partition.inner_dirichlet import InnerDirichlet
from fedbc_lightning.partition.natural import Natural
from fedbc_lightning.partition.power_law import PowerLaw, power_law_sizes
from fedbc_lightning.partition.shards import Shards
from fedbc_lightning.partition.sizes import IID, ExponentialSizes, LinearSizes, LogNormalSizes

__all__ = [
    "IID",
    "ClassesPerClient",
    "Dirichlet",
    "Explicit",
    "ExponentialSizes",
    "Flower",
    "InnerDirichlet",
    "LinearSizes",
    "LogNormalSizes",
    "Natural",
    "Partition",
    "Partitioner",
    "PowerLaw",
    "SavedPartition",
    "Shards",
    "power_law_sizes",
]
