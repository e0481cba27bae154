"""The parts of local training: terms, penalties, solvers, and changes of the iterate after a step."""

from fedbc_lightning.local.contrast import ModelContrast
from fedbc_lightning.local.engine import Engine
from fedbc_lightning.local.fine_tuning import FineTuning
from fedbc_lightning.local.loopless import LooplessSteps
from fedbc_lightning.local.penalties import AbsoluteNorm, Layerwise, Norm, Penalty, SquaredNorm
from fedbc_lightning.local.solvers import Armijo, Mixture, ModelAgnostic, MoreauEnvelope, Solver
from fedbc_lightning.local.terms import (
    AfterStep,
    Linear,
    LinearTerm,
    MixWith,
    Proximal,
    ProximalTerm,
    Term,
    TermFactory,
)  # fmt: skip

__all__ = [
    "AbsoluteNorm", "AfterStep", "Armijo", "Engine", "FineTuning", "Layerwise", "Linear", "LinearTerm", "LooplessSteps",
    "MixWith", "Mixture", "ModelAgnostic", "ModelContrast", "MoreauEnvelope", "Norm", "Penalty", "Proximal",
    "ProximalTerm", "Solver", "SquaredNorm", "Term", "TermFactory",
]  # fmt: skip
