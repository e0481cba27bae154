"""Ready data modules for federated learning; those that need files download them, or name the files they miss."""

from .arrays import ArraysDataModule
from .digits import DigitsDataModule
from .emnist import EMNISTDataModule
from .femnist import FEMNISTDataModule
from .hugging_face import HuggingFaceDataModule
from .image_folder import ImageFolderDataModule
from .libsvm import LibSVMDataModule
from .mnist_variants import MNISTPersonalDataModule, MNISTRobustDataModule
from .regression import SyntheticRegressionDataModule
from .sent140 import Sent140DataModule
from .shakespeare import ShakespeareDataModule
from .synthetic import SyntheticDataModule
from .table import TableDataModule
from .vision import CIFAR10DataModule, CIFAR100DataModule, MNISTDataModule

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
