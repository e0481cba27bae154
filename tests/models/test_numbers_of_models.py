"""Sizes that the papers state, and outputs by independent formulas."""

import math

import numpy as np
import pytest
import torch
from fedbc_lightning.models import (
    CIFARCNN,
    FEMNISTCNN,
    MLP,
    BatchNormMLP,
    BinaryLogisticRegression,
    CharLSTM,
    LinearRegression,
    LogisticRegression,
    ResNet18GroupNorm,
    Sent140LSTM,
)
from helpers.model_cases import plain_trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_of_the_papers_networks():
    assert count(LogisticRegression()) == 60 * 10 + 10
    assert count(LinearRegression()) == 1000 + 1
    assert count(BinaryLogisticRegression()) == 123
    assert count(MLP()) == 784 * 128 + 128 + 128 * 10 + 10
    assert count(BatchNormMLP()) == count(MLP()) + 2 * 128
    assert count(CIFARCNN()) == 62_006
    assert count(ResNet18GroupNorm()) == 11_173_962
    assert count(ResNet18GroupNorm(num_groups=32)) == 11_173_962
    assert count(ResNet18GroupNorm(num_classes=100)) == 11_173_962 + 90 * 513
    assert count(FEMNISTCNN()) == 6_603_710  # LEAF
    assert count(FEMNISTCNN(num_classes=10, hidden=512)) == 1_663_370  # McMahan et al. 2017
    assert [type(layer).__name__ for layer in MLP().network] == ["Flatten", "Linear", "ReLU", "Dropout", "Linear"]
    assert MLP().network[3].p == 0.5


def test_sizes_of_the_recurrent_networks():
    layers = 4 * 256 * (8 + 256) + 4 * 256 * (256 + 256)
    biases = 2 * 4 * 256
    assert count(CharLSTM()) == 80 * 8 + layers + 2 * biases + 256 * 80 + 80 == 819_920
    assert count(CharLSTM(vocabulary_size=90)) - biases == 820_522  # Reddi et al. 2021: one bias vector per layer
    sizes = {"vocabulary_size": 50, "embedding_dim": 20}
    layers = 4 * 256 * (20 + 256) + 4 * 256 * (256 + 256)
    assert count(Sent140LSTM(**sizes)) == 50 * 20 + layers + 2 * biases + 2 * 257


def test_group_norm_is_everywhere_and_nothing_is_downsampled_at_the_start():
    model = ResNet18GroupNorm(num_groups=4)
    norms = [child for child in model.modules() if isinstance(child, nn.GroupNorm)]
    assert len(norms) == 20
    assert {norm.num_groups for norm in norms} == {4}
    assert not any(isinstance(child, nn.BatchNorm2d) for child in model.modules())
    assert not list(model.buffers())
    assert {norm.num_groups for norm in ResNet18GroupNorm().modules() if isinstance(norm, nn.GroupNorm)} == {2}
    shapes = []
    model.network.layer1.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    model.network.layer4.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    model(torch.zeros(1, 3, 32, 32))
    assert shapes == [(1, 64, 32, 32), (1, 512, 4, 4)]
    deviation = model.network.conv1.weight.std().item()
    assert deviation == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.1)  # Kaiming, fan out


@pytest.mark.parametrize("image_size", [16, 28, 32, 33, 64])
def test_the_cnn_takes_other_image_sizes(image_size):
    assert CIFARCNN(image_size=image_size)(torch.zeros(2, 3, image_size, image_size)).shape == (2, 10)


def test_linear_models_are_their_formulas():
    inputs = torch.randn(6, 5)
    linear = LinearRegression(5)
    weight, bias = (parameter.detach().numpy() for parameter in linear.parameters())
    expected = inputs.numpy() @ weight[0] + bias
    np.testing.assert_allclose(linear(inputs).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    logistic = LogisticRegression(5, 3)
    weight, bias = (parameter.detach().numpy() for parameter in logistic.parameters())
    np.testing.assert_allclose(logistic(inputs).detach().numpy(), inputs.numpy() @ weight.T + bias, 1e-5, 1e-6)


def test_binary_logistic_regression_is_the_loss_of_l2gd():
    """f(w) = mean log(1 + exp(-b a.w)) + mu/2 |w|^2, by autograd and one step of the model's optimizer."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(20, 5, generator=generator), torch.randint(0, 2, (20,), generator=generator)
    mu, lr = 0.3, 0.5
    model = BinaryLogisticRegression(5, lr=lr, weight_decay=mu)
    assert model.loss(model(inputs), targets).item() == pytest.approx(math.log(2))  # w = 0
    with torch.no_grad():
        model.network[1].weight.copy_(torch.randn(1, 5, generator=generator))
    w = model.network[1].weight.detach().clone().requires_grad_()
    signs = 2.0 * targets - 1
    margin = signs * (inputs @ w[0])
    value = torch.log1p(torch.exp(-margin)).mean()
    assert model.loss(model(inputs), targets).item() == pytest.approx(value.item(), rel=1e-6)
    assert model.accuracy(model(inputs), targets).item() == pytest.approx((margin > 0).float().mean().item())
    (value + mu / 2 * w.square().sum()).backward()
    optimizer = model.configure_optimizers()
    model.loss(model(inputs), targets).backward()
    optimizer.step()
    torch.testing.assert_close(model.network[1].weight.detach(), (w - lr * w.grad).detach())


def test_the_softmax_of_two_classes_moves_twice_as_far():
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(20, 5, generator=generator), torch.randint(0, 2, (20,), generator=generator)
    one, two = BinaryLogisticRegression(5, lr=0.2, weight_decay=0.1), LogisticRegression(5, 2, lr=0.1)
    two.network[1].bias.requires_grad_(False).zero_()
    with torch.no_grad():
        two.network[1].weight.zero_()
    steps = [model.configure_optimizers() for model in (one, two)]
    steps[1].param_groups[0]["weight_decay"] = 0.2  # mu on two vectors is mu / 2 on their difference
    for _ in range(3):
        for model, optimizer in zip((one, two), steps, strict=True):
            optimizer.zero_grad()
            model.loss(model(inputs), targets).backward()
            optimizer.step()
    weight = two.network[1].weight
    torch.testing.assert_close(one.network[1].weight[0], weight[1] - weight[0])
    torch.testing.assert_close(one(inputs).softmax(1), two(inputs).softmax(1))


def lstm_by_hand(recurrent: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """States of the second layer, gate by gate."""
    states = recurrent.embedding.weight[tokens]
    for layer in range(2):
        wi, wh, bi, bh = (getattr(recurrent.lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih",
                          "bias_hh"))  # fmt: skip
        h, c, outputs = torch.zeros(len(tokens), wh.shape[1]), torch.zeros(len(tokens), wh.shape[1]), []
        for t in range(tokens.shape[1]):
            i, f, g, o = (states[:, t] @ wi.T + bi + h @ wh.T + bh).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        states = torch.stack(outputs, dim=1)
    return states


def test_the_recurrent_models_are_two_lstm_layers():
    tokens = torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(0))
    model = CharLSTM(vocabulary_size=7, hidden=5)
    expected = lstm_by_hand(model.recurrent, tokens) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(tokens), expected)
    last, _ = model._apply_to((tokens, torch.zeros(3, dtype=torch.int64)))
    torch.testing.assert_close(last, expected[:, -1])


class OneHot(CharLSTM):
    """Predicts each character itself."""

    def __init__(self) -> None:
        super().__init__(vocabulary_size=4, embedding_dim=4, hidden=4)
        self.recurrent = nn.Sequential(nn.Embedding(4, 4))
        self.head = nn.Identity()
        with torch.no_grad():
            self.recurrent[0].weight.copy_(10 * torch.eye(4))


def test_accuracy_and_loss_count_each_predicted_character_once(tmp_path):
    """By hand: 5 + 1 predicted characters in two batches, of which 3 + 1 are right."""
    inputs = torch.tensor([[0, 1, 2], [1, 1, 3], [2, 0, 0], [3, 3, 3]])
    targets = torch.tensor([[0, 1, 3], [1, 2, -100], [2, -100, -100], [-100, -100, -100]])
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=2)
    metrics = plain_trainer(tmp_path).test(OneHot(), loader, verbose=False)[0]
    right = math.log(1 + 3 * math.exp(-10))
    assert metrics["test_accuracy"] == pytest.approx(4 / 6)
    assert metrics["test_loss"] == pytest.approx((4 * right + 2 * (right + 10)) / 6, rel=1e-5)
    loader = DataLoader(TensorDataset(inputs, torch.tensor([2, 0, 0, 3])), batch_size=3)
    assert plain_trainer(tmp_path).test(OneHot(), loader, verbose=False)[0]["test_accuracy"] == pytest.approx(3 / 4)


def test_a_batch_of_padding_only_changes_nothing(tmp_path):
    model = OneHot()
    padding = torch.full((2, 3), -100)
    outputs, targets = model._apply_to((torch.zeros(2, 3, dtype=torch.int64), padding))
    loss = model.loss(outputs, targets)
    loss.backward()
    assert loss.item() == 0
    assert not model.recurrent[0].weight.grad.any()
    inputs = torch.tensor([[0, 1, 2], [1, 1, 3], [2, 0, 0]])
    targets = torch.cat([padding, torch.tensor([[2, 0, 1]])])
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=2)
    assert plain_trainer(tmp_path).test(model, loader, verbose=False)[0]["test_accuracy"] == pytest.approx(2 / 3)


def test_padding_behind_a_tweet_changes_nothing():
    model = Sent140LSTM(vocabulary_size=9, embedding_dim=4, hidden=6)
    short = torch.tensor([[3, 5, 0, 8]])
    padded = functional.pad(short, (0, 5))
    torch.testing.assert_close(model(padded), model(short))
    states = lstm_by_hand(model.recurrent, short)
    torch.testing.assert_close(model(padded), states[:, -1] @ model.head.weight.T + model.head.bias)
    mixed = torch.cat([padded, torch.zeros_like(padded), functional.pad(torch.tensor([[4]]), (0, 8))])
    torch.testing.assert_close(model(mixed)[0], model(short)[0])
    torch.testing.assert_close(model(mixed)[1], model.head.bias)
    assert not model.recurrent.embedding.weight[0].any()
    model.loss(model(torch.zeros(2, 5, dtype=torch.int64)), torch.tensor([0, 0])).backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad.any()} == {"head.bias"}


def test_rmse_is_the_root_over_unequal_batches(tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(9, 5, generator=generator), 10 * torch.rand(9, generator=generator) ** 3
    model = LinearRegression(5)
    metrics = plain_trainer(tmp_path).test(
        model, DataLoader(TensorDataset(inputs, targets), batch_size=4), verbose=False
    )
    squares = (model(inputs).detach().numpy() - targets.numpy()) ** 2
    assert metrics[0]["test_rmse"] == pytest.approx(np.sqrt(squares.mean()), rel=1e-5)
    assert metrics[0]["test_loss"] == pytest.approx(squares.mean(), rel=1e-5)
    of_batches = np.average([np.sqrt(part.mean()) for part in np.split(squares, [4, 8])], weights=[4, 4, 1])
    assert abs(metrics[0]["test_rmse"] - of_batches) > 0.01


def test_squares_of_halves_keep_their_digits():
    """In bfloat16 itself, 1e-3 beside 1 would be lost."""
    model = LinearRegression(1).to(torch.bfloat16)
    with torch.no_grad():
        model.network[1].weight.fill_(1.0)
        model.network[1].bias.fill_(0.0)
    inputs = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)
    outputs, targets = model._apply_to((inputs, torch.tensor([1.001, 2.003])))
    assert model.loss(outputs, targets).item() == pytest.approx((0.001**2 + 0.003**2) / 2, rel=1e-3)
