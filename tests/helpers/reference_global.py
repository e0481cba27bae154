"""NumPy loops for the methods with one global model and for robust rules, from ALGORITHMS.md sections 1 and 2 alone.

No code of the package but its coins (``seeding``). Shapes: w, z (d,); x, multiplier, correction (N, d); updates (n, d)
are w_i - z. Trajectories have one row per finished round: "z", client state by its declared name, "server_<name>".
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from fedbc_lightning.core import seeding
from helpers import reference
from helpers.reference import Clients, Local, Logged, Rule, Run, Trained, gradient, outer_loop, train

Trajectories = dict[str, np.ndarray]
ServerStep = Callable[[np.ndarray, np.ndarray, list[Trained], np.ndarray], tuple[np.ndarray, dict[str, np.ndarray]]]
"""(z, mean of w_i - z, what the clients did, p) -> the next z and the server's vectors."""


# Robust rules: factories, since centred clipping keeps its last output. Weights need not sum to 1.


def _present(rule: Rule) -> Rule:
    """Clients of weight 0 are left out; if all are 0, all count alike."""

    def with_weights(updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
        weights = np.asarray(weights, dtype=np.float64)
        if not weights.any():
            weights = np.ones(len(weights))
        return rule(updates[weights > 0], weights[weights > 0])

    return with_weights


def weighted_mean() -> Rule:
    """Sum of p_i u_i."""
    return _present(lambda updates, weights: weights @ updates / weights.sum())


def coordinate_median() -> Rule:
    """Per coordinate the mean of the lower and the upper weighted median."""

    def rule(updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
        out = []
        for column in updates.T:
            order = np.argsort(column, kind="stable")
            below_or_at = np.cumsum(weights[order])
            half = below_or_at[-1] / 2
            lower = next(k for k, mass in enumerate(below_or_at) if mass >= half)
            upper = next(k for k, mass in enumerate(below_or_at) if mass > half)
            out.append((column[order[lower]] + column[order[upper]]) / 2)
        return np.array(out)

    return _present(rule)


def trimmed_mean(trim: float) -> Rule:
    """Per coordinate the weighted mean of what is left without the floor(trim n) least and greatest."""

    def rule(updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
        drop, out = int(np.floor(trim * len(updates))), []
        for column in updates.T:
            kept = np.argsort(column, kind="stable")[drop : len(column) - drop]
            out.append(weights[kept] @ column[kept] / weights[kept].sum())
        return np.array(out)

    return _present(rule)


def _krum_scores(updates: np.ndarray, num_byzantine: int) -> np.ndarray:
    """Sum of squared distances to the n - f - 2 nearest others."""
    assert len(updates) > 2 * num_byzantine + 2
    scores = []
    for i, update in enumerate(updates):
        squares = sorted(float(np.sum((update - other) ** 2)) for j, other in enumerate(updates) if j != i)
        scores.append(sum(squares[: len(updates) - num_byzantine - 2]))
    return np.array(scores)


def krum(num_byzantine: int) -> Rule:
    """The update with the lowest score."""
    return _present(lambda updates, weights: updates[np.argmin(_krum_scores(updates, num_byzantine))])


def multi_krum(num_byzantine: int) -> Rule:
    """The weighted mean of the n - f updates with the lowest scores."""

    def rule(updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
        kept = np.argsort(_krum_scores(updates, num_byzantine), kind="stable")[: len(updates) - num_byzantine]
        return weights[kept] @ updates[kept] / weights[kept].sum()

    return _present(rule)


def geometric_median(smoothing: float = 1e-5, max_iter: int = 100, rtol: float = 1e-6) -> Rule:
    """Weiszfeld's sweeps from the weighted mean; b_i = p_i / max(nu, |v - u_i|)."""

    def rule(updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
        p = weights / weights.sum()
        v = p @ updates
        for _ in range(max_iter):
            b = np.array([p[i] / max(smoothing, np.linalg.norm(v - u)) for i, u in enumerate(updates)])
            last, v = v, b @ updates / b.sum()
            if np.linalg.norm(v - last) <= rtol * np.linalg.norm(last):
                break
        return v

    return _present(rule)


def centered_clipping(radius: float, num_iterations: int = 1) -> Rule:
    """From the last output, ``num_iterations`` times a mean of differences clipped to ``radius``."""
    centre: list[np.ndarray] = []

    def rule(updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
        v, p = centre[-1] if centre else np.zeros(updates.shape[1]), weights / weights.sum()
        for _ in range(num_iterations):
            moves = [(u - v) * min(1.0, radius / max(np.linalg.norm(u - v), 1e-300)) for u in updates]
            v = v + p @ np.array(moves)
        centre.append(v)
        return v

    return _present(rule)


def norm_bound(bound: float) -> Rule:
    """The weighted mean of updates clipped to length ``bound``."""

    def rule(updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
        clipped = [u * min(1.0, bound / max(np.linalg.norm(u), 1e-300)) for u in updates]
        return weights @ np.array(clipped) / weights.sum()

    return _present(rule)


def with_rule(loop: Callable[..., Trajectories], make: Callable[[], Rule], **options: Any) -> Callable[..., Any]:
    """The loop with a fresh rule in every run; the rule's outputs are ``server_clipping_center``."""

    def run(clients: Clients, rounds: list[list[int]], z: np.ndarray, local: Local) -> Trajectories:
        rule, outputs = make(), []

        def recorded(updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
            outputs.append(rule(updates, weights))
            return outputs[-1]

        found = loop(clients, rounds, z, local, rule=recorded, **options)
        return found | {"server_clipping_center": np.stack(outputs)}

    return run


# FedAvg with another server


@outer_loop
def _averaged(
    run: Run, z: np.ndarray, step: ServerStep, weighting: str = "samples", rule: Rule | None = None, mu: float = 0.0
) -> Logged:
    """Local training from z with the term mu (w - z), the (robust) mean of w_i - z, then the server's step."""
    x, average = run.each(z), rule or weighted_mean()
    for t, sampled in run.rounds:
        done = [run.train(t, i, z, lambda w, z=z: mu * (w - z)) for i in sampled]
        weights = run.sizes(sampled, weighting)
        mean = average(np.stack([out.w - z for out in done]), weights)
        for i, out in zip(sampled, done, strict=True):
            x[i] = out.w
        z, vectors = step(z, mean, done, weights / weights.sum())
        yield {"z": z, "local_model": x, **{f"server_{name}": vector for name, vector in vectors.items()}}


def fedavg(*args: Any, **how: Any) -> Trajectories:
    """FedAvg with a robust rule, and FedProx with one where ``mu`` is given."""
    return _averaged(*args, lambda z, mean, done, p: (z + mean, {}), **how)


fedprox = fedavg


def rfa(*args: Any, smoothing: float = 1e-5, max_iter: int = 100, **how: Any) -> Trajectories:
    """RFA: the geometric median of the w_i."""
    return fedavg(*args, rule=geometric_median(smoothing, max_iter), **how)


def fedavgm(*args: Any, server_lr: float = 1.0, momentum: float = 0.9, **how: Any) -> Trajectories:
    """FedAvgM: m <- beta m - Delta, z <- z + eta_s m."""
    m = 0.0

    def step(z: np.ndarray, mean: np.ndarray, done: list[Trained], p: np.ndarray) -> Any:
        nonlocal m
        m = momentum * m + mean
        return z + server_lr * m, {"momentum": m}

    return _averaged(*args, step, **how)


def fedopt(
    *args: Any,
    kind: str,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    **how: Any,
) -> Trajectories:
    """FedAdagrad, FedAdam, FedYogi (Reddi et al. 2021): v starts at tau squared, no bias correction."""
    m, v = 0.0, tau**2

    def step(z: np.ndarray, mean: np.ndarray, done: list[Trained], p: np.ndarray) -> Any:
        nonlocal m, v
        delta = -mean
        m = beta1 * m + (1 - beta1) * -delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        return z + server_lr * m / (np.sqrt(v) + tau), {"momentum": m, "second_moment": v}

    return _averaged(*args, step, **how)


def fedlilu(
    *args: Any,
    server_lr: float = 0.01,
    server_momentum: float = 0.9,
    weight_decay: float = 1e-5,
    gammas: list[float] | None = None,
    **how: Any,
) -> Trajectories:
    """FedLi-LU: a Deep-Frank-Wolfe step at the server; ``gammas`` collects gamma of each round."""
    m = 0.0

    def step(z: np.ndarray, mean: np.ndarray, done: list[Trained], p: np.ndarray) -> Any:
        nonlocal m
        delta, decay = -mean, weight_decay * z
        value = sum(share * out.mean_loss for share, out in zip(p, done, strict=True))
        gamma = (value - server_lr * (delta @ decay)) / (server_lr * (delta @ delta) + 1e-5)
        gamma = min(max(gamma, 0.0), 1.0)
        if gammas is not None:
            gammas.append(gamma)
        z = z - server_lr * (decay + gamma * delta)
        m = server_momentum * m - server_lr * gamma * (delta + decay)
        return z + server_momentum * m, {"momentum": m}

    return _averaged(*args, step, **how)


@outer_loop
def fedexp(
    run: Run, z: np.ndarray, epsilon: float = 1e-3, style: str = "paper", steps: list[float] | None = None
) -> Logged:
    """FedExP; ``steps`` collects eta_s of each round.

    The public code (Divyansh03/FedExP, main.py) shrinks eta and epsilon at the start of every round, also the first.
    """
    x = run.each(z)
    for t, sampled in run.rounds:
        public = style == "public"
        shrunk = replace(run.local, lr=run.local.lr * 0.998**t) if public else run.local
        p = run.sizes(sampled, "samples" if public else "uniform")
        p = p / p.sum()
        deltas = []
        for i in sampled:
            x[i] = train(run.clients, shrunk, t, i, z).w
            deltas.append(z - x[i])
        mean = p @ np.array(deltas)
        squares = sum(share * (delta @ delta) for share, delta in zip(p, deltas, strict=True))
        guard = len(sampled) * epsilon * 0.998 ** (2 * t) if public else epsilon
        server_lr = max(1.0, squares / (2 * (mean @ mean + guard)))
        if steps is not None:
            steps.append(server_lr)
        previous, z = z, z - server_lr * mean
        yield {"z": z, "local_model": x, "server_previous_z": previous}


@outer_loop
def qfedavg(run: Run, z: np.ndarray, q: float = 1.0, lipschitz: float | None = None, style: str = "paper") -> Logged:
    """q-FedAvg: clients with a higher loss at z weigh more."""
    x = run.each(z)
    for t, sampled in run.rounds:
        numerator, denominator = np.zeros_like(z), 0.0
        for i in sampled:
            out = run.train(t, i, z)
            constant = 1 / out.mean_lr if lipschitz is None else lipschitz
            value, move = run.loss(i, z) + 1e-10, constant * (z - out.w)
            weight, squares = 1.0, move @ move
            if style == "public":
                weight, squares = len(run.clients[i][1]), (z - out.w) @ (z - out.w)
            numerator += weight * value**q * move
            denominator += weight * (q * value ** (q - 1) * squares + constant * value**q)
            x[i] = out.w
        z = z - numerator / denominator
        yield {"z": z, "local_model": x}


@outer_loop
def fedlils(
    run: Run, z: np.ndarray, server_step: str = "max", sufficient_decrease: float = 0.1, shrink: float = 0.9,
    growth: float = 2.0, max_step: float = 10.0, weighting: str = "samples", rule: Rule | None = None,
) -> Logged:  # fmt: skip
    """FedLi-LS: Armijo's rule on every batch; the server steps by 1 or by the largest of the last step sizes."""
    x, average = run.each(z), rule or weighted_mean()
    last_step = np.ones(len(run.clients))
    for t, sampled in run.rounds:
        searched = []
        for i in sampled:
            w, eta = z, 1.0
            for rows in (rows for batches in run.local.steps(t, i) for rows in batches):
                value, g = run.loss(i, w, rows), run.gradient(i, w, rows)
                if np.linalg.norm(g) < 1e-8:
                    continue
                searched.append(i)
                eta = min(max_step, eta * growth ** (1 / run.local.steps.batches_per_epoch(i)))
                for attempt in range(100):
                    if attempt:
                        eta *= shrink
                    if run.loss(i, w - eta * g, rows) <= value - sufficient_decrease * eta * (g @ g):
                        w = w - eta * g
                        break
                else:
                    w = w - 1e-6 * g
            x[i] = w
            last_step[i] = eta if i in searched else last_step[i]
        server_lr = max(last_step[searched]) if server_step == "max" and searched else 1.0
        z = z + server_lr * average(x[sampled] - z, run.sizes(sampled, weighting))
        yield {"z": z, "local_model": x, "last_step": last_step}


# Methods with state


@outer_loop
def feddyn(run: Run, z: np.ndarray, alpha: float = 0.01, rule: Rule | None = None) -> Logged:
    """FedDyn: term alpha (w - z) - h_i; z is the (robust) mean of the w_i less h / alpha."""
    x, h_i, h = run.each(z), np.zeros((len(run.clients), len(z))), np.zeros_like(z)
    average = rule or weighted_mean()
    for t, sampled in run.rounds:
        for i in sampled:
            x[i] = run.train(t, i, z, lambda w, z=z, i=i: alpha * (w - z) - h_i[i]).w
            h_i[i] -= alpha * (x[i] - z)
        h = h - alpha / len(run.clients) * (x[sampled] - z).sum(0)
        z = z + average(x[sampled] - z, np.ones(len(sampled))) - h / alpha
        yield {"z": z, "local_model": x, "correction": h_i, "server_correction": h}


@outer_loop
def fedadmm(run: Run, z: np.ndarray, rho: float = 0.01) -> Logged:
    """FedADMM: from x_i with the term y_i + rho (w - z); z is the mean of u_i over all N."""
    x = run.each(z)
    y, u = np.zeros_like(x), x.copy()
    for t, sampled in run.rounds:
        for i in sampled:
            x[i] = run.train(t, i, x[i], lambda w, z=z, i=i: y[i] + rho * (w - z)).w
            y[i] += rho * (x[i] - z)
            u[i] = x[i] + y[i] / rho
        z = u.mean(0)
        yield {"z": z, "local_model": x, "multiplier": y, "server_augmented_mean": z}


@outer_loop
def fedpd(run: Run, z: np.ndarray, rho: float = 0.01, skip_probability: float = 0.0) -> Logged:
    """FedPD: all clients, each about its own z_i; with the skip probability nothing is exchanged."""
    x = run.each(z)
    y, centre = np.zeros_like(x), x.copy()
    for t, sampled in run.rounds:
        assert sorted(sampled) == list(range(len(run.clients)))
        for i in sampled:
            own = centre[i].copy()
            x[i] = run.train(t, i, x[i], lambda w, own=own, i=i: y[i] + rho * (w - own)).w
            y[i] += rho * (x[i] - own)
            centre[i] = x[i] + y[i] / rho
        if not is_skipped(run.local.steps.seed, t, skip_probability):
            z = centre.mean(0)
            centre[:] = z
        yield {"z": z, "local_model": x, "multiplier": y, "center": centre}


def is_skipped(seed: int, round: int, skip_probability: float) -> bool:
    """FedPD's coin."""
    return seeding.numpy_generator(seed, "skip", round).random() < skip_probability


def perfedbc(
    clients: Clients,
    rounds: list[list[int]],
    z: np.ndarray,
    local: Local,
    inner_lr: float = 0.01,
    outer_lr: float = 0.001,
    num_inner_steps: int = 1,
    **fedbc_options: Any,
) -> Trajectories:
    """Per-FedBC (Algorithm 3): every outer step takes the next J + 1 batches; the server is FedBC's."""

    def solve(round: int, client: int, z: np.ndarray, dual: float) -> np.ndarray:
        w, stream = z, local.steps.batches(round, client)
        for _ in local.steps(round, client):
            *inner, outer = islice(stream, num_inner_steps + 1)
            adapted = w
            for rows in inner:
                adapted = adapted - inner_lr * (gradient(clients, client, adapted, rows) + 2 * dual * (adapted - z))
            w = w - outer_lr * gradient(clients, client, adapted, outer)
        return w

    return reference.fedbc(clients, rounds, z, local, solve=solve, **fedbc_options)


@outer_loop
def fednova(run: Run, z: np.ndarray, weighting: str = "samples") -> Logged:
    """z - tau * sum of p_i d_i, where d_i is the update over the sum of its gradients' coefficients."""
    x = run.each(z)
    for t, sampled in run.rounds:
        shares, directions, norms = run.shares(sampled, weighting), [], []
        for i in sampled:
            out = run.train(t, i, z)
            x[i], velocity, norm = out.w, 0.0, 0.0
            for _ in range(out.num_steps):  # the optimizer on gradients that are all 1
                velocity = run.local.momentum * velocity + 1.0
                norm += velocity
            directions.append((z - out.w) / norm)
            norms.append(norm)
        z = z - float(shares @ np.array(norms)) * (shares @ np.stack(directions))
        yield {"z": z, "local_model": x}


# Algorithms that are assembled from parts, and training on pooled data


@outer_loop
def mixed(run: Run, z: np.ndarray) -> Logged:
    """FedProx term (0.2) + FedBC's dual ascent (0.05, tolerance 0.5) + geometric median (4 sweeps) + server Adam."""
    number = len(run.clients)
    dual, gamma = np.zeros(number), np.full(number, 0.5)
    first, second = np.zeros_like(z), np.full_like(z, 1e-3**2)
    for t, sampled in run.rounds:
        x = {i: run.train(t, i, z, lambda w, z=z: 0.2 * (w - z)).w for i in sampled}
        for i in sampled:
            dual[i] = max(0.0, dual[i] + 0.05 * (np.sum((x[i] - z) ** 2) - gamma[i]))
        updates = np.stack([x[i] - z for i in sampled])
        direction = geometric_median(max_iter=4, rtol=1e-12)(updates, dual[sampled])
        first = 0.9 * first + 0.1 * direction
        second = 0.99 * second + 0.01 * direction**2
        z = z + 0.1 * first / (np.sqrt(second) + 1e-3)
        yield {"z": z, "dual": dual, "tolerance": gamma, "server_momentum": first, "server_second_moment": second}


@outer_loop
def centralized(run: Run, z: np.ndarray) -> Logged:
    """E epochs over all clients' samples, as of one client with the number -1."""
    pooled = [tuple(np.concatenate(parts) for parts in zip(*run.clients, strict=True))]
    for t, _ in run.rounds:
        z = train(pooled, run.local, t, -1, z).w
        yield {"z": z}
