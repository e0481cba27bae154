"""NumPy loops for FedAvg, FedProx, SCAFFOLD and FedBC on quadratics, from ALGORITHMS.md alone; no code of the package.

Shapes: w, z, grad (d,); x, control (N, d); dual, tolerance (N,). Trajectories have one row per finished round.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

Clients = list[tuple[np.ndarray, np.ndarray]]
Term = Callable[[np.ndarray], np.ndarray]
Rows = np.ndarray | None
Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A robust rule: updates w_i - z (n, d) and weights (n,) -> what z moves by (d,)."""


def gradient(clients: Clients, client: int, w: np.ndarray, rows: Rows = None) -> np.ndarray:
    """g_i(w) (d,) of the mean loss over ``rows`` (all samples where None)."""
    matrices, centres = clients[client]
    picked = slice(None) if rows is None else rows
    return np.einsum("nij,nj->i", matrices[picked], w - centres[picked]) / len(centres[picked])


def loss(clients: Clients, client: int, w: np.ndarray, rows: Rows = None) -> float:
    """f_i(w) of the mean loss over ``rows`` (all samples where None)."""
    matrices, centres = clients[client]
    picked = slice(None) if rows is None else rows
    offset = w - centres[picked]
    return float(0.5 * np.einsum("ni,nij,nj->", offset, matrices[picked], offset) / len(offset))


def minimiser(clients: Clients) -> np.ndarray:
    """argmin (d,) of the unweighted mean over clients of f_i."""
    curvature = sum(matrices.mean(0) for matrices, _ in clients)
    linear = sum(np.einsum("nij,nj->i", matrices, centres) / len(centres) for matrices, centres in clients)
    return np.linalg.solve(curvature, linear)


@dataclass(frozen=True)
class FullBatches:
    """Which samples a client's steps see: all of them, in ``number`` steps. Tests have others with the same names.

    Attributes:
        number: Number of steps.
        seed: The run's seed, for the coins of an algorithm.
        batch_size: Samples per batch; None: all of a client's.
    """

    number: int
    seed: int = 0
    batch_size: int | None = None

    def __call__(self, round: int, client: int) -> list[list[Rows]]:
        """Optimizer steps of one local training, each a list of micro-batches of sample indices (None: all)."""
        return [[None]] * self.number

    def batches(self, round: int, client: int) -> Iterator[Rows]:
        """The same batches as a stream that runs on through further epochs without an end."""
        return repeat(None)

    def batches_per_epoch(self, client: int) -> int:
        """How many batches of that stream are one pass over the client's samples."""
        return 1


full_batches = FullBatches


@dataclass
class Local:
    """What one local training does.

    Attributes:
        lr: Step size, a number or one per coordinate (d,).
        momentum: Of SGD.
        decay: Factor of the step size after every optimizer step.
        clip: Largest gradient norm, None for no clipping.
        steps: Which samples the optimizer steps see.
        divisor: Number of micro-batches by which each loss is divided (``accumulate_grad_batches``).
    """

    lr: float | np.ndarray = 0.1
    momentum: float = 0.0
    decay: float = 1.0
    clip: float | None = None
    steps: Any = FullBatches(1)
    divisor: int = 1


@dataclass
class Trained:
    """The outcome of one local training: last iterate, steps, mean raw gradient, step size and loss before a step."""

    w: np.ndarray
    num_steps: int
    mean_gradient: np.ndarray
    mean_lr: float | np.ndarray
    mean_loss: float


def train(
    clients: Clients,
    local: Local,
    round: int,
    client: int,
    start: np.ndarray,
    term: Term = np.zeros_like,
    of_batch: Callable[[np.ndarray, Rows], np.ndarray] | None = None,
) -> Trained:
    """Default local training: the term is added once per step, after accumulation and before clipping.

    ``of_batch(w, rows)``: the gradient of what a method adds to the loss of each batch.
    """
    w, lr = start.copy(), local.lr
    velocity = np.zeros_like(w)
    raw_sum = np.zeros_like(w)
    lr_sum = 0.0 * np.asarray(local.lr)
    losses: list[float] = []
    steps = local.steps(round, client)
    for batches in steps:
        losses += [loss(clients, client, w, rows) for rows in batches]
        raw = sum(gradient(clients, client, w, rows) for rows in batches) / local.divisor
        if of_batch is not None:
            raw = raw + sum(of_batch(w, rows) for rows in batches) / local.divisor
        raw_sum = raw_sum + raw
        grad = raw + term(w)
        if local.clip is not None:
            grad = grad * min(1.0, local.clip / (np.linalg.norm(grad) + 1e-6))
        velocity = local.momentum * velocity + grad
        w = w - lr * velocity
        lr_sum = lr_sum + lr
        lr = lr * local.decay
    return Trained(w, len(steps), raw_sum / len(steps), lr_sum / len(steps), float(np.mean(losses)))


Logged = Iterator[dict[str, np.ndarray]]
"""What a method's function yields after each round: z, client state by its declared name, "server_<name>"."""


@dataclass(frozen=True)
class Run:
    """What every method is given: who trains in which round, on which data, and how a client trains by default."""

    clients: Clients
    rounds: list[tuple[int, list[int]]]
    local: Local

    def each(self, z: np.ndarray) -> np.ndarray:
        """One copy of z for each client, (N, d)."""
        return np.tile(z, (len(self.clients), 1))

    def sizes(self, sampled: list[int], weighting: str) -> np.ndarray:
        """Weights (n,) of the sampled clients, by samples or alike."""
        return np.array([len(self.clients[i][1]) if weighting == "samples" else 1.0 for i in sampled])

    def shares(self, sampled: list[int], weighting: str) -> np.ndarray:
        """The weights with the sum 1."""
        sizes = self.sizes(sampled, weighting)
        return sizes / sizes.sum()

    def gradient(self, client: int, w: np.ndarray, rows: Rows = None) -> np.ndarray:
        return gradient(self.clients, client, w, rows)

    def loss(self, client: int, w: np.ndarray, rows: Rows = None) -> float:
        return loss(self.clients, client, w, rows)

    def train(self, round: int, client: int, start: np.ndarray, *terms: Any) -> Trained:
        return train(self.clients, self.local, round, client, start, *terms)


def outer_loop(method: Callable[..., Logged]) -> Callable[..., dict[str, np.ndarray]]:
    """Make ``(clients, rounds, z, local, ...) -> trajectories`` of a method that yields its state after each round."""

    def trajectories(
        clients: Clients, rounds: list[list[int]], z: np.ndarray, local: Local, *args: Any, **options: Any
    ) -> dict[str, np.ndarray]:
        kept: dict[str, list[np.ndarray]] = {}
        for state in method(Run(clients, list(enumerate(rounds, start=1)), local), z, *args, **options):
            for name, value in state.items():
                kept.setdefault(name, []).append(np.array(value, dtype=np.float64))
        return {name: np.stack(values) for name, values in kept.items()}

    return trajectories


@outer_loop
def fedprox(run: Run, z: np.ndarray, mu: float, weighting: str = "samples") -> Logged:
    """FedProx: gradient term mu (w - z), then z <- z - sum of p_i (z - w_i)."""
    x = run.each(z)
    for t, sampled in run.rounds:
        received = z.copy()
        for i in sampled:
            x[i] = run.train(t, i, received, lambda w, z=received: mu * (w - z)).w
        delta = sum(p * (received - x[i]) for p, i in zip(run.shares(sampled, weighting), sampled, strict=True))
        z = received - delta
        yield {"z": z, "local_model": x}


def fedavg(
    clients: Clients, rounds: list[list[int]], z: np.ndarray, local: Local, weighting: str = "samples"
) -> dict[str, np.ndarray]:
    """FedAvg: no term."""
    return fedprox(clients, rounds, z, local, 0.0, weighting)


@outer_loop
def scaffold(
    run: Run, z: np.ndarray, server_lr: float = 1.0, control: str = "step_size", rule: Rule | None = None
) -> Logged:
    """SCAFFOLD: term c - c_i; both forms of c_i; c moves by (1/N) of the sum, z by server_lr times the mean or rule."""
    number = len(run.clients)
    x, c_i, c = run.each(z), np.zeros((number, len(z))), np.zeros_like(z)
    for t, sampled in run.rounds:
        moved = np.zeros_like(z)
        delta = np.zeros_like(z)
        for i in sampled:
            out = run.train(t, i, z, lambda w, shift=c - c_i[i]: shift)
            if control == "step_size":
                new = c_i[i] - c + (z - out.w) / (out.num_steps * out.mean_lr)
            else:
                new = out.mean_gradient
            moved += new - c_i[i]
            c_i[i] = new
            x[i] = out.w
            delta += (z - out.w) / len(sampled)
        c = c + moved / number
        if rule is not None:
            delta = -rule(x[sampled] - z, np.ones(len(sampled)))
        z = z - server_lr * delta
        yield {"z": z, "local_model": x, "control": c_i, "server_control": c}


@outer_loop
def fedbc(
    run: Run,
    z: np.ndarray,
    dual_lr: float,
    dual_init: float = 0.0,
    tolerance: str | float | list[float] = "learned",
    tolerance_lr: float | None = None,
    dual_min: float = 0.0,
    dual_max: float = np.inf,
    dual_momentum: float = 0.0,
    dual_momentum_style: str = "client",
    init_from: str = "global",
    solve: Callable[[int, int, np.ndarray, float], np.ndarray] | None = None,
    rule: Rule | None = None,
) -> Logged:
    """FedBC, eq. 11 and 13, with the momentum of the public code's loop where the style is ``public``.

    ``solve``: ``(round, client, z, dual) -> w_i`` in place of the local training; ``rule`` in place of the mean.
    """
    number = len(run.clients)
    learned = tolerance == "learned"
    step_gamma = (dual_lr if tolerance_lr is None else tolerance_lr) if learned else 0.0
    dual = np.full(number, float(dual_init))
    gamma = np.zeros(number) if learned else np.broadcast_to(np.asarray(tolerance, dtype=np.float64), number).copy()
    v_dual, v_gamma = np.zeros(number), np.zeros(number)
    x = run.each(z)
    for t, sampled in run.rounds:
        for i in sampled:
            start = x[i] if init_from == "local" else z
            if solve is None:
                x[i] = run.train(t, i, start, lambda w, lam=dual[i], z=z: 2.0 * lam * (w - z)).w
            else:
                x[i] = solve(t, i, z, dual[i])
            distance = float(np.sum((x[i] - z) ** 2))
            if dual_momentum_style == "public":
                push_dual, push_gamma = np.zeros(number), np.zeros(number)
                push_dual[i], push_gamma[i] = distance - gamma[i], dual[i]
                v_dual, v_gamma = dual_momentum * v_dual + push_dual, dual_momentum * v_gamma + push_gamma
                dual = np.clip(dual + dual_lr * v_dual, dual_min, dual_max)
                gamma = gamma + step_gamma * v_gamma
            else:
                v_dual[i] = dual_momentum * v_dual[i] + (distance - gamma[i])
                v_gamma[i] = dual_momentum * v_gamma[i] + dual[i]
                dual[i] = np.clip(dual[i] + dual_lr * v_dual[i], dual_min, dual_max)
                gamma[i] = gamma[i] + step_gamma * v_gamma[i]
        weights = dual[sampled]
        if not weights.any():
            weights = np.ones(len(sampled))
        z = weights @ x[sampled] / weights.sum() if rule is None else z + rule(x[sampled] - z, weights)
        yield {"z": z, "local_model": x, "dual": dual, "tolerance": gamma}
