"""The problem of L2GD's experiments: F, its minimisers, the bounds of theory, and a callback that logs the error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from scipy.linalg import block_diag
from torch.utils.data import default_collate

from fedbc_lightning.core.checks import Fraction, checked
from fedbc_lightning.data.datamodule import FederatedDataModule
from fedbc_lightning.trainer.trainer import FederatedTrainer

# Name of log10 of (F(x^k) − F*) / (F(0) − F*) after k communications; "error" in it makes small values good.
ERROR = "mixture/log10_error"
# Names of the distances to x(0), each client's own minimiser, and to x(∞), the minimiser of the mean of all f_i.
TO_LOCAL, TO_GLOBAL = "mixture/distance_to_local", "mixture/distance_to_global"
# Smallest relative error; below it the value is rounding.
SMALLEST = 1e-16


@dataclass(frozen=True)
class MixtureProblem:
    """l2-regularised logistic regression whose clients' models are tied to their mean.

    Problem::

        F(x_1 ... x_N) = (1/N) Σ f_i(x_i) + (λ/2N) Σ ‖x_i − x̄‖²
        f_i(x) = mean_j log(1 + exp(−b_ij a_ij·x)) + (μ/2) ‖x‖²

    References:
        Hanzely & Richtárik 2020, "Federated Learning of a Mixture of Global and Local Models".

    Attributes:
        inputs: a_ij, (N, m, d), float64.
        labels: b_ij, -1 or 1, (N, m).
        mu: μ > 0.
        penalty: λ ≥ 0.
    """

    inputs: np.ndarray
    labels: np.ndarray
    mu: float
    penalty: float

    @classmethod
    def of_clients(cls, data: FederatedDataModule, mu: float, penalty: float) -> MixtureProblem:
        """Make the problem from the training data of all clients, with the classes 0 and 1 as -1 and 1.

        Args:
            data: Data module that has been set up; its clients have equal numbers of training samples.
            mu: μ, the weight of the L2 term.
            penalty: λ, the pull of each x_i to the mean.
        """
        sets = [data.client_train_dataset(client) for client in range(data.num_clients)]
        parts = [default_collate([dataset[k] for k in range(len(dataset))]) for dataset in sets]  # type: ignore[arg-type]
        inputs = np.stack([features.flatten(1).numpy() for features, _ in parts]).astype(np.float64)
        return cls(inputs, np.stack([2.0 * targets.numpy() - 1.0 for _, targets in parts]), mu, penalty)

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return self.labels.shape[0]

    @property
    def num_samples(self) -> int:
        """Number of samples of each client, m."""
        return self.labels.shape[1]

    @cached_property
    def _signed(self) -> np.ndarray:
        return self.inputs * self.labels[:, :, None]

    def _margins(self, x: np.ndarray) -> np.ndarray:
        return (self._signed @ x[:, :, None])[:, :, 0]

    def value(self, x: np.ndarray) -> float:
        """Return F at x (N, d)."""
        spread = ((x - x.mean(axis=0)) ** 2).sum(axis=1).mean()
        ridge = (x**2).sum(axis=1).mean()
        # logaddexp, because exp(-margin) overflows for a large wrong margin
        return float(np.logaddexp(0, -self._margins(x)).mean() + self.mu / 2 * ridge + self.penalty / 2 * spread)

    def gradients(self, x: np.ndarray) -> np.ndarray:
        """Return all gradients ∇f_ij(x_i), (N, m, d), at x (N, d)."""
        weights = 1 / (1 + np.exp(self._margins(x)))
        return self.mu * x[:, None] - weights[:, :, None] * self._signed

    def pull(self, x: np.ndarray) -> np.ndarray:
        """Return λ(x_i − x̄), (N, d), at x (N, d)."""
        return self.penalty * (x - x.mean(axis=0))

    @cached_property
    def minimiser(self) -> np.ndarray:
        """Minimiser x(λ), (N, d), by damped Newton steps until F(x) − F* ≤ N‖∇F(x)‖²/(2μ) is below 1e-14.

        The bound holds because F is μ/N-strongly convex. The Hessian is N∇²F = diag(H_i + λ) − (λ/N) 11ᵀ.

        Raises:
            RuntimeError: 100 steps did not suffice.
        """
        x = np.zeros((self.num_clients, self.inputs.shape[2]))
        for _ in range(100):
            residual = -(self.gradients(x).mean(axis=1) + self.pull(x))
            gap = (residual**2).sum() / (2 * self.num_clients * self.mu)
            if gap < 1e-14:
                return x
            weights = 1 / (1 + np.exp(self._margins(x)))
            scaled = (weights * (1 - weights) / self.num_samples)[:, :, None] * self._signed
            curvatures = block_diag(*scaled.transpose(0, 2, 1) @ self._signed)
            hessian = curvatures + (self.mu + self.penalty) * np.eye(x.size)
            # As a whole, since it is small in the shipped studies: five clients with 119 features each.
            hessian -= self.penalty / self.num_clients * np.tile(np.eye(x.shape[1]), (self.num_clients,) * 2)
            step = np.linalg.solve(hessian, residual.ravel()).reshape(x.shape)
            # Far from the minimum a full Newton step may overshoot; near it rounding would stop the search for a size.
            size = 1.0
            while gap > 1e-8 and self.value(x + size * step) > self.value(x) and size > 1e-9:
                size /= 2
            x = x + size * step
        raise RuntimeError(f"F* was not found: the last bound on F(x) - F* is {gap:.1e}")

    @cached_property
    def local_minimiser(self) -> np.ndarray:
        """Local minimiser x(0), (N, d): row i minimises f_i."""
        return self.with_penalty(0.0).minimiser

    def with_penalty(self, penalty: float) -> MixtureProblem:
        """Return the problem on the same data with another λ."""
        return replace(self, penalty=penalty)

    @cached_property
    def global_minimiser(self) -> np.ndarray:
        """Global minimiser x(∞), (N, d): each row is the minimiser of the mean of all f_i."""
        pooled = self.inputs.reshape(1, -1, self.inputs.shape[2]), self.labels.reshape(1, -1)
        # Parts are equal, so the mean of all f_i is the objective of one client that holds all samples.
        one = MixtureProblem(*pooled, self.mu, 0.0).minimiser
        return np.repeat(one, self.num_clients, axis=0)

    def distances(self, x: np.ndarray) -> tuple[float, float]:
        """Return the root mean squares over clients of ‖x_i − x_i(0)‖ and of ‖x_i − x_i(∞)‖ at x (N, d)."""
        ends = self.local_minimiser, self.global_minimiser
        to_local, to_global = (math.sqrt(((x - end) ** 2).sum(axis=1).mean()) for end in ends)
        return to_local, to_global

    @cached_property
    def least(self) -> float:
        """Minimum of F, F*."""
        return self.value(self.minimiser)

    @cached_property
    def span(self) -> float:
        """Initial error F(0) − F*, by which errors are divided."""
        return self.value(np.zeros_like(self.minimiser)) - self.least

    def error(self, x: np.ndarray) -> float:
        """Return (F(x) − F*) / (F(0) − F*), at least :data:`SMALLEST`."""
        return max((self.value(x) - self.least) / self.span, SMALLEST)

    # theory

    @cached_property
    def smoothness(self) -> float:
        """Smoothness L̃, the largest of the f_ij."""
        return float((self.inputs**2).sum(axis=2).max() / 4 + self.mu)

    @property
    def best_probability(self) -> float:
        """Best probability p by the theory of L2SGD+, p*."""
        pull, mu = 4 * self.penalty, self.mu
        return (pull + mu) / (pull + 4 * self.smoothness + (self.num_samples + 1) * mu)

    def step_size(self, p: float) -> float:
        """Return the largest α that L2SGD+'s theorem allows."""
        of_samples = (1 - p) / (4 * self.smoothness + self.mu * self.num_samples)
        return self.num_clients * min(of_samples, p / (4 * self.penalty + self.mu))

    def bound(self, p: float, accuracy: float, what: str = "communications") -> float:
        """Return what L2SGD+ needs by its theorem until ‖x − x*‖² has shrunk by ``accuracy``, at its α(p).

        It needs N log(1/accuracy)/(αμ) iterations; 1 − p of them are local steps, p(1 − p) of them communications.
        """
        iterations = self.num_clients / (self.step_size(p) * self.mu) * math.log(1 / accuracy)
        return iterations * (1 - p) * (p if what == "communications" else 1.0)

    def floor(self, method: str, p: float, lr: float) -> float:
        """Return the error at which L2SGD or L2SGD2 stops improving, relative to F(0) − F*; 0 for L2SGD+.

        x ← x − αG with noise of covariance C at x* stops at F − F* = α tr(C)/4, to first order in α. N² tr(C) is, with
        g_ij the gradients at x* and c_i = λ(x_i* − x̄*)::

            L2SGD     Σ_i mean_j ‖g_ij‖²/(1 − p)  + ‖c_i‖²/p
            L2SGD2    Σ_i mean_j (1 − p)‖g_ij/(1 − p) + c_i‖² + p‖c_i‖²
        """
        if method == "L2SGD+":
            return 0.0
        single, pull = self.gradients(self.minimiser), self.pull(self.minimiser)
        if method == "L2SGD":
            local = (single**2).sum(axis=2).mean(axis=1).sum() / (1 - p)
        else:
            local = (1 - p) * ((single / (1 - p) + pull[:, None]) ** 2).sum(axis=2).mean(axis=1).sum()
        at_exchange = (pull**2).sum() * (p if method == "L2SGD2" else 1 / p)
        return float(lr / 4 * (local + at_exchange) / self.num_clients**2 / self.span)


@checked("trainer.callbacks: MixtureError")
class MixtureError(Callback):
    """Logs :data:`ERROR` and both distances after each communication, and ends a run that has reached a goal.

    It is for L2GD and its kin with a BinaryLogisticRegression. F is that of :class:`MixtureProblem` on the clients'
    training data, with the algorithm's λ; μ is the model's weight decay, and is above 0 so that F has one minimiser.

    Args:
        goal: Relative error at which the run ends, in [0, 1); None: the run ends after its last round.
    """

    def __init__(self, goal: Fraction | None = None) -> None:
        self.goal = goal

    def on_fit_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Set up the problem of the run."""
        algorithm: Any = trainer.federation.algorithm
        mu = float(pl_module.hparams["weight_decay"])
        self._problem = MixtureProblem.of_clients(trainer.datamodule, mu, algorithm.penalty)

    def on_round_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Log the error and the distances of the clients' models at the exchange; stop the run at the goal."""
        rows = [trainer.clients.vector("local_model", client) for client in range(self._problem.num_clients)]
        x = torch.stack(rows).cpu().double().numpy()
        error = self._problem.error(x)
        to_local, to_global = self._problem.distances(x)
        for name, value in ((ERROR, math.log10(error)), (TO_LOCAL, to_local), (TO_GLOBAL, to_global)):
            pl_module.log(name, value)
        if self.goal is not None and error <= self.goal:
            trainer.should_stop = True
