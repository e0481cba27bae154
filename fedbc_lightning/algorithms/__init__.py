"""Federated methods, one file per paper; each method is composed of local terms and server parts."""

from fedbc_lightning.algorithms.apfl import APFL
from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.algorithms.centralized import Centralized
from fedbc_lightning.algorithms.composed import ComposedAlgorithm
from fedbc_lightning.algorithms.ditto import Ditto
from fedbc_lightning.algorithms.fedadmm import FedADMM, FedPD
from fedbc_lightning.algorithms.fedasync import FedAsync
from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.algorithms.fedbc import FedBC
from fedbc_lightning.algorithms.fedbc_finetune import FedBCFineTune
from fedbc_lightning.algorithms.fedbuff import FedBuff
from fedbc_lightning.algorithms.feddyn import FedDyn
from fedbc_lightning.algorithms.fedexp import FedExP
from fedbc_lightning.algorithms.fedli import FedLiLS, FedLiLU
from fedbc_lightning.algorithms.fednova import FedNova
from fedbc_lightning.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedbc_lightning.algorithms.fedplus import FedAvgPlus, FedCoMedPlus, FedGeoMedPlus, FedPlus
from fedbc_lightning.algorithms.fedprox import FedProx
from fedbc_lightning.algorithms.fedrep import FedBABU, FedRep
from fedbc_lightning.algorithms.l2gd import L2GD, L2SGD, L2SGD2, L2SGDPlus, L2SGDPlusPlus
from fedbc_lightning.algorithms.local import Local
from fedbc_lightning.algorithms.moon import MOON
from fedbc_lightning.algorithms.per_fedavg import PerFedAvg
from fedbc_lightning.algorithms.per_fedbc import PerFedBC
from fedbc_lightning.algorithms.pfedme import PFedMe
from fedbc_lightning.algorithms.q_fedavg import QFedAvg
from fedbc_lightning.algorithms.rfa import RFA
from fedbc_lightning.algorithms.scaffold import SCAFFOLD

__all__ = [
    "APFL", "L2GD", "L2SGD", "L2SGD2", "MOON", "RFA", "SCAFFOLD", "Centralized", "ComposedAlgorithm", "Ditto",
    "FedADMM", "FedAdagrad", "FedAdam", "FedAsync", "FedAvg", "FedAvgM", "FedAvgPlus", "FedBABU", "FedBC",
    "FedBCFineTune", "FedBuff", "FedCoMedPlus", "FedDyn", "FedExP", "FedGeoMedPlus", "FedLiLS", "FedLiLU",
    "FedNova", "FedPD", "FedPlus", "FedProx", "FedRep", "FedYogi", "FederatedAlgorithm", "L2SGDPlus",
    "L2SGDPlusPlus", "Local", "PFedMe", "PerFedAvg", "PerFedBC", "QFedAvg",
]  # fmt: skip
