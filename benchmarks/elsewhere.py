"""One run on every engine: the largest difference of z, seconds and bytes per round.

    python benchmarks/elsewhere.py [METHOD ...] [--engines ENGINE ...]

The digits on ten unequal clients, six of them in each of five rounds, as ``fedbc-cli`` trains them: momentum, dropout
where BatchNorm is not, batches of 20. Two engines lose something on purpose: one of two torchrun agents, and one of two
Ray actors, are killed (SIGKILL) in round 3. An engine that is not installed is left out. Seconds are the median of
rounds 2 to 5, evaluation left out; where something is killed they count nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import psutil
import torch

ROUNDS, KILLED_IN = 5, 3
PROGRAM = [sys.executable, "-m", "fedbc_lightning"]
BASE = [
    "fit", "--config", "digits.yaml", f"--trainer.max_rounds={ROUNDS}", "--trainer.clients_per_round=6",
    "--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu",
    "--trainer.eval_every_n_rounds=0", "--trainer.checkpoint_every_n_rounds=1", "--model.dropout=0.2",
]  # fmt: skip
BATCH_NORM = ["--model=BatchNormMLP", "--model.num_features=64", "--model.hidden=64"]
METHODS = {
    "FedBC": [],
    "SCAFFOLD": ["--algorithm=SCAFFOLD"],
    "FedAvg, BatchNorm": ["--algorithm=FedAvg", *BATCH_NORM],
    "Ditto": ["--algorithm=Ditto"],
    "FedBC, own head": ["--trainer.local_parameters=[network.4.*]"],
    "FedAvg, top-k": ["--algorithm=FedAvg", "--trainer.codec.up=TopK", "--trainer.codec.up.fraction=0.1"],
}
Start = Callable[[list[str], Path], None]


class Found(NamedTuple):
    """What a run ended with."""

    z: dict[str, torch.Tensor]
    seconds: float
    bytes: float


def run(words: list[str], folder: Path, watch: Callable[[subprocess.Popen], None] | None = None) -> None:
    """Run a command to its end, which must be good; ``watch`` sees it running."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("a") as output:
        program = subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        if watch is not None:
            threading.Thread(target=watch, args=(program,), daemon=True).start()
        if program.wait():
            raise SystemExit(f"{' '.join(words)}\n{(folder / 'output.txt').read_text()[-3000:]}")


def in_round(folder: Path, round: int) -> None:
    """Wait until a run has finished the round before."""
    while not any(f"\n{round - 1}," in path.read_text() for path in folder.glob("runs/*/*/metrics.csv")):
        time.sleep(0.01)


def children(program: subprocess.Popen, name: str) -> Iterator[psutil.Process]:
    """Yield the processes below a program whose command lines hold a text."""
    for child in psutil.Process(program.pid).children(recursive=True):
        if name in " ".join(child.cmdline()):
            yield child


def one(words: list[str], folder: Path) -> None:
    """One process."""
    run([*PROGRAM, *words], folder)


def two(words: list[str], folder: Path) -> None:
    """Two processes, which meet once per round."""
    run([*PROGRAM, *words, "--trainer.devices=2", "--trainer.strategy=ddp_spawn"], folder)


def torchrun(words: list[str], folder: Path) -> None:
    """Two agents, of which the one that has come second is killed with its worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=5", "-m", "fedbc_lightning", *words,
    ]  # fmt: skip

    def kill(first: subprocess.Popen) -> None:
        while not psutil.Process(first.pid).net_connections():  # the second one meets it there
            time.sleep(0.01)
        with subprocess.Popen(agent, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as second:
            in_round(folder, KILLED_IN)
            for process in (*psutil.Process(second.pid).children(recursive=True), second):
                process.send_signal(signal.SIGKILL)

    run(agent, folder, kill)
    assert "This job was started again" in (folder / "output.txt").read_text(), "the run had ended before"


def ray(words: list[str], folder: Path, watch: Callable[[subprocess.Popen], None] | None = None) -> None:
    """Two Ray actors."""
    run([*PROGRAM, *words, "--trainer.backend=Ray", "--trainer.backend.num_actors=2"], folder, watch)


def ray_killed(words: list[str], folder: Path) -> None:
    """Two Ray actors, of which one is killed."""

    def kill(program: subprocess.Popen) -> None:
        in_round(folder, KILLED_IN)
        next(children(program, "ray::_Actor")).send_signal(signal.SIGKILL)

    ray(words, folder, kill)


def flower(words: list[str], folder: Path, num_supernodes: int = 0) -> None:
    """Flower's simulation of ten clients, or that many SuperNodes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = folder / "flower"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    os.environ |= {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    place, kind = ["--insecure", "--host=127.0.0.1"], [] if num_supernodes else ["--simulation"]
    started = [["flower-superlink", *place, f"--port={port}", *kind]]
    for k in range(num_supernodes):
        own = [f"--port={port + 1 + k}", f"--superlink=127.0.0.1:{port}", f"--node-config=client={k}"]
        started.append(["flower-supernode", *place, *own])
    quiet = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen(command, **quiet) for command in started]
    try:
        run([*PROGRAM, "deploy", "flower", *words[1:], "--folder=app"], folder)
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        simulated = ["--federation-config", "num-supernodes=10 client-resources-num-cpus=1"]
        run(["flwr", "run", "app", "here", "--stream", *([] if num_supernodes else simulated)], folder)
    finally:
        for program in running[::-1]:
            program.terminate()
            program.wait()


ENGINES: dict[str, tuple[str, Start]] = {
    "one process": ("torch", one),
    "two processes": ("torch", two),
    "torchrun, one of two nodes killed": ("torch", torchrun),
    "Ray, two actors": ("ray", ray),
    "Ray, one of two actors killed": ("ray", ray_killed),
    "Flower, simulation": ("flwr", flower),
    "Flower, ten SuperNodes on loopback": ("flwr", partial(flower, num_supernodes=10)),
}


def found(folder: Path) -> Found:
    """Read what a run has left."""
    last = max(folder.glob("runs/*/*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    metrics = pd.read_csv(last.parents[1] / "metrics.csv")
    metrics = metrics[metrics["round"] > 1]
    assert metrics["round"].max() == ROUNDS, f"{folder}: {metrics['round'].max()} rounds"
    lost = pd.read_csv(last.parents[1] / "clients.csv").query("status != 'ok'")
    if len(lost):  # then z is that of dropouts, and the run's output says why
        print(lost[["round", "client", "status"]], (folder / "output.txt").read_text()[-3000:], file=sys.stderr)
    total = metrics["comm/bytes_up"] + metrics["comm/bytes_down"]
    state = torch.load(last, weights_only=False)["state_dict"]
    return Found(state, metrics["time/round_seconds"].median(), total.mean())


def main() -> None:
    """Run everything, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}; default: all")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=[*ENGINES], help=f"of {', '.join(ENGINES)}")
    asked = parser.parse_args()
    print("| method | engine | max \\|Δz\\| | seconds per round | bytes per round |\n|---|---|---|---|---|")
    for method in asked.methods or METHODS:
        reference: Found | None = None
        for engine in asked.engines:
            module, start = ENGINES[engine]
            if find_spec(module) is None:
                continue
            with tempfile.TemporaryDirectory() as place:
                start([*BASE, *METHODS[method]], Path(place))
                now = found(Path(place))
            reference = reference or now
            differences = [
                float((value.double() - now.z[name].double()).abs().max()) for name, value in reference.z.items()
            ]
            seconds = "" if "killed" in engine else f"{now.seconds:.3f}"
            print(f"| {method} | {engine} | {max(differences):.1e} | {seconds} | {now.bytes:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
