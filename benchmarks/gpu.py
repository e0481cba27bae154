"""Time training on one GPU: loops by hand, our engines, and pfl-research if it is installed, in turn.

    python benchmarks/gpu.py [WORKLOAD ...] [--results gpu.jsonl] [--minutes 8]
    python benchmarks/gpu.py --device cpu --scale tiny       # a check of this script, in less than a minute
    python benchmarks/gpu.py --table gpu.jsonl               # the results as a table in Markdown

It needs no network, and no data but CIFAR-10's images, in whose place there is noise where they are not. Each
measurement is one line of JSON, which is printed and appended to the results at once; a way that fails has its reason
there, and the others go on. Started again with the same results, it leaves out the workloads that are finished.

by-hand          The floor of benchmarks/engines.py: parameters and gradients are views into two vectors on the device.
by-hand-graph    The same, with one CUDA graph for each step.
as-written       The sequential engine with ``record_steps: false``.
recorded         The sequential engine with ``record_steps: true``.
vectorized       The vectorized engine with ``record_steps: true``.
one-by-one, K=k, vmap, K=k, ...   One step of K clients, see benchmarks/cohort_steps.py; timed in the first turn only.
pfl-research     Its simulation of FedAvg, which does not train FedBC; it is timed in the first turn only.

The columns are those of a :class:`Measurement`. Two things are read from one more round, under torch's profiler: for
how long the GPU was at work, and how often the CPU waited for it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import cohort_steps
import engines
import numpy as np
import peers
import torch
from engines import ALGORITHMS, LEAN, WORKLOADS, Clients, Plain, Workload
from fedbc_lightning.models import CIFARCNN, ResNet18GroupNorm
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity

from fedbc_lightning import FederatedTrainer, UniformSampler

Line = dict[str, Any]
IMAGES = [Path(__file__).parents[k] / "shared/data/cifar10_images.zip" for k in (1, 2)]
"""Where CIFAR-10's images may be: one JPEG for each, in a folder for each class."""
HANGS_AFTER = 120
"""Seconds without a new line after which a worker is ended; the longest measurement takes about 20."""
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
"""Functions of the CUDA runtime in which the CPU waits; torch calls one for each ``.item()`` and ``.cpu()``."""


class Transformer(nn.Module):
    """Two encoder layers over a sequence of vectors, whose mean is classified."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of a batch of sequences (B, L, 64)."""
        return self.classify(self.encoder(self.embed(inputs)).mean(1))


def pfl_cnn() -> nn.Module:
    """Return the two-layer CNN of pfl-research's benchmarks, with its dropout, for 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A workload of this script.

    Attributes:
        work: Models and clients; its number of rounds is not used, as rounds are timed until the time is over.
        method: Name of the method that our engines train.
        published_rounds: Number of rounds of the published benchmark, to which the time is extrapolated; 0: none.
    """

    work: Workload
    method: str = "FedAvg"
    published_rounds: int = 0

    def tiny(self) -> Case:
        """Return the same with few and small batches, for a CPU."""
        shape = self.work.shape
        if self.work.make_net is ResNet18GroupNorm:
            shape = (3, 8, 8)
        work = replace(
            self.work, sizes=np.array([3, 5, 4]), shape=shape, num_sampled=2, epochs=1, warm_up=1, batch_size=2
        )
        return replace(self, work=work)


def _images(num_clients: int, size: int, make_net: Callable[[], nn.Module], **options: Any) -> Workload:
    return Workload(np.full(num_clients, size), (3, 32, 32), make_net, rounds=1, **options)


CASES = {
    # baseline.yaml of pfl-research: 1,500 rounds are 375,000 local steps.
    "pfl-cifar": Case(
        _images(1000, 50, pfl_cnn, num_sampled=50, epochs=1, warm_up=8, batch_size=10, lr=0.1, momentum=0.0),
        published_rounds=1500,
    ),
    # The paper's clients have 299 to 10,000 samples; a fifth of them, so that a round takes a second or so.
    "fedbc-cifar": Case(
        Workload(np.geomspace(60, 2000, 20).round().astype(int), (3, 32, 32), CIFARCNN, 10, 1, rounds=1, warm_up=30),
        "FedBC",
    ),
    "W1": Case(WORKLOADS["W1"], "FedBC"),
    "W4": Case(WORKLOADS["W4"], "FedBC"),
    "transformer": Case(
        Workload(np.full(50, 320), (32, 64), Transformer, 10, 1, rounds=1, warm_up=8, batch_size=32),
    ),
    "resnet": Case(
        _images(20, 320, ResNet18GroupNorm, num_sampled=10, epochs=1, warm_up=4, batch_size=32),
    ),
}  # fmt: skip
COHORTS = {f"cohort-{name}": name for name in cohort_steps.MODELS}
"""Workloads that are single steps of K clients, and the names of their models."""
WAYS = ["by-hand", "by-hand-graph", "as-written", "recorded", "vectorized", "pfl-research"]
ENGINES: dict[str, dict[str, Any]] = {
    "as-written": {"engine": "sequential", "record_steps": False},
    "recorded": {"engine": "sequential", "record_steps": True},
    "vectorized": {"engine": "vectorized", "record_steps": True},
}


@dataclass(frozen=True)
class Task:
    """One measurement that is to be made, and under which conditions; it travels to a worker as JSON."""

    workload: str
    way: str
    turn: int
    device: str
    is_tiny: bool
    seconds: float

    def line(self, **found: Any) -> Line:
        """Return a line of the results."""
        return {"workload": self.workload, "way": self.way, "turn": self.turn, **found}

    @property
    def case(self) -> Case:
        """The workload in its scale."""
        return CASES[self.workload].tiny() if self.is_tiny else CASES[self.workload]


@dataclass
class Measurement:
    """What is known of one way at the end; None stands for what a device or a way does not tell.

    Attributes:
        steps_per_second: Local steps per second of all sampled clients, without start-up and warm-up.
        rounds: Number of rounds that were timed.
        milliseconds_per_round: Time of a round.
        minutes_as_published: Minutes that the published number of rounds would take, without evaluation.
        busy: Share of the time in which the GPU computes: its seconds in a step, times ``steps_per_second``.
        waits_per_step: How often the CPU waits for the GPU, divided by the number of steps.
        kernels_per_step: Number of kernels and copies that the GPU does for a step.
        peak_mib: Largest amount of memory of the GPU that tensors took, with the training data, in MiB.
        said: What the trainer said of its steps, such as why they are not recorded.
    """

    steps_per_second: float
    rounds: int | None = None
    milliseconds_per_round: float | None = None
    minutes_as_published: float | None = None
    busy: float | None = None
    waits_per_step: float | None = None
    kernels_per_step: float | None = None
    peak_mib: float | None = None
    said: str = ""


def synchronized_clock(device: torch.device) -> float:
    """Return the time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Watch:
    """Times the rounds of a run: those of a warm-up, those that count, and perhaps one under the profiler.

    Args:
        task: What is measured.
        warm_up: Largest number of rounds of the warm-up; it also ends after a limit of time.

    Attributes:
        first: First round that is timed.
        last: Last round that is timed, once ``is_last`` is true.
        seconds: Time of these rounds.
        is_last: Whether the current round is the last one of the run.
    """

    def __init__(self, task: Task, warm_up: int) -> None:
        self.device, self.warm_up, self.limit = torch.device(task.device), warm_up, task.seconds
        # The first turn only: the profiler costs as much time as the measurement.
        self.is_profiled = self.device.type == "cuda" and task.turn == 1
        self.first = self.last = 0
        self.seconds, self.is_last = 0.0, False
        self._began = self._started = 0.0
        self._profiler: torch.profiler.profile | None = None

    def start_round(self, number: int) -> None:
        """Look at the clock when a round begins."""
        if self.is_last:
            return
        now = synchronized_clock(self.device)
        if not self.first:
            self._began = self._began or now
            if number > self.warm_up or now - self._began > 4 * self.limit:
                self.first, self._started = number, now
        elif now - self._started > self.limit:
            self.last, self.seconds, self.is_last = number - 1, now - self._started, True
            if self.is_profiled:
                self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
                self._profiler.start()

    def close(self) -> tuple[Counter, float] | None:
        """Return how often the profiled round called each function of CUDA, and the GPU's seconds of work."""
        if self._profiler is None:
            return None
        synchronized_clock(self.device)
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            self._profiler.export_chrome_trace(f"{folder}/trace.json")
            return count_events(json.loads(Path(folder, "trace.json").read_text())["traceEvents"])


def count_events(events: list[dict[str, Any]]) -> tuple[Counter, float]:
    """Return how often each function of CUDA's runtime was called, and the GPU's seconds of work, from a trace."""
    counts: Counter = Counter()
    microseconds = 0.0
    for event in events:
        kind = event.get("cat", "")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            counts["on the GPU"] += 1
            microseconds += event["dur"]
        elif kind == "cuda_runtime":
            counts[event["name"]] += 1
    return counts, microseconds / 1e6


class WatchedRounds(UniformSampler):
    """Tells a watch of the rounds of our trainer, and ends the run after the last one; a hook would cost time itself.

    Args:
        watch: The watch.

    Attributes:
        trainer: The trainer, which is made after its sampler.
    """

    trainer: FederatedTrainer

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __call__(self, num_clients: int, num_sampled: int, seed: int, round: int) -> list[int]:
        """Look at the clock, and sample the clients of a round."""
        self.watch.start_round(round)
        self.trainer.should_stop = self.watch.is_last
        return super().__call__(num_clients, num_sampled, seed, round)


def conclude(task: Task, watch: Watch, steps: dict[int, int], said: str = "") -> Measurement:
    """Return what was measured; ``steps`` are the local steps of each round."""
    rounds = watch.last - watch.first + 1
    per_second = sum(steps[t] for t in range(watch.first, watch.last + 1)) / watch.seconds
    found = Measurement(per_second, rounds, 1000 * watch.seconds / rounds, said=said)
    if task.case.published_rounds:
        found.minutes_as_published = task.case.published_rounds * watch.seconds / rounds / 60
    if watch.device.type == "cuda":
        found.peak_mib = torch.cuda.max_memory_allocated(watch.device) / 2**20
    try:
        profile = watch.close()
    except Exception as error:  # a profiler that does not work here must not cost the rate
        found.said = f"{said} The profiler failed: {_reason(error)}".strip()
        return found
    if profile is not None:
        counts, seconds = profile
        in_round = steps[watch.last + 1]
        found.busy = seconds / in_round * per_second
        found.waits_per_step = sum(counts[name] for name in WAITS) / in_round
        found.kernels_per_step = counts["on the GPU"] / in_round
    return found


class ByHand:
    """The floor of benchmarks/engines.py on any device.

    Args:
        task: What is measured.
        data: Clients, whose tensors are on the device.
        is_graph: Whether a step is one CUDA graph.
    """

    def __init__(self, task: Task, data: Clients, is_graph: bool) -> None:
        self.work, self.data, self.device = task.case.work, data, torch.device(task.device)
        self.net = make_net(self.work).to(self.device)
        parameters = list(self.net.parameters())
        numels = [p.numel() for p in parameters]
        self.row = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.z, self.grad, self.moment = self.row.clone(), torch.zeros_like(self.row), torch.zeros_like(self.row)
        views = zip(parameters, self.row.split(numels), self.grad.split(numels), strict=True)
        for parameter, weights, gradient in views:
            parameter.data, parameter.grad = weights.view_as(parameter), gradient.view_as(parameter)
        self.graphs = {size: self._captured(size) for size in self._batch_sizes()} if is_graph else {}

    def _batch_sizes(self) -> set[int]:
        sizes = {int(n) % self.work.batch_size for n in self.work.sizes} - {0}
        return sizes | ({self.work.batch_size} if max(self.work.sizes) >= self.work.batch_size else set())

    def _captured(self, size: int) -> Callable[[Tensor, Tensor], None]:
        inputs, targets = self.data.arrays[int(np.argmax(self.work.sizes))]
        inputs, targets = inputs[:size].clone(), targets[:size].clone()
        # As torch's notes on CUDA graphs ask: a few steps on another stream set up what cannot be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(inputs, targets)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(inputs, targets)

        def replay(new_inputs: Tensor, new_targets: Tensor) -> None:
            inputs.copy_(new_inputs)
            targets.copy_(new_targets)
            graph.replay()

        return replay

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Take a step of SGD with momentum."""
        self.grad.zero_()
        functional.cross_entropy(self.net(inputs), targets).backward()
        self.row.sub_(self.moment.mul_(self.work.momentum).add_(self.grad), alpha=self.work.lr)

    def round(self, number: int) -> int:
        """Train the sampled clients, and return the number of their steps."""
        total, weight, steps = torch.zeros_like(self.z), 0, 0
        for client in UniformSampler()(self.data.num_clients, self.work.num_sampled, seed=0, round=number):
            inputs, targets = self.data.arrays[client]
            self.row.copy_(self.z)
            self.moment.zero_()
            for _ in range(self.work.epochs):
                for chosen in torch.randperm(len(inputs), device=self.device).split(self.work.batch_size):
                    step = self.graphs.get(len(chosen), self.step)
                    step(inputs.index_select(0, chosen), targets.index_select(0, chosen))
                    steps += 1
            total.add_(self.row, alpha=len(inputs))
            weight += len(inputs)
        self.z = total / weight
        return steps


def by_hand(task: Task, data: Clients) -> Measurement:
    """Time a loop by hand."""
    is_graph = task.way == "by-hand-graph"
    if is_graph and task.device == "cpu":
        raise RuntimeError("a CPU has no CUDA graphs")
    on_device(data, task.device)
    loop, watch, steps = ByHand(task, data, is_graph), Watch(task, warm_up=1), {}
    for number in count(1):
        watch.start_round(number)
        if watch.is_last and not watch.is_profiled:
            break
        steps[number] = loop.round(number)
        if watch.is_last:
            break
    return conclude(task, watch, steps)


def ours(task: Task, data: Clients) -> Measurement:
    """Time a run of our trainer, with the settings that leave out everything but training and the tables."""
    case, options = task.case, ENGINES[task.way]
    watch, said = Watch(task, case.work.warm_up_of(options["engine"])), io.StringIO()
    sampler = WatchedRounds(watch)
    on_device(data, task.device)  # as it lies there after enough rounds, of which few are timed
    with (
        tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said),
        warnings.catch_warnings(record=True) as warned,
    ):  # fmt: skip
        trainer = FederatedTrainer(
            max_rounds=100_000, clients_per_round=case.work.num_sampled, local_epochs=case.work.epochs, seed=0,
            accelerator="gpu" if task.device == "cuda" else "cpu", devices=1, default_root_dir=folder,
            sampler=sampler, **options, **LEAN,
        )  # fmt: skip
        sampler.trainer = trainer
        trainer.fit(Plain(make_net(case.work), case.work.lr, case.work.momentum), data, ALGORITHMS[case.method]())
        steps: Counter = Counter()
        with open(f"{trainer.log_dir}/clients.csv") as file:
            for row in csv.DictReader(file):
                steps[int(row["round"])] += int(row["num_steps"])
    text = [*said.getvalue().splitlines(), *(str(warning.message) for warning in warned)]
    about_steps = dict.fromkeys(line.strip() for line in text if re.search("record|as written|mapped|replay", line))
    return conclude(task, watch, steps, " ".join(about_steps)[:500])


def pfl_research(task: Task, data: Clients) -> Measurement:
    """Time a run of pfl-research."""
    if find_spec("pfl") is None:
        raise RuntimeError("pfl-research is not installed: pip install 'pfl[pytorch]'")
    engines.CLOCK = partial(synchronized_clock, torch.device(task.device))
    on_device(data, task.device)
    work = replace(task.case.work, rounds=1000, warm_up=min(2, task.case.work.warm_up))
    work.make_net = partial(make_net, task.case.work)
    rate = peers.pfl_research(work, data, task.seconds)
    found = Measurement(rate)
    if task.case.published_rounds:
        per_round = work.num_sampled * peers.num_steps(work, work.sizes[:1])
        found.milliseconds_per_round = 1000 * per_round / rate
        found.minutes_as_published = task.case.published_rounds * per_round / rate / 60
    if task.device == "cuda":
        found.peak_mib = torch.cuda.max_memory_allocated() / 2**20
    return found


def cohort_step(task: Task) -> Measurement:
    """Time steps of K clients."""
    way, _, number = task.way.partition(", K=")
    step = cohort_steps.CohortStep(COHORTS[task.workload], int(number), task.device).of(way)
    clock = partial(synchronized_clock, torch.device(task.device))
    found = Measurement(cohort_steps.steps_per_second(step, int(number), task.seconds / 2, clock))
    if task.device == "cuda":
        found.peak_mib = torch.cuda.max_memory_allocated() / 2**20
    return found


def make_net(work: Workload) -> nn.Module:
    """Return a network whose lazy layers, if any, know their sizes."""
    torch.manual_seed(0)
    net = work.make_net()
    with torch.no_grad():
        net(torch.zeros(1, *work.shape))
    return net


def on_device(data: Clients, device: str) -> None:
    """Move the training data to the device, as our trainer does by itself when a client trains for the first time."""
    data.arrays = [(inputs.to(device), targets.to(device)) for inputs, targets in data.arrays]


@cache
def cifar_images() -> tuple[Tensor, Tensor] | None:
    """Return the training images of CIFAR-10, which are centred, and their labels; None where they are not."""
    from PIL import Image

    file = next((path for path in IMAGES if path.exists()), None)
    if file is None:
        return None
    with zipfile.ZipFile(file) as images:
        names = sorted(name for name in images.namelist() if "/train/" in name and name.endswith(".jpg"))
        pixels = [np.asarray(Image.open(io.BytesIO(images.read(name)))) for name in names]
    classes = sorted({name.split("/")[-2] for name in names})
    labels = torch.tensor([classes.index(name.split("/")[-2]) for name in names])
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255 - 0.5, labels


def make_clients(task: Task) -> Clients:
    """Return the clients of a workload: CIFAR-10's images where they are and fit, and noise otherwise."""
    work = task.case.work
    data = Clients(work.sizes, work.shape, batch_size=work.batch_size)
    if work.shape == (3, 32, 32) and not task.is_tiny and (found := cifar_images()) is not None:
        order = torch.randperm(len(found[1]), generator=torch.Generator().manual_seed(0))
        parts = order[: int(work.sizes.sum())].split([int(n) for n in work.sizes])
        data.arrays = [(found[0][part], found[1][part]) for part in parts]
    return data


def measure(task: Task) -> Line:
    """Make one measurement, and return its line; a failure is a line, too."""
    make: Callable[[Task, Clients], Measurement] = {"by-hand": by_hand, "by-hand-graph": by_hand}.get(task.way, ours)
    if task.way == "pfl-research":
        make = pfl_research
    gc.collect()
    if task.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    deterministic, benchmark = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        found = cohort_step(task) if task.workload in COHORTS else make(task, make_clients(task))
        return task.line(**asdict(found))
    except Exception as error:
        return task.line(failed=_reason(error))
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:500]


def work_off(tasks: list[Task]) -> None:
    """Make measurements in this process, the worker, and print their lines.

    It ends early after an error of CUDA, since nothing works on a device after one, and after pfl-research, which
    leaves costs behind; the caller then starts another worker for what is left.
    """
    torch.set_num_threads(1)
    for task in tasks:
        line = measure(task)
        print(json.dumps(line), flush=True)
        has_pfl_run = task.way == "pfl-research" and "failed" not in line
        if has_pfl_run or re.search("CUDA error|cuDNN|CUBLAS", line.get("failed", "")):
            return


def run_workers(tasks: list[Task], until: float) -> Iterator[Line]:
    """Yield the line of each measurement, made by workers, of which a new one is started when one dies or hangs."""
    left = deque(tasks)
    while left:
        if time.monotonic() > until - 3 * left[0].seconds:
            yield left.popleft().line(failed="no time is left: start again with the same --results")
            continue
        command = [sys.executable, __file__, "--worker", json.dumps([asdict(task) for task in left])]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker,
        ):
            num_before = len(left)
            try:
                for line in _lines(worker, until):
                    left.popleft()
                    yield line
            except BaseException:
                worker.kill()
                raise
            if worker.wait() and left:
                errors.seek(0)
                why = (errors.read().strip().splitlines() or [""])[-1][:300]
                yield left.popleft().line(failed=f"the process ended with {worker.returncode}. {why}".strip())
            elif len(left) == num_before:
                yield left.popleft().line(failed="the process ended without a result")


def _lines(worker: subprocess.Popen, until: float) -> Iterator[Line]:
    """Yield the results of a worker, and kill it when there is none for too long, or the time is over."""
    assert worker.stdout is not None
    while True:
        limit = max(0.0, min(HANGS_AFTER, until - time.monotonic()))
        timer = threading.Timer(limit, worker.kill)
        timer.start()
        text = worker.stdout.readline()
        timer.cancel()
        if not text:
            return
        if text.startswith("{"):  # another package may print, too
            yield json.loads(text)


def schedule(workload: str, given: argparse.Namespace) -> list[Task]:
    """Return the measurements of a workload: all ways in turn, and every second turn backwards."""
    tasks: list[Task] = []
    if workload in COHORTS:
        numbers = cohort_steps.CLIENTS[:1] if given.scale == "tiny" else cohort_steps.CLIENTS
        ways = [f"{way}, K={number}" for number in numbers for way in cohort_steps.WAYS]
        return [Task(workload, way, 1, given.device, False, given.seconds) for way in ways]
    for turn in range(1, given.turns + 1):
        ways = [way for way in WAYS if engines.matches(way, given.ways) and not (way == "pfl-research" and turn > 1)]
        ways = ways[:: 1 if turn % 2 else -1]  # what drifts during a turn cancels
        tasks += [Task(workload, way, turn, given.device, given.scale == "tiny", given.seconds) for way in ways]
    return tasks


def machine(given: argparse.Namespace) -> Line:
    """Return the line that says where the numbers come from."""
    is_gpu = given.device == "cuda"
    return {
        "machine": torch.cuda.get_device_name() if is_gpu else "CPU", "scale": given.scale, "torch": torch.__version__,
        "cuda": torch.version.cuda if is_gpu else None, "matmul": torch.get_float32_matmul_precision(),
        "cifar": "images" if any(path.exists() for path in IMAGES) and given.scale == "full" else "noise",
    }  # fmt: skip


def read(results: Path) -> list[Line]:
    """Return the lines of a file; the last one may have been cut off."""
    lines = []
    for text in results.read_text().splitlines() if results.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def table(lines: list[Line]) -> Iterator[str]:
    """Yield rows in Markdown: medians over the turns, and the share of the loop by hand's speed."""
    yield "| workload | way | steps/s | / by hand | ms a round | minutes | busy | waits/step | kernels/step | MiB |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    keys = ("milliseconds_per_round", "minutes_as_published", "busy", "waits_per_step", "kernels_per_step", "peak_mib")
    found = [line for line in lines if "way" in line]
    for workload, way in dict.fromkeys((line["workload"], line["way"]) for line in found):
        mine = [line for line in found if (line["workload"], line["way"]) == (workload, way)]
        rate = _median(mine, "steps_per_second")
        if rate is None:
            yield f"| {workload} | {way} | {mine[-1]['failed'].replace('|', '/')} |" + " |" * 7
            continue
        floor = _median([x for x in found if (x["workload"], x["way"]) == (workload, "by-hand")], "steps_per_second")
        values = [rate, floor and rate / floor, *(_median(mine, key) for key in keys)]
        shown = ["" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in values]
        yield f"| {workload} | {way} | {' | '.join(shown)} |"


def _median(lines: list[Line], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return statistics.median(values) if values else None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join([*CASES, *COHORTS])}; default: all"
    )
    parser.add_argument("--ways", nargs="+", default=["*"], help="patterns of the ways that are timed")
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"), help="file to which lines are appended")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny: only to check this script")
    parser.add_argument("--turns", type=int, default=None, help="how often each way is timed; default: 2, tiny: 1")
    parser.add_argument("--seconds", type=float, default=None, help="per measurement; default: 2, tiny: 0.05")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of all; what is left is not started")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="only print the table of these results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = set(given.workloads) - {*CASES, *COHORTS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*CASES, *COHORTS])}")
    is_tiny = given.scale == "tiny"
    given.turns = given.turns or (1 if is_tiny else 2)
    given.seconds = given.seconds or (0.05 if is_tiny else 2.0)
    if not (given.table or given.worker) and given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu --scale tiny checks the script")
    return given


def main() -> None:
    """Measure what is not yet in the results, and print and append it line by line."""
    given = _parse()
    if given.table:
        print("\n".join(table(read(given.table))))
        return
    if given.worker:
        work_off([Task(**task) for task in json.loads(given.worker)])
        return
    until, here = time.monotonic() + 60 * given.minutes, machine(given)
    finished = [line["workload"] for line in read(given.results) if line.get("finished_on") == here]
    with given.results.open("a") as file:

        def write(line: Line) -> None:
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

        write(here)
        workloads = [name for name in given.workloads or [*CASES, *COHORTS] if name not in finished]
        tasks = [task for name in workloads for task in schedule(name, given)]
        num_left = Counter(task.workload for task in tasks)
        for line in run_workers(tasks, until):
            write(line)
            num_left[line["workload"]] -= 1
            if "no time is left" in line.get("failed", ""):
                num_left[line["workload"]] = -1  # it is begun anew next time
            elif not num_left[line["workload"]]:
                write({"workload": line["workload"], "finished_on": here})


if __name__ == "__main__":
    main()
