"""What very many clients cost: memory, seconds per round, checkpoints; and a killed run that goes on bit for bit.

    python benchmarks/many_clients.py [--clients 1000 100000] [--sampled 100] [--rounds 50] [--devices 1]
                                      [--logistic 1000000] [--logistic-sampled 10000] [--logistic-rounds 6] [--kill]

Images: N clients of 20 images, uint8 3x32x32, made by index from the seed when a client takes part; FedBC on the CIFAR
CNN of its paper. Every client keeps its own model x_i (248 kB), above 64 MiB in checkpoints/clients.bin. A round writes
those of the sampled clients, at most sampled x rounds x 252 kB on the disk in all (full size: --sampled 1000, 12.6 GB).
Peak memory is VmHWM of all processes; the last data sets, up to 128 MiB, are kept, so it grows until these are full.
CPU seconds depend less on what else the machine does than seconds. A checkpoint is written every fifth round; its
seconds are those between such a round and the next, with all rows that are not yet on the disk.

Logistic: N clients of 5 to 15 samples, 60 inputs, 10 classes, FedBC, both engines, one after the other.

--kill: the images again with N = 100,000 and 8 rounds, in one piece and killed by SIGKILL in the sixth, then resumed:
last.ckpt and all rows must be equal. Every run is a process of its own with one thread, in a folder that is removed.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedbc_lightning.models import CIFARCNN, LogisticRegression
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from fedbc_lightning import FedBC, FederatedDataModule, FederatedTrainer
from fedbc_lightning.core.seeding import generator, numpy_generator
from fedbc_lightning.data import ArrayDataset
from fedbc_lightning.state.file_rows import RowFile, RowLayout

EARLY = 5
"""The round whose peak memory the last one is compared with."""
CHECKPOINT_EVERY = 5
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SOME = 10
"""Rounds at the beginning (but for the first) and at the end whose CPU seconds are compared."""


class GeneratedImages(FederatedDataModule):
    """20 images per client, a function of (seed, client); the brighter, the higher the class."""

    num_each = 20

    def __init__(self, num_clients: int) -> None:
        super().__init__(batch_size=20, seed=0)
        self._num_clients = num_clients

    @property
    def num_clients(self) -> int:
        """N."""
        return self._num_clients

    def num_samples(self, split: str) -> np.ndarray:
        """Known without making them, int64 ``(N,)``."""
        return np.full(self.num_clients, self.num_each if split == "train" else 0)

    def client_train_dataset(self, client: int) -> ArrayDataset:
        """A client's images, made now."""
        draws = generator(self.split_seed, "images", client=client)
        targets = torch.randint(10, (self.num_each,), generator=draws)
        images = torch.randint(128, (self.num_each, 3, 32, 32), dtype=torch.uint8, generator=draws)
        images += (12 * targets).to(torch.uint8)[:, None, None, None]
        return ArrayDataset((images, targets), transform=_to_unit)

    def client_test_dataset(self, client: int) -> None:
        """None."""
        return

    def partition_hash(self) -> str:
        """Of what they are made from."""
        return hashlib.sha256(f"{type(self).__name__} {self.num_clients} {self.split_seed}".encode()).hexdigest()

    def label_histogram(self) -> None:
        """Not known without making them."""
        return


class GeneratedRows(GeneratedImages):
    """5 to 15 samples of 60 features per client, a function of (seed, client); one linear rule gives the classes."""

    def __init__(self, num_clients: int) -> None:
        super().__init__(num_clients)
        self._sizes = numpy_generator(self.split_seed, "sizes").integers(5, 16, num_clients)
        self._rule = torch.randn(60, 10, generator=generator(self.split_seed, "rule"))

    def num_samples(self, split: str) -> np.ndarray:
        """Known without making them, int64 ``(N,)``."""
        return self._sizes if split == "train" else np.zeros_like(self._sizes)

    def client_train_dataset(self, client: int) -> ArrayDataset:
        """A client's samples, made now."""
        draws = generator(self.split_seed, "samples", client=client)
        inputs = torch.randn(int(self._sizes[client]), 60, generator=draws)
        return ArrayDataset((inputs, (inputs @ self._rule).argmax(1)))


def _to_unit(images: Tensor) -> Tensor:
    return images.float() / 255


@dataclass(frozen=True)
class Run:
    """What one process trains.

    Attributes:
        data: ``"images"`` or ``"logistic"``.
        num_clients: N.
        num_sampled: S.
        rounds: T.
        folder: Of the run.
        engine: Of the trainer.
        devices: Processes.
        checkpoint_every: Rounds.
        is_resumed: Whether it goes on from ``last.ckpt``.
    """

    data: str
    num_clients: int
    num_sampled: int
    rounds: int
    folder: str
    engine: str = "sequential"
    devices: int = 1
    checkpoint_every: int = CHECKPOINT_EVERY
    is_resumed: bool = False

    @property
    def version(self) -> Path:
        """The run folder."""
        return next(Path(self.folder, "run").glob("*-*"))

    @property
    def command(self) -> list[str]:
        """Of a process of its own."""
        return [sys.executable, __file__, "--train", json.dumps(asdict(self))]

    def finish(self) -> None:
        """Do it in a process of its own.

        Raises:
            RuntimeError: It failed; with the end of what it wrote.
        """
        done = subprocess.run(self.command, env=ENVIRONMENT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])


@dataclass
class Watch(Callback):
    """Notes of each round this process's CPU seconds, its peak memory so far, and the seconds until the next round."""

    folder: str
    started: float = 0.0
    ended: float = 0.0
    cpu: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def on_round_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """The tables and the checkpoint of the round before are written."""
        if self.ended:
            self.pauses.append(time.perf_counter() - self.ended)
        self.started = time.process_time()

    def on_round_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """The round's numbers are known, its tables and checkpoint not yet written."""
        self.cpu.append(time.process_time() - self.started)
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        self.peaks.append(int(status["VmHWM"].split()[0]))
        if trainer.current_round == trainer.max_rounds:
            notes = {"cpu": self.cpu, "peaks": self.peaks, "pauses": self.pauses}
            Path(self.folder, f"watch-{trainer.global_rank}.json").write_text(json.dumps(notes))
        self.ended = time.perf_counter()


def train(run: Run) -> None:
    """What every process runs."""
    torch.set_num_threads(1)
    data = GeneratedImages(run.num_clients) if run.data == "images" else GeneratedRows(run.num_clients)
    torch.manual_seed(0)
    model = CIFARCNN() if run.data == "images" else LogisticRegression(60, 10)
    trainer = FederatedTrainer(
        max_rounds=run.rounds, clients_per_round=run.num_sampled, accelerator="cpu", devices=run.devices,
        engine=run.engine, callbacks=Watch(run.folder), logger=False, eval_every_n_rounds=0,
        enable_progress_bar=False, checkpoint_every_n_rounds=run.checkpoint_every, default_root_dir=run.folder,
        name="run", seed=0,
    )  # fmt: skip
    trainer.fit(model, data, FedBC(dual_lr=1e-3), ckpt_path="last" if run.is_resumed else None)


@dataclass(frozen=True)
class Measured:
    """What a run cost.

    Attributes:
        seconds: Of each round.
        cpu: CPU seconds of each round, of all processes together.
        peaks: MiB of all processes together, at each round's end.
        pauses: Seconds from each round's end to the next one's start.
        checkpoint_bytes: Of ``last.ckpt``.
        rows_bytes: Of ``clients.bin`` on the disk; 0: the rows are in ``last.ckpt``.
    """

    seconds: list[float]
    cpu: list[float]
    peaks: list[float]
    pauses: list[float]
    checkpoint_bytes: int
    rows_bytes: int


def measure(run: Run) -> Measured:
    """Run it and read what it left."""
    run.finish()
    with (run.version / "metrics.csv").open() as file:
        rounds = [row for row in csv.DictReader(file) if row["round"] != "0"]
    notes = [json.loads(path.read_text()) for path in sorted(Path(run.folder).glob("watch-*.json"))]
    rows = run.version / "checkpoints" / "clients.bin"
    return Measured(
        [float(row["time/round_seconds"]) for row in rounds],
        [sum(of_process) for of_process in zip(*(note["cpu"] for note in notes), strict=True)],
        [sum(of_process) / 1024 for of_process in zip(*(note["peaks"] for note in notes), strict=True)],
        notes[0]["pauses"],
        (run.version / "checkpoints" / "last.ckpt").stat().st_size,
        rows.stat().st_blocks * 512 if rows.exists() else 0,
    )


def image_rows(counts: list[int], num_sampled: int, rounds: int, devices: int) -> Iterator[str]:
    """The table of the images: a row for each N."""
    yield (
        f"images, {num_sampled:,} sampled, {rounds} rounds, {devices} process(es)\n"
        f"{'clients':>9} {f'MiB, round {EARLY}':>13} {rounds // 2:>6} {rounds:>6} {'ratio':>6} "
        f"{'s/round first':>14} {'median':>7} {'last':>6} {f'CPU s 2-{1 + SOME}':>11} {f'last {SOME}':>8} "
        f"{'checkpoint MB':>14} {'s':>6} {'rows on disk GB':>16}"
    )
    for num_clients in counts:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Run("images", num_clients, num_sampled, rounds, folder, devices=devices))
        early, middle, last = (found.peaks[round - 1] for round in (min(EARLY, rounds), max(rounds // 2, 1), rounds))
        pauses = found.pauses[CHECKPOINT_EVERY - 1 :: CHECKPOINT_EVERY] or found.pauses
        yield (
            f"{num_clients:9,} {early:13.0f} {middle:6.0f} {last:6.0f} {last / early:6.3f} "
            f"{found.seconds[0]:14.2f} {statistics.median(found.seconds):7.2f} {found.seconds[-1]:6.2f} "
            f"{statistics.median(found.cpu[1 : 1 + SOME]):11.2f} {statistics.median(found.cpu[-SOME:]):8.2f} "
            f"{found.checkpoint_bytes / 1e6:14.2f} {statistics.median(pauses):6.2f} {found.rows_bytes / 1e9:16.2f}"
        )


def logistic_rows(num_clients: int, num_sampled: int, rounds: int) -> Iterator[str]:
    """The table of the logistic clients: a row for each engine."""
    yield (
        f"logistic, {num_clients:,} clients, {num_sampled:,} sampled, {rounds} rounds\n"
        f"{'engine':>11} {'s/round first':>14} {'median of later':>16} {'CPU s':>6} {'MiB':>6} {'checkpoint MB':>14}"
    )
    for engine in ("sequential", "vectorized"):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Run("logistic", num_clients, num_sampled, rounds, folder, engine))
        later, cpu = found.seconds[1:] or found.seconds, found.cpu[1:] or found.cpu
        yield (
            f"{engine:>11} {found.seconds[0]:14.2f} {statistics.median(later):16.2f} {statistics.median(cpu):6.2f} "
            f"{found.peaks[-1]:6.0f} {found.checkpoint_bytes / 1e6:14.2f}"
        )


def digests(run: Run) -> dict[str, str]:
    """sha256 of all that ``last.ckpt`` says but where the rows lie, and of the rows that it names."""
    checkpoint = torch.load(run.version / "checkpoints" / "last.ckpt", weights_only=True)
    file = checkpoint["fedbc_lightning"]["federation"]["clients"]["file"]
    slots, _ = file.pop("slots"), file.pop("id")
    vectors = {name: [len(row), str(row.dtype).removeprefix("torch.")] for name, row in file["initial"].items()}
    stored = RowFile(run.version / "checkpoints" / "clients.bin", RowLayout(run.num_clients, vectors))
    rows = hashlib.sha256()
    for name, live in sorted(slots.items()):
        for client in live.nonzero().flatten().tolist():
            rows.update(f"{name} {client} ".encode() + stored.read(name, int(live[client]), client).numpy().tobytes())
    return {"last.ckpt": hashlib.sha256(_plain_bytes(checkpoint)).hexdigest(), "clients.bin": rows.hexdigest()}


def _plain_bytes(value: Any) -> bytes:
    """Of nested containers, tensors by their values."""
    if isinstance(value, dict):
        return b"".join(str(key).encode() + _plain_bytes(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return b"".join(map(_plain_bytes, value))
    return value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()


def killed_rows(num_clients: int, num_sampled: int, rounds: int = 8, kill_in: int = 6) -> Iterator[str]:
    """Whether a run that is killed and resumed ends as one that was not.

    Args:
        num_clients: N.
        num_sampled: S.
        rounds: T.
        kill_in: The round in which SIGKILL comes, after one of which there is no checkpoint.
    """
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole = Run("images", num_clients, num_sampled, rounds, one, checkpoint_every=2)
        whole.finish()
        expected = digests(whole)
        killed = Run("images", num_clients, num_sampled, rounds, other, checkpoint_every=2)
        process = subprocess.Popen(
            killed.command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and _rounds_in(killed) < kill_in - 1:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed; give more rounds or clients"
        there = torch.load(killed.version / "checkpoints" / "last.ckpt", weights_only=True)["fedbc_lightning"]["round"]
        yield f"killed by SIGKILL with {_rounds_in(killed)} rounds in metrics.csv and {there} in last.ckpt"
        Run(**(asdict(killed) | {"is_resumed": True})).finish()
        for name, digest in digests(killed).items():
            verdict = "bitwise equal" if digest == expected[name] else "DIFFERENT"
            yield f"resumed to round {rounds}: {name} {verdict} (sha256 {digest[:16]}, {expected[name][:16]})"


def _rounds_in(run: Run) -> int:
    lines = [path.read_text().count("\n") for path in Path(run.folder, "run").glob("*-*/metrics.csv")]
    return max([0, *(number - 2 for number in lines)])


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[1000, 100_000], help="N of the images, one or more")
    parser.add_argument("--sampled", type=int, default=100, help="S of the images")
    parser.add_argument("--rounds", type=int, default=50, help="of the images")
    parser.add_argument("--devices", type=int, default=1, help="processes of a run on images")
    parser.add_argument("--logistic", type=int, default=1_000_000, help="N of the logistic clients; 0: none")
    parser.add_argument("--logistic-sampled", type=int, default=10_000)
    parser.add_argument("--logistic-rounds", type=int, default=6)
    parser.add_argument("--kill", action="store_true", help="also kill a run of 100,000 clients and resume it")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train:
        train(Run(**json.loads(given.train)))
        return
    if given.clients:
        for row in image_rows(given.clients, given.sampled, given.rounds, given.devices):
            print(row, flush=True)
    if given.logistic:
        for row in logistic_rows(given.logistic, given.logistic_sampled, given.logistic_rounds):
            print(row, flush=True)
    if given.kill:
        for row in killed_rows(100_000, given.sampled):
            print(row, flush=True)


if __name__ == "__main__":
    main()
