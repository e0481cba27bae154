"""How a round's time grows with the clients, the sampled clients, the parameters and the processes.

    python benchmarks/scaling.py [--out scaling.png] [--rounds 7] [--only N S d processes]

Prints seconds per round and draws four panels. FedBC (every client keeps its x_i; above 64 MiB in all in a file), batch
20, 20 generated samples per client, made when it takes part; one thread. Every point is a process of its own and the
median of rounds after those in which steps are not yet recorded; checkpoints and evaluation are left out.

N: logistic 60-10, 100 sampled, E=1. S: the same, N = 20,000. d: MLPs 60-h-h-10, N = 100, 10 sampled, E=5, so 50 steps.
processes: 1 and 2, each with one thread; logistic N = 10,000, 1,000 sampled, E=5; MLP and the CIFAR CNN N = 1,000.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from engines import Plain
from fedbc_lightning.models import CIFARCNN
from many_clients import GeneratedImages, GeneratedRows
from torch import nn

from fedbc_lightning import FedBC, FederatedTrainer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS_OF_WARM_UP = {"sequential": 600, "vectorized": 70}
"""After so many steps of one shape they are recorded, for one client or for a cohort."""
COHORT = 1024
COLORS = {"sequential": "#2a6f97", "vectorized": "#c1121f"}
MARKERS = {"sequential": "o", "vectorized": "s"}


class EqualRows(GeneratedRows):
    """20 samples of 60 features per client."""

    def __init__(self, num_clients: int) -> None:
        super().__init__(num_clients)
        self._sizes = np.full(num_clients, 20)


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        num_clients: N.
        num_sampled: S.
        hidden: Units of each of the MLP's two hidden layers; 0: a logistic model; -1: the CIFAR CNN on images.
        epochs: E.
        engine: Of the trainer.
        devices: Processes.
    """

    num_clients: int
    num_sampled: int
    hidden: int = 0
    epochs: int = 1
    engine: str = "sequential"
    devices: int = 1

    @property
    def warm_up(self) -> int:
        """Rounds before those that are timed."""
        in_round = self.num_sampled if self.engine == "sequential" else -(-self.num_sampled // COHORT)
        return 1 + STEPS_OF_WARM_UP[self.engine] * self.devices // (in_round * self.epochs)

    @property
    def network(self) -> nn.Module:
        """What is trained."""
        if self.hidden < 0:
            return CIFARCNN()
        sizes = [60, self.hidden, self.hidden, 10] if self.hidden else [60, 10]
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    @property
    def num_parameters(self) -> int:
        """Of the network, d."""
        return sum(parameter.numel() for parameter in self.network.parameters())


def train(point: Point, rounds: int, folder: str) -> None:
    """What every process runs."""
    torch.set_num_threads(1)
    data = GeneratedImages(point.num_clients) if point.hidden < 0 else EqualRows(point.num_clients)
    trainer = FederatedTrainer(
        max_rounds=point.warm_up + rounds, clients_per_round=point.num_sampled, local_epochs=point.epochs,
        accelerator="cpu", devices=point.devices, engine=point.engine, logger=False,
        eval_every_n_rounds=0, enable_progress_bar=False, enable_checkpointing=False, default_root_dir=folder,
        name="run", seed=0,
    )  # fmt: skip
    trainer.fit(Plain(point.network), data, FedBC(dual_lr=1e-3))


def measure(point: Point, rounds: int) -> float:
    """Seconds per round: the median of those after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--train", json.dumps(asdict(point)), str(rounds), folder]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        with next(Path(folder).glob("run/*/metrics.csv")).open() as file:
            seconds = [float(row["time/round_seconds"] or 0) for row in csv.DictReader(file)]
    return statistics.median(seconds[-rounds:])


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        title: What is fixed.
        label: Of the horizontal axis.
        curves: Name -> position -> what is measured there.
    """

    title: str
    label: str
    curves: dict[str, dict[int, Point]]


def panels() -> dict[str, Panel]:
    """What is measured."""
    clients, sampled, widths = (10**2, 10**3, 10**4, 10**5, 10**6), (10, 100, 1000, 10_000), (0, 64, 256, 960)
    engines = ("sequential", "vectorized")
    models = {"logistic": (10_000, 1000, 0, 5), "MLP, d = 84 k": (1000, 100, 256, 5), "CIFAR CNN": (1000, 50, -1, 5)}
    return {
        "N": Panel(
            "logistic, 100 sampled", "clients N", {e: {n: Point(n, 100, engine=e) for n in clients} for e in engines}
        ),
        "S": Panel(
            "logistic, N = 20,000",
            "sampled clients S",
            {e: {s: Point(20_000, s, engine=e) for s in sampled} for e in engines},
        ),
        "d": Panel(
            "MLPs, 10 sampled, 50 steps",
            "parameters d",
            {e: {p.num_parameters: p for p in (Point(100, 10, width, 5, e) for width in widths)} for e in engines},
        ),
        "processes": Panel(
            "sequential, one thread each",
            "processes",
            {name: {k: Point(*of, devices=k) for k in (1, 2)} for name, of in models.items()},
        ),
    }


def rows(chosen: dict[str, Panel], rounds: int, found: dict[Point, float]) -> Iterator[str]:
    """Measure all points into ``found``; a line for each."""
    for panel in chosen.values():
        yield f"{panel.title}: seconds per round"
        for name, points in panel.curves.items():
            for position, point in points.items():
                found[point] = measure(point, rounds)
                yield f"    {name:14} {panel.label} {position:>9,}   {found[point]:9.4f}"


def draw(chosen: dict[str, Panel], found: dict[Point, float]) -> Figure:
    """A panel beside the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5 * len(chosen), 3.6), layout="constrained")
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(chosen))), chosen.values(), strict=True):
        _draw_panel(axes, panel, found)
    figure.axes[0].set_ylabel("seconds per round")
    return figure


def _draw_panel(axes: Axes, panel: Panel, found: dict[Point, float]) -> None:
    for name, points in panel.curves.items():
        seconds = [found[point] for point in points.values()]
        style = {"color": COLORS.get(name), "marker": MARKERS.get(name, "o"), "markersize": 5}
        (curve,) = axes.plot([*points], seconds, label=name, **style)
        if [*points] == [1, 2]:
            axes.plot([1, 2], [seconds[0], seconds[0] / 2], color=curve.get_color(), linestyle=":", linewidth=1.2)
            ratio = f"{seconds[0] / seconds[1]:.2f} ×"
            axes.annotate(ratio, (2, seconds[1]), xytext=(6, -3), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    if panel.label == "processes":
        axes.set_xticks([1, 2])
        axes.set_xlim(0.8, 2.5)
        axes.plot([], [], color="0.3", linestyle=":", label="half the time")
    else:
        axes.set_xscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.3, high * 4)
    axes.set_title(panel.title, fontsize=9.5)
    axes.set_xlabel(panel.label)
    axes.legend(fontsize=7, loc="upper left")
    axes.grid(alpha=0.25)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("scaling.png"), help="the picture")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of a point")
    parser.add_argument("--only", nargs="+", choices=["N", "S", "d", "processes"], help="panels; default: all")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train:
        point, rounds, folder = given.train
        train(Point(**json.loads(point)), int(rounds), folder)
        return
    found: dict[Point, float] = {}
    chosen = {name: panel for name, panel in panels().items() if not given.only or name in given.only}
    for row in rows(chosen, given.rounds, found):
        print(row, flush=True)
    draw(chosen, found).savefig(given.out, dpi=100)
    print(f"drawn: {given.out}")


if __name__ == "__main__":
    main()
