"""Time both engines and hand-written loops on the same steps, in turn within one run.

    python benchmarks/engines.py [W1 W2 W3 W4] [--ways floor 'FedBC*'] [--pairs 9] [--wall | --threads 2] [--peers]
    python benchmarks/engines.py [W1 W2 W3 W4] [--ways 'FedBC*'] --profile

The table has client-steps per second (median) and the ratio to "the floor" of the same turn: median, minimum to
maximum, and from 5 turns on an interval that holds the median with at least 90 %. Machines are noisy, ratios carry
over. One thread is timed in CPU seconds, because other jobs of a machine stretch seconds. Start-up and the first
rounds, in which steps are not recorded yet, are left out on all sides; clients.csv and metrics.csv are written.

floor         The shortest loop that one would write by hand: parameters and gradients are views into two vectors,
              batches are gathered by ``index_select``, and SGD with momentum steps on the vector.
torch.optim   The same loop with ``torch.optim.SGD``.
*-written     The same with ``record_steps: false``: every step runs as it is written. All others are recorded.
*-users       All defaults of the trainer (evaluation after every round, TensorBoard, checkpoints, progress bar), and a
              module that logs its accuracy in ``training_step``. The ways without it leave all of that out. The last
              column is the time of a round divided by that of the same way without it.

W1 trains a logistic model 60-10 with E=5 on 30 clients of the sizes that ``SyntheticDataModule`` draws for seed 0, 10
sampled; W2 an MLP 784-128-10 on 100 x 600, 10 sampled; W3 the CIFAR CNN of the FedBC paper on 20 clients of 299 to
10,000, 10 sampled; W4 a logistic model on 10,000 x 20, 1,000 sampled. Batch 20, SGD lr .01 momentum .5. Each client has
a quarter as many test samples.

--peers times pfl-research and Flower, too, if they are installed (benchmarks/peers.py). Flower works in processes of
its own, which only ``--wall`` times, and needs minutes for a turn of W4. --profile shows instead in which files the
time of a way is spent; the profiler makes Python calls dearer than they are.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from fedbc_lightning.datamodules import SyntheticDataModule
from fedbc_lightning.models import CIFARCNN
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning import FedAvg, FedBC, FederatedAlgorithm, FederatedDataModule, FederatedTrainer, UniformSampler

BATCH_SIZE = 20
LEARNING_RATE, MOMENTUM = 0.01, 0.5
CLOCK: Callable[[], float] = time.process_time
"""Clock of all timings; ``--wall`` and several threads replace it by ``time.perf_counter``."""


class Clients(FederatedDataModule):
    """Random inputs and labels in memory.

    Args:
        sizes: Number of training samples of each client.
        shape: Shape of an input.
        test_sizes: Number of test samples of each client; None: a quarter as many, at least one.
        batch_size: Number of samples in a batch.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        shape: tuple[int, ...],
        test_sizes: np.ndarray | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        super().__init__(batch_size=batch_size)
        generator = torch.Generator().manual_seed(0)

        def draw(n: int) -> tuple[Tensor, Tensor]:
            return torch.randn(n, *shape, generator=generator), torch.randint(10, (n,), generator=generator)

        self.arrays = [draw(int(n)) for n in sizes]
        self.test_arrays = [draw(int(n)) for n in (np.maximum(1, sizes // 4) if test_sizes is None else test_sizes)]

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return len(self.arrays)

    def client_train_dataset(self, client: int) -> TensorDataset:
        """Return the training samples of a client."""
        return TensorDataset(*self.arrays[client])

    def client_test_dataset(self, client: int) -> TensorDataset:
        """Return the test samples of a client."""
        return TensorDataset(*self.test_arrays[client])


class Plain(LightningModule):
    """Cross entropy on any network, and nothing else."""

    def __init__(self, net: nn.Module, lr: float = LEARNING_RATE, momentum: float = MOMENTUM) -> None:
        super().__init__()
        self.net, self.lr, self.momentum = net, lr, momentum

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        inputs, targets = batch
        return functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class Logging(Plain):
    """Cross entropy with logged metrics, as most users write it."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Log the accuracy and return the loss."""
        loss, accuracy = self._measure(batch)
        self.log("train_accuracy", accuracy)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        loss, accuracy = self._measure(batch)
        self.log_dict({"test_loss": loss, "test_accuracy": accuracy})

    def _measure(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = self.net(inputs)
        return functional.cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()


FEW_ROUNDS = 8
"""Number of rounds after which the steps of single clients are recorded."""


@dataclass
class Workload:
    """Models and clients that are trained.

    Attributes:
        sizes: Number of training samples of each client.
        shape: Shape of an input.
        make_net: Function that makes the network.
        num_sampled: Number of clients in a round.
        epochs: Number of local epochs.
        rounds: Number of rounds that are timed.
        warm_up: Number of rounds before those, until steps are recorded; a mapped step is recorded when its shape has
            come 60 times.
        batch_size: Number of samples in a batch.
        lr: Step size of SGD.
        momentum: Momentum of SGD.
    """

    sizes: np.ndarray
    shape: tuple[int, ...]
    make_net: Callable[[], nn.Module]
    num_sampled: int
    epochs: int
    rounds: int
    warm_up: int = 0
    batch_size: int = BATCH_SIZE
    lr: float = LEARNING_RATE
    momentum: float = MOMENTUM

    def warm_up_of(self, engine: str) -> int:
        """Return the warm-up for an engine; the rounds that are timed then differ, but in W4 all clients are equal."""
        return min(self.warm_up, FEW_ROUNDS) if engine == "sequential" else self.warm_up


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def _logistic() -> nn.Module:
    return nn.Linear(60, 10)


def sizes_of_synthetic() -> np.ndarray:
    """Return the training sizes of ``configs/synthetic.yaml``: log-normal, from 40 to 3,206 with median 98."""
    data = SyntheticDataModule(seed=0)
    data.setup()
    return data.num_samples("train")


PEERS = {"pfl-research": "pfl", "Flower": "flwr"}
"""Packages of the other frameworks by their names."""

WORKLOADS = {
    "W1": Workload(sizes_of_synthetic(), (60,), _logistic, 10, 5, 12, 8),
    "W2": Workload(np.full(100, 600), (784,), _mlp, 10, 1, 10, 5),
    "W3": Workload(np.geomspace(299, 10_000, 20).round(), (3, 32, 32), CIFARCNN, 10, 1, 1, 1),
    "W4": Workload(np.full(10_000, 20), (60,), _logistic, 1000, 1, 10, 66),
}

ALGORITHMS: dict[str, Callable[[], FederatedAlgorithm]] = {"FedAvg": FedAvg, "FedBC": partial(FedBC, dual_lr=1e-3)}
Engine = Literal["sequential", "vectorized", "auto"]
LEAN: dict[str, Any] = {
    "logger": False, "eval_every_n_rounds": 0, "enable_progress_bar": False, "enable_checkpointing": False,
}  # fmt: skip
"""Settings that leave out everything but training and the tables."""


@dataclass(frozen=True)
class Way:
    """One way in which the framework trains.

    Attributes:
        algorithm: Name of the method.
        engine: Engine of the trainer.
        is_as_users: Whether the settings and the module are those that users have.
        is_written: Whether no step is recorded.
    """

    algorithm: str
    engine: Engine = "sequential"
    is_as_users: bool = False
    is_written: bool = False

    @property
    def name(self) -> str:
        """Name in the table, such as ``FedBC-vectorized-users``."""
        engine = "" if self.engine == "sequential" else f"-{self.engine}"
        written = "-written" if self.is_written else ""
        return f"{self.algorithm}{engine}{written}{'-users' if self.is_as_users else ''}"

    def speed(self, work: Workload, data: Clients, callbacks: Sequence[Callback] = ()) -> float:
        """Return client-steps per second of a run."""
        warm_up = work.warm_up_of(self.engine)
        watch = Stopwatch(warm_up)
        make_module = Logging if self.is_as_users else Plain
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            trainer = FederatedTrainer(
                max_rounds=warm_up + work.rounds, clients_per_round=work.num_sampled, local_epochs=work.epochs,
                accelerator="cpu", default_root_dir=folder, seed=0, callbacks=[watch, *callbacks], engine=self.engine,
                record_steps=not self.is_written, **{} if self.is_as_users else LEAN,
            )  # fmt: skip
            trainer.fit(make_module(work.make_net()), data, ALGORITHMS[self.algorithm]())
            with open(f"{trainer.log_dir}/clients.csv") as file:
                steps = sum(int(row["num_steps"]) for row in csv.DictReader(file) if int(row["round"]) > warm_up)
        return steps / watch.seconds


WAYS = [
    Way(algorithm, engine, is_as_users)
    for is_as_users in (False, True)
    for engine in ("sequential", "vectorized", "auto")
    for algorithm in ALGORITHMS
    if not (engine == "auto" and is_as_users)
] + [Way(algorithm, is_as_users=users, is_written=True) for users in (False, True) for algorithm in ALGORITHMS]


class Stopwatch(Callback):
    """Times a run from the end of its warm-up to its last table row."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.started, self.seconds = warm_up, 0.0, 0.0

    def on_round_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Start after the warm-up."""
        if trainer.current_round == self.warm_up + 1:
            self.started = CLOCK()

    def on_train_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.seconds = CLOCK() - self.started


def loop(work: Workload, data: Clients, *, flat: bool) -> float:
    """Return client-steps per second of the floor (flat), or of the loop with ``torch.optim.SGD``."""
    net = work.make_net()
    parameters = list(net.parameters())
    row = torch.cat([p.detach().reshape(-1) for p in parameters])
    z, grad, moment = row.clone(), torch.zeros_like(row), torch.empty_like(row)
    numels = [p.numel() for p in parameters]
    for p, weights, gradient in zip(parameters, row.split(numels), grad.split(numels), strict=True):
        p.data, p.grad = weights.view_as(p), gradient.view_as(p) if flat else None
    steps, started = 0, 0.0
    for t in range(max(1, work.warm_up + 1 - FEW_ROUNDS), work.warm_up + work.rounds + 1):  # nothing is recorded here
        if t == work.warm_up + 1:
            steps, started = 0, CLOCK()
        total, weight = torch.zeros_like(z), 0
        for client in UniformSampler()(data.num_clients, work.num_sampled, seed=0, round=t):
            inputs, targets = data.arrays[client]
            row.copy_(z)
            moment.zero_()
            optimizer = None if flat else torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
            for _ in range(work.epochs):
                for chosen in torch.randperm(len(inputs)).split(BATCH_SIZE):
                    logits = net(inputs.index_select(0, chosen))
                    loss = functional.cross_entropy(logits, targets.index_select(0, chosen))
                    if optimizer is not None:
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                    else:
                        grad.zero_()
                        loss.backward()
                        row.sub_(moment.mul_(MOMENTUM).add_(grad), alpha=LEARNING_RATE)
                    steps += 1
            total.add_(row, alpha=len(inputs))
            weight += len(inputs)
        z = total / weight
    return steps / (CLOCK() - started)


def speed_of_peer(name: str, workload: str) -> float:
    """Return client-steps per second of another framework, in a process of its own, as it leaves costs behind."""
    clock = ["--wall"] if CLOCK is time.perf_counter else []
    command = [sys.executable, str(Path(__file__).with_name("peers.py")), PEERS[name], workload, *clock]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed on {workload}:\n{done.stderr[-2000:]}")
    return float(done.stdout.split("steps/s ")[-1])


def interval(values: Sequence[float], probability: float = 0.9) -> tuple[float, float] | None:
    """Return the two values between which the median lies with at least this probability.

    The k-th smallest and the k-th largest value miss it if at most k - 1 values fall on one side: fair coins.

    Returns:
        The narrowest such pair; None if even the smallest and the largest miss it too often (fewer than 5 values).

    Example:
        >>> interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]), interval([1.0, 2.0, 3.0])
        ((2.0, 8.0), None)
    """
    ordered, missed, found = sorted(values), 0.0, None
    for k in range(len(values) // 2):
        missed += 2 * math.comb(len(values), k) / 2 ** len(values)
        if missed <= 1 - probability:
            found = ordered[k], ordered[-1 - k]
    return found


def describe(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the paired ratios as text: median, minimum to maximum, and the 90 % interval of the median."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    found = interval(ratios)
    likely = "" if found is None else f"; 90 %: {found[0]:.2f} to {found[1]:.2f}"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}{likely})"


def table(workload: str, work: Workload, pairs: int, ways: Sequence[str], peers: Sequence[str] = ()) -> Iterator[str]:
    """Time the ways whose names match one of the patterns, and yield one line for each."""
    data = Clients(work.sizes, work.shape)
    runs: dict[str, Callable[[], float]] = {
        "floor": lambda: loop(work, data, flat=True),
        "torch.optim": lambda: loop(work, data, flat=False),
        **{way.name: partial(way.speed, work, data) for way in WAYS},
        **{name: partial(speed_of_peer, name, workload) for name in peers},
    }
    runs = {name: run for name, run in runs.items() if name == "floor" or name in peers or matches(name, ways)}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(pairs):
        for name, run in list(runs.items())[:: -1 if turn % 2 else 1]:  # what drifts during a turn cancels
            speeds[name].append(run())
    for name, values in speeds.items():
        line = f"{workload} {name:23} {statistics.median(values):8.0f} steps/s   / floor "
        yield line + describe(values, speeds["floor"]) + beside(name, speeds)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns matches."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def beside(name: str, speeds: dict[str, list[float]]) -> str:
    """Return the last column: the ratio to the way that this one is compared with, if both are timed."""
    method, _, rest = name.partition("-")
    if name.endswith("-users"):
        lean = name.removesuffix("-users")
        return f"   time / {lean} {describe(speeds[lean], speeds[name])}" if lean in speeds else ""
    if name.endswith("-written"):
        other = method
    elif rest == "auto":
        engines = [way for way in (method, f"{method}-vectorized") if way in speeds]
        other = max(engines, key=lambda way: statistics.median(speeds[way]), default="")
    else:
        other = name.replace("FedBC", "FedAvg") if method == "FedBC" else "FedAvg" if name in PEERS else ""
    return f"   / {other} {describe(speeds[name], speeds[other])}" if other in speeds else ""


class Profile(Callback):
    """Profiles a run from the end of its warm-up on, from the start of each round to that of the next."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.found = warm_up, cProfile.Profile()

    def on_round_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Start after the warm-up."""
        if trainer.current_round == self.warm_up + 1:
            self.found.enable()

    def on_train_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.found.disable()


def profile(workload: str, work: Workload, ways: Sequence[str], num_shown: int = 8) -> Iterator[str]:
    """Yield for each way the files with the largest shares of the time of its rounds."""
    data = Clients(work.sizes, work.shape)
    for way in WAYS:
        if not matches(way.name, ways):
            continue
        watch = Profile(work.warm_up_of(way.engine))
        way.speed(work, data, [watch])
        seconds = seconds_of_files(watch.found)
        total = sum(seconds.values())
        yield f"{workload} {way.name}: {total:.2f} s under the profiler"
        for file in sorted(seconds, key=lambda file: -seconds[file])[:num_shown]:
            yield f"    {seconds[file] / total:6.1%}  {file}"


def seconds_of_files(found: cProfile.Profile) -> dict[str, float]:
    """Return the seconds of a file's functions and of the tensor operations that these call, by folder and file."""
    seconds: dict[str, float] = defaultdict(float)
    for entry in found.getstats():  # pstats would take operations of one name for one
        if isinstance(entry.code, str):
            continue
        path = entry.code.co_filename
        name = "recorded steps" if path == "<string>" else "/".join(path.split("/")[-2:])
        operations = (call.inlinetime for call in entry.calls or () if isinstance(call.code, str))
        seconds[name] += entry.inlinetime + sum(operations)
    return seconds


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the names of the peers to time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--ways", nargs="+", default=["*"], help="patterns of the rows; the floor is always timed")
    parser.add_argument("--pairs", type=int, default=9, help="turns, in each of which every way is timed once")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; several are timed in seconds")
    parser.add_argument("--wall", action="store_true", help="time in seconds instead of CPU seconds")
    parser.add_argument("--peers", action="store_true", help="also time pfl-research and Flower if installed")
    parser.add_argument("--profile", action="store_true", help="show where the time goes, instead of how much it is")
    given = parser.parse_args()
    unknown = set(given.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if not given.peers:
        return given, []
    if given.threads > 1:
        parser.error("--peers: they have one thread")
    peers = [name for name, package in PEERS.items() if find_spec(package) is not None]
    if not peers:
        parser.error("--peers: none is installed; pip install 'pfl[pytorch]' 'flwr[simulation]'")
    return given, [name for name in peers if given.wall or name != "Flower"]


def main() -> None:
    """Measure and print."""
    given, peers = _parse()
    global CLOCK
    CLOCK = time.perf_counter if given.wall or given.threads > 1 else time.process_time
    torch.set_num_threads(given.threads)
    clock = "CPU seconds" if CLOCK is time.process_time else "seconds"
    print(f"torch {torch.__version__}, {given.threads} thread(s), {given.pairs} turns, {clock}", flush=True)
    for name in given.workloads or WORKLOADS:
        work = WORKLOADS[name]
        for line in (
            profile(name, work, given.ways) if given.profile else table(name, work, given.pairs, given.ways, peers)
        ):
            print(line, flush=True)


if __name__ == "__main__":
    main()
