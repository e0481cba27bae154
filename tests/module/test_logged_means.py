"""Logged numbers are averaged with the bits of torch's operations on scalar tensors, also of many steps at once."""

import math

import numpy as np
import pytest
import torch

from fedbc_lightning.engines.step_function import LoggedCall, log_replayed
from fedbc_lightning.module.collector import MetricCollector, WeightedMean, by_plain_name

SINGLE, DOUBLE = torch.float32, torch.float64


def by_torch(values, weights):
    """The sums as operations on tensors."""
    total, weight = 0.0, 0.0
    for value, w in zip(values, weights, strict=True):
        total, weight = total + value * w, weight + w
    return total / weight


def numbers_of(dtype, exponents, seed):
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(*exponents, (200,), generator=generator, dtype=torch.float64)
    return list((torch.randn(200, generator=generator, dtype=torch.float64) * scales).to(dtype))


def same(a, b):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return a.dtype == b.dtype and (a.item() == b.item() or (math.isnan(a.item()) and math.isnan(b.item())))


def mean_of(values, weights):
    mean = WeightedMean()
    for value, weight in zip(values, weights, strict=True):
        mean.add(value, weight)
    return mean


@pytest.mark.parametrize("exponents", [(-3, 3), (-46, -36), (30, 39), (-20, 20)])
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("weights", [[5] * 200, list(range(1, 201)), [0.1 * k for k in range(1, 201)], [2**40] * 200])
def test_bits_of_scalars(dtype, exponents, weights):
    """Numbers between the smallest that float32 has, where digits are lost, and sums that are infinite."""
    values = numbers_of(dtype, exponents, seed=0)
    for count in (1, 2, 7, 200):
        mean, expected = mean_of(values[:count], weights[:count]), by_torch(values[:count], weights[:count])
        assert same(mean.value(), expected)


@pytest.mark.parametrize("before", [[], [0.3], [torch.tensor(0.3)], [-0.0]])
@pytest.mark.parametrize(
    ("dtype", "reduce_fx", "batch_size"),
    [
        (torch.float32, "mean", None),
        (torch.float64, "mean", 3),
        (torch.bfloat16, "mean", None),
        (torch.int64, "mean", None),
        (torch.float32, "mean", 0.7),
        (torch.float32, "sum", None),
        (torch.float32, "max", None),
        (torch.float32, "mean", torch.tensor(0.3)),
    ],
)
@pytest.mark.parametrize("names", [("a", "b"), ("a", "a")])
def test_many_steps_at_once_have_the_bits_of_one_after_another(before, dtype, reduce_fx, batch_size, names):
    values = (torch.randn(200, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    calls = [LoggedCall(names[0], values[0], reduce_fx, batch_size), LoggedCall(names[1], 0.1, "mean", 7)]
    single, together = MetricCollector(), MetricCollector()
    for collector in (single, together):
        for value in before:
            collector.start_batch([torch.zeros(20)], 20)
            collector.log("a", value, reduce_fx=reduce_fx)
    for value in values:
        single.start_batch([torch.zeros(20)], 20)
        single.log(names[0], value, reduce_fx=reduce_fx, batch_size=batch_size)
        single.log(names[1], 0.1, batch_size=7)
    for part in values.split(63):
        together.start_batch([torch.zeros(20)], 20, num_batches=len(part))
        sizes = [batch_size] if isinstance(batch_size, torch.Tensor) else []
        log_replayed(together, calls, [[value, *sizes] for value in part], 20)
    assert together.num_samples == single.num_samples
    assert together.num_batches == single.num_batches
    bits = [{k: (torch.as_tensor(v).dtype, float(v)) for k, v in each.means().items()} for each in (together, single)]
    assert bits[0] == bits[1]
    assert together.logged() == single.logged()


@pytest.mark.parametrize("values", [[3e38, 3e38, 3e38], [float("inf"), -float("inf"), 1.0]])
def test_infinities_add_up_without_a_word(values):
    """The suite turns warnings into errors; NumPy would warn, and with ``np.seterr(all="raise")`` end the run."""
    collector = MetricCollector()
    collector.start_batch([torch.zeros(20)], 20, num_batches=3)
    with np.errstate(all="raise"):
        collector.log_all("a", [torch.tensor(value) for value in values], batch_size=20)
    assert not math.isfinite(float(collector.means()["a"]))


def test_a_value_that_changes_later():
    """A tensor is read when it is added: steps change what they have logged."""
    value = torch.tensor(1.0)
    mean = mean_of([value], [2])
    value.fill_(5.0)
    assert mean.value() == 1.0


def test_no_gradient_is_kept():
    """A kept graph would hold a client's activations until the client ends."""
    value = torch.tensor(1.0, requires_grad=True) * 2
    assert not mean_of([value, value.to(torch.bfloat16)], [2, 2]).value().requires_grad


def test_names_that_are_one_metric_are_said():
    collector = MetricCollector()
    for name, value in {"train_twice": 1.0, "other": 2.0, "train/twice": 3.0}.items():
        collector.log(name, value, batch_size=1)
    with pytest.warns(UserWarning, match="'train_twice' and 'train/twice' are logged, which are one metric"):
        assert by_plain_name(collector.logged()) == {"twice": 3.0, "other": 2.0}
