"""Robust rules: replacements of the server's mean of w_i − z that withstand clients which send arbitrary vectors.

Each rule is a pure function of the round's ``points`` (n, d) and their ``weights`` (n,), with a thin class for the YAML
configuration. Results are float64 like all sums of the server (float32 on MPS, which has no float64).
"""

from __future__ import annotations

import logging
import math
from typing import Annotated

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.checks import Checked, Count, FinitePositive, NotNegative, Number, Positive, at_least, below
from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.state import ServerState, StateDeclaration

log = logging.getLogger(__name__)


def weighted_sum(points: Tensor, coefficients: Tensor) -> Tensor:
    """Return Σ c_i x_i, (d,); points are added one after another, so that no float64 copy of all is made."""
    total = torch.zeros(points.shape[1:], dtype=wide_dtype(points.device), device=points.device)
    for point, coefficient in zip(points, coefficients.tolist(), strict=True):
        total.add_(point, alpha=coefficient)
    return total


def weighted_mean(points: Tensor, weights: Tensor) -> Tensor:
    """Return Σ a_i x_i / Σ a_i, (d,)."""
    return weighted_sum(points, weights / weights.sum())


def coordinate_median(points: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of the lower and the upper weighted median of each coordinate, (d,).

    Sort the values of a coordinate in ascending order, and sum the weights up to and including each value. The lower
    median is the first value with a sum ≥ half of all weight, the upper median the first with a sum > half. They differ
    if the values split into two halves of the same weight; with equal weights, this happens for even n.

    Example:
        >>> points = torch.tensor([[1.0], [2.0], [4.0], [9.0]])
        >>> coordinate_median(points, torch.tensor([1.0, 1.0, 1.0, 1.0])).item()
        3.0
        >>> coordinate_median(points, torch.tensor([1.0, 1.0, 1.0, 5.0])).item()
        9.0
    """
    values, order = points.sort(dim=0, stable=True)
    half = weights.sum() / 2
    rounding = 1e-12 * half  # weights that are fractions, like 1/6 + 1/3, sum to a half only up to rounding
    so_far = torch.zeros(points.shape[1:], dtype=weights.dtype, device=points.device)
    lower, upper = torch.zeros_like(order[0]), torch.zeros_like(order[0])
    for client in order:  # not cumsum: it needs (n, d) more, and is not deterministic on every GPU
        so_far += weights[client]
        lower += so_far < half - rounding
        upper += so_far <= half + rounding
    return values.gather(0, torch.stack([lower, upper])).to(wide_dtype(points.device)).mean(dim=0)


def trimmed_mean(points: Tensor, weights: Tensor, num_trimmed: int) -> Tensor:
    """Return the weighted mean of each coordinate without its ``num_trimmed`` lowest and highest values, (d,).

    Example:
        >>> trimmed_mean(torch.tensor([[-1e6], [1.0], [2.0], [1e6]]), torch.ones(4), num_trimmed=1).item()
        1.5
    """
    values, order = points.sort(dim=0, stable=True)
    kept = slice(num_trimmed, len(points) - num_trimmed)
    kept_weights = weights[order[kept]]
    return (values[kept] * kept_weights).sum(dim=0) / kept_weights.sum(dim=0)


def krum_scores(points: Tensor, num_byzantine: int) -> Tensor:
    """Return the sum of squared distances of each point to its n − f − 2 nearest others, (n,)."""
    wide = points.to(wide_dtype(points.device))
    # The faster ‖x‖² + ‖y‖² − 2⟨x, y⟩ is not used: its rounding hides small distances between large points.
    squared = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square().fill_diagonal_(math.inf)
    num_nearest = max(0, len(points) - num_byzantine - 2)
    return squared.sort(dim=1).values[:, :num_nearest].sum(dim=1)


def geometric_median_weights(
    points: Tensor, weights: Tensor, smoothing: float = 1e-5, max_iter: int = 100, rtol: float = 1e-6
) -> Tensor:
    """Return weights b_i, (n,), whose weighted mean is the v that minimises Σ p_i ‖v − x_i‖, by Weiszfeld's iteration.

    The iteration starts at v = Σ p_i x_i and repeats b_i = p_i / max(ν, ‖v − x_i‖), v ← Σ b_i x_i / Σ b_i, until
    ‖v⁺ − v‖ ≤ ``rtol`` ‖v⁺‖. Here p_i = a_i / Σ a_j.

    Args:
        points: The points x_i, (n, d).
        weights: Their weights a_i, (n,).
        smoothing: ν, the smallest distance that is used.
        max_iter: Largest number of iterations.
        rtol: Relative tolerance of the stopping rule.

    Example:
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1e6, 1e6]])
        >>> weights = torch.ones(4)
        >>> weighted_mean(points, geometric_median_weights(points, weights)).round(decimals=3)
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    median = weighted_mean(points, weights)
    for _ in range(max_iter):
        distances = torch.linalg.vector_norm(points - median, dim=1)
        pulls = weights / weights.sum() / distances.clamp(min=smoothing)
        previous, median = median, weighted_mean(points, pulls)
        if torch.linalg.vector_norm(median - previous) <= rtol * torch.linalg.vector_norm(median):
            break
    return pulls


def clipped_mean(points: Tensor, weights: Tensor, bound: float) -> Tensor:
    """Return the weighted mean of the clipped points x_i min(1, b / ‖x_i‖), (d,); b is ``bound``.

    Example:
        >>> clipped_mean(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.ones(2), bound=1.0)
        tensor([0.3000, 0.4000], dtype=torch.float64)
    """
    norms = torch.linalg.vector_norm(points, dim=1, dtype=wide_dtype(points.device))
    return weighted_sum(points, weights / weights.sum() * (bound / norms).clamp(max=1))


class RobustRule(Checked):
    """Base class of the rules that replace the weighted mean; your own rule overrides :meth:`combine`."""

    section = "algorithm.robust_rule"

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the state that the rule keeps between rounds."""

    def check(self, num_sampled: int) -> None:
        """Raise a ConfigurationError if the rule cannot work with S clients in a round."""

    def aggregate(
        self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState
    ) -> tuple[Tensor, Tensor]:
        """Return the aggregate of w_i − z, (d,), and of the buffers, (b,); clients of weight 0 are left out.

        Args:
            updates: The updates w_i − z of the n clients whose models arrived, (n, d).
            weights: Their weights a_i ≥ 0, (n,), of any scale. If all are 0, all clients get the same weight.
            buffers: Their floating-point buffers, (n, b).
            server: The server's state, in which the rule reads and stages what :meth:`declare_state` declared.
        """
        weights = weights.to(updates.device, wide_dtype(updates.device))
        kept = weights > 0
        if not kept.any():
            weights = torch.ones_like(weights)
        elif not kept.all():
            updates, weights, buffers = updates[kept], weights[kept], buffers[kept]
        return self.combine(updates, weights, buffers, server)

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """Return what :meth:`aggregate` returns, for n ≥ 1 clients that all have a weight > 0."""
        raise NotImplementedError


class CoordinateMedian(RobustRule):
    """Takes the weighted median of each coordinate; for even n and equal weights, the mean of the middle two values.

    It withstands adversaries that have less than half of the weight. The buffers are aggregated by their own median.
    Yin et al. 2018, "Byzantine-Robust Distributed Learning", Algorithm 1, option I.
    """

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """Return the medians of the updates and of the buffers."""
        return coordinate_median(updates, weights), coordinate_median(buffers, weights)


class TrimmedMean(RobustRule):
    """Takes the weighted mean of each coordinate without its ⌊β n⌋ lowest and ⌊β n⌋ highest values.

    It withstands up to ⌊β n⌋ adversaries. The buffers are trimmed in the same way. Yin et al. 2018, "Byzantine-Robust
    Distributed Learning", Algorithm 1, option II.

    Args:
        trim: Fraction β in [0, 0.5) that is trimmed at each end; 0 gives the mean.

    Raises:
        ConfigurationError: β is out of range.
    """

    def __init__(self, trim: Annotated[float, at_least(0), below(0.5)] = 0.1) -> None:
        self.trim = trim

    def num_trimmed(self, num_clients: int) -> int:
        """Return ⌊β n⌋ for β as a decimal number: 0.29 of 100 is 29, although floating point alone gives 28."""
        return min(math.floor(self.trim * num_clients + 1e-9), (num_clients - 1) // 2)

    def check(self, num_sampled: int) -> None:
        """Warn if β n < 1, since the rule would then be the mean."""
        if self.trim > 0 and self.num_trimmed(num_sampled) == 0:
            rank_zero_only(log.warning)(
                f"algorithm.robust_rule: TrimmedMean.trim={self.trim} of {num_sampled} clients per round is less than "
                f"one client, so nothing is trimmed; that takes {math.ceil(1 / self.trim)} clients, or a larger trim."
            )

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """Return the trimmed means of the updates and of the buffers."""
        num_trimmed = self.num_trimmed(len(updates))
        return trimmed_mean(updates, weights, num_trimmed), trimmed_mean(buffers, weights, num_trimmed)


class Krum(RobustRule):
    """Takes the one client with the least sum of squared distances to its n − f − 2 nearest others, without weights.

    It withstands up to f adversaries if n > 2f + 2. In a round in which fewer clients arrive, f is the largest number
    that n allows; a warning says so once. Distances are over parameters only, and the buffers are those of the chosen
    client. Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent".

    Args:
        num_byzantine: Number f ≥ 0 of adversaries per round that the rule withstands.

    Raises:
        ConfigurationError: f is not a whole number ≥ 0.
    """

    def __init__(self, num_byzantine: Number = 1) -> None:
        self.num_byzantine = num_byzantine

    def check(self, num_sampled: int) -> None:
        """Raise a ConfigurationError unless S > 2f + 2."""
        needed = 2 * self.num_byzantine + 3
        smaller = f", or num_byzantine to at most {(num_sampled - 3) // 2}" if num_sampled >= 3 else ""
        if num_sampled < needed:
            raise ConfigurationError(
                f"algorithm.robust_rule: {type(self).__name__} needs 2f + 3 = {needed} clients in a round, got "
                f"{num_sampled}; set trainer.clients_per_round to {needed} or more{smaller}."
            )

    def tolerated(self, num_clients: int, server: ServerState) -> int:
        """Return f for a round with n clients: the given f, or the largest one ≥ 0 with n > 2f + 2; warn then once."""
        if num_clients > 2 * self.num_byzantine + 2:
            return self.num_byzantine
        largest = max(0, (num_clients - 3) // 2)
        server.warn_once(
            "num_byzantine",
            f"Only {num_clients} clients arrived in a round, too few for {type(self).__name__}.num_byzantine="
            f"{self.num_byzantine}; rounds like this one take {largest} (said once).",
        )
        return largest

    def num_chosen(self, num_clients: int, num_byzantine: int) -> int:
        """Return how many of the clients with the lowest scores are averaged."""
        return 1

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of the clients with the lowest scores; among equal scores, the first ones count."""
        num_byzantine = self.tolerated(len(updates), server)
        best_first = krum_scores(updates, num_byzantine).argsort(stable=True)
        chosen = best_first[: self.num_chosen(len(updates), num_byzantine)]
        return weighted_mean(updates[chosen], weights[chosen]), weighted_mean(buffers[chosen], weights[chosen])


class MultiKrum(Krum):
    """Takes the weighted mean of the n − f clients with the lowest Krum scores.

    The scores, and what happens if few clients arrive, are those of :class:`Krum`. Blanchard et al. 2017, "Machine
    Learning with Adversaries: Byzantine Tolerant Gradient Descent", with m = n − f.

    Args:
        num_byzantine: Number f ≥ 0 of adversaries per round that the rule withstands.

    Raises:
        ConfigurationError: f is not a whole number ≥ 0.
    """

    def num_chosen(self, num_clients: int, num_byzantine: int) -> int:
        """Return n − f."""
        return num_clients - num_byzantine


class GeometricMedian(RobustRule):
    """RFA: the point v with the least weighted distance Σ p_i ‖v − w_i‖, by the smoothed Weiszfeld iteration.

    It withstands adversaries that have less than half of the weight; the closer they are to half, the more iterations
    it takes. Distances are over parameters only, and the buffers are averaged with the weights b_i of the last
    iteration. Pillutla et al. 2022, "Robust Aggregation for Federated Learning"; its public code stops after 4
    iterations, far from convergence.

    Args:
        smoothing: Smallest distance ν > 0; a smaller distance counts as ν.
        max_iter: Largest number of iterations.
        rtol: Relative tolerance: the iteration stops when v moves by no more than this times ‖v‖.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, smoothing: FinitePositive = 1e-5, max_iter: Count = 100, rtol: NotNegative = 1e-6) -> None:
        self.smoothing, self.max_iter, self.rtol = smoothing, max_iter, rtol

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """Return the means of the updates and of the buffers with the weights b_i."""
        pulls = geometric_median_weights(updates, weights, self.smoothing, self.max_iter, self.rtol)
        return weighted_mean(updates, pulls), weighted_mean(buffers, pulls)


class CenteredClipping(RobustRule):
    """Clips the updates x_i = w_i − z around last round's aggregate v, and takes their weighted mean.

    It repeats L times v ← v + Σ p_i (x_i − v) min(1, τ / ‖x_i − v‖). An adversary of weight p moves v by at most p τ L.
    v is the server vector ``clipping_center``, which starts at 0. The buffers get the weighted mean. Karimireddy et al.
    2021, "Learning from History for Byzantine Robust Optimization" (there the x_i are the clients' momenta).

    Args:
        radius: Clipping radius τ > 0.
        num_iterations: Number of iterations L.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, radius: Positive = 10.0, num_iterations: Count = 1) -> None:
        self.radius, self.num_iterations = radius, num_iterations

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare ``clipping_center``, the aggregate of the round before."""
        state.server_vector("clipping_center", for_clients=False)

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """Clip around the aggregate of the round before, and stage the new one."""
        center = server["clipping_center"].to(wide_dtype(updates.device))
        for _ in range(self.num_iterations):
            center = center + clipped_mean(updates - center, weights, self.radius)
        server.stage("clipping_center", center)
        return center, weighted_mean(buffers, weights)


class NormBound(RobustRule):
    """Clips each update x_i = w_i − z to a norm of at most b, and takes the weighted mean of x_i min(1, b / ‖x_i‖).

    The buffers get the weighted mean. Sun et al. 2019, "Can You Really Backdoor Federated Learning?".

    Args:
        bound: Largest norm b > 0 of an update.

    Raises:
        ConfigurationError: b is out of range.
    """

    def __init__(self, bound: Positive = 10.0) -> None:
        self.bound = bound

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """Return the mean of the clipped updates, and the mean of the buffers."""
        return clipped_mean(updates, weights, self.bound), weighted_mean(buffers, weights)
