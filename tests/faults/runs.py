"""The run that faults are injected into, in child processes, and its comparison with one that nothing disturbed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.boring import assert_equal_trees, read_csv, without_times
from helpers.folders import only_run
from helpers.row_processes import fit, state_of
from matplotlib.figure import Figure

from fedbc_lightning import ConfigurationError
from fedbc_lightning.distributed.heartbeat import LostProcessError
from fedbc_lightning.state import client_rows

ROUNDS = 4
SECONDS_TO_FINISH = 120.0
"""How long a run that takes seconds may take before it hangs."""
REFUSED, BROKEN = 1, 2
"""Exit status of a run that ended with one line, and with a traceback."""


def train(root: Path, rounds: int = ROUNDS, **options: Any) -> None:
    """Train, or go on with, the run in ``root``; its clients' rows lie in ``clients.bin``."""
    options = {"checkpoint_every_n_rounds": 1, "max_rounds": rounds, **options}
    trainer = fit(root, "fedbc", "last", **options)
    if trainer._fabric.is_global_zero:
        torch.save(state_of(trainer), root / "state.pt")


class Child:
    """A fork that does something; what it prints goes into a file.

    Args:
        act: What it does.
        folder: Where it prints to: ``said.txt``, but for a folder that may be full.
    """

    def __init__(self, act: Callable[[], None], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._said = folder / f"said_{time.monotonic_ns()}.txt"
        self.pid = os.fork()
        if not self.pid:
            self._be(act)

    def _be(self, act: Callable[[], None]) -> None:
        file = os.open(self._said, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = 0
        try:
            act()
        except (ConfigurationError, LostProcessError) as error:
            print("error:", error, flush=True)
            status = REFUSED
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except SystemExit as stop:
            status = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
            status = BROKEN
        os._exit(status)

    def kill(self) -> None:
        """Send it SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def finish(self) -> tuple[int, str]:
        """Its exit status, negative for a signal, and what it printed.

        Raises:
            TimeoutError: It hangs; it was killed.
        """
        deadline = time.monotonic() + SECONDS_TO_FINISH
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                self.kill()
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"a process hangs: {self._said.read_text(errors='replace')[-500:]}")
            time.sleep(0.005)
        status = os.waitstatus_to_exitcode(ended[1])
        return status, self._said.read_text(errors="replace")


class Bench:
    """The undisturbed run, and what is compared with it.

    Args:
        folder: Of the runs; emptied by whoever made it.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        client_rows.IN_MEMORY_BELOW = 0
        Figure.savefig = lambda *args, **kwargs: None  # type: ignore[method-assign]
        self.folder = folder
        self.whole = folder / "whole"
        self.seconds = self.timed(lambda: train(self.whole))
        self._parts: dict[int, Path] = {}

    def timed(self, *acts: Callable[[], None]) -> float:
        """Do something to its end, in a process for each act; returns how many seconds it took."""
        started = time.monotonic()
        for child in [Child(act, self.folder) for act in acts]:
            self.expect(child)
        return time.monotonic() - started

    @staticmethod
    def expect(child: Child, *allowed: int) -> tuple[int, str]:
        """Let a child end, with status 0 or one that is allowed."""
        status, said = child.finish()
        if status not in (0, *allowed):
            raise RuntimeError(f"status {status}: {said[-1500:]}")
        return status, said

    def part(self, rounds: int) -> Path:
        """A run that ended after so many rounds; to be copied."""
        if rounds not in self._parts:
            root = self._parts[rounds] = self.folder / f"part_{rounds}"
            self.expect(Child(lambda: train(root, rounds), self.folder))
        return self._parts[rounds]

    def copy_part(self, rounds: int, root: Path) -> Path:
        """A copy of such a run; returns its run folder."""
        shutil.copytree(self.part(rounds), root, dirs_exist_ok=True)
        return only_run(root / "default")

    def resume(self, root: Path, *allowed: int) -> tuple[int, str]:
        """Go on with a run to its end, or to a status that is allowed, too."""
        return self.expect(Child(lambda: train(root), root.with_name(root.name + "_said")), *allowed)

    def resume_to(self, root: Path, rounds: int) -> None:
        """Go on with a run to a round before its end."""
        self.expect(Child(lambda: train(root, rounds), root.with_name(root.name + "_said")))

    def lost(self, root: Path, whole: Path | None = None) -> str | None:
        """What differs from an undisturbed run; None: nothing, to the bit."""
        folders = whole or self.whole, root
        runs = [only_run(folder / "default") for folder in folders]
        found = sorted(os.listdir(root / "default"))
        if len(found) != 1:
            return f"there are {found}"
        try:
            assert_equal_trees(*(torch.load(folder / "state.pt", weights_only=True) for folder in folders))
        except AssertionError as error:
            return f"the state differs at {error}"
        for name in ("metrics", "clients", "evaluation"):
            tables = [without_times(read_csv(run / f"{name}.csv")) for run in runs]
            if tables[0] != tables[1]:
                return f"{name}.csv differs"
        return None

    def resumed(self, root: Path) -> str | None:
        """Go on to the end, and compare."""
        self.resume(root)
        return self.lost(root)


def is_one_line(said: str) -> bool:
    """Whether a run that ended said why in one line, without a traceback."""
    return "Traceback" not in said and sum(line.startswith("error: ") for line in said.splitlines()) == 1


# kinds of faults, each registered by the module that makes its cases


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: What is done, and where.
        try_it: Injects it in an empty folder; returns None where nothing was lost, else what was.
    """

    name: str
    try_it: Callable[[Path], str | None]


Kind = Callable[[Bench, int, random.Random], Iterator[Case]]
"""Makes at most so many cases; none where the machine does not allow the fault."""

KINDS: dict[str, tuple[Kind, int]] = {}
"""Name -> the kind and how many of its cases the full form tries."""


def kind(name: str, count: int) -> Callable[[Kind], Kind]:
    """Register a kind of fault.

    Args:
        name: As given to ``--kind``.
        count: Cases of the full form.
    """

    def register(cases: Kind) -> Kind:
        KINDS[name] = cases, count
        return cases

    return register
