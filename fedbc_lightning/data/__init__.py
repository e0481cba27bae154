"""Federated data.

Four classes hold the data of clients: :class:`FederatedDataModule` is the base class for data of your own,
:class:`PartitionedDataModule` federates any ordinary data, :class:`SitesDataModule` takes one data set per client, and
:class:`IndexedDataModule` keeps one data set (:class:`LoadedData`) and an index array per client.
:class:`ClientLoader` and :class:`ArrayDataset` make batches.
"""

from fedbc_lightning.data.datamodule import FederatedDataModule
from fedbc_lightning.data.datasets import ArrayDataset
from fedbc_lightning.data.indexed import IndexedDataModule, LoadedData
from fedbc_lightning.data.loading import ClientLoader, EpochSampler
from fedbc_lightning.data.sites import SitesDataModule
from fedbc_lightning.data.wrapper import PartitionedDataModule

__all__ = [
    "ArrayDataset",
    "ClientLoader",
    "EpochSampler",
    "FederatedDataModule",
    "IndexedDataModule",
    "LoadedData",
    "PartitionedDataModule",
    "SitesDataModule",
]
