"""Processes that are stopped, killed or interrupted, of a run of two and with workers."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from helpers.boring import BoringData, Hidden
from helpers.programs import free_port

from faults import runs
from faults.kills import Operation, at_operation
from faults.runs import REFUSED, ROUNDS, Bench, Case, Child, is_one_line, kind
from fedbc_lightning.distributed import fabric, heartbeat, interrupts

MOMENTS = ("pwrite clients.bin", "open evaluation.csv", "os.rename last.ckpt", "fsync checkpoints")
"""Operations of rank 0: in a round, after its evaluation, before the commit of a checkpoint, and after it."""
Fault = tuple[Operation, int]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class WorkersData(BoringData):
    """Data that only workers can load."""

    def __init__(self) -> None:
        super().__init__(num_workers=2)

    def client_train_dataset(self, client: int) -> Hidden:  # type: ignore[override]
        return Hidden(super().client_train_dataset(client))


class Pair:
    """The two processes of a run.

    Args:
        bench: Trains.
        root: Where it lies.
        fault: Before which of its operations rank 0 does something to the victim, and the signal.
        victim: The rank to which it does that.
    """

    def __init__(self, bench: Bench, root: Path, fault: Fault | None = None, victim: int = 0) -> None:
        self._bench, self._root, self._port = bench, root, free_port()
        said = root.with_name(root.name + "_said")
        second = Child(lambda: self._be(1), said)
        first = Child(lambda: self._be(0, fault, second.pid if victim else None), said)
        self.children = first, second

    def _be(self, rank: int, fault: Fault | None = None, victim: int | None = None) -> None:
        if not runs.has_true_limits:
            fabric.SECONDS_TO_MEET = 20.0
            heartbeat.MOST_SECONDS_WITHOUT_ANSWER, heartbeat.SECONDS_TO_NAME = 4, 2
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": self._port, "RANK": rank, "LOCAL_RANK": rank}
        world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "faults"}
        os.environ.update({name: str(value) for name, value in {**place, **world}.items()})
        if fault is not None:
            at_operation(fault[0], self._root, lambda: os.kill(victim or os.getpid(), fault[1]))
        self._bench.train(self._root, devices=2, strategy="ddp")


def pair_resumed(bench: Bench, root: Path) -> str | None:
    """Go on with a run of two processes to its end; what it has lost."""
    whole = bench.folder / "whole_of_two"
    for folder in (whole, root) if not whole.exists() else (root,):
        for child in Pair(bench, folder).children:
            bench.expect(child)
    return bench.lost(root, whole)


def survivor_tells(bench: Bench, child: Child) -> str | None:
    """The process that is left ends with one line; what it says where it does not."""
    status, said = bench.expect(child, REFUSED)
    return None if status == REFUSED and is_one_line(said) else f"status {status}: {said[-500:]}"


@kind("killed-process", 24)
def one_of_two_is_killed(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """SIGKILL in a round, in an evaluation, and around the save; the other says so, and both go on."""
    for index in range(count):
        moment, victim = Operation(MOMENTS[index // 2 % len(MOMENTS)], rng.randint(1, ROUNDS)), index % 2

        def try_it(root: Path, moment: Operation = moment, victim: int = victim) -> str | None:
            children = Pair(bench, root, fault=(moment, signal.SIGKILL), victim=victim).children
            problem = survivor_tells(bench, children[1 - victim])
            bench.expect(children[victim], -signal.SIGKILL)
            return problem or pair_resumed(bench, root)

        yield Case(f"SIGKILL of process {victim} before {moment}", try_it)


@kind("stopped-process", 16)
def one_of_two_is_stopped(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """SIGSTOP for a while, after which nothing is lost; or for good, so that the other ends the run."""
    for index in range(count):
        moment, victim = Operation(rng.choice(MOMENTS), rng.randint(1, ROUNDS)), index // 2 % 2
        seconds = rng.uniform(0.1, 1.0) if index % 2 else None

        def try_it(
            root: Path, moment: Operation = moment, victim: int = victim, seconds: float | None = seconds
        ) -> str | None:
            children = Pair(bench, root, fault=(moment, signal.SIGSTOP), victim=victim).children
            stopped, problem = children[victim], None
            os.waitpid(stopped.pid, os.WUNTRACED)
            if seconds is None:
                problem = survivor_tells(bench, children[1 - victim])
                os.kill(stopped.pid, signal.SIGKILL)
            else:
                time.sleep(seconds)
                os.kill(stopped.pid, signal.SIGCONT)
                bench.expect(children[1 - victim])
            bench.expect(stopped, -signal.SIGKILL if seconds is None else 0)
            return problem or pair_resumed(bench, root)

        how_long = "for good" if seconds is None else f"for {seconds:.3f} s"
        yield Case(f"SIGSTOP of process {victim} {how_long} before {moment}", try_it)


@kind("signal", 40, 0)
def signals_with_workers(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """Signals at random moments, at which workers are started and ended, too; each ends the run."""
    for index in range(count):
        number, after = SIGNALS[index % len(SIGNALS)], rng.uniform(0.1, 5.0) * bench.seconds  # to start them takes long

        def try_it(root: Path, number: int = number, after: float = after) -> str | None:
            child = Child(lambda: bench.train(root, data=WorkersData()), root.with_name(root.name + "_said"))
            time.sleep(after)
            os.kill(child.pid, number)  # one that has ended waits for us
            status, said = bench.expect(child, 128 + number, -number)
            if status == 0 and "stopping after this step" in said:
                return "the signal was said, and the run went on to its end"
            bench.timed(lambda: bench.train(root, data=WorkersData()))
            return bench.lost(root)

        yield Case(f"{number.name} after {after:.3f} s", try_it)


@kind("second-signal", 8)
def a_second_signal_in_the_save(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """Ctrl-C in a round, and once more while the checkpoint is written that the first one asked for."""
    for index in range(count):
        # After round 1, and in the second checkpoint: the first one is that of round 0
        first, second = Operation(MOMENTS[0], rng.randint(4, 3 * ROUNDS)), Operation(MOMENTS[2 + index % 2], 2)

        def try_it(root: Path, first: Operation = first, second: Operation = second) -> str | None:
            def run() -> None:
                interrupts.SECONDS_OF_ONE = 0.0
                for moment in (first, second):
                    at_operation(moment, root, lambda: os.kill(os.getpid(), signal.SIGINT))
                bench.train(root, checkpoint_every_n_rounds=1000)

            status, said = bench.expect(Child(run, root.with_name(root.name + "_said")), 128 + signal.SIGINT)
            if not status or "still stopping" not in said:
                return f"status {status}: {said[-500:]}"
            return bench.resumed(root)

        yield Case(f"Ctrl-C before {first} and {second}", try_it)
