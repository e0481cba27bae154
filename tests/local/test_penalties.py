"""Fed+'s penalties and server rule against their definitions: ALGORITHMS.md section 3."""

import logging
import math

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

import fedbc_lightning.server.smoothed_center as center_module
from fedbc_lightning import ConfigurationError
from fedbc_lightning.local.penalties import AbsoluteNorm, Layerwise, Norm, Penalty, SquaredNorm
from fedbc_lightning.server.smoothed_center import smoothed_center
from fedbc_lightning.state.layout import ParameterLayout

VALUES = {  # Ψ/σ
    SquaredNorm: lambda theta, delta: delta / 2 * (theta**2).sum(),
    Norm: lambda theta, delta: delta * np.linalg.norm(theta),
    AbsoluteNorm: lambda theta, delta: delta * np.abs(theta).sum(),
}
simple_penalties = pytest.mark.parametrize("penalty", VALUES)


class Net(nn.Module):
    """Six parameters in four tensors: body 0..2, head 3..5."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(2, 1)


def net_layout():
    layout = ParameterLayout(Net())
    offsets = {entry.name: (entry.offset, entry.end) for entry in layout.entries}
    assert offsets == {"scale": (0, 1), "body.weight": (1, 3), "head.weight": (3, 5), "head.bias": (5, 6)}
    return layout


def points(n, d=6, seed=0, dtype=torch.float64):
    return torch.as_tensor(np.random.default_rng(seed).normal(size=(n, d)), dtype=dtype)


# prox


@simple_penalties
@pytest.mark.parametrize("delta", [0.0, 0.3, 2.0])
def test_prox_is_the_least_of_its_objective(penalty, delta):
    """No point of a dense cloud around theta, nor 0 nor v, is better."""
    rng = np.random.default_rng(0)
    for v, theta in zip(points(8).numpy(), penalty(delta).prox(points(8)).numpy(), strict=True):

        def objective(t, v=v):
            return VALUES[penalty](t, delta) + ((v - t) ** 2).sum() / 2

        cloud = [theta + 10.0 ** rng.uniform(-5, 0) * rng.normal(size=6) * rng.integers(0, 2, 6) for _ in range(500)]
        assert objective(theta) <= min(map(objective, [*cloud, np.zeros(6), v])) + 1e-14


@simple_penalties
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prox_keeps_shape_dtype_and_input_and_knows_zero(penalty, dtype):
    v = points(3, dtype=dtype)
    v[1] = 0
    before = v.clone()
    assert torch.equal(penalty(0.0).prox(v), v)
    assert not penalty(math.inf).prox(v).any()
    for delta in (0.0, 1e-3, 1.0, math.inf):
        theta = penalty(delta).prox(v)
        assert theta.shape == v.shape
        assert theta.dtype == dtype
        assert theta.isfinite().all()
        assert not theta[1].any()
        assert torch.equal(v, before)


@simple_penalties
@pytest.mark.parametrize("delta", [0.0, 0.3, math.inf])
def test_pull_is_what_prox_leaves(penalty, delta):
    v = torch.cat([points(5), torch.zeros(1, 6, dtype=torch.float64)])
    torch.testing.assert_close(penalty(delta).pull(v), v - penalty(delta).prox(v), rtol=0, atol=1e-15)


def test_pull_of_blocks_and_of_a_prox_of_ones_own():
    v, blocks = points(5), Layerwise({"head.*": Norm(0.5), "scale": AbsoluteNorm(0.3)}, SquaredNorm(1.0))
    bound = blocks.bind(net_layout())
    torch.testing.assert_close(bound.pull(v), v - bound.prox(v), rtol=0, atol=1e-15)

    class Half(AbsoluteNorm):
        def prox(self, v):
            return v / 2

    torch.testing.assert_close(Half(0.1).pull(v), v / 2)


def test_closed_forms():
    v = torch.tensor([[3.0, -4.0], [0.3, -0.4]])
    torch.testing.assert_close(SquaredNorm(0.25).prox(v), v / 1.25)
    torch.testing.assert_close(Norm(2.5).prox(v), torch.tensor([[1.5, -2.0], [0.0, 0.0]]))
    torch.testing.assert_close(AbsoluteNorm(0.35).prox(v), torch.tensor([[2.65, -3.65], [0.0, -0.05]]))


# layer-wise


def test_each_pattern_has_its_own_penalty_over_all_its_parameters():
    rules = {"body.*": AbsoluteNorm(0.2)}
    v = points(4)
    theta, rest = Layerwise(rules, default=Norm(0.5)).bind(net_layout()).prox(v), [0, 3, 4, 5]
    torch.testing.assert_close(theta[:, 1:3], AbsoluteNorm(0.2).prox(v[:, 1:3]))
    torch.testing.assert_close(theta[:, rest], Norm(0.5).prox(v[:, rest]))  # one norm, though they are no neighbours


def test_binding_leaves_the_given_penalty_unbound_for_other_models():
    given = Layerwise({"head.*": Norm(0.5)}, default=SquaredNorm(1.0))
    bound = given.bind(net_layout())
    other = given.bind(ParameterLayout(nn.ModuleDict({"head": nn.Linear(1, 1), "tail": nn.Linear(1, 1)})))
    assert bound.prox(points(2)).shape == (2, 6)
    assert other.prox(points(2, 4)).shape == (2, 4)
    with pytest.raises(AssertionError, match="bind"):
        given.prox(points(2))


@pytest.mark.parametrize(
    ("rules", "pattern"),
    [({"haed.*": Norm(1.0)}, "haed"), ({"HEAD.*": Norm(1.0)}, "HEAD"), ({"*": Norm(1.0), "head.*": Norm(2.0)}, "head")],
)
def test_a_pattern_without_parameters_is_named_with_the_parameters(rules, pattern):
    with pytest.raises(ConfigurationError, match=rf"'{pattern}\.\*' fits no parameter.*scale, body\.weight, head"):
        Layerwise(rules, default=Norm(1.0)).bind(net_layout())


def test_penalties_are_given_by_class_path():
    def of(name, **init_args):
        return {"class_path": f"fedbc_lightning.local.penalties.{name}", "init_args": init_args}

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--penalty", type=Penalty)
    given = of("Layerwise", rules={"head.*": of("Norm", delta=0.1)}, default=of("SquaredNorm", delta=0.001))
    config = parser.parse_object({"penalty": given})
    penalty = parser.instantiate(config).penalty
    assert isinstance(penalty.rules["head.*"], Norm)
    assert penalty.rules["head.*"].delta == 0.1
    assert penalty.default.delta == 0.001
    assert parser.parse_string(parser.dump(config)) == config


# the server's centre


def huber_location_by_bisection(column, delta):
    """First and last z with Σ clip(w_i − z, ±δ) = 0, a falling function of z."""
    ends = []
    for rounding in (1e-12, -1e-12):  # the sum is above it left of the first, right of the last it is below
        low, high = column.min() - 1, column.max() + 1
        for _ in range(100):
            middle = (low + high) / 2
            if np.clip(column - middle, -delta, delta).sum() > rounding:
                low = middle
            else:
                high = middle
        ends.append(low)
    return ends


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("delta", [0.1, 0.5, 3.0])
def test_absolute_norm_gives_hubers_location(n, delta):
    w = points(n)
    z = smoothed_center(w, AbsoluteNorm(delta)).numpy()
    for column, middle in zip(w.numpy().T, z, strict=True):
        first, last = huber_location_by_bisection(column, delta)
        assert first - 1e-6 <= middle <= last + 1e-6


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("delta", [0.1, 0.5, 3.0])
def test_norm_gives_the_point_where_the_clipped_pulls_cancel(n, delta):
    w = points(n)
    z = smoothed_center(w, Norm(delta)).numpy()
    away = w.numpy() - z
    pulls = [v * min(1, delta / np.linalg.norm(v)) for v in away]
    assert np.linalg.norm(sum(pulls)) / n < 2e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_norm_gives_the_mean(dtype):
    w = points(7, dtype=dtype)
    for delta in (0.0, 1e-12, 0.001, 5.0, math.inf):
        z = smoothed_center(w, SquaredNorm(delta))
        assert z.dtype == torch.float64
        torch.testing.assert_close(z, w.double().mean(dim=0), rtol=1e-12, atol=1e-12)


@simple_penalties
def test_sweeps_in_float32_come_to_rest(penalty, monkeypatch, caplog):
    """On MPS there is nothing wider."""
    w = torch.randn(10, 1000, generator=torch.Generator().manual_seed(0))
    expected = smoothed_center(w, penalty(0.1))
    monkeypatch.setattr(center_module, "wide_dtype", lambda device: torch.float32)
    z = smoothed_center(w, penalty(0.1))
    assert z.dtype == torch.float32
    torch.testing.assert_close(z.double(), expected, rtol=0, atol=1e-4)
    assert not caplog.records


@simple_penalties
@pytest.mark.parametrize("delta", [0.0, 0.3, math.inf])
def test_one_model_or_equal_models_are_their_own_centre(penalty, delta):
    for n in (1, 4):
        w = points(1).expand(n, 6)
        torch.testing.assert_close(smoothed_center(w, penalty(delta)), w[0], rtol=1e-14, atol=1e-15)


def test_layerwise_is_each_block_on_its_own():
    w = points(5)
    penalty = Layerwise({"head.*": Norm(0.5), "scale": AbsoluteNorm(0.3)}, SquaredNorm(1.0)).bind(net_layout())
    z = smoothed_center(w, penalty)
    torch.testing.assert_close(z[:1], smoothed_center(w[:, :1], AbsoluteNorm(0.3)), rtol=0, atol=1e-7)
    torch.testing.assert_close(z[1:3], w[:, 1:3].mean(dim=0))
    torch.testing.assert_close(z[3:], smoothed_center(w[:, 3:], Norm(0.5)), rtol=0, atol=1e-7)


class Counted(AbsoluteNorm):
    """Counts the sweeps."""

    num_calls = 0

    def pull(self, v):
        self.num_calls += 1
        return super().pull(v)


def test_clients_far_beyond_delta_need_few_sweeps():
    """The mean is a million deltas from two of three models; a sweep with the number of clients below moves by one."""
    penalty = Counted(0.1)
    z = smoothed_center(torch.tensor([[0.0], [0.0], [3e5]]), penalty)
    torch.testing.assert_close(z.item(), 0.05, rtol=0, atol=1e-7)
    assert penalty.num_calls < 60


@pytest.mark.parametrize(("scale", "tolerance"), [(1e-9, 1e-8), (1.0, 1e-7), (1e9, 1e2)])
def test_sweeps_end_at_a_step_of_1e_minus_8_absolute_below_norm_one_and_relative_above(scale, tolerance):
    """In units of scale z is 23/24: there one pull of 1/8 meets three of 1/24."""
    penalty = Counted(scale / 8)
    z = smoothed_center(scale * torch.tensor([[0.0], [1.0], [1.0], [1.0]], dtype=torch.float64), penalty)
    torch.testing.assert_close(z.item(), scale * 23 / 24, rtol=0, atol=tolerance)
    assert penalty.num_calls == 1 if scale < 1e-8 else penalty.num_calls <= 15


def test_unfinished_sweeps_are_said_once_per_penalty(caplog, monkeypatch):
    monkeypatch.setattr(center_module, "MAX_SWEEPS", 2)
    w = torch.tensor([[0.0], [0.0], [3e5]])
    penalty = AbsoluteNorm(0.1)
    with caplog.at_level(logging.WARNING):
        smoothed_center(w, penalty)
        smoothed_center(w, penalty)
        assert len(caplog.records) == 1
        smoothed_center(w, AbsoluteNorm(0.1))
    assert len(caplog.records) == 2
    assert "AbsoluteNorm still moves after 2 sweeps" in caplog.text
