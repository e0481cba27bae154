"""Robust rules against loops in NumPy written from ALGORITHMS.md section 2, and against what they promise."""

import itertools
import logging

import numpy as np
import pytest
import torch

from fedbc_lightning import ConfigurationError
from fedbc_lightning.server import robust
from fedbc_lightning.server.robust import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormBound,
    TrimmedMean,
)
from fedbc_lightning.state.declaration import ServerState, StateDeclaration
from fedbc_lightning.state.layout import Weights

RULES = {
    "median": CoordinateMedian,
    "trimmed_mean": lambda: TrimmedMean(0.3),
    "krum": lambda: Krum(2),
    "multi_krum": lambda: MultiKrum(2),
    "geometric_median": GeometricMedian,
    "centered_clipping": lambda: CenteredClipping(radius=1.5, num_iterations=3),
    "norm_bound": lambda: NormBound(1.5),
}
all_rules = pytest.mark.parametrize("name", RULES)


def server_for(rule, updates, buffers):
    declaration = StateDeclaration()
    rule.declare_state(declaration)
    initial = Weights(torch.zeros_like(updates[0]), torch.zeros_like(buffers[0]), torch.empty(0), torch.empty(0))
    return ServerState(initial, declaration)


def aggregate(rule, updates, weights=None, buffers=None, server=None):
    """The rule on arrays or tensors; float64 unless ``updates`` is float32."""
    updates = torch.as_tensor(updates)
    weights = torch.ones(len(updates)) if weights is None else torch.as_tensor(weights)
    buffers = updates.new_zeros(len(updates), 0) if buffers is None else torch.as_tensor(buffers)
    server = server or server_for(rule, updates, buffers)
    return rule.aggregate(updates, weights.double(), buffers, server)


def points(n, d=5, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


# independent versions: integer weights, loops


def median_by_repeating(x, weights):
    return np.median(np.repeat(x, weights, axis=0), axis=0)


def trimmed_mean_by_loops(x, weights, num_trimmed):
    result = []
    for column in x.T:
        pairs = sorted(zip(column, weights, strict=True))[num_trimmed : len(column) - num_trimmed]
        result.append(sum(v * a for v, a in pairs) / sum(a for _, a in pairs))
    return np.array(result)


def krum_scores_by_loops(x, f):
    n, scores = len(x), []
    for i in range(n):
        others = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(others[: n - f - 2]))
    return np.array(scores)


def krum_order_by_loops(x, f):
    return np.argsort(krum_scores_by_loops(x, f), kind="stable")


def geometric_median_by_loops(x, weights, smoothing=1e-5, max_iter=100, rtol=1e-6):
    p = weights / weights.sum()
    v = sum(p[i] * x[i] for i in range(len(x)))
    for _ in range(max_iter):
        b = [p[i] / max(smoothing, float(np.linalg.norm(v - x[i]))) for i in range(len(x))]
        new = sum(b[i] * x[i] for i in range(len(x))) / sum(b)
        moved, v = np.linalg.norm(new - v), new
        if moved <= rtol * np.linalg.norm(v):
            break
    return v, np.array(b) / sum(b)


def clipping_by_loops(x, weights, center, radius, num_iterations):
    p, v = weights / weights.sum(), center
    for _ in range(num_iterations):
        away = [x[i] - v for i in range(len(x))]
        v = v + sum(p[i] * away[i] * min(1, radius / np.linalg.norm(away[i])) for i in range(len(x)))
    return v


def expected(name, x, weights, buffers):
    """(aggregate, buffers) of ``RULES[name]``."""
    n, p = len(x), weights / weights.sum()
    if name == "median":
        return median_by_repeating(x, weights), median_by_repeating(buffers, weights)
    if name == "trimmed_mean":
        num_trimmed = 3 * n // 10
        return trimmed_mean_by_loops(x, weights, num_trimmed), trimmed_mean_by_loops(buffers, weights, num_trimmed)
    if name in ("krum", "multi_krum"):
        best = krum_order_by_loops(x, 2)[: 1 if name == "krum" else n - 2]
        return tuple(np.average(values[best], axis=0, weights=weights[best]) for values in (x, buffers))
    if name == "geometric_median":
        v, b = geometric_median_by_loops(x, weights)
        return v, b @ buffers
    num_iterations = 3 if name == "centered_clipping" else 1
    return clipping_by_loops(x, weights, np.zeros(x.shape[1]), 1.5, num_iterations), p @ buffers


@all_rules
@pytest.mark.parametrize("n", [7, 8, 10, 21])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_equals_loops(name, n, weighted, dtype):
    rng = np.random.default_rng(n)
    x, buffers = rng.normal(size=(n, 5)).astype(dtype), rng.normal(size=(n, 3)).astype(dtype)
    weights = rng.integers(1, 6, size=n) if weighted else np.ones(n, dtype=int)
    got, got_buffers = aggregate(RULES[name](), x, weights, buffers)
    want, want_buffers = expected(name, x.astype(np.float64), weights, buffers.astype(np.float64))
    tolerance = 1e-12 if dtype is np.float64 else 1e-6
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got_buffers, want_buffers, rtol=tolerance, atol=tolerance)
    assert got.dtype == got_buffers.dtype == torch.float64
    assert got.shape == (5,)
    assert got_buffers.shape == (3,)


# what holds for all


@all_rules
def test_the_order_of_clients_plays_no_part(name):
    x, buffers, weights = points(9), points(9, 2, seed=1), np.random.default_rng(2).uniform(1, 3, 9)
    order = np.random.default_rng(3).permutation(9)
    one = aggregate(RULES[name](), x, weights, buffers)
    other = aggregate(RULES[name](), x[order], weights[order], buffers[order])
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@all_rules
def test_clients_of_weight_zero_are_left_out(name):
    x, buffers, weights = points(12), points(12, 2, seed=1), np.array([1, 0, 2, 1, 0, 1, 3, 1, 1, 0, 2, 1])
    x[weights == 0] = 1e9
    kept = weights > 0
    one = aggregate(RULES[name](), x, weights, buffers)
    other = aggregate(RULES[name](), x[kept], weights[kept], buffers[kept])
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


ATTACKS = {
    "colluding": lambda n, d: np.full((n, d), 1e6),
    "scattered": lambda n, d: 1e6 * np.random.default_rng(5).choice([-1, 1], size=(n, d)),
    "far apart": lambda n, d: 1e6 * np.arange(1, n + 1)[:, None] * np.ones(d),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "rule",
    [CoordinateMedian(), TrimmedMean(0.4), Krum(4), MultiKrum(4), GeometricMedian()],
    ids=lambda rule: type(rule).__name__,
)
def test_four_of_eleven_adversaries_do_not_move_it_far(rule, attack, dtype):
    x = np.concatenate([ATTACKS[attack](4, 20), points(7, 20)]).astype(dtype)
    got, _ = aggregate(rule, x)
    assert np.abs(got.numpy()).max() < 5
    assert np.linalg.norm(got.numpy() - x[4:].mean(axis=0)) < 8


# each on its own


@pytest.mark.parametrize("n", [2, 3, 10, 49, 1000])
def test_the_median_is_exact_for_equal_weights_that_are_no_binary_numbers(n):
    x = points(n)
    for weight in (0.1, 1 / 3, 1 / n, 1e-9):
        got, _ = aggregate(CoordinateMedian(), x, np.full(n, weight))
        np.testing.assert_array_equal(got, np.median(x, axis=0))


def test_the_median_sees_halves_in_every_weighting():
    """All weights 1..4 of four clients, whole and as shares: 1/6 + 1/3 is a half."""
    x = points(4)
    for weights in itertools.product(range(1, 5), repeat=4):
        weights = np.array(weights)
        want = median_by_repeating(x, weights)
        for scale in (1, weights.sum()):
            got, _ = aggregate(CoordinateMedian(), x, weights / scale)
            np.testing.assert_allclose(got, want, rtol=1e-15)


def test_a_trim_of_less_than_one_client_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        TrimmedMean(0.1).check(10)
        TrimmedMean(0.0).check(5)
        assert not caplog.records
        TrimmedMean(0.1).check(5)
    assert "nothing is trimmed; that takes 10 clients" in caplog.text


@pytest.mark.parametrize(("n", "f"), [(3, 0), (5, 1), (6, 1), (7, 2), (30, 13)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 1000])
def test_krum_scores_see_small_distances_of_points_far_out(n, f, dtype, offset):
    """Not in float32, and not by squares of the points: torch.cdist alone does that above 25 points."""
    x = torch.as_tensor(points(n) + offset, dtype=dtype)
    np.testing.assert_allclose(robust.krum_scores(x, f), krum_scores_by_loops(x.double().numpy(), f), rtol=1e-12)


@pytest.mark.parametrize("rule", [Krum, MultiKrum])
def test_krum_needs_more_than_two_f_and_two_clients(rule):
    rule(2).check(7)
    rule(0).check(3)
    with pytest.raises(ConfigurationError, match=r"needs 2f \+ 3 = 7 clients.* to at most 1"):
        rule(2).check(6)
    with pytest.raises(ConfigurationError, match=r"clients_per_round to 3 or more\.$"):
        rule(0).check(2)


@pytest.mark.parametrize("rule", [Krum, MultiKrum])
@pytest.mark.parametrize(("n", "largest"), [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1)])
def test_krum_of_a_round_with_lost_clients_takes_the_largest_f_and_says_it_once(rule, n, largest, caplog):
    x, given = points(8), rule(2)
    weights, server = np.array([1] * n + [0] * (8 - n)), server_for(given, torch.zeros(1, 5), torch.zeros(1, 0))
    with caplog.at_level(logging.WARNING):
        aggregate(given, x)
        assert not caplog.records
        got, _ = aggregate(given, x, weights, server=server)
        aggregate(given, x, weights, server=server)
    want, _ = aggregate(rule(largest), x[:n])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert [r.getMessage() for r in caplog.records][:1] == [
        f"Only {n} clients arrived in a round, too few for {rule.__name__}.num_byzantine=2; rounds like this one "
        f"take {largest} (said once)."
    ]
    assert sum("num_byzantine=2" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("n", [3, 4, 10])
@pytest.mark.parametrize("smoothing", [1e-5, 0.5])
def test_the_geometric_median_is_where_the_pulls_cancel(n, smoothing):
    """Also where it lies nearer than ν to a client, or at one."""
    for seed in range(20):
        x, p = points(n, 3, seed), np.random.default_rng(seed).dirichlet(np.ones(n))
        v = aggregate(GeometricMedian(smoothing, max_iter=20_000, rtol=1e-13), x, p)[0].numpy()
        away = v - x
        gradient = (p / np.maximum(smoothing, np.linalg.norm(away, axis=1))) @ away
        assert np.linalg.norm(gradient) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_centered_clipping_goes_on_from_its_last_output(dtype):
    rule, weights = CenteredClipping(radius=0.5, num_iterations=2), np.arange(1, 8)
    buffers = torch.zeros(7, 0, dtype=dtype)
    server = server_for(rule, torch.zeros(7, 5, dtype=dtype), buffers)
    want = np.zeros(5)
    for seed in range(5):
        x = points(7, seed=seed) + 2
        got, _ = rule.aggregate(torch.as_tensor(x, dtype=dtype), torch.as_tensor(weights).double(), buffers, server)
        want = clipping_by_loops(x, weights, want, 0.5, 2)
        np.testing.assert_allclose(got, want, rtol=1e-12 if dtype == torch.float64 else 1e-6)
        server.commit()
        torch.testing.assert_close(server["clipping_center"], got.to(dtype), rtol=0, atol=0)
