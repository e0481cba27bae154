"""Synthetic data whose clients have different models: Synthetic(alpha, beta), and a linear regression."""

from __future__ import annotations

import random
from typing import Annotated, Any, Literal

import numpy as np
import torch

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import Count, NotNegative, at_least
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Natural


class SyntheticDataModule(IndexedDataModule):
    """Synthetic(alpha, beta) of Li et al. 2020 (FedProx), as the FedBC paper uses it (both 0.5, N = 30).

    The model of client i is::

        y = argmax(W_i x + b_i),   W_i, b_i ~ N(u_i, 1),   u_i ~ N(0, alpha)
        x ~ N(v_i, Σ),   Σ_jj = j^(-1.2),   v_i ~ N(B_i, 1),   B_i ~ N(0, beta)

    A client has ⌊LogNormal(4, 2)⌋ + 50 samples. Inputs are float32 ``(B, dimension)``, targets int64 ``(B,)``.
    alpha and beta are standard deviations, as in the public codes of FedProx and FedBC (the papers write variances;
    give the square roots of these). Fed+ has alpha = 1000 and beta = 10. As in those codes, u_i is one number per
    client. It raises all logits of a sample by the same amount, so alpha changes no label; u_i is therefore left out of
    the sums, where a large one would cause rounding errors. The clients' models differ by their own draws from N(., 1),
    whatever alpha is.

    The style ``public`` makes the draws of the FedBC authors' public code in their order. With ``seed=1``, which its
    scripts have, and ``split_order="ordered"``, which cuts each client's shuffled samples at 80 %, the clients hold
    exactly that code's training and test data.

    Args:
        alpha: Standard deviation of u_i, >= 0.
        beta: Standard deviation of B_i, >= 0; a larger one makes the clients' inputs differ more.
        num_clients: Number of clients N, at least 1.
        iid: Whether all clients share one W, b ~ N(0, 1), and v_i = B_i in each coordinate; the clients are really IID
            with ``beta=0`` only.
        dimension: Length of x, at least 1.
        num_classes: Number of classes, at least 2.
        style: How the draws are made: ``"own"``, with this package's generators, for many clients at once; or
            ``"public"``, see :meth:`draw_publicly`.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule` (e.g. ``batch_size``, ``seed``).

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> data = SyntheticDataModule(num_clients=5, seed=0)
        >>> data.setup()
        >>> data.source[0][0].shape
        torch.Size([60])
    """

    def __init__(
        self,
        alpha: NotNegative = 0.5,
        beta: NotNegative = 0.5,
        num_clients: Count = 30,
        iid: bool = False,
        dimension: Count = 60,
        num_classes: Annotated[int, at_least(2)] = 10,
        style: Literal["own", "public"] = "own",
        **kwargs: Any,
    ) -> None:
        super().__init__(Natural(num_clients), **kwargs)
        self.alpha, self.beta, self.iid = alpha, beta, iid
        self.dimension, self.num_classes = dimension, num_classes
        if style == "public" and iid:
            raise ConfigurationError("data.iid: the public draws have no IID variant; give style 'own' or iid false")
        self.style = style

    def load(self) -> LoadedData:
        """Draw all clients' samples, one client after the other."""
        if self.style == "public" and not 0 <= self.split_seed < 2**32:
            raise ConfigurationError(f"data.seed={self.split_seed}: the public draws take a seed from 0 to {2**32 - 1}")
        if self.style == "public":
            inputs, labels, sizes = self.draw_publicly()
        else:
            rng = seeding.numpy_generator(self.split_seed, "synthetic")
            sizes = _draw_sizes(rng, self.num_clients)
            inputs, labels = self.draw(rng, sizes)
        dataset = ArrayDataset((torch.from_numpy(inputs), torch.from_numpy(labels)))
        return LoadedData(dataset, labels, clients=np.repeat(np.arange(self.num_clients), sizes))

    def draw(self, rng: np.random.Generator, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the samples in the style ``own``.

        Args:
            rng: Generator of all draws.
            sizes: Number of samples of each client ``(N,)``.

        Returns:
            Inputs float32 ``(sum(sizes), dimension)`` and classes int64 ``(sum(sizes),)``, one client after the other.
        """
        num_clients = len(sizes)
        rng.normal(0, self.alpha, num_clients)  # u_i: drawn as in the public codes but unused, as it changes no argmax
        input_means = np.repeat(rng.normal(0, self.beta, (num_clients, 1)), self.dimension, axis=1)  # B_i
        num_models = 1 if self.iid else num_clients
        models = np.empty((num_models, self.dimension + 1, self.num_classes), dtype=np.float32)  # W_i above b_i
        for model in models:  # one by one, because draws in float64 for 1,000,000 clients would take 4.9 GB
            model[:] = rng.standard_normal(model.shape)
        # Without this draw of v_i around B_i, all coordinates of a client's inputs have the mean B_i.
        if not self.iid:
            input_means += rng.standard_normal((num_clients, self.dimension))  # v_i
        inputs = rng.standard_normal((sizes.sum(), self.dimension), dtype=np.float32)
        # Standard deviations: the variance is j^-1.2.
        inputs *= np.arange(1, self.dimension + 1, dtype=np.float32) ** -0.6
        labels = np.empty(len(inputs), dtype=np.int64)
        ends = np.cumsum(sizes)
        for client, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
            model = models[0 if self.iid else client]
            inputs[start:end] += input_means[client].astype(np.float32)
            labels[start:end] = (inputs[start:end] @ model[:-1] + model[-1]).argmax(axis=1)
        return inputs, labels

    def draw_publicly(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the samples exactly as the FedBC authors' public code does, in the order of its draws.

        NumPy's older generator draws, for all clients: sizes, u_i, B_i; for each client: v_i; then for each client:
        W_i, b_i and the inputs. Labels are computed in float64. Last, Python's generator shuffles each client's
        samples.

        Returns:
            Inputs float32 ``(M, dimension)`` and classes int64 ``(M,)``, one client after the other, and the number of
            samples of each client, int64 ``(N,)`` with sum M.
        """
        rng, shuffler = np.random.RandomState(self.split_seed), random.Random(self.split_seed)
        sizes = _draw_sizes(rng, self.num_clients)
        model_means = rng.normal(0, self.alpha, self.num_clients)  # u_i
        input_centres = rng.normal(0, self.beta, self.num_clients)  # B_i
        input_means = [rng.normal(centre, 1, self.dimension) for centre in input_centres]  # v_i
        covariance = np.diag(np.arange(1, self.dimension + 1) ** -1.2)
        inputs, labels = [], []
        for size, model_mean, input_mean in zip(sizes.tolist(), model_means, input_means, strict=True):
            weight = rng.normal(model_mean, 1, (self.dimension, self.num_classes))
            bias = rng.normal(model_mean, 1, self.num_classes)
            x = rng.multivariate_normal(input_mean, covariance, size)
            order = list(range(size))
            shuffler.shuffle(order)
            inputs.append(x[order].astype(np.float32))
            labels.append((x @ weight + bias).argmax(axis=1)[order])
        return np.concatenate(inputs), np.concatenate(labels), sizes


def _draw_sizes(rng: np.random.Generator | np.random.RandomState, num_clients: int) -> np.ndarray:
    """Return the clients' numbers of samples, ⌊LogNormal(4, 2)⌋ + 50, int64 ``(N,)``."""
    return np.floor(rng.lognormal(4, 2, num_clients)).astype(np.int64) + 50


# Standard deviations
NOISE, MEAN, MODEL, OUTLIER = 2.0**0.5, 0.5**0.5, 5.0**0.5, 50.0**0.5
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
        num_clients: Count = 10,
        samples_per_client: Count = 100,
        dimension: Count = 1000,
        *,
        test_fraction: float | None = 0.5,
        batch_size: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(Natural(num_clients), test_fraction=test_fraction, batch_size=batch_size, **kwargs)
        self.samples_per_client, self.dimension = samples_per_client, dimension

    def load(self) -> LoadedData:
        """Draw all clients' samples, one client after the other."""
        inputs, targets = self.draw(seeding.numpy_generator(self.split_seed, "synthetic regression"))
        tensors = torch.from_numpy(inputs).flatten(0, 1), torch.from_numpy(targets).flatten()
        clients = np.repeat(np.arange(self.num_clients), self.samples_per_client)
        return LoadedData(ArrayDataset(tensors), clients=clients)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw all samples.

        Args:
            rng: Generator of all draws, in this order: w̄, the last client's w̄, the Laplace noise, μ, x, the noise of y.

        Returns:
            Inputs float32 ``(N, n, d)`` and targets float32 ``(N, n)``.
        """
        center, other = rng.normal(0, MODEL, self.dimension), rng.normal(0, OUTLIER, self.dimension)
        weights = rng.laplace(0, LAPLACE_SCALE, (self.num_clients, self.dimension))
        weights += center
        # Fed+ gives the last client a model of its own kind, around another w̄ of ten times the variance: an outlier
        # that one global model cannot fit.
        weights[-1] += other - center
        means = rng.normal(0, MEAN, (self.num_clients, self.dimension)).astype(np.float32)
        remainder = np.arange(1, self.dimension + 1) % 50
        scale = np.where(remainder == 0, 1, remainder) ** -0.55  # standard deviations: the variance is mod(j, 50)^-1.1
        inputs = rng.standard_normal((self.num_clients, self.samples_per_client, self.dimension), dtype=np.float32)
        inputs *= scale.astype(np.float32)
        inputs += means[:, None]
        targets = (inputs @ weights.astype(np.float32)[:, :, None])[:, :, 0]
        targets += NOISE * rng.standard_normal(targets.shape, dtype=np.float32)
        return inputs, targets
