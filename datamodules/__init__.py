"""Ready data modules for federated learning; those that need files download them, or name the files they miss."""

from .arrays import ArraysDataModule
from .hugging_face import HuggingFaceDataModule
from .image_folder import ImageFolderDataModule
from .leaf import FEMNISTDataModule
from .libsvm import LibSVMDataModule
from .sent140 import Sent140DataModule
from .shakespeare import ShakespeareDataModule
from .synthetic import SyntheticDataModule, SyntheticRegressionDataModule
from .table import TableDataModule
from .vision import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    DigitsDataModule,
    EMNISTDataModule,
    MNISTDataModule,
    MNISTPersonalDataModule,
    MNISTRobustDataModule,
)

__all__ = [
    "ArraysDataModule",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "DigitsDataModule",
    "EMNISTDataModule",
    "FEMNISTDataModule",
    "HuggingFaceDataModule",
    "ImageFolderDataModule",
    "LibSVMDataModule",
    "MNISTDataModule",
    "MNISTPersonalDataModule",
    "MNISTRobustDataModule",
    "Sent140DataModule",
    "ShakespeareDataModule",
    "SyntheticDataModule",
    "SyntheticRegressionDataModule",
    "TableDataModule",
]
