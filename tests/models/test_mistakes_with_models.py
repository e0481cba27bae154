"""One clear sentence for what does not fit a model."""

from dataclasses import replace

import pytest
import torch
from fedbc_lightning.models import (
    CIFARCNN,
    FEMNISTCNN,
    MLP,
    CharLSTM,
    LinearRegression,
    ResNet18GroupNorm,
    Sent140LSTM,
)
from helpers.boring import make_trainer
from helpers.model_cases import CASES, ClientsOf, integers

from fedbc_lightning.algorithms import FedAvg
from fedbc_lightning.core.errors import ConfigurationError


@pytest.mark.parametrize(
    ("model_class", "arguments", "message"),
    [
        (CIFARCNN, {"image_size": 15}, "image_size=15 is too small"),
        (ResNet18GroupNorm, {"num_groups": 3}, "model.num_groups: got 3; it must divide 64"),
    ],
)
def test_arguments(model_class, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        model_class(**arguments)


TOKENS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (MLP(), torch.zeros(2, 1, 8, 8), "model.num_features: got 784, but an input has 64"),
        (CIFARCNN(), torch.zeros(2, 1, 32, 32), r"CIFARCNN takes images .* of \(3, 32, 32\), but .* \(1, 32, 32\)"),
        (CIFARCNN(), torch.zeros(3, 32, 32), r"of \(3, 32, 32\), but an input has the shape \(32, 32\)"),
        (FEMNISTCNN(), torch.zeros(2, 28, 28), r"of \(1, 28, 28\), but an input has the shape \(28, 28\)"),
        (ResNet18GroupNorm(), torch.zeros(2, 1, 32, 32), r"of \(3, any, any\)"),
        (CharLSTM(), TOKENS + 80, "model.vocabulary_size: got 80, but the batch holds token 80; tokens are 0..79"),
        (Sent140LSTM(9, 4), TOKENS - 1, "model.vocabulary_size: got 9, but the batch holds token -1; tokens are 0..8"),
    ],
)
def test_inputs(model, inputs, message):
    with pytest.raises(ConfigurationError, match=message):
        model(inputs)


def test_targets_of_a_regression_are_one_number_per_sample():
    # torch would broadcast them against the predictions
    with pytest.raises(ConfigurationError, match=r"\(2,\) or \(2, 1\); the batch has \(2, 2\)"):
        LinearRegression(5).training_step((torch.zeros(2, 5), torch.zeros(2, 2)), 0)


def test_integer_targets_of_a_regression_are_numbers():
    model = LinearRegression(5)
    model.log = lambda *args, **kwargs: None
    model._trainer = None
    model.training_step((torch.zeros(2, 5), torch.tensor([1, 3])), 0).backward()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("logistic", {"num_classes": 2}, "model.num_classes: got 2, but the data has 4 classes"),
        ("binary logistic", {}, "takes the classes 0 and 1, but the data has 4 classes; use LogisticRegression"),
        ("next character", {"vocabulary_size": 3}, "model.vocabulary_size: got 3, but the data has 4 classes"),
    ],
)
def test_more_classes_in_the_data_are_seen_before_training(name, arguments, message, tmp_path):
    case = replace(next(case for case in CASES if case.name == name), targets=integers(4))
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, clients_per_round=1.0).fit(case.model(**arguments), ClientsOf(case), FedAvg())


def test_tokens_beyond_the_vocabulary_are_named_in_training(tmp_path):
    case = next(case for case in CASES if case.name == "sent140")
    with pytest.raises(ConfigurationError, match="vocabulary_size: got 4, but the batch holds token 8"):
        make_trainer(tmp_path, clients_per_round=1.0).fit(case.model(vocabulary_size=4), ClientsOf(case), FedAvg())
