"""Terms, seeds, sampling, collector: the small parts."""

import random

import numpy as np
import pytest
import torch
from torchmetrics import MeanMetric

from fedbc_lightning import ConfigurationError, UniformSampler
from fedbc_lightning.core.seeding import derive, preserved_globals, seed_globals
from fedbc_lightning.federation.participation import num_sampled
from fedbc_lightning.local import Linear, Proximal
from fedbc_lightning.module.collector import MetricCollector, by_plain_name


@pytest.mark.parametrize("num_clients", [1, 3])
@pytest.mark.parametrize("term", ["proximal", "linear"])
def test_closed_form_gradient_equals_autograd_of_the_value(term, num_clients):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(num_clients, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    z = torch.randn(7, generator=generator, dtype=torch.float64)
    coefficient = torch.rand(num_clients, generator=generator, dtype=torch.float64)
    part = Proximal(coefficient, z) if term == "proximal" else Linear(z.expand(num_clients, 7))
    grad = torch.zeros_like(w)
    part.add_gradient(grad, w.detach())
    part.value(w).sum().backward()
    torch.testing.assert_close(grad, w.grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("center", [torch.ones(4), torch.ones(3, 4), torch.ones(1)], ids=["one", "each", "a number"])
def test_the_terms_of_single_clients_are_those_of_all(center):
    """Also where the coefficient is given anew, one of them is 0, and the terms of all have been used before."""
    term, w, together = Proximal(1.0, center), torch.rand(3, 4), torch.zeros(3, 4)
    term.add_gradient(torch.zeros(3, 4), w)
    term.coefficient = torch.tensor([2.0, 0.0, 3.0])
    term.add_gradient(together, w)
    rows = [term.part(slice(k, k + 1)) for k in range(3)]
    for row, own, expected in zip(rows, w.split(1), together.split(1), strict=True):
        alone = torch.zeros(1, 4)
        row.add_gradient(alone, own)
        assert torch.equal(alone, expected)
    assert [row.is_zero for row in rows] == [False, True, False]
    rows[0].coefficient = 0.0
    assert rows[0].is_zero
    assert not term.is_zero


def test_every_argument_of_derive_changes_the_seed():
    base = {"seed": 1, "purpose": "a", "round": 2, "client": 3, "epoch": 4, "step": 5}
    seeds = {derive(**base)}
    for name in base:
        seeds.add(derive(**{**base, name: "b" if name == "purpose" else 9}))
    assert len(seeds) == 7


def test_the_callers_generators_are_put_back():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    with preserved_globals(torch.device("cpu")):
        seed_globals(5, torch.device("cpu"))
        torch.rand(4), random.random(), np.random.rand(4)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_sampling_is_uniform_without_replacement_and_a_function_of_seed_and_round():
    sampler = UniformSampler()
    rounds = [sampler(20, 5, seed=0, round=t) for t in range(1, 2001)]
    assert all(len(set(ids)) == 5 for ids in rounds)
    assert rounds[6] == sampler(20, 5, seed=0, round=7)
    assert rounds[6] != sampler(20, 5, seed=1, round=7)
    counts = np.bincount(np.concatenate(rounds), minlength=20)
    assert abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


@pytest.mark.parametrize(("given", "expected"), [(1, 1), (30, 30), (0.1, 3), (1.0, 30), (0.001, 1)])
def test_clients_per_round_int_is_a_number_float_a_fraction(given, expected):
    assert num_sampled(given, 30) == expected


@pytest.mark.parametrize("given", [0, 31, 0.0, 1.5, -1])
def test_impossible_clients_per_round(given):
    with pytest.raises(ConfigurationError, match="clients_per_round"):
        num_sampled(given, 30)


def test_collector_weighs_by_batch_size_and_computes_metrics_per_epoch():
    collector, metric = MetricCollector(), MeanMetric()
    for epoch_values in ([(1.0, 10), (2.0, 30)], [(3.0, 10), (4.0, 30)]):
        for value, size in epoch_values:
            collector.start_batch(None, size)
            metric.update(value)
            collector.log("train_loss", torch.tensor(value))
            collector.log("train/metric", metric)
            collector.log("max", value, reduce_fx="max")
        collector.end_epoch()
    result = by_plain_name(collector.logged())
    assert result["loss"] == pytest.approx((10 + 60 + 30 + 120) / 80)
    assert result["metric"] == pytest.approx((1.5 + 3.5) / 2)
    assert result["max"] == pytest.approx(3.0)
