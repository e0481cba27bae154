"""Processes that are stopped, killed or interrupted, of a run of two and with workers, and two that resume one run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.boring import BoringData, Hidden
from helpers.programs import free_port
from helpers.row_processes import Killer

from faults.runs import REFUSED, ROUNDS, Bench, Case, Child, is_one_line, kind, train
from fedbc_lightning.distributed import fabric, heartbeat, interrupts

MOMENTS = ("client", "evaluation", "before commit", "after commit")
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
        root: Where it lies.
        absent: The rank that dies before it has met the other.
        fault: What rank 0 does to the victim: moment, count and signal, as a :class:`Killer` has them.
        victim: The rank to which it does that.
    """

    def __init__(
        self, root: Path, absent: int | None = None, fault: tuple[str, int, int] | None = None, victim: int = 0
    ) -> None:
        self._root, self._absent, self._port = root, absent, free_port()
        said = root.with_name(root.name + "_said")
        second = Child(lambda: self._be(1), said)
        pid = second.pid if victim else None
        first = Child(lambda: self._be(0, callbacks=[Killer(*fault, pid)] if fault else []), said)
        self.children = first, second

    def _be(self, rank: int, **options: Any) -> None:
        if rank == self._absent:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.SECONDS_TO_MEET = 20.0 if self._absent is None else 1.0
        heartbeat.MOST_SECONDS_WITHOUT_ANSWER, heartbeat.SECONDS_TO_NAME = 4, 2
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": self._port, "RANK": rank, "LOCAL_RANK": rank}
        world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "faults"}
        os.environ.update({name: str(value) for name, value in {**place, **world}.items()})
        train(self._root, devices=2, strategy="ddp", **options)


def pair_resumed(bench: Bench, root: Path) -> str | None:
    """Go on with a run of two processes to its end; what it has lost."""
    whole = bench.folder / "whole_of_two"
    for folder in (whole, root) if not whole.exists() else (root,):
        for child in Pair(folder).children:
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
        moment, victim, k = MOMENTS[index // 2 % len(MOMENTS)], index % 2, rng.randint(1, ROUNDS)

        def try_it(root: Path, moment: str = moment, victim: int = victim, k: int = k) -> str | None:
            children = Pair(root, fault=(moment, k, signal.SIGKILL), victim=victim).children
            problem = survivor_tells(bench, children[1 - victim])
            bench.expect(children[victim], -signal.SIGKILL)
            return problem or pair_resumed(bench, root)

        yield Case(f"SIGKILL of process {victim}, {moment} {k}", try_it)


@kind("stopped-process", 16)
def one_of_two_is_stopped(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """SIGSTOP for a while, after which nothing is lost; or for good, so that the other ends the run."""
    for index in range(count):
        moment, victim, k = rng.choice(MOMENTS), index // 2 % 2, rng.randint(1, ROUNDS)
        seconds = rng.uniform(0.1, 1.0) if index % 2 else None

        def try_it(
            root: Path, moment: str = moment, victim: int = victim, k: int = k, seconds: float | None = seconds
        ) -> str | None:
            children = Pair(root, fault=(moment, k, signal.SIGSTOP), victim=victim).children
            stopped, problem = children[victim], None
            os.waitpid(stopped.pid, os.WUNTRACED)
            if seconds is None:
                problem = survivor_tells(bench, children[1 - victim])
                stopped.kill()
            else:
                time.sleep(seconds)
                os.kill(stopped.pid, signal.SIGCONT)
                bench.expect(children[1 - victim])
            bench.expect(stopped, -signal.SIGKILL if seconds is None else 0)
            return problem or pair_resumed(bench, root)

        how_long = "for good" if seconds is None else f"for {seconds:.3f} s"
        yield Case(f"SIGSTOP of process {victim} {how_long}, {moment} {k}", try_it)


@kind("never-met", 4)
def one_of_two_never_comes(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """A process dies before it has met the other, and nobody stands above them."""
    for index in range(count):
        absent = index % 2

        def try_it(root: Path, absent: int = absent) -> str | None:
            children = Pair(root, absent=absent).children
            bench.expect(children[absent], -signal.SIGKILL)
            return survivor_tells(bench, children[1 - absent]) or pair_resumed(bench, root)

        yield Case(f"process {absent} dies before they have met", try_it)


@kind("signal", 40)
def signals_with_workers(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """Signals at random moments, at which workers are started and ended, too; each ends the run."""
    whole = bench.folder / "whole_with_workers"
    seconds = bench.timed(lambda: train(whole, data=WorkersData()))
    for index in range(count):
        number, after = SIGNALS[index % len(SIGNALS)], rng.uniform(0.05, 1.0) * seconds

        def try_it(root: Path, number: int = number, after: float = after) -> str | None:
            child = Child(lambda: train(root, data=WorkersData()), root.with_name(root.name + "_said"))
            time.sleep(after)
            os.kill(child.pid, number)  # one that has ended waits for us
            status, said = bench.expect(child, 128 + number, -number)
            if status == 0 and "stopping after this step" in said:
                return "the signal was said, and the run went on to its end"
            bench.timed(lambda: train(root, data=WorkersData()))
            return bench.lost(root, whole)

        yield Case(f"{number.name} after {after:.3f} s", try_it)


@kind("second-signal", 8)
def a_second_signal_in_the_save(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """Ctrl-C in a round, and once more while the checkpoint is written that the first one asked for."""
    for index in range(count):
        moment, k = MOMENTS[2 + index % 2], rng.randint(4, 3 * ROUNDS)  # after round 1

        def try_it(root: Path, moment: str = moment, k: int = k) -> str | None:
            def run() -> None:
                interrupts.SECONDS_OF_ONE = 0.0
                both = [Killer("client", k, signal.SIGINT), Killer(moment, 2, signal.SIGINT)]
                train(root, checkpoint_every_n_rounds=1000, callbacks=both)

            status, said = bench.expect(Child(run, root.with_name(root.name + "_said")), 128 + signal.SIGINT)
            if not status or "still stopping" not in said:
                return f"status {status}: {said[-500:]}"
            return bench.resumed(root)

        yield Case(f"Ctrl-C at client {k}, and {moment}", try_it)


@kind("two-at-once", 12)
def two_at_once(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """The second starts while the first trains; one of them goes on."""
    for _ in range(count):
        seconds = rng.uniform(0, 0.5 * bench.seconds)

        def try_it(root: Path, seconds: float = seconds) -> str | None:
            bench.copy_part(1, root)
            first = Child(lambda: train(root), root.with_name(root.name + "_said"))
            time.sleep(seconds)
            second = Child(lambda: train(root), root.with_name(root.name + "_said"))
            ends = [bench.expect(child, REFUSED) for child in (first, second)]
            refused = [said for status, said in ends if status]
            if len(refused) == 2 or not all(is_one_line(said) and "is being written by" in said for said in refused):
                return "\n".join(refused)
            return bench.lost(root)

        yield Case(f"a second resume after {seconds:.3f} s", try_it)
