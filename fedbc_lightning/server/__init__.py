"""Server callbacks: the parts that make up the server's half of an algorithm."""

from fedbc_lightning.server.aggregation import WeightedAverage
from fedbc_lightning.server.arrived_updates import BufferedUpdates, MixedModels
from fedbc_lightning.server.augmented_mean import AugmentedMean, CenterConsensus
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.server.codecs import QSGD, BFloat16, Codec, Float8, Sign, TopK
from fedbc_lightning.server.control_variates import ControlVariates
from fedbc_lightning.server.dual_ascent import DualAscent
from fedbc_lightning.server.dynamic_regularization import DynamicRegularization
from fedbc_lightning.server.extrapolation import Extrapolation
from fedbc_lightning.server.fair_step import FairStep
from fedbc_lightning.server.line_search import FrankWolfe, LargestClientStep
from fedbc_lightning.server.mean_message import MeanMessage
from fedbc_lightning.server.normalized_average import NormalizedAverage
from fedbc_lightning.server.optimizers import ServerAdaptive, ServerMomentum, ServerOptimizer, ServerSGD
from fedbc_lightning.server.robust import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
)
from fedbc_lightning.server.smoothed_average import SmoothedAverage
from fedbc_lightning.server.staleness import Staleness

__all__ = [
    "QSGD", "AugmentedMean", "BFloat16", "BufferedUpdates", "CenterConsensus", "CenteredClipping", "Codec",
    "ControlVariates", "CoordinateMedian", "DualAscent", "DynamicRegularization", "Extrapolation", "FairStep",
    "Float8", "FrankWolfe", "GeometricMedian", "Krum", "LargestClientStep", "MeanMessage", "MixedModels", "MultiKrum",
    "NormBound", "NormalizedAverage", "RobustRule", "ServerAdaptive", "ServerCallback", "ServerMomentum",
    "ServerOptimizer", "ServerSGD", "Sign", "SmoothedAverage", "Staleness", "Sums", "TopK", "TrimmedMean",
    "WeightedAverage",
]  # fmt: skip
