"""Federated learning beyond consensus, on PyTorch Lightning."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbc_lightning.algorithms import SCAFFOLD, FedAvg, FedBC, FederatedAlgorithm, FedProx
    from fedbc_lightning.commands.studies import reproduce
    from fedbc_lightning.core.errors import ConfigurationError
    from fedbc_lightning.data import FederatedDataModule, PartitionedDataModule, SitesDataModule
    from fedbc_lightning.federation.coding import Codecs
    from fedbc_lightning.federation.participation import ClientSampler, PoissonSampler, UniformSampler
    from fedbc_lightning.federation.privacy import Privacy
    from fedbc_lightning.federation.system import Diurnal, Lognormal, System
    from fedbc_lightning.pages.pages import report
    from fedbc_lightning.run.run_record import FitResult
    from fedbc_lightning.studies.compare import Comparison
    from fedbc_lightning.studies.study import Study
    from fedbc_lightning.trainer.trainer import FederatedTrainer

__version__ = "0.1.0"

if not os.path.isdir(os.path.join(__path__[0], "configs")):
    # This is the source tree, which comes before an installed package for programs that are started in its root. There
    # `configs`, `models` and `datamodules` lie beside this package; an installation puts them into it.
    __path__.append(os.path.dirname(__path__[0]))

_HOMES = {
    "SCAFFOLD": "algorithms",
    "ClientSampler": "federation.participation",
    "Codecs": "federation.coding",
    "Comparison": "studies.compare",
    "ConfigurationError": "core.errors",
    "Diurnal": "federation.system",
    "FedAvg": "algorithms",
    "FedBC": "algorithms",
    "FedProx": "algorithms",
    "FederatedAlgorithm": "algorithms",
    "FederatedDataModule": "data",
    "FederatedTrainer": "trainer.trainer",
    "FitResult": "run.run_record",
    "Lognormal": "federation.system",
    "PartitionedDataModule": "data",
    "PoissonSampler": "federation.participation",
    "Privacy": "federation.privacy",
    "SitesDataModule": "data",
    "Study": "studies.study",
    "System": "federation.system",
    "UniformSampler": "federation.participation",
    "recordable": "core.recordable",
    "report": "pages.pages",
    "reproduce": "commands.studies",
}

__all__ = [
    "SCAFFOLD",
    "ClientSampler",
    "Codecs",
    "Comparison",
    "ConfigurationError",
    "Diurnal",
    "FedAvg",
    "FedBC",
    "FedProx",
    "FederatedAlgorithm",
    "FederatedDataModule",
    "FederatedTrainer",
    "FitResult",
    "Lognormal",
    "PartitionedDataModule",
    "PoissonSampler",
    "Privacy",
    "SitesDataModule",
    "Study",
    "System",
    "UniformSampler",
    "__version__",
    "recordable",
    "report",
    "reproduce",
]

# Packages whose classes users take
_PACKAGES = "algorithms", "callbacks", "datamodules", "models", "partition"


def __dir__() -> list[str]:
    """Return the public names, which a completion offers; they are imported on first use."""
    return [*__all__, *_PACKAGES]


def __getattr__(name: str) -> Any:
    """Import on first use: ``fedbc-cli --help`` and worker start-up do not wait for what they do not use."""
    if name in _PACKAGES:
        return import_module(f"fedbc_lightning.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedbc_lightning' has no attribute '{name}'")
    return getattr(import_module(f"fedbc_lightning.{_HOMES[name]}"), name)
