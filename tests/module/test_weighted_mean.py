"""A mean of logged numbers has the bits of torch's operations on scalar tensors."""

import math

import pytest
import torch

from fedbc_lightning.module.collector import WeightedMean

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
        assert same(float(mean.number()), float(expected))


@pytest.mark.parametrize(
    "values",
    [
        [torch.tensor(0.1), 0.2, torch.tensor(0.3)],
        [0.2, torch.tensor(0.1), torch.tensor(0.3)],
        [torch.tensor(0.1), torch.tensor(0.1, dtype=DOUBLE)],
        [torch.tensor(0.1, dtype=DOUBLE), torch.tensor(0.1)],
        [torch.tensor(0.1, dtype=torch.bfloat16)] * 3,
        [torch.tensor(3), torch.tensor(0.1)],
        [torch.tensor(math.nan), torch.tensor(0.1)],
        [0.1, 3, True],
    ],
)
@pytest.mark.parametrize("weight", [3, 0.7, 1e-60, 10**17, torch.tensor(0.3)])
def test_bits_of_numbers_of_several_kinds(values, weight):
    weights = [weight] * len(values)
    mean, expected = mean_of(values, weights), by_torch(values, weights)
    assert same(mean.value(), expected)
    outer = WeightedMean()
    outer.add_mean(mean, 7)
    outer.add_mean(mean, 9)
    assert same(outer.value(), by_torch([expected, expected], [7, 9]))


@pytest.mark.parametrize("first", [[], [torch.tensor(0.3)], [0.3], [torch.tensor(0.3, dtype=DOUBLE)]])
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE, torch.float16])
def test_bits_of_many_at_once(dtype, first):
    values, together = numbers_of(dtype, (-3, 3), seed=1), mean_of(first, [4] * len(first))
    together.add_all(values, 20)
    together.add_all(values, 3)
    weights = [4] * len(first) + [20] * len(values) + [3] * len(values)
    assert same(together.value(), by_torch([*first, *values, *values], weights))


def test_a_value_that_changes_later():
    """A tensor is read when it is added: steps change what they have logged."""
    value = torch.tensor(1.0)
    mean = mean_of([value], [2])
    value.fill_(5.0)
    assert mean.number() == 1.0
    assert isinstance(mean.number(), float)


def test_no_gradient_is_kept():
    """A kept graph would hold a client's activations until the client ends."""
    value = torch.tensor(1.0, requires_grad=True) * 2
    assert not mean_of([value, value.to(torch.bfloat16)], [2, 2]).value().requires_grad
