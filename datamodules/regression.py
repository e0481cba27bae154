"""Synthetic linear regression whose clients have different models, one of them far from the others."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import at_least, check_arguments
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Natural

NOISE, MEAN, MODEL, OUTLIER = 2.0, 0.5, 5.0, 50.0
LAPLACE_SCALE = 0.5


class SyntheticRegressionDataModule(IndexedDataModule):
    """Synthetic regression of the Fed+ paper, with linear models around a common one and an outlying last client.

    The model of client k is::

        y = w_k·x + N(0, 2),   x ~ N(μ_k, Σ),   Σ_jj = mod(j, 50)^(-1.1),   μ_k ~ N(0, 0.5)
        w_k = w̄ + Laplace(0.5),   w̄ ~ N(0, 5 I)

    The last client's w is drawn around a w̄ of its own, from N(0, 50 I). The index j is 1..dimension; if mod(j, 50) is
    0, the variance is 1. The coordinates of μ_k are drawn independently. Inputs are float32 ``(B, dimension)``, targets
    float32 ``(B,)``. The paper trains with batches of 10, step size 1e-4 and σ = 1.

    Args:
        num_clients: Number of clients N, at least 1.
        samples_per_client: Number of training and test samples of each client together, at least 1.
        dimension: Length of x, at least 1.
        std: Whether b of N(a, b) is a standard deviation; by default it is a variance. The variance of x is the one
            above either way.
        test_fraction: Fraction of each client's samples that are its test data, in (0, 1); None is no test data.
        batch_size: Number of samples per training batch.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> data = SyntheticRegressionDataModule(num_clients=3, dimension=5, seed=0)
        >>> data.setup()
        >>> data.num_samples("train").tolist(), data.source[0][0].shape
        ([50, 50, 50], torch.Size([5]))
    """

    def __init__(
        self,
        num_clients: Annotated[int, at_least(1)] = 10,
        samples_per_client: Annotated[int, at_least(1)] = 100,
        dimension: Annotated[int, at_least(1)] = 1000,
        std: bool = False,
        *,
        test_fraction: float | None = 0.5,
        batch_size: int = 10,
        **kwargs: Any,
    ) -> None:
        check_arguments(SyntheticRegressionDataModule, locals(), "data")
        super().__init__(Natural(num_clients), test_fraction=test_fraction, batch_size=batch_size, **kwargs)
        self.samples_per_client, self.dimension, self.std = samples_per_client, dimension, std

    def load(self) -> LoadedData:
        """Draw all clients' samples, one client after the other."""
        rng = seeding.numpy_generator(self.split_seed, "synthetic regression")
        inputs, targets = draw_regression(rng, self.num_clients, self.samples_per_client, self.dimension, self.std)
        tensors = torch.from_numpy(inputs).flatten(0, 1), torch.from_numpy(targets).flatten()
        return LoadedData(
            ArrayDataset(tensors), clients=np.repeat(np.arange(self.num_clients), self.samples_per_client)
        )


def draw_regression(
    rng: np.random.Generator, num_clients: int, num_samples: int, dimension: int, std: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Draw samples of the synthetic regression that :class:`SyntheticRegressionDataModule` defines.

    Args:
        rng: Generator of all draws, in this order: w̄, the last client's w̄, the Laplace noise, μ, x, the noise of y.
        num_clients: Number of clients N.
        num_samples: Number of samples of each client, n.
        dimension: Length of x, d.
        std: Whether b of N(a, b) is a standard deviation.

    Returns:
        Inputs float32 ``(N, n, d)`` and targets float32 ``(N, n)``.
    """
    noise, mean, model, outlier = (b if std else b**0.5 for b in (NOISE, MEAN, MODEL, OUTLIER))
    center, other = rng.normal(0, model, dimension), rng.normal(0, outlier, dimension)
    weights = rng.laplace(0, LAPLACE_SCALE, (num_clients, dimension))
    weights += center
    # Fed+ gives the last client a model of its own kind, around another w̄ of ten times the variance: an outlier that
    # one global model cannot fit.
    weights[-1] += other - center
    means = rng.normal(0, mean, (num_clients, dimension)).astype(np.float32)
    remainder = np.arange(1, dimension + 1) % 50
    scale = np.where(remainder == 0, 1, remainder) ** -0.55  # of standard deviations: the variance is mod(j, 50)^-1.1
    inputs = rng.standard_normal((num_clients, num_samples, dimension), dtype=np.float32)
    inputs *= scale.astype(np.float32)
    inputs += means[:, None]
    targets = (inputs @ weights.astype(np.float32)[:, :, None])[:, :, 0]
    targets += noise * rng.standard_normal(targets.shape, dtype=np.float32)
    return inputs, targets
