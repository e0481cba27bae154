"""Server callbacks: the parts that make up the server's half of an algorithm."""

from fedbc_lightning.server.adaptive_steps import Extrapolation, FairStep, FrankWolfe, LargestClientStep
from fedbc_lightning.server.aggregation import NormalizedAverage, WeightedAverage
from fedbc_lightning.server.arrived_updates import BufferedUpdates, MixedModels, Staleness
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.server.codecs import QSGD, BFloat16, Codec, Float8, Sign, TopK
from fedbc_lightning.server.corrections import (
    AugmentedMean,
    CenterConsensus,
    ControlVariates,
    DynamicRegularization,
    MeanMessage,
)
from fedbc_lightning.server.dual_ascent import DualAscent
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
from fedbc_lightning.server.smoothed_center import SmoothedAverage

__all__ = [
    "QSGD", "AugmentedMean", "BFloat16", "BufferedUpdates", "CenterConsensus", "CenteredClipping", "Codec",
    "ControlVariates", "CoordinateMedian", "DualAscent", "DynamicRegularization", "Extrapolation", "FairStep",
    "Float8", "FrankWolfe", "GeometricMedian", "Krum", "LargestClientStep", "MeanMessage", "MixedModels", "MultiKrum",
    "NormBound", "NormalizedAverage", "RobustRule", "ServerAdaptive", "ServerCallback", "ServerMomentum",
    "ServerOptimizer", "ServerSGD", "Sign", "SmoothedAverage", "Staleness", "Sums", "TopK", "TrimmedMean",
    "WeightedAverage",
]  # fmt: skip
