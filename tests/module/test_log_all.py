"""What many steps logged at once is added with the bits of one step after another."""

import math

import numpy as np
import pytest
import torch

from fedbc_lightning.engines.step_function import LoggedCall, log_replayed
from fedbc_lightning.module.collector import MetricCollector


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
def test_the_bits_of_one_after_another(before, dtype, reduce_fx, batch_size, names):
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
    assert {k: (v.dtype, v.item()) for k, v in together.current().items()} == {
        k: (v.dtype, v.item()) for k, v in single.current().items()
    }
    assert together.logged() == single.logged()


@pytest.mark.parametrize("values", [[3e38, 3e38, 3e38], [float("inf"), -float("inf"), 1.0]])
def test_infinities_add_up_without_a_word(values):
    """The suite turns warnings into errors; NumPy would warn, and with ``np.seterr(all="raise")`` end the run."""
    collector = MetricCollector()
    collector.start_batch([torch.zeros(20)], 20, num_batches=3)
    with np.errstate(all="raise"):
        collector.log_all("a", [torch.tensor(value) for value in values], batch_size=20)
    assert not math.isfinite(collector.current()["a"].item())
