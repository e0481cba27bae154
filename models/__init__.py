"""Ready models, which are ordinary LightningModules without any code for federated learning."""

from .batch_norm_mlp import BatchNormMLP
from .binary_logistic_regression import BinaryLogisticRegression
from .char_lstm import CharLSTM
from .classifier import Classifier
from .cnn import CIFARCNN
from .femnist_cnn import FEMNISTCNN
from .linear_regression import LinearRegression
from .logistic_regression import LogisticRegression
from .lora_gpt2 import LoRAGPT2
from .mlp import MLP
from .next_token import NextToken
from .regressor import Regressor
from .resnet import ResNet18GroupNorm
from .sent140_lstm import Sent140LSTM

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
