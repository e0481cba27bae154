"""Rules of sizes without classes."""

from fractions import Fraction

import numpy as np
import pytest

from fedbc_lightning.partition import IID, ExponentialSizes, LinearSizes, LogNormalSizes
from fedbc_lightning.partition.dealing import apportion


def plain_shares(total, weights, least):
    """Largest remainder in exact fractions, those below ``least`` raised to it, until nobody is below."""
    low = set()
    while True:
        rest = total - least * len(low)
        free = [k for k in range(len(weights)) if k not in low]
        weight = sum(weights[k] for k in free)
        shares = {k: Fraction(rest * weights[k], weight) for k in free}
        below = {k for k in free if shares[k] < least}
        if not below:
            break
        low |= below
    given = [least if k in low else int(shares[k]) for k in range(len(weights))]
    by_remainder = sorted(free, key=lambda k: (int(shares[k]) - shares[k], k))
    for k in by_remainder[: total - sum(given)]:
        given[k] += 1
    return given


@pytest.mark.parametrize("seed", range(60))
def test_apportion_is_the_largest_remainder_in_exact_fractions(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, rng.choice([3, 50, 5000]), rng.integers(1, 30))
    least = int(rng.integers(1, 4))
    total = least * len(weights) + int(rng.integers(0, 2000))
    assert apportion(total, weights, least).tolist() == plain_shares(total, weights.tolist(), least)


@pytest.mark.parametrize("seed", range(40))
def test_apportion_between_bounds(seed):
    rng = np.random.default_rng(seed)
    weights = rng.lognormal(0, 2, 12)
    most = rng.integers(1, 40, 12)
    total = int(rng.integers(12, most.sum() + 1))
    given = apportion(total, weights, 1, most)
    assert given.sum() == total
    assert (given >= 1).all()
    assert (given <= most).all()
    inside = (given > 1) & (given < most)
    lowest, highest = (given - 1) / weights, (given + 1) / weights  # of the factor t, if shares are within 1 of t * w
    assert lowest[inside].max(initial=0) < highest[inside].min(initial=np.inf)
    assert apportion(int(most.sum()), weights, 1, most).tolist() == most.tolist()


def test_sizes_without_classes_are_as_asked():
    nothing = np.zeros(1000, dtype=int)
    assert sorted(set(IID(7)(nothing, 0).sizes.tolist())) == [142, 143]
    assert LinearSizes(30)(nothing, 0).sizes.tolist() == plain_shares(1000, list(range(1, 31)), 1)
    assert ExponentialSizes(12, 2.0)(nothing, 0).sizes.tolist() == plain_shares(1000, [2**k for k in range(12)], 1)
    assert LogNormalSizes(30, 0.0, 5)(nothing, 0).sizes.tolist() == IID(30)(nothing, 0).sizes.tolist()


def test_log_normal_sizes_have_the_spread_asked_for():
    sizes = LogNormalSizes(2000, 1.5)(np.zeros(1_000_000, dtype=int), seed=0).sizes
    assert np.log(sizes).std() == pytest.approx(1.5, rel=0.05)
    assert LogNormalSizes(50, 2.0, min_samples=7)(np.zeros(1000, dtype=int), seed=0).sizes.min() == 7
