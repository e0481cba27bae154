"""Partitioners, which split the samples of one data set over clients, reproducibly for a given seed."""

from fedbc_lightning.partition.base import Partition, Partitioner, SavedPartition
from fedbc_lightning.partition.dirichlet import Dirichlet, InnerDirichlet
from fedbc_lightning.partition.few_classes import ClassesPerClient, Shards
from fedbc_lightning.partition.given import Explicit, Flower, Natural
from fedbc_lightning.partition.power_law import PowerLaw, power_law_sizes
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
