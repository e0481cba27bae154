"""Federated data: what a user imports.

Clients' data: :class:`FederatedDataModule` (subclass it), :class:`PartitionedDataModule` (federates any ordinary data),
:class:`IndexedDataModule` (one data set, given as :class:`LoadedData`, and an index array per client). Their batches:
:class:`ClientLoader`, :class:`ArrayDataset`.
"""

from fedbc_lightning.data.datamodule import FederatedDataModule
from fedbc_lightning.data.datasets import ArrayDataset, BatchTransformDataset
from fedbc_lightning.data.indexed import IndexedDataModule, LoadedData
from fedbc_lightning.data.loading import ClientLoader, EpochSampler
from fedbc_lightning.data.wrapper import PartitionedDataModule

__all__ = [
    "ArrayDataset",
    "BatchTransformDataset",
    "ClientLoader",
    "EpochSampler",
    "FederatedDataModule",
    "IndexedDataModule",
    "LoadedData",
    "PartitionedDataModule",
]
