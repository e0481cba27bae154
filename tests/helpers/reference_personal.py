"""NumPy loops for the personalised methods on quadratics, from ALGORITHMS.md section 3 alone; no code of the package.

The package gives only the coins of the L2GD family (``seeding.numpy_generator``), by the convention that is written
at :func:`coins` and :func:`l2`. Shapes as in :mod:`helpers.reference`: w, z (d,); x, v, theta, psi (N, d).

What the seed and the batches are is read from ``local.steps`` (:class:`helpers.reference.FullBatches`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbc_lightning.core import seeding
from helpers.reference import Clients, Logged, Rows, Run, gradient, outer_loop, train

Prox = Callable[[np.ndarray], np.ndarray]


def _aggregate(
    run: Run,
    sampled: list[int],
    z: np.ndarray,
    ends: list[np.ndarray],
    weighting: str = "samples",
    median: bool = False,
) -> np.ndarray:
    """z - sum of p_i (z - w_i); or, for uniform weights, z plus the coordinate median of w_i - z."""
    updates = np.stack(ends) - z
    if median:
        assert weighting == "uniform"
        return z + np.median(updates, axis=0)
    return z + run.shares(sampled, weighting) @ updates


# Local, Per-FedAvg, pFedMe, Ditto, APFL


@outer_loop
def local_only(run: Run, z: np.ndarray) -> Logged:
    """Local: every client goes on from its own x_i; z is the mean over the sampled clients, for reporting."""
    x = run.each(z)
    for t, sampled in run.rounds:
        for i in sampled:
            x[i] = run.train(t, i, x[i]).w
        yield {"z": x[sampled].mean(0), "local_model": x}


@outer_loop
def perfedavg(
    run: Run, z: np.ndarray, inner_lr: float = 0.01, outer_lr: float = 0.001, variant: str = "first_order", **how: Any
) -> Logged:
    """Per-FedAvg: as many outer steps as ``local`` has, each on two (first_order) or three fresh batches."""
    for t, sampled in run.rounds:
        ends = []
        for i in sampled:
            w, batches = z.copy(), run.local.steps.batches(t, i)
            for _ in run.local.steps(t, i):
                inner = w - inner_lr * run.gradient(i, w, next(batches))
                v = run.gradient(i, inner, next(batches))
                if variant == "hessian_free":
                    rows, eps = next(batches), 1e-3 / max(1.0, float(np.linalg.norm(v)))
                    ahead, behind = (run.gradient(i, w + sign * eps * v, rows) for sign in (1.0, -1.0))
                    v = v - inner_lr * (ahead - behind) / (2.0 * eps)
                w = w - outer_lr * v
            ends.append(w)
        z = _aggregate(run, sampled, z, ends, **how)
        yield {"z": z}


@outer_loop
def pfedme(
    run: Run, z: np.ndarray, penalty: float = 15.0, personal_lr: float = 0.005, num_inner_steps: int = 5,
    server_lr: float = 1.0, **how: Any,
) -> Logged:  # fmt: skip
    """pFedMe: theta moves K times on each batch towards the prox of w, then w moves towards theta."""
    x = run.each(z)
    for t, sampled in run.rounds:
        ends = []
        for i in sampled:
            w, theta, eta = z.copy(), z.copy(), run.local.lr
            for (rows,) in run.local.steps(t, i):
                for _ in range(num_inner_steps):
                    theta = theta - personal_lr * (run.gradient(i, theta, rows) + penalty * (theta - w))
                w = w - eta * penalty * (w - theta)
                eta = eta * run.local.decay
            x[i] = theta
            ends.append(w)
        z = (1.0 - server_lr) * z + server_lr * _aggregate(run, sampled, z, ends, **{"weighting": "uniform"} | how)
        yield {"z": z, "local_model": x}


@outer_loop
def ditto(run: Run, z: np.ndarray, penalty: float = 0.1, personal_epochs: int | None = None, **how: Any) -> Logged:
    """Ditto: v_i goes on from the stored v_i with the term lambda (v - z); z is FedAvg's, on the same batches."""
    x = run.each(z)

    def personal_steps(round: int, client: int) -> list[list[Rows]]:
        batches = run.local.steps.batches(round, client)
        return [[next(batches)] for _ in range(personal_epochs * run.local.steps.batches_per_epoch(client))]

    personal = run.local if personal_epochs is None else replace(run.local, steps=personal_steps)
    for t, sampled in run.rounds:
        ends = []
        for i in sampled:
            x[i] = train(run.clients, personal, t, i, x[i], lambda v, z=z: penalty * (v - z)).w
            ends.append(run.train(t, i, z).w)
        z = _aggregate(run, sampled, z, ends, **how)
        yield {"z": z, "local_model": x}


@outer_loop
def apfl(run: Run, z: np.ndarray, mixture: float = 0.5, adaptive: bool = False, **how: Any) -> Logged:
    """APFL: w and v move side by side, both by gradients at the old pair; alpha on the first batch of the round.

    The step on that first batch uses the old alpha, as the gradient at the old mixture does.
    """
    v_all = run.each(z)
    mixtures = np.full(len(run.clients), float(mixture))
    for t, sampled in run.rounds:
        ends = []
        for i in sampled:
            w, v, alpha, eta = z.copy(), v_all[i].copy(), mixtures[i], run.local.lr
            for k, (rows,) in enumerate(run.local.steps(t, i)):
                at_w = run.gradient(i, w, rows)
                at_mixed = run.gradient(i, alpha * v + (1.0 - alpha) * w, rows)
                moved = alpha - float(np.sum(eta * (v - w) * at_mixed)) if adaptive and k == 0 else alpha
                w, v = w - eta * at_w, v - eta * alpha * at_mixed
                alpha = min(max(moved, 0.0), 1.0)
                eta = eta * run.local.decay
            v_all[i], mixtures[i] = v, alpha
            ends.append(w)
        z = _aggregate(run, sampled, z, ends, **how)
        yield {"z": z, "local_model": v_all, "mixture": mixtures}


# the L2GD family


@dataclass
class L2Problem:
    """min (1/N) sum f_i(x_i) + (penalty / 2N) sum of |x_i - mean|^2, and one of the five methods for it.

    Attributes:
        clients: The quadratics.
        penalty: lambda.
        probability: p of an aggregation step.
        lr: alpha.
        method: ``l2gd``, ``l2sgd``, ``l2sgd2``, ``l2sgd+`` or ``l2sgd++``.
        batch_size: Of the components; None: one component, the whole data.
        num_sampled: S of ``l2sgd++``.
    """

    clients: Clients
    penalty: float
    probability: float
    lr: float
    method: str = "l2gd"
    batch_size: int | None = None
    num_sampled: int | None = None

    def components(self, client: int) -> list[np.ndarray]:
        """The client's samples in their own order, cut every ``batch_size``."""
        size = len(self.clients[client][1])
        cut = self.batch_size or size
        return [np.arange(start, min(start + cut, size)) for start in range(0, size, cut)]

    def component_gradient(self, client: int, component: int, w: np.ndarray) -> np.ndarray:
        """Of f_ij, scaled by m n_ij / n_i: the plain mean over j is the gradient of f_i."""
        parts, size = self.components(client), len(self.clients[client][1])
        scale = len(parts) * len(parts[component]) / size
        return scale * gradient(self.clients, client, w, parts[component])

    def minimiser(self) -> np.ndarray:
        """argmin (N, d) of the objective, by one linear solve."""
        number, dim = len(self.clients), self.clients[0][1].shape[1]
        system, right = np.zeros((number * dim, number * dim)), np.zeros(number * dim)
        pull = self.penalty * (np.eye(number) - 1.0 / number)
        for i, (matrices, centres) in enumerate(self.clients):
            rows = slice(i * dim, (i + 1) * dim)
            system[rows, rows] = matrices.mean(0)
            right[rows] = np.einsum("nij,nj->i", matrices, centres) / len(centres)
        return np.linalg.solve(system + np.kron(pull, np.eye(dim)), right).reshape(number, dim)

    def start(self, z: np.ndarray) -> L2State:
        """Every x_i = z, empty tables."""
        number = len(self.clients)
        tables = [np.zeros((len(self.components(i)), len(z))) for i in range(number)]
        return L2State(np.tile(z, (number, 1)), np.zeros((number, len(z))), tables)


@dataclass
class L2State:
    """x (N, d); psi (N, d); per client a table J_i (m_i, d). Unused tables stay zero."""

    x: np.ndarray
    psi: np.ndarray
    tables: list[np.ndarray]

    @property
    def table_means(self) -> np.ndarray:
        """J-bar_i, (N, d)."""
        return np.stack([table.mean(0) for table in self.tables])


def l2_direction(problem: L2Problem, state: L2State, coin: int, picks: list[int | None]) -> np.ndarray:
    """G (N, d) of one iteration; ``picks`` the component of each client, None where l2sgd++ does not sample it."""
    number, p, x = len(state.x), problem.probability, state.x
    has_psi, has_tables = problem.method in ("l2sgd2", "l2sgd+", "l2sgd++"), problem.method in ("l2sgd+", "l2sgd++")
    out = np.zeros_like(x)
    if coin == 1:
        out += problem.penalty * (x - x.mean(0)) / (number * p)
        if has_psi:
            out -= (1.0 / p - 1.0) * state.psi / number
        if has_tables:
            out += state.table_means / number
        return out
    boost = number / problem.num_sampled if problem.method == "l2sgd++" else 1.0
    for i, pick in enumerate(picks):
        if problem.method == "l2gd":
            fresh = gradient(problem.clients, i, x[i])
        elif pick is None:
            fresh = np.zeros_like(x[i])
        else:
            fresh = problem.component_gradient(i, pick, x[i]) - (state.tables[i][pick] if has_tables else 0.0)
        out[i] = boost * fresh / (number * (1.0 - p))
    if has_psi:
        out += state.psi / number
    if has_tables:
        out += state.table_means / number
    return out


def l2_iterate(problem: L2Problem, state: L2State, coin: int, picks: list[int | None]) -> L2State:
    """One iteration of the method; the tables are written from the x_i before the step."""
    x = state.x - problem.lr * l2_direction(problem, state, coin, picks)
    psi, tables = state.psi, state.tables
    if coin == 1 and problem.method in ("l2sgd2", "l2sgd+", "l2sgd++"):
        psi = problem.penalty * (state.x - state.x.mean(0))
    if coin == 0 and problem.method in ("l2sgd+", "l2sgd++"):
        tables = [table.copy() for table in tables]
        for i, pick in enumerate(picks):
            if pick is not None:
                tables[i][pick] = problem.component_gradient(i, pick, state.x[i])
    return L2State(x, psi, tables)


def coins(seed: int, probability: float, round: int) -> tuple[int, int]:
    """(k0, k1) of a round: iterations with coin 0 before its communication, with coin 1 after it.

    Runs of equal Bernoulli(p) coins: of 0 geometric in p, of 1 geometric in 1 - p.
    """
    rng = seeding.numpy_generator(seed, "coin", round)
    return int(rng.geometric(probability)), int(rng.geometric(1.0 - probability))


@outer_loop
def l2(
    run: Run,
    z: np.ndarray,
    penalty: float,
    probability: float,
    lr: float,
    method: str = "l2gd",
    num_sampled: int | None = None,
) -> Logged:
    """The L2GD family as the plain iteration of ALGORITHMS.md; the state is kept at each 0 -> 1 switch (a round).

    Here x-bar and the mean of J-bar are taken anew in every iteration. Draws: components from
    ``numpy_generator(seed, "component", t, client=i).integers(m_i)``, sampled clients of an l2sgd++ iteration from
    ``numpy_generator(seed, "participants", t).choice(N, S, replace=False)``, one draw per iteration with coin 0.
    """
    seed, number = run.local.steps.seed, len(run.clients)
    problem = L2Problem(
        run.clients, penalty, probability, lr, method, run.local.steps.batch_size, num_sampled or number
    )
    state, ones = problem.start(z), 0
    for t, sampled in run.rounds:
        assert sorted(sampled) == list(range(number))
        zeros, next_ones = coins(seed, probability, t)
        for _ in range(ones):
            state = l2_iterate(problem, state, 1, [])
        draws = [seeding.numpy_generator(seed, "component", t, client=i) for i in range(number)]
        participants = seeding.numpy_generator(seed, "participants", t)
        for _ in range(zeros):
            taking = set(range(number))
            if method == "l2sgd++":
                taking = set(participants.choice(number, num_sampled, replace=False).tolist())
            picks = [int(draws[i].integers(len(state.tables[i]))) if i in taking else None for i in range(number)]
            state = l2_iterate(problem, state, 0, picks)
        ones = next_ones
        yield {
            "z": state.x.mean(0),
            "local_model": state.x,
            "coupling_table": state.psi,
            "server_gradient_mean": state.table_means.mean(0),
            "gradient_tables": np.concatenate(state.tables),
        }


# Fed+


def squared_norm(delta: float) -> Prox:
    """Prox of (delta / 2) |.|^2."""
    return lambda v: v / (1.0 + delta)


def norm(delta: float) -> Prox:
    """Prox of delta |.|_2: 0 at 0."""

    def prox(v: np.ndarray) -> np.ndarray:
        length = float(np.linalg.norm(v))
        return np.zeros_like(v) if length <= delta else (1.0 - delta / length) * v

    return prox


def absolute_norm(delta: float) -> Prox:
    """Prox of delta |.|_1, both signs."""
    return lambda v: np.sign(v) * np.maximum(np.abs(v) - delta, 0.0)


def layerwise(*parts: tuple[slice, Prox]) -> Prox:
    """A prox of its own for each part of the vector."""

    def prox(v: np.ndarray) -> np.ndarray:
        out = np.full_like(v, np.nan)
        for where, inner in parts:
            out[where] = inner(v[where])
        return out

    return prox


def smoothed_center(w: np.ndarray, prox: Prox, max_sweeps: int = 1000) -> tuple[np.ndarray, int]:
    """From the mean of w (n, d), sweep z <- z + mean(w_i - z - theta_i); also the number of sweeps."""
    z = w.mean(0)
    for sweep in range(1, max_sweeps + 1):
        step = np.mean([row - z - prox(row - z) for row in w], axis=0)
        z = z + step
        if np.linalg.norm(step) <= 1e-8 * max(1.0, float(np.linalg.norm(z))):
            return z, sweep
    return z, max_sweeps + 1


@outer_loop
def fedplus(run: Run, z: np.ndarray, sigma: float, prox: Prox, mixing: float = 0.0, over: str = "sampled") -> Logged:
    """Fed+: after every optimizer step w <- kappa w + (1 - kappa)(z + theta_i), kappa from the step's own lr."""
    x = run.each(z)
    for t, sampled in run.rounds:
        for i in sampled:
            anchor = z + prox(x[i] - z)
            w, velocity, lr = (1.0 - mixing) * x[i] + mixing * z, np.zeros_like(z), run.local.lr
            for batches in run.local.steps(t, i):
                grad = sum(run.gradient(i, w, rows) for rows in batches) / run.local.divisor
                if run.local.clip is not None:
                    grad = grad * min(1.0, run.local.clip / (np.linalg.norm(grad) + 1e-6))
                velocity = run.local.momentum * velocity + grad
                kappa = 1.0 / (1.0 + lr * sigma)
                w = kappa * (w - lr * velocity) + (1.0 - kappa) * anchor
                lr = lr * run.local.decay
            x[i] = w
        z, _ = smoothed_center(x[sampled] if over == "sampled" else x, prox)
        yield {"z": z, "local_model": x}


# MOON


def contrast_gradient(
    centres: np.ndarray, w: np.ndarray, z: np.ndarray, own: np.ndarray, temperature: float
) -> np.ndarray:
    """The gradient in w of the mean over samples of equation 3, where a model's features of a sample are w - centre."""
    total = np.zeros_like(w)
    for centre in centres:
        feature, slopes, similarities = w - centre, [], []
        for other in (z - centre, own - centre):
            norm, length = np.linalg.norm(feature), np.linalg.norm(other)
            cosine = feature @ other / (norm * length)
            similarities.append(cosine)
            slopes.append(other / (norm * length) - cosine * feature / norm**2)
        powers = np.exp(np.array(similarities) / temperature)
        share = powers[0] / powers.sum()
        total += -(1 - share) / temperature * (slopes[0] - slopes[1])
    return total / len(centres)


@outer_loop
def moon(
    run: Run,
    z: np.ndarray,
    mu: float = 1.0,
    temperature: float = 0.5,
    weighting: str = "samples",
    is_kept: np.ndarray | bool = False,
) -> Logged:
    """FedAvg with mu times the contrastive term; a client's own model is that after its last participation.

    ``is_kept`` (d,): which parameters stay with their client; those of ``z`` stay as they were at the beginning.
    """
    x = run.each(z)
    for t, sampled in run.rounds:
        ends = []
        for i in sampled:
            start = np.where(is_kept, x[i], z)

            def contrast(w: np.ndarray, rows: Rows, i: int = i, z: np.ndarray = start) -> np.ndarray:
                centres = run.clients[i][1] if rows is None else run.clients[i][1][rows]
                return mu * contrast_gradient(centres, w, z, x[i], temperature)

            ends.append(run.train(t, i, start, np.zeros_like, contrast).w)
        x[sampled] = ends
        z = np.where(is_kept, z, run.shares(sampled, weighting) @ np.stack(ends))
        yield {"z": z, "local_model": x}
