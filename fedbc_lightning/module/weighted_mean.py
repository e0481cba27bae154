"""Weighted means of logged numbers, with the bits of torch's operations and without their cost for single numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

# Largest sum of weights that is a Python float exactly, if the weights are whole numbers
LARGEST = 2**53


def _nearest_float32(number: float) -> float:
    return c_float(number).value


# Functions that round a Python float to a dtype. A sum, product or quotient of two float32 numbers, computed in
# float64 and then rounded to float32, is what float32 gives, because float64 has more than twice its digits (Figueroa,
# "When is double rounding innocuous?", 1995)
ROUND: dict[torch.dtype, Callable[[float], float]] = {torch.float32: _nearest_float32, torch.float64: float}


class WeightedMean:
    """Weighted mean of numbers or scalar tensors that are added one after another.

    An operation on a scalar tensor costs 2 us, on a Python float 0.1 us. Scalars of float32 and float64 on the CPU are
    therefore added as floats, and each result is rounded to their dtype, which gives the bits of torch's operations.

    Attributes:
        weight: Sum of the weights.
    """

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._dtype: torch.dtype | None = None  # if set, the total is a float that stands for a tensor of this dtype
        self.weight: float = 0.0

    def add(self, value: Any, weight: Any) -> None:
        """Add a value, which is a number or a tensor, with a weight."""
        if (
            type(value) is Tensor and not value.ndim and value.is_cpu and self._takes(value.dtype, weight)
            and not is_dynamo_compiling()  # item() would cut a compiled step in two
        ):  # fmt: skip
            self._add_float(value.item(), value.dtype, weight)
            return
        if isinstance(value, Tensor):
            value = value.detach()
        self._total, self._dtype = self._plain_total() + value * weight, None
        self.weight += weight

    def add_all(self, values: Sequence[Any], weight: Any) -> None:
        """Add values of one class and dtype with equal weights; the bits are those of a call of :meth:`add` for each.

        NumPy's ``accumulate`` rounds as a loop of additions does.
        """
        first = values[0]
        if not isinstance(first, Tensor) or not first.is_cpu or not self._takes(first.dtype, weight * len(values)):
            for value in values:
                self.add(value, weight)
            return
        products = torch.stack([torch.tensor(self._total, dtype=first.dtype), *values])
        products[1:] *= weight
        with np.errstate(all="ignore"):  # sums of infinities are as silent as torch's
            self._total = float(np.add.accumulate(products.numpy())[-1])
        self._dtype = first.dtype
        self.weight += weight * len(values)

    def add_mean(self, other: WeightedMean, weight: float) -> None:
        """Add the value of another mean with a weight."""
        if other._dtype is not None and self._takes(other._dtype, weight):
            self._add_float(other.number(), other._dtype, weight)
        else:
            self.add(other.value(), weight)

    def number(self) -> Any:
        """Return the mean: a Python float if it is known, else a tensor that may not be computed yet."""
        if self._dtype is None:
            return self._total / self.weight
        to_nearest = ROUND[self._dtype]
        return to_nearest(self._total / to_nearest(self.weight))

    def value(self) -> Any:
        """Return the mean as torch's operations give it: a tensor if a tensor was added, else a Python float."""
        return self.number() if self._dtype is None else torch.tensor(self.number(), dtype=self._dtype)

    def _takes(self, dtype: torch.dtype, weight: Any) -> bool:
        """Return whether a tensor of a dtype may be added as a float: the total is one, and no weight is rounded."""
        if dtype not in ROUND or type(weight) not in (int, float) or not 1 / LARGEST <= weight <= LARGEST - self.weight:
            return False
        return dtype == self._dtype if self._dtype is not None else type(self._total) is float and self._total == 0

    def _add_float(self, value: float, dtype: torch.dtype, weight: float) -> None:
        to_nearest = ROUND[dtype]
        self._total, self._dtype = to_nearest(self._total + to_nearest(value * to_nearest(weight))), dtype
        self.weight += weight

    def _plain_total(self) -> Any:
        return self._total if self._dtype is None else torch.tensor(self._total, dtype=self._dtype)
