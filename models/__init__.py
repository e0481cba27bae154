"""Ready models, which are ordinary LightningModules without any code for federated learning."""

from .base import Classifier, NextToken, Regressor
from .cnn import CIFARCNN, FEMNISTCNN, ResNet18GroupNorm
from .linear import BinaryLogisticRegression, LinearRegression, LogisticRegression
from .lora_gpt2 import LoRAGPT2
from .mlp import MLP, BatchNormMLP
from .recurrent import CharLSTM, Sent140LSTM

__all__ = [
    "CIFARCNN",
    "FEMNISTCNN",
    "MLP",
    "BatchNormMLP",
    "BinaryLogisticRegression",
    "CharLSTM",
    "Classifier",
    "LinearRegression",
    "LoRAGPT2",
    "LogisticRegression",
    "NextToken",
    "Regressor",
    "ResNet18GroupNorm",
    "Sent140LSTM",
]
