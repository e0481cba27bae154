"""What is started again: a study by its command, a job of two lines by SLURM, a run by another machine."""

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import yaml
from helpers.command_line import run_cli, write_project

from faults import runs
from faults.kills import Operation, at_operation
from faults.processes import MOMENTS
from faults.runs import REFUSED, ROUNDS, Bench, Case, Child, is_one_line, kind, runs_differ
from fedbc_lightning.run import lock
from fedbc_lightning.studies import workers

STUDY = {
    "base": "tiny.yaml",
    "algorithms": {"FedAvg": {}, "FedBC": {"dual_lr": 0.01}},
    "overrides": {"trainer.max_rounds": ROUNDS, "trainer.checkpoint_every_n_rounds": 1},
    "seeds": 1,
    "workers": 2,
}
TABLES = ("results.csv", "differences.csv", "table.md")
VICTIMS = ("all its processes", "the command", "the process that does it")
NUMBERS = (signal.SIGUSR1, signal.SIGKILL, signal.SIGTERM)
SLURM = {"NTASKS": 1, "JOB_ID": 7, "JOB_NAME": "lines", "PROCID": 0, "LOCALID": 0, "NODEID": 0, "NODELIST": "localhost"}
ENDS = ("sleeps", "dies", "goes on")
HOSTS = ("another host", "the same host")
IN_A_SAVE = ("write last.ckpt", *MOMENTS[2:])
"""Where a host may sleep that finds out before it writes again; one that wakes within a row of a table writes that."""


def compare(root: Path, moment: Operation | None = None, victim: str = "", killed: Path = Path()) -> None:
    """Do the study in ``root``, or go on with it, in this process and its forks, of which one is killed once."""
    root.mkdir(exist_ok=True)
    write_project(root)
    (root / "study.yaml").write_text(yaml.safe_dump(STUDY))
    os.chdir(root)
    os.setpgid(0, 0)
    sys.path.insert(0, str(root))
    workers.SECONDS_BETWEEN_LOOKS = 0.05
    forks = multiprocessing.get_context("fork")
    workers.multiprocessing = SimpleNamespace(get_context=lambda _: forks)  # type: ignore[attr-defined]
    command = os.getpid()

    def kill() -> None:
        if not killed.exists():  # whoever takes its place comes to the same operation
            killed.mkdir()
            os.kill({VICTIMS[0]: -command, VICTIMS[1]: command}.get(victim, os.getpid()), signal.SIGKILL)

    if moment is not None:
        at_operation(moment, root, kill)
    sys.exit(run_cli("compare", "--config", "study.yaml"))


@kind("killed-study", 24)
def killed_studies(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """SIGKILL of the command, of a worker or of all, in a run, between tables, or anywhere; the command goes on."""
    whole = bench.folder / "whole_study"
    if not whole.exists():
        bench.timed(lambda: compare(whole))
    for index in range(count):
        in_run = Operation(rng.choice(MOMENTS[1:]), rng.randint(1, ROUNDS) if index else 3)
        in_table = Operation(f"{rng.choice(['create', 'write', 'os.rename'])} {rng.choice(TABLES)}", 1)
        moment, victim = (in_run, in_run, in_table, None)[index % 4], VICTIMS[index % 3]
        after = rng.uniform(0.0, 5.0) * bench.seconds

        def try_it(
            root: Path, moment: Operation | None = moment, victim: str = victim, after: float = after
        ) -> str | None:
            said, killed = (root.with_name(f"{root.name}_{name}") for name in ("said", "killed"))
            child = Child(lambda: compare(root, moment, victim, killed), said)
            if moment is None:
                time.sleep(after)
                os.kill(child.pid, signal.SIGKILL)
            status, _ = bench.expect(child, -signal.SIGKILL)
            if moment is not None and not killed.exists():
                return f"nothing was killed: status {status}"
            bench.expect(Child(lambda: compare(root), said))
            return runs_differ(root / "studies", whole / "studies")

        yield Case(f"SIGKILL of {victim} before {moment}" if moment else f"SIGKILL after {after:.3f} s", try_it)


def script(bench: Bench, root: Path, restarts: int = 0, faults: Sequence[tuple[Operation, int]] = ()) -> int:
    """A job of SLURM, whose two lines train for one and for two epochs; the k-th time, the k-th fault is in line k."""
    tool = bench.folder / "bin" / "scontrol"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\necho $@ >> {tool.parent}/log\n")
    tool.chmod(0o755)
    slurm = {f"SLURM_{name}": str(value) for name, value in {**SLURM, "RESTART_COUNT": restarts}.items()}
    for line in (0, 1):

        def act(line: int = line) -> None:
            os.environ.update({**slurm, "PATH": f"{tool.parent}:{os.environ['PATH']}"})
            if line == restarts and faults:
                at_operation(faults[line][0], root, partial(signal.raise_signal, faults[line][1]))
            bench.train(root, ckpt_path=None, local_epochs=1 + line)

        child = Child(act, root.with_name(root.name + "_said"))
        if status := bench.expect(child, *(end for _, number in faults for end in (-number, 128 + number)))[0]:
            return status
    return 0


@kind("requeued-script", 18)
def requeued_scripts(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """A job is ended in its first line, started again, ended in its second one, and started once more."""
    whole, log = bench.folder / "whole_script", bench.folder / "bin" / "log"
    if not whole.exists():
        script(bench, whole)
    for index in range(count):
        numbers = NUMBERS[index % 3], NUMBERS[index // 3 % 3]
        faults = [(Operation(rng.choice(MOMENTS), rng.randint(1, ROUNDS)), number) for number in numbers]

        def try_it(root: Path, faults: list[tuple[Operation, int]] = faults) -> str | None:
            log.write_text("")
            statuses = [script(bench, root, restarts, faults) for restarts in range(3)]
            asked = log.read_text().count("requeue 7\n")
            if [bool(status) for status in statuses] != [True, True, False]:
                return f"it ended with {statuses}"
            if asked != [number for _, number in faults].count(signal.SIGUSR1):
                return f"SLURM was asked {asked} times to start the job again"
            return bench.lost(root, whole)

        yield Case(
            " and ".join(f"{number.name} before {faults[k][0]} of line {k}" for k, number in enumerate(numbers)), try_it
        )


def train_on(host: str, bench: Bench, root: Path, moment: Operation | None = None, hours: float = 0.0) -> None:
    """Go on with a run on another host, whose clock is ahead; before an operation it stops, and then only waits."""
    if not runs.has_true_limits:
        lock.SECONDS_TO_LIVE, lock.SECONDS_BETWEEN_TOUCHES, lock.SECONDS_BETWEEN_LOOKS = 2.0, 0.1, 0.05
    clock = time.time
    socket.gethostname, time.time = lambda: host, lambda: clock() + 3600 * hours

    def wait() -> None:
        continued: list[int] = []
        signal.signal(signal.SIGCONT, lambda number, _: continued.append(number))
        os.kill(os.getpid(), signal.SIGSTOP)
        while len(continued) < 2:  # the thread of the lease goes on
            time.sleep(0.01)

    if moment is not None:
        at_operation(moment, root, wait)
    bench.train(root)


@kind("two-at-once", 18, is_general=True)
def two_at_once(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """A second process is refused while the lease of the first one lives, and takes over if that dies or sleeps."""
    for index in range(count):
        end, hours, host = ENDS[index % 3], rng.uniform(-2, 2), HOSTS[index // 3 % 2]
        moment = Operation(rng.choice(IN_A_SAVE if end == "sleeps" else MOMENTS[1:]), rng.randint(1, ROUNDS - 1))

        def try_it(
            root: Path, end: str = end, hours: float = hours, host: str = host, moment: Operation = moment
        ) -> str | None:
            bench.copy_part(1, root)
            said = root.with_name(root.name + "_said")
            first = Child(lambda: train_on(HOSTS[1], bench, root, moment), said)
            if not os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1]):
                return f"it ended before {moment}"
            os.kill(first.pid, signal.SIGCONT)
            second, refused = bench.expect(Child(lambda: train_on(host, bench, root, hours=hours), said), REFUSED)
            os.kill(first.pid, {"goes on": signal.SIGCONT, "dies": signal.SIGKILL, "sleeps": signal.SIGSTOP}[end])
            if end != "goes on":
                bench.expect(Child(lambda: train_on(host, bench, root, hours=hours), said))
                os.kill(first.pid, signal.SIGCONT)
            _, told = bench.expect(first, REFUSED, -signal.SIGKILL)
            named = refused.partition(" is being written by ")[2].partition(" (run ")[2]  # from the run's own note
            if second != REFUSED or not is_one_line(refused) or not named:
                return f"the second was not refused: status {second}, {refused[-500:]}"
            if end == "sleeps" and not (is_one_line(told) and "was taken over by" in told):
                return f"the first was not told: {told[-500:]}"
            return bench.lost(root)

        yield Case(f"the first {end} at {moment}; a second on {host} whose clock is {hours:+.1f} h ahead", try_it)
