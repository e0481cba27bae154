"""Robust rules: the server's mean of w_i − z, made to withstand clients that send anything.

Pure functions of the round's ``points`` (n, d) and their ``weights`` (n,), each with a thin class for the YAML. Results
are float64 like all sums of the server (float32 on MPS, which has no float64).
"""

from __future__ import annotations

import logging
import math

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.state.declaration import ServerState, StateDeclaration

log = logging.getLogger(__name__)


def weighted_sum(points: Tensor, coefficients: Tensor) -> Tensor:
    """Σ c_i x_i, (d,); one client after another, so without a wide copy of all points."""
    total = torch.zeros(points.shape[1:], dtype=wide_dtype(points.device), device=points.device)
    for point, coefficient in zip(points, coefficients.tolist(), strict=True):
        total.add_(point, alpha=coefficient)
    return total


def weighted_mean(points: Tensor, weights: Tensor) -> Tensor:
    """Σ a_i x_i / Σ a_i, (d,)."""
    return weighted_sum(points, weights / weights.sum())


def coordinate_median(points: Tensor, weights: Tensor) -> Tensor:
    """Per coordinate the mean of the lower and the upper weighted median, (d,).

    In ascending order the lower one is the first value with Σ a ≥ half of all weight up to and including it, the upper
    one the first with Σ a > half. They differ where the values split into two halves of the same weight: with equal
    weights, for even n.

    Example:
        >>> points = torch.tensor([[1.0], [2.0], [4.0], [9.0]])
        >>> coordinate_median(points, torch.tensor([1.0, 1.0, 1.0, 1.0])).item()
        3.0
        >>> coordinate_median(points, torch.tensor([1.0, 1.0, 1.0, 5.0])).item()
        9.0
    """
    values, order = points.sort(dim=0, stable=True)
    half = weights.sum() / 2
    rounding = 1e-12 * half  # of weights that are shares, like 1/6 + 1/3; sums of integers have none
    so_far = torch.zeros(points.shape[1:], dtype=weights.dtype, device=points.device)
    lower, upper = torch.zeros_like(order[0]), torch.zeros_like(order[0])
    for client in order:  # not cumsum: it needs (n, d) more, and is not deterministic on every GPU
        so_far += weights[client]
        lower += so_far < half - rounding
        upper += so_far <= half + rounding
    middle = values.gather(0, torch.stack([lower, upper]))
    return middle.to(wide_dtype(points.device)).mean(dim=0)


def trimmed_mean(points: Tensor, weights: Tensor, num_trimmed: int) -> Tensor:
    """Per coordinate the weighted mean without the ``num_trimmed`` lowest and highest values, (d,).

    Example:
        >>> trimmed_mean(torch.tensor([[-1e6], [1.0], [2.0], [1e6]]), torch.ones(4), num_trimmed=1).item()
        1.5
    """
    values, order = points.sort(dim=0, stable=True)
    kept = slice(num_trimmed, len(points) - num_trimmed)
    kept_weights = weights[order[kept]]
    return (values[kept] * kept_weights).sum(dim=0) / kept_weights.sum(dim=0)


def krum_scores(points: Tensor, num_byzantine: int) -> Tensor:
    """Sum of squared distances of each point to its n − f − 2 nearest others, (n,)."""
    wide = points.to(wide_dtype(points.device))
    # not by ‖x‖² + ‖y‖² − 2⟨x, y⟩, whose rounding hides small distances between large points
    squared = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square().fill_diagonal_(math.inf)
    num_nearest = max(0, len(points) - num_byzantine - 2)
    return squared.sort(dim=1).values[:, :num_nearest].sum(dim=1)


def geometric_median_weights(
    points: Tensor, weights: Tensor, smoothing: float = 1e-5, max_iter: int = 100, rtol: float = 1e-6
) -> Tensor:
    """The b_i, (n,), with which the weighted mean is the point v of least Σ p_i ‖v − x_i‖: Weiszfeld's iteration.

    From v = Σ p_i x_i: b_i = p_i / max(ν, ‖v − x_i‖), v ← Σ b_i x_i / Σ b_i, until ‖v⁺ − v‖ ≤ ``rtol`` ‖v⁺‖.

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
    """The weighted mean of x_i min(1, b / ‖x_i‖), (d,).

    Example:
        >>> clipped_mean(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.ones(2), bound=1.0)
        tensor([0.3000, 0.4000], dtype=torch.float64)
    """
    norms = torch.linalg.vector_norm(points, dim=1, dtype=wide_dtype(points.device))
    return weighted_sum(points, weights / weights.sum() * (bound / norms).clamp(max=1))


class RobustRule:
    """Base class: what takes the place of the weighted mean. A rule of one's own overrides :meth:`combine`."""

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare what outlives a round."""

    def check(self, num_sampled: int) -> None:
        """Raise a ConfigurationError if the rule cannot work with S clients in a round."""

    def aggregate(
        self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState
    ) -> tuple[Tensor, Tensor]:
        """The aggregate of w_i − z, (d,), and the buffers, (b,); clients of weight 0 are left out.

        Args:
            updates: w_i − z of the n clients that arrived, (n, d).
            weights: a_i ≥ 0, (n,), of any scale. If all are 0, all clients count alike.
            buffers: Their floating-point buffers, (n, b).
            server: Where :meth:`declare_state`'s names are read and staged.
        """
        weights = weights.to(updates.device, wide_dtype(updates.device))
        kept = weights > 0
        if not kept.any():
            weights = torch.ones_like(weights)
        elif not kept.all():
            updates, weights, buffers = updates[kept], weights[kept], buffers[kept]
        return self.combine(updates, weights, buffers, server)

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """:meth:`aggregate` of clients that all have a weight > 0, n ≥ 1."""
        raise NotImplementedError

    def _require(self, name: str, fits: bool, remedy: str) -> None:
        """Raise unless the argument kept as ``self.name`` fits."""
        if not fits:
            value = getattr(self, name)
            raise ConfigurationError(f"algorithm.robust_rule: {type(self).__name__}.{name}={value!r}: {remedy}.")


class CoordinateMedian(RobustRule):
    """Per coordinate the weighted median of the clients; for even n and equal weights the mean of the middle two.

    Stands as long as less than half of the weight is adversarial. Yin et al. 2018, "Byzantine-Robust Distributed
    Learning", Algorithm 1, option I. Buffers get their own median.
    """

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """The median of each coordinate."""
        return coordinate_median(updates, weights), coordinate_median(buffers, weights)


class TrimmedMean(RobustRule):
    """Per coordinate the weighted mean without the ⌊β n⌋ lowest and the ⌊β n⌋ highest values.

    Stands up to ⌊β n⌋ adversaries. Yin et al. 2018, "Byzantine-Robust Distributed Learning", Algorithm 1, option II.
    Buffers are trimmed likewise.

    Args:
        trim: β in [0, 0.5); 0 is the mean.

    Raises:
        ConfigurationError: β outside its range.
    """

    def __init__(self, trim: float = 0.1) -> None:
        self.trim = trim
        self._require("trim", 0 <= trim < 0.5, "give a number in [0, 0.5), else nothing is left")

    def num_trimmed(self, num_clients: int) -> int:
        """⌊β n⌋ of the decimal number β: 0.29 of 100 are 29, which floating point alone would make 28."""
        return min(math.floor(self.trim * num_clients + 1e-9), (num_clients - 1) // 2)

    def check(self, num_sampled: int) -> None:
        """Warn if β n < 1: the rule would be the mean."""
        if self.trim > 0 and self.num_trimmed(num_sampled) == 0:
            rank_zero_only(log.warning)(
                f"algorithm.robust_rule: TrimmedMean.trim={self.trim} of {num_sampled} clients per round is less than "
                f"one client, so nothing is trimmed; that takes {math.ceil(1 / self.trim)} clients, or a larger trim."
            )

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """The trimmed mean of each coordinate."""
        num_trimmed = self.num_trimmed(len(updates))
        return trimmed_mean(updates, weights, num_trimmed), trimmed_mean(buffers, weights, num_trimmed)


class Krum(RobustRule):
    """The one client whose n − f − 2 nearest others are nearest, in squared distance; weights play no part.

    Stands up to f adversaries of n > 2f + 2. In a round in which fewer clients arrive, f is the largest that n allows
    (said once). Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent".
    Buffers are those of the chosen client; distances are over parameters only.

    Args:
        num_byzantine: f ≥ 0, the adversaries per round that the rule withstands.

    Raises:
        ConfigurationError: f is no whole number ≥ 0.
    """

    def __init__(self, num_byzantine: int = 1) -> None:
        self.num_byzantine = num_byzantine
        self._warned = False
        whole = isinstance(num_byzantine, int) and not isinstance(num_byzantine, bool)
        self._require("num_byzantine", whole and num_byzantine >= 0, "give a whole number, 0 or more")

    def check(self, num_sampled: int) -> None:
        """S > 2f + 2."""
        needed = 2 * self.num_byzantine + 3
        smaller = f", or num_byzantine to at most {(num_sampled - 3) // 2}" if num_sampled >= 3 else ""
        self._require(
            "num_byzantine",
            num_sampled >= needed,
            f"needs 2f + 3 = {needed} clients in a round, got {num_sampled}; set trainer.clients_per_round to {needed} "
            f"or more{smaller}",
        )

    def tolerated(self, num_clients: int) -> int:
        """The f of a round in which n clients arrived: the given one, or the largest with n > 2f + 2; at least 0."""
        if num_clients > 2 * self.num_byzantine + 2:
            return self.num_byzantine
        largest = max(0, (num_clients - 3) // 2)
        if not self._warned:
            self._warned = True
            rank_zero_only(log.warning)(
                f"Only {num_clients} clients arrived in a round, too few for {type(self).__name__}.num_byzantine="
                f"{self.num_byzantine}; rounds like this one take {largest} (said once)."
            )
        return largest

    def num_chosen(self, num_clients: int, num_byzantine: int) -> int:
        """How many of the best clients make the mean."""
        return 1

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """The weighted mean of the clients with the lowest scores; of equal ones the first."""
        num_byzantine = self.tolerated(len(updates))
        best_first = krum_scores(updates, num_byzantine).argsort(stable=True)
        chosen = best_first[: self.num_chosen(len(updates), num_byzantine)]
        return weighted_mean(updates[chosen], weights[chosen]), weighted_mean(buffers[chosen], weights[chosen])


class MultiKrum(Krum):
    """The weighted mean of the n − f clients with the lowest Krum scores.

    As :class:`Krum` in all else. Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent", with m = n − f.

    Args:
        num_byzantine: f ≥ 0, the adversaries per round that the rule withstands.

    Raises:
        ConfigurationError: f is no whole number ≥ 0.
    """

    def num_chosen(self, num_clients: int, num_byzantine: int) -> int:
        """All but f."""
        return num_clients - num_byzantine


class GeometricMedian(RobustRule):
    """RFA: the point of least weighted distance Σ p_i ‖v − w_i‖, by the smoothed Weiszfeld iteration.

    Stands as long as less than half of the weight is adversarial; the nearer to half, the more iterations it needs.
    Pillutla et al. 2022, "Robust Aggregation for Federated Learning", whose public code stops after 4 iterations, far
    from converged. Buffers get the weights b_i of the last iteration; distances are over parameters only.

    Args:
        smoothing: ν > 0: nearer than this, distance counts as ν.
        max_iter: Iterations at most.
        rtol: Stop when v moves by no more than this times ‖v‖.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def __init__(self, smoothing: float = 1e-5, max_iter: int = 100, rtol: float = 1e-6) -> None:
        self.smoothing = smoothing
        self.max_iter = max_iter
        self.rtol = rtol
        self._require("smoothing", 0 < smoothing < math.inf, "give a number above 0")
        self._require("max_iter", max_iter >= 1, "give 1 or more")
        self._require("rtol", rtol >= 0, "give 0 or more")

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """The means with the weights b_i."""
        pulls = geometric_median_weights(updates, weights, self.smoothing, self.max_iter, self.rtol)
        return weighted_mean(updates, pulls), weighted_mean(buffers, pulls)


class CenteredClipping(RobustRule):
    """From last round's aggregate v, L times: v ← v + Σ p_i (x_i − v) min(1, τ / ‖x_i − v‖), where x_i = w_i − z.

    An adversary of weight p moves v by at most p τ L. v is the server vector ``clipping_center``, 0 at first.
    Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization" (there x_i are the clients'
    momenta). Buffers get the weighted mean.

    Args:
        radius: τ > 0.
        num_iterations: L.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def __init__(self, radius: float = 10.0, num_iterations: int = 1) -> None:
        self.radius = radius
        self.num_iterations = num_iterations
        self._require("radius", radius > 0, "give a number above 0")
        self._require("num_iterations", num_iterations >= 1, "give 1 or more")

    def declare_state(self, state: StateDeclaration) -> None:
        """``clipping_center``, the last aggregate."""
        state.server_vector("clipping_center")

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """Clip around the last aggregate; stage the new one."""
        center = server["clipping_center"].to(wide_dtype(updates.device))
        for _ in range(self.num_iterations):
            center = center + clipped_mean(updates - center, weights, self.radius)
        server.stage("clipping_center", center)
        return center, weighted_mean(buffers, weights)


class NormBound(RobustRule):
    """The weighted mean of the updates, each shortened to at most b: x_i min(1, b / ‖x_i‖), where x_i = w_i − z.

    Sun et al. 2019, "Can You Really Backdoor Federated Learning?". Buffers get the weighted mean.

    Args:
        bound: b > 0.

    Raises:
        ConfigurationError: b outside its range.
    """

    def __init__(self, bound: float = 10.0) -> None:
        self.bound = bound
        self._require("bound", bound > 0, "give a number above 0")

    def combine(self, updates: Tensor, weights: Tensor, buffers: Tensor, server: ServerState) -> tuple[Tensor, Tensor]:
        """The mean of the shortened updates."""
        return clipped_mean(updates, weights, self.bound), weighted_mean(buffers, weights)
