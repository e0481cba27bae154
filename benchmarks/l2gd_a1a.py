"""The study of Hanzely & Richtárik 2020 (their Figures 2, 3 and 5) on LibSVM a1a, with this package's own trainer.

    python benchmarks/l2gd_a1a.py --data ../shared/data/libsvm/a1a [--out l2gd_a1a] [--quick]

    min F(x_1 ... x_N) = (1/N) Σ f_i(x_i) + (λ/2N) Σ ‖x_i − x̄‖²
    f_i(x) = mean_j log(1 + exp(−b_ij a_ij·x)) + (μ/2)‖x‖²

It prints a table and writes figure.png, figure.svg, runs.csv (a row per run), curves.csv (a row per communication).

(a) (F(x^k) − F*) / (F(0) − F*) against communications for L2SGD+, and for L2SGD2 and L2SGD with the same p, α, coins
    and samples: L2SGD+ converges linearly, the others idle. So does L2GD, at the largest α of its theorem and at a
    quarter of it: its gradients are full, but the coin is noise too; its floor falls with α. Dotted: the floors of
    theory, α/4 E‖G(x*)‖² (see Problem.floor).
(b) Communications and local steps that L2SGD+ needs to 1e-5 for other p, with the α(p) of its theorem,
    N min{(1 − p)/(4L̃ + μm), p/(4λ + μ)}, and p* = (4λ + μ)/(4λ + 4L̃ + (m + 1)μ). Dotted: the theorem's bounds,
    p(1 − p)N/(α(p)μ) and (1 − p)N/(α(p)μ) up to a factor that is chosen to meet the run at p*. By them
    communications hardly change below p* and are proportional to p above: p* needs about the fewest, and of the p
    that do, the least work.

Setup. Rows are scaled to one length, so that every f_ij has smoothness L̃ = 1, the L2 term included: ‖a‖²/4 + μ = 1.
No bias. λ = 0.1 as in the paper. N = 5 clients of m = 321 samples with μ = 1e-3 (p* = 0.085; the paper's Figure 2:
about 0.09). N = 100 of 16, for which 5 rows of the 1,605, drawn at random, are left out, with μ = 1e-2: a communication
costs 20 times as much there. "homogeneous": shuffled; "heterogeneous": sorted by label. A component is one sample; L2GD
gets its full gradient as one batch. All in float64. x_i is seen where it is sent: at the end of a run of local steps.
"""

from __future__ import annotations

import argparse
import csv
import io
import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_svmlight_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning import FederatedDataModule, FederatedTrainer
from fedbc_lightning.algorithms import L2GD, L2SGD, L2SGD2, L2SGDPlus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOAL = 1e-5
SMOOTHNESS = 1.0
SUBOPTIMALITY = "(F(xᵏ) − F*) / (F(0) − F*)"
MAX_POINTS = 50  # of a curve in (a): each is a window of communications
SMALLER = 4  # the second step size of L2GD is α / 4
METHODS: dict[str, type[L2GD]] = {"L2SGD+": L2SGDPlus, "L2SGD2": L2SGD2, "L2SGD": L2SGD, "L2GD": L2GD}
COLORS = {
    "L2SGD+": "#c1121f", "L2SGD2": "#7b2cbf", "L2SGD": "#2a6f97", "L2GD": "#e09f3e", f"L2GD, α/{SMALLER}": "#588157",
}  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What is run for one number of clients.

    Attributes:
        num_clients: N.
        mu: μ.
        factors: The p of (b), in units of p*; 1 is the run of (a).
        splits: Those of (a).
        swept: Those of (b).
        depth: (a) ends where L2SGD+ has come down to this.
    """

    num_clients: int
    mu: float
    factors: tuple[float, ...]
    splits: tuple[str, ...] = ("homogeneous", "heterogeneous")
    swept: tuple[str, ...] = ("homogeneous", "heterogeneous")
    depth: float = 1e-6


FULL = (
    Study(5, 1e-3, factors=(0.25, 0.5, 0.7, 1.4, 2.0, 4.0)),
    Study(100, 1e-2, factors=(0.5, 2.0), swept=("heterogeneous",), depth=GOAL),
)
QUICK = (Study(5, 1e-2, factors=(0.5, 2.0), splits=("heterogeneous",), swept=("heterogeneous",), depth=GOAL),)


# the problem


@dataclass(frozen=True)
class Problem:
    """F, its minimiser, and what theory says of the methods.

    Attributes:
        inputs: a_ij, (N, m, d).
        labels: b_ij, -1 or 1, (N, m).
        mu: μ.
        penalty: λ.
        split: Its name.
    """

    inputs: np.ndarray
    labels: np.ndarray
    mu: float
    penalty: float = 0.1
    split: str = ""

    @classmethod
    def from_rows(cls, features: np.ndarray, labels: np.ndarray, study: Study, split: str, seed: int = 0) -> Problem:
        """Scale the rows, drop what does not divide by N at random, and deal out equal parts."""
        length = np.sqrt(4 * (SMOOTHNESS - study.mu))
        scaled = features * (length / np.linalg.norm(features, axis=1, keepdims=True))
        num_samples = len(labels) // study.num_clients
        order = np.random.default_rng(seed).permutation(len(labels))[: num_samples * study.num_clients]
        if split == "heterogeneous":
            order = order[np.argsort(labels[order], kind="stable")]
        shape = study.num_clients, num_samples
        return cls(scaled[order].reshape(*shape, -1), labels[order].reshape(shape), study.mu, split=split)

    @property
    def num_clients(self) -> int:
        """N."""
        return self.labels.shape[0]

    @property
    def num_samples(self) -> int:
        """Of each client, m."""
        return self.labels.shape[1]

    @cached_property
    def _signed(self) -> np.ndarray:
        return self.inputs * self.labels[:, :, None]

    def _margins(self, x: np.ndarray) -> np.ndarray:
        return (self._signed @ x[:, :, None])[:, :, 0]

    def value(self, x: np.ndarray) -> float:
        """F at x (N, d)."""
        spread = ((x - x.mean(axis=0)) ** 2).sum(axis=1).mean()
        ridge = (x**2).sum(axis=1).mean()
        return float(np.logaddexp(0, -self._margins(x)).mean() + self.mu / 2 * ridge + self.penalty / 2 * spread)

    def gradients(self, x: np.ndarray) -> np.ndarray:
        """All ∇f_ij(x_i), (N, m, d)."""
        weights = 1 / (1 + np.exp(self._margins(x)))
        return self.mu * x[:, None] - weights[:, :, None] * self._signed

    def pull(self, x: np.ndarray) -> np.ndarray:
        """λ(x_i − x̄), (N, d)."""
        return self.penalty * (x - x.mean(axis=0))

    @cached_property
    def minimiser(self) -> np.ndarray:
        """x*, (N, d), by damped Newton steps until F(x) − F* ≤ N‖∇F(x)‖²/(2μ) is below 1e-14: F is μ/N-convex.

        Of N∇²F = diag(H_i + λ) − (λ/N) 11ᵀ only the blocks are inverted, B_i: s_i = B_i(r_i + λs̄), with
        (1 − λ mean(B_i)) s̄ = mean(B_i r_i), solves N∇²F s = r.
        """
        x = np.zeros((self.num_clients, self.inputs.shape[2]))
        identity = np.eye(x.shape[1])
        for _ in range(100):
            residual = -(self.gradients(x).mean(axis=1) + self.pull(x))
            gap = (residual**2).sum() / (2 * self.num_clients * self.mu)
            if gap < 1e-14:
                return x
            weights = 1 / (1 + np.exp(self._margins(x)))
            curvature = (weights * (1 - weights) / self.num_samples)[:, :, None] * self._signed
            blocks = np.linalg.inv(curvature.transpose(0, 2, 1) @ self._signed + (self.mu + self.penalty) * identity)
            own = (blocks @ residual[:, :, None])[:, :, 0]
            mean = np.linalg.solve(identity - self.penalty * blocks.mean(axis=0), own.mean(axis=0))
            step = own + self.penalty * (blocks @ mean)
            size = 1.0
            while gap > 1e-8 and self.value(x + size * step) > self.value(x) and size > 1e-9:
                size /= 2
            x = x + size * step
        raise RuntimeError(f"F* was not found: the last bound on F(x) - F* is {gap:.1e}")

    @cached_property
    def least(self) -> float:
        """F*."""
        return self.value(self.minimiser)

    @cached_property
    def span(self) -> float:
        """F(0) − F*."""
        return self.value(np.zeros_like(self.minimiser)) - self.least

    def suboptimality(self, x: np.ndarray) -> float:
        """(F(x) − F*) / (F(0) − F*)."""
        return (self.value(x) - self.least) / self.span

    # theory

    @cached_property
    def client_smoothness(self) -> float:
        """L, the largest of the f_i."""
        gram = self.inputs.transpose(0, 2, 1) @ self.inputs / self.num_samples
        return float(np.linalg.eigvalsh(gram).max() / 4 + self.mu)

    def probability(self, method: str) -> float:
        """p*."""
        pull, mu = self.penalty, self.mu
        if method == "L2GD":
            return pull / (self.client_smoothness + pull)
        return (4 * pull + mu) / (4 * pull + 4 * SMOOTHNESS + (self.num_samples + 1) * mu)

    def step_size(self, method: str, p: float) -> float:
        """The largest α of the theorems; L2SGD and L2SGD2 have L2SGD+'s."""
        if method == "L2GD":
            return self.num_clients / (2 * max(self.client_smoothness / (1 - p), self.penalty / p))
        of_samples = (1 - p) / (4 * SMOOTHNESS + self.mu * self.num_samples)
        return self.num_clients * min(of_samples, p / (4 * self.penalty + self.mu))

    def bound(self, p: float, accuracy: float = GOAL, what: str = "communications") -> float:
        """What L2SGD+ needs by its theorem until ‖x − x*‖² has shrunk by ``accuracy``, at its α(p).

        Iterations: N log(1/accuracy)/(αμ); 1 − p of them are local steps, p(1 − p) communications.
        """
        iterations = self.num_clients / (self.step_size("L2SGD+", p) * self.mu) * math.log(1 / accuracy)
        return iterations * (1 - p) * (p if what == "communications" else 1.0)

    def floor(self, method: str, p: float, lr: float) -> float:
        """Where a method idles, relative to F(0) − F*.

        x ← x − αG with noise of covariance C at x* idles at F − F* = α tr(C)/4, to first order in α. N² tr(C) is, with
        g_ij and g_i the gradients at x* and c_i = λ(x_i* − x̄*) = −g_i::

            L2GD      Σ_i        ‖g_i‖²/(1 − p)  + ‖c_i‖²/p        (the theorem's σ²)
            L2SGD     Σ_i mean_j ‖g_ij‖²/(1 − p) + ‖c_i‖²/p
            L2SGD2    Σ_i mean_j (1 − p)‖g_ij/(1 − p) + c_i‖² + p‖c_i‖²
        """
        if method == "L2SGD+":
            return 0.0
        single, pull = self.gradients(self.minimiser), self.pull(self.minimiser)
        if method == "L2GD":
            local = (single.mean(axis=1) ** 2).sum() / (1 - p)
        elif method == "L2SGD":
            local = (single**2).sum(axis=2).mean(axis=1).sum() / (1 - p)
        else:
            local = (1 - p) * ((single / (1 - p) + pull[:, None]) ** 2).sum(axis=2).mean(axis=1).sum()
        at_exchange = (pull**2).sum() * (p if method == "L2SGD2" else 1 / p)
        return float(lr / 4 * (local + at_exchange) / self.num_clients**2 / self.span)


# training


class Clients(FederatedDataModule):
    """The samples of a problem, targets 0 and 1."""

    def __init__(self, problem: Problem, batch_size: int) -> None:
        super().__init__(batch_size=batch_size)
        self.problem = problem

    @property
    def num_clients(self) -> int:
        """N."""
        return self.problem.num_clients

    def client_train_dataset(self, client: int) -> TensorDataset:
        """(m, d) and (m, 1)."""
        targets = (self.problem.labels[client, :, None] + 1) / 2
        return TensorDataset(torch.from_numpy(self.problem.inputs[client]), torch.from_numpy(targets))

    def client_test_dataset(self, client: int) -> None:
        """None."""
        return


class BinaryLogistic(LightningModule):
    """Logistic regression without a bias, from 0. The L2 term is SGD's weight decay, as anywhere in PyTorch."""

    def __init__(self, num_features: int, mu: float) -> None:
        super().__init__()
        self.mu = mu
        self.linear = nn.Linear(num_features, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """log(1 + exp(−b a·x)), mean over the batch."""
        inputs, targets = batch
        return functional.binary_cross_entropy_with_logits(self.linear(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Only its weight decay is used: the methods have step sizes of their own."""
        return torch.optim.SGD(self.parameters(), lr=1.0, weight_decay=self.mu)


@dataclass
class Run(Callback):
    """One training, and what it gave.

    Attributes:
        problem: What is minimised.
        method: A key of METHODS.
        probability: p.
        lr: α.
        label: In the figure.
        stop_at: End the training at this suboptimality; None: not before the last round.
        values: Relative suboptimality after k communications, k = 0, 1, ...
        local_steps: Gradient steps that each client had taken by then.
        seconds: Processor time.
    """

    problem: Problem
    method: str
    probability: float
    lr: float
    label: str = ""
    stop_at: float | None = None
    values: list[float] = field(default_factory=lambda: [1.0])
    local_steps: list[int] = field(default_factory=lambda: [0])
    seconds: float = 0.0

    def train(self, max_rounds: int, seed: int) -> Run:
        """Run it."""
        problem, started = self.problem, time.process_time()
        algorithm = METHODS[self.method](penalty=problem.penalty, probability=self.probability, lr=self.lr)
        with tempfile.TemporaryDirectory() as folder:
            trainer = FederatedTrainer(
                max_rounds=max_rounds, precision="64-true", accelerator="cpu", callbacks=self, logger=False,
                eval_every_n_rounds=0, enable_progress_bar=False, enable_checkpointing=False, default_root_dir=folder,
                seed=seed,
            )  # fmt: skip
            data = Clients(problem, batch_size=problem.num_samples if self.method == "L2GD" else 1)
            trainer.fit(BinaryLogistic(problem.inputs.shape[2], problem.mu), data, algorithm)
        self.seconds = time.process_time() - started
        return self

    def on_round_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Evaluate F at the clients' models."""
        rows = [trainer.clients.vector("local_model", client) for client in range(self.problem.num_clients)]
        self.values.append(self.problem.suboptimality(torch.stack(rows).numpy()))
        self.local_steps.append(self.local_steps[-1] + int(trainer.callback_metrics["coin/local_steps"]))
        if self.stop_at is not None and self.values[-1] <= self.stop_at:
            trainer.should_stop = True

    @property
    def communications(self) -> int | None:
        """To GOAL; None where the training did not end there: noise may pass it for a moment."""
        if self.values[-1] > GOAL:
            return None
        return next(k for k, value in enumerate(self.values) if value <= GOAL)

    def cost(self, what: str) -> int:
        """Communications or local steps to GOAL, or to the end."""
        end = len(self.values) - 1 if self.communications is None else self.communications
        return end if what == "communications" else self.local_steps[end]

    @property
    def floor(self) -> float:
        """Mean over the last third of the communications."""
        return float(np.mean(self.values[-(len(self.values) // 3) :]))

    @property
    def theory(self) -> float:
        """The floor of theory."""
        return self.problem.floor(self.method, self.probability, self.lr)


def compare(problem: Problem, depth: float, seed: int, console: Console) -> list[Run]:
    """(a): all methods for as many communications as L2SGD+ takes to come down to ``depth``."""
    p = problem.probability("L2SGD+")
    lr = problem.step_size("L2SGD+", p)
    plus = Run(problem, "L2SGD+", p, lr, "L2SGD+", stop_at=depth)
    runs = [plus.train(max(1, math.ceil(problem.bound(p, depth))), seed)]
    report(runs[-1], console)
    p_full = problem.probability("L2GD")
    lr_full = problem.step_size("L2GD", p_full)
    for run in (
        Run(problem, "L2SGD2", p, lr, "L2SGD2"),
        Run(problem, "L2SGD", p, lr, "L2SGD"),
        Run(problem, "L2GD", p_full, lr_full, "L2GD"),
        Run(problem, "L2GD", p_full, lr_full / SMALLER, f"L2GD, α/{SMALLER}"),
    ):
        runs.append(run.train(len(plus.values) - 1, seed))
        report(run, console)
    return runs


def sweep(problem: Problem, factors: Sequence[float], seed: int, console: Console) -> list[Run]:
    """(b): L2SGD+ to GOAL for p at multiples of p*."""
    runs = []
    for factor in factors:
        p = factor * problem.probability("L2SGD+")
        run = Run(problem, "L2SGD+", p, problem.step_size("L2SGD+", p), f"{factor:g} p*", stop_at=GOAL)
        runs.append(run.train(math.ceil(problem.bound(p)), seed))
        report(run, console)
    return runs


@dataclass
class Results:
    """All runs on one problem, and its study."""

    study: Study
    problem: Problem
    compared: list[Run]
    swept: list[Run]

    @property
    def by_probability(self) -> list[Run]:
        """L2SGD+ by p, the run of (a) among them."""
        return sorted([*self.swept, self.compared[0]], key=lambda run: run.probability)


def run_study(
    features: np.ndarray, labels: np.ndarray, studies: Sequence[Study], seed: int, console: Console
) -> list[Results]:
    """Everything, one run after another."""
    results = []
    for study in studies:
        for split in study.splits:
            problem = Problem.from_rows(features, labels, study, split, seed)
            console.print(
                f"[bold]N = {problem.num_clients}, {split}[/bold]: m = {problem.num_samples}, "
                f"{labels.size - problem.labels.size} rows left out, d = {features.shape[1]}, μ = {problem.mu:g}, "
                f"λ = {problem.penalty:g}, L̃ = {SMOOTHNESS:g}, L = {problem.client_smoothness:.3f}, "
                f"F* = {problem.least:.12f}"
            )
            compared = compare(problem, study.depth, seed, console)
            swept = sweep(problem, study.factors, seed, console) if split in study.swept else []
            results.append(Results(study, problem, compared, swept))
    return results


# what is shown


def report(run: Run, console: Console) -> None:
    """One line, as soon as a run is done."""
    console.print(
        f"  {run.label:12} p = {run.probability:.4f}  α = {run.lr:8.4g}  {len(run.values) - 1:5} communications, "
        f"{run.local_steps[-1]:6} local steps: {run.values[-1]:.1e}   ({run.seconds:.0f} s)"
    )


def make_table(results: Sequence[Results]) -> Table:
    """The numbers."""
    table = Table(title=f"Communications to {GOAL:g}, and floors", title_justify="left")
    for column in ("N", "split", "method"):
        table.add_column(column)
    for column in ("p", "p / p*", "α", f"to {GOAL:g}", "at the end", "floor", "of theory", "CPU s"):
        table.add_column(column, justify="right")
    for result in results:
        best = result.problem.probability("L2SGD+")
        for run in [*result.compared, *result.swept]:
            idles = run.method != "L2SGD+"
            table.add_row(
                f"{run.problem.num_clients}", run.problem.split, run.method, f"{run.probability:.4f}",
                "" if run.method == "L2GD" else f"{run.probability / best:.2f}", f"{run.lr:.4g}",
                "never" if run.communications is None else f"{run.communications}", f"{run.values[-1]:.1e}",
                f"{run.floor:.1e}" if idles else "", f"{run.theory:.1e}" if idles else "", f"{run.seconds:.0f}",
            )  # fmt: skip
        table.add_section()
    return table


def describe_best(result: Results) -> str:
    """Where the fewest communications were needed."""
    problem, runs = result.problem, [run for run in result.by_probability if run.communications is not None]
    if not runs:
        return f"N = {problem.num_clients}, {problem.split}: never at {GOAL:g}"
    best = min(runs, key=lambda run: run.communications or 0)
    optimum = problem.probability("L2SGD+")
    return (
        f"N = {problem.num_clients}, {problem.split}: fewest communications, {best.communications}, at p = "
        f"{best.probability:.4f} = {best.probability / optimum:.2f} p*; at p* {result.compared[0].communications}"
    )


def save_tables(results: Sequence[Results], folder: Path) -> None:
    """runs.csv and curves.csv."""
    with (folder / "runs.csv").open("w", newline="") as runs, (folder / "curves.csv").open("w", newline="") as curves:
        run_rows, curve_rows = csv.writer(runs), csv.writer(curves)
        run_rows.writerow(
            ["run", "study", "num_clients", "split", "mu", "method", "probability", "lr", "communications_to_goal",
             "communications", "local_steps", "last", "floor", "floor_of_theory", "cpu_seconds"]
        )  # fmt: skip
        curve_rows.writerow(["run", "communications", "suboptimality"])
        index = 0
        for result in results:
            for name, group in (("methods", result.compared), ("probabilities", result.swept)):
                for run in group:
                    problem, idles = run.problem, run.method != "L2SGD+"
                    run_rows.writerow(
                        [index, name, problem.num_clients, problem.split, problem.mu, run.method, run.probability,
                         run.lr, run.communications, len(run.values) - 1, run.local_steps[-1], run.values[-1],
                         run.floor if idles else "", run.theory if idles else "", round(run.seconds, 1)]
                    )  # fmt: skip
                    curve_rows.writerows([index, k, f"{value:.6e}"] for k, value in enumerate(run.values))
                    index += 1


def draw(results: Sequence[Results]) -> Figure:
    """Above (a), a problem per panel; below (b), curves for all p, then what they cost against p."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    swept = [result for result in results if result.swept]
    shown = swept[:2]
    figure = Figure(figsize=(3.5 * max(len(results), len(shown) + 2), 7.6), layout="constrained")
    above, below = figure.subfigures(2, 1)  # type: ignore[misc]
    panels = above.subplots(1, len(results), squeeze=False)[0]
    for axes, result in zip(panels, results, strict=True):
        _draw_methods(axes, result)
    handles = [*panels[0].get_legend_handles_labels()[0], Line2D([], [], color="0.3", linestyle=":", label="theory")]
    above.legend(handles=handles, loc="outside lower center", ncol=len(handles), frameon=False, fontsize=9)
    panels = below.subplots(1, len(shown) + 2, squeeze=False)[0]
    for axes, result in zip(panels, shown, strict=False):
        _draw_curves(axes, result)
    _draw_counts(panels[-2], swept, "communications")
    _draw_counts(panels[-1], swept, "local steps")
    for row in (above, below):
        row.axes[0].set_ylabel(SUBOPTIMALITY)
    return figure


def _draw_methods(axes: Axes, result: Results) -> None:
    """Figure 3."""
    width = math.ceil(len(result.compared[0].values) / MAX_POINTS)
    for run in result.compared:
        color, windows = COLORS[run.label], np.split(run.values, range(1, len(run.values), width))
        ends = np.cumsum([len(window) for window in windows]) - 1
        axes.semilogy(ends, [window.mean() for window in windows], color=color, linewidth=1.3, label=run.label)
        low, high = [window.min() for window in windows], [window.max() for window in windows]
        axes.fill_between(ends, low, high, color=color, alpha=0.15, linewidth=0)
        if run.method != "L2SGD+":
            axes.axhline(run.theory, color=color, linewidth=1.2, linestyle=":")
    note = f"lines: means of {width} communications\nbands: their range" if width > 1 else ""
    axes.text(0.03, 0.03, note, transform=axes.transAxes, fontsize=7, color="0.35")
    _finish(axes, _title(result.problem), result.study.depth)


def _draw_curves(axes: Axes, result: Results) -> None:
    """Figure 5."""
    from matplotlib import colormaps

    runs, best = result.by_probability, result.problem.probability("L2SGD+")
    for run, shade in zip(runs, np.linspace(0.0, 0.85, len(runs)), strict=True):
        is_best = run is result.compared[0]
        factor = "" if is_best else f"{run.probability / best:.3g} "
        axes.semilogy(
            run.values[: (run.communications or len(run.values)) + 1],
            color=COLORS["L2SGD+"] if is_best else colormaps["viridis"](shade),
            linewidth=1.8 if is_best else 0.9, zorder=3 if is_best else 2,
            label=f"{run.probability:.3f} = {factor}p*",
        )  # fmt: skip
    _finish(axes, f"L2SGD+, {_title(result.problem)}", GOAL)
    axes.legend(title="p", fontsize=7, title_fontsize=8, loc="upper right")


def _draw_counts(axes: Axes, swept: Sequence[Results], what: str) -> None:
    """Figure 2."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    for result, marker in zip(swept, "os^D", strict=False):
        problem, best = result.problem, result.compared[0]
        runs = [run for run in result.by_probability if run.communications is not None]
        factors = [run.probability / best.probability for run in runs]
        label = f"N = {problem.num_clients}, {problem.split}, p* = {best.probability:.3f}"
        (points,) = axes.loglog(factors, [run.cost(what) for run in runs], marker, markersize=4.5, label=label)
        grid = np.geomspace(min(factors), max(factors), 200)
        bounds = [problem.bound(factor * best.probability, what=what) for factor in grid]
        scale = best.cost(what) / problem.bound(best.probability, what=what)
        axes.loglog(grid, np.multiply(bounds, scale), color=points.get_color(), linewidth=1.2, linestyle=":")
    axes.axvline(1.0, color="0.5", linewidth=0.9, linestyle="--")
    unit = " of a client" if what == "local steps" else ""
    axes.set(xlabel="p / p*", title=f"L2SGD+: {what}{unit} to {GOAL:g}")
    axes.set_xticks([0.25, 0.5, 1.0, 2.0, 4.0])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.title.set_fontsize(9.5)
    axes.margins(y=0.25)
    axes.legend(fontsize=7, loc="upper left" if what == "communications" else "upper right")
    axes.grid(alpha=0.25)


def _finish(axes: Axes, title: str, depth: float) -> None:
    axes.set(xlabel="communications", ylim=(depth / 2, 1.6), title=title)
    axes.set_xlim(left=0)
    axes.title.set_fontsize(9.5)
    axes.grid(alpha=0.25)


def _title(problem: Problem) -> str:
    return f"N = {problem.num_clients}, {problem.split}, μ = {problem.mu:g}"


def save_figure(figure: Figure, folder: Path) -> None:
    """As SVG, and as PNG with 256 colours, a third of the size that it has with all."""
    from PIL import Image

    figure.savefig(folder / "figure.svg")
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=100)
    Image.open(pixels).convert("RGB").quantize(256).save(folder / "figure.png", optimize=True)


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Dense rows (M, d) and labels -1, 1."""
    features, labels = load_svmlight_file(str(path))
    return np.asarray(features.todense()), np.where(labels > 0, 1.0, -1.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a LibSVM file, e.g. a1a")
    parser.add_argument("--out", type=Path, default=Path("l2gd_a1a"), help="folder of figure and tables")
    parser.add_argument("--quick", action="store_true", help="N = 5, heterogeneous, μ = 0.01: a minute")
    parser.add_argument("--seed", type=int, default=0, help="of split, coins and samples")
    given = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)  # the table whole, rather than as wide as the terminal
    results = run_study(*load(given.data), QUICK if given.quick else FULL, given.seed, console)
    console.print(make_table(results))
    for result in results:
        if result.swept:
            console.print(describe_best(result))
    given.out.mkdir(parents=True, exist_ok=True)
    save_tables(results, given.out)
    save_figure(draw(results), given.out)
    console.print(f"Saved in {given.out}: figure.png, figure.svg, runs.csv, curves.csv")


if __name__ == "__main__":
    main()
