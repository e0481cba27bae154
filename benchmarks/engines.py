"""Both engines against hand-written loops on the same steps, in turn within one run.

    python benchmarks/engines.py [W1 W2 W3 W4] [--pairs 9] [--threads 1] [--cpu-time] [--peers] [--profile]

Prints client-steps per second (median) and the ratio to the loop on a flat vector ("the floor") of the same turn:
median, minimum to maximum, and from 5 turns on an interval that holds the median with at least 90 %. Machines are
noisy, ratios carry over. FedBC stands also beside FedAvg of its engine, and auto beside the better engine.

Workloads: W1 logistic 60-10, 30 clients of 40 to 1,471 samples, 10 sampled, E=5; W2 MLP 784-128-10, 100 x 600, 10
sampled; W3 the FedBC paper's CIFAR CNN, 20 clients of 299 to 10,000, 10 sampled; W4 logistic, 10,000 x 20, 1,000
sampled. Batch 20, SGD lr .01 momentum .5. Start-up, evaluation and the first rounds, in which steps are not yet
recorded, are left out on all sides; writing clients.csv and metrics.csv is not.

--cpu-time: CPU seconds in place of seconds, for one thread on a machine that does other things, too.

--peers: also pfl-research and Flower, where they are installed (benchmarks/peers.py); they have a ratio to FedAvg, too.
Flower needs minutes for a turn of W4.

--profile: instead, where the time of both engines goes, by the files of the functions that spend it. The profiler makes
Python calls dearer than they are, so it shows what there is rather than seconds.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from fedbc_lightning.models import CIFARCNN
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning import FedAvg, FedBC, FederatedAlgorithm, FederatedDataModule, FederatedTrainer, UniformSampler

BATCH_SIZE = 20
LEARNING_RATE, MOMENTUM = 0.01, 0.5
CLOCK: Callable[[], float] = time.perf_counter
"""``time.process_time`` by ``--cpu-time``."""


class Clients(FederatedDataModule):
    """Random inputs and labels, in memory."""

    def __init__(self, sizes: np.ndarray, shape: tuple[int, ...]) -> None:
        super().__init__(batch_size=BATCH_SIZE)
        generator = torch.Generator().manual_seed(0)
        self.arrays = [
            (torch.randn(int(n), *shape, generator=generator), torch.randint(10, (int(n),), generator=generator))
            for n in sizes
        ]

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.arrays)

    def client_train_dataset(self, client: int) -> TensorDataset:
        """All of a client's samples."""
        return TensorDataset(*self.arrays[client])

    def client_test_dataset(self, client: int) -> None:
        """None."""
        return


class Plain(LightningModule):
    """Cross entropy on any network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        inputs, targets = batch
        return functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


FEW_ROUNDS = 8
"""By then steps of single clients are recorded."""


@dataclass
class Workload:
    """What is trained."""

    sizes: np.ndarray
    shape: tuple[int, ...]
    make_net: Callable[[], nn.Module]
    num_sampled: int
    epochs: int
    rounds: int
    warm_up: int = 0
    """Rounds before those that are timed: until steps are recorded, which takes 60 of a shape where they are mapped."""

    def warm_up_of(self, engine: str) -> int:
        """So many for an engine. The rounds that follow have other clients, in W4 of the same size."""
        return min(self.warm_up, FEW_ROUNDS) if engine == "sequential" else self.warm_up


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def _logistic() -> nn.Module:
    return nn.Linear(60, 10)


PEERS = {"pfl-research": "pfl", "Flower": "flwr"}
"""Name -> package."""

WORKLOADS = {
    "W1": Workload(np.geomspace(40, 1471, 30).round(), (60,), _logistic, 10, 5, 12, 8),
    "W2": Workload(np.full(100, 600), (784,), _mlp, 10, 1, 10, 5),
    "W3": Workload(np.geomspace(299, 10_000, 20).round(), (3, 32, 32), CIFARCNN, 10, 1, 1, 1),
    "W4": Workload(np.full(10_000, 20), (60,), _logistic, 1000, 1, 10, 66),
}


def loop(work: Workload, data: Clients, *, flat: bool) -> float:
    """Client-steps per second of a loop by hand: with torch.optim.SGD, or with a flat vector ("the floor")."""
    net = work.make_net()
    parameters = list(net.parameters())
    row = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for p in parameters:
        p.data = row[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    z, grad, moment = row.clone(), torch.empty_like(row), torch.empty_like(row)
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
                    loss = functional.cross_entropy(net(inputs[chosen]), targets[chosen])
                    for p in parameters:
                        p.grad = None
                    loss.backward()
                    if optimizer is not None:
                        optimizer.step()
                    else:
                        torch.cat([p.grad.reshape(-1) for p in parameters], out=grad)
                        row.sub_(moment.mul_(MOMENTUM).add_(grad), alpha=LEARNING_RATE)
                    steps += 1
            total.add_(row, alpha=len(inputs))
            weight += len(inputs)
        z = total / weight
    return steps / (CLOCK() - started)


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


def ours(
    work: Workload,
    data: Clients,
    algorithm: FederatedAlgorithm,
    engine: Literal["sequential", "vectorized", "auto"] = "sequential",
    callbacks: Sequence[Callback] = (),
) -> float:
    """Client-steps per second of the framework, tables written."""
    warm_up = work.warm_up_of(engine)
    watch = Stopwatch(warm_up)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=warm_up + work.rounds, clients_per_round=work.num_sampled, local_epochs=work.epochs,
            accelerator="cpu", logger=False, eval_every_n_rounds=0, enable_progress_bar=False,
            enable_checkpointing=False, default_root_dir=folder, seed=0, callbacks=[watch, *callbacks],
            engine=engine,
        )  # fmt: skip
        trainer.fit(Plain(work.make_net()), data, algorithm)
        with open(f"{trainer.log_dir}/clients.csv") as file:
            steps = sum(int(row["num_steps"]) for row in csv.DictReader(file) if int(row["round"]) > warm_up)
    return steps / watch.seconds


def speed_of_peer(name: str, workload: str) -> float:
    """Client-steps per second of another framework, in a process of its own: what they leave behind costs time, too."""
    command = [sys.executable, str(Path(__file__).with_name("peers.py")), PEERS[name], workload]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed on {workload}:\n{done.stderr[-2000:]}")
    return float(done.stdout.split("steps/s ")[-1])


def interval(values: Sequence[float], probability: float = 0.9) -> tuple[float, float] | None:
    """Two of the values between which the median of what they are drawn from lies, with at least this probability.

    The k-th smallest and k-th largest miss it where at most k - 1 values fall on one side: a matter of fair coins.

    Returns:
        The narrowest such pair; None: even the smallest and the largest miss it too often (fewer than 5 values).

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
    """The paired ratios: median, minimum to maximum, and the 90 % interval of the median."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    found = interval(ratios)
    likely = "" if found is None else f"; 90 %: {found[0]:.2f} to {found[1]:.2f}"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}{likely})"


def table(workload: str, work: Workload, pairs: int, peers: Sequence[str] = ()) -> Iterator[str]:
    """One line for each way to train."""
    data = Clients(work.sizes, work.shape)
    runs: dict[str, Callable[[], float]] = {
        "floor": lambda: loop(work, data, flat=True),
        "torch.optim": lambda: loop(work, data, flat=False),
        "FedAvg": lambda: ours(work, data, FedAvg()),
        "FedBC": lambda: ours(work, data, FedBC(dual_lr=1e-3)),
        "FedAvg-vectorized": lambda: ours(work, data, FedAvg(), "vectorized"),
        "FedBC-vectorized": lambda: ours(work, data, FedBC(dual_lr=1e-3), "vectorized"),
        "FedAvg-auto": lambda: ours(work, data, FedAvg(), "auto"),
    } | {name: partial(speed_of_peer, name, workload) for name in peers}
    speeds: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(pairs):
        for way, run in runs.items():
            speeds[way].append(run())
    better = max("FedAvg", "FedAvg-vectorized", key=lambda way: statistics.median(speeds[way]))
    beside = {"FedBC": "FedAvg", "FedBC-vectorized": "FedAvg-vectorized", "FedAvg-auto": better}
    beside |= dict.fromkeys(peers, "FedAvg")
    for way, values in speeds.items():
        speed = f"{workload} {way:17} {statistics.median(values):8.0f} steps/s"
        line = f"{speed}   / floor {describe(values, speeds['floor'])}"
        yield line + (f"   / {beside[way]} {describe(values, speeds[beside[way]])}" if way in beside else "")


class Profile(Callback):
    """Profiles a run from the end of its warm-up on."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.found = warm_up, cProfile.Profile()

    def on_round_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Start after the warm-up."""
        if trainer.current_round > self.warm_up:
            self.found.enable()

    def on_round_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Stop between rounds."""
        self.found.disable()


def profile(name: str, work: Workload, num_shown: int = 8) -> Iterator[str]:
    """For each engine, the files with the largest shares of the time of FedBC's rounds."""
    data = Clients(work.sizes, work.shape)
    engines: tuple[Literal["sequential", "vectorized"], ...] = ("sequential", "vectorized")
    for engine in engines:
        watch = Profile(work.warm_up_of(engine))
        ours(work, data, FedBC(dual_lr=1e-3), engine, [watch])
        seconds = seconds_of_files(watch.found)
        total = sum(seconds.values())
        yield f"{name} {engine}: {total:.2f} s under the profiler"
        for file in sorted(seconds, key=lambda file: -seconds[file])[:num_shown]:
            yield f"    {seconds[file] / total:6.1%}  {file}"


def seconds_of_files(found: cProfile.Profile) -> dict[str, float]:
    """A file's name with its folder's -> seconds in its functions and in the tensor operations that these call."""
    seconds: dict[str, float] = defaultdict(float)
    for entry in found.getstats():  # pstats would take operations of one name for one
        if isinstance(entry.code, str):
            continue
        path = entry.code.co_filename
        name = "recorded steps" if path == "<string>" else "/".join(path.split("/")[-2:])
        operations = (call.inlinetime for call in entry.calls or () if isinstance(call.code, str))
        seconds[name] += entry.inlinetime + sum(operations)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--pairs", type=int, default=9, help="turns, in each of which every way is timed once")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--cpu-time", action="store_true", help="by CPU seconds; for one thread")
    parser.add_argument("--peers", action="store_true", help="also pfl-research and Flower, those that are installed")
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead of how much it is")
    given = parser.parse_args()
    unknown = set(given.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if given.cpu_time and given.threads > 1:
        parser.error("--cpu-time counts the seconds of all threads; give --threads 1")
    peers: list[str] = []
    if given.peers:
        if given.cpu_time or given.threads > 1:
            parser.error("--peers: Flower works in a process of its own, with one thread, timed by seconds alone")
        peers = [name for name, package in PEERS.items() if find_spec(package) is not None]
        if not peers:
            parser.error("--peers: none is installed; pip install 'pfl[pytorch]' 'flwr[simulation]'")
    torch.set_num_threads(given.threads)
    clock = "CPU seconds" if given.cpu_time else "seconds"
    print(f"torch {torch.__version__}, {given.threads} thread(s), {given.pairs} turns, {clock}", flush=True)
    global CLOCK
    CLOCK = time.process_time if given.cpu_time else time.perf_counter
    for name in given.workloads or WORKLOADS:
        lines = profile(name, WORKLOADS[name]) if given.profile else table(name, WORKLOADS[name], given.pairs, peers)
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
