"""Partitioners, which split the samples of one data set over clients, reproducibly for a given seed."""

from fedbc_lightning.partition.base import Partition, Partitioner, SavedPartition
from fedbc_lightning.partition.classes_per_client import ClassesPerClient, count_holders, split_classes
from fedbc_lightning.partition.dirichlet import Dirichlet, split_dirichlet
from fedbc_lightning.partition.explicit import Explicit
from fedbc_lightning.partition.flower import Flower
from fedbc_lightning.partition.inner_dirichlet import InnerDirichlet, split_inner_dirichlet
from fedbc_lightning.partition.natural import Natural, split_natural
from fedbc_lightning.partition.power_law import PowerLaw, power_law_sizes, split_power_law, split_power_law_publicly
from fedbc_lightning.partition.shards import Shards, split_shards
from fedbc_lightning.partition.sizes import (
    IID,
    ExponentialSizes,
    LinearSizes,
    LogNormalSizes,
    equal_sizes,
    exponential_sizes,
    linear_sizes,
    log_normal_sizes,
    split_by_sizes,
    split_iid,
)

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
    "count_holders",
    "equal_sizes",
    "exponential_sizes",
    "linear_sizes",
    "log_normal_sizes",
    "power_law_sizes",
    "split_by_sizes",
    "split_classes",
    "split_dirichlet",
    "split_iid",
    "split_inner_dirichlet",
    "split_natural",
    "split_power_law",
    "split_power_law_publicly",
    "split_shards",
]
