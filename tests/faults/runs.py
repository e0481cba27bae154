"""The runs that faults are injected into, in child processes, and their comparison with undisturbed ones."""

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
from helpers.programs import settle
from helpers.row_processes import fit, state_of

from fedbc_lightning import Codecs, ConfigurationError, Diurnal, Lognormal, Privacy, System
from fedbc_lightning.distributed import fabric
from fedbc_lightning.distributed.heartbeat import LostProcessError
from fedbc_lightning.server import BFloat16, TopK
from fedbc_lightning.state import client_rows

ROUNDS = 4
SECONDS_TO_FINISH = 120.0
"""How long a run that takes seconds may take before it hangs; with the true limits, that much after the longest."""
has_true_limits = False
"""Whether processes wait for each other as long as those of users, and not for seconds."""
REFUSED, BROKEN = 1, 2
"""Exit status of a run that ended with one line, and with a traceback."""


def _private() -> dict[str, Any]:
    os.environ["FEDBC_FAULTS_SECRET"] = "x"
    privacy = Privacy(0.5, delta=1e-3, secret="env:FEDBC_FAULTS_SECRET", noise_multiplier=0.7)
    return {"privacy": privacy, "buffers": "global"}


CONFIGURATIONS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "plain": ("fedbc", dict),
    "scaffold": ("scaffold", dict),
    "asynchronous": ("fedbuff", lambda: {"system": System(Lognormal(1.0), availability=Diurnal(0.6, 20.0))}),
    "codec": ("fedbc-global", lambda: {"codec": Codecs(TopK(0.3), BFloat16())}),
    "private": ("fedavg", _private),
}
"""Name -> the algorithm, and options of the trainer; rows of clients lie in ``clients.bin`` in all but the last."""


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
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
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

    def finish(self) -> tuple[int, str]:
        """Its exit status, negative for a signal, and what it printed.

        Raises:
            TimeoutError: It hangs; it was killed.
        """
        deadline = time.monotonic() + SECONDS_TO_FINISH + has_true_limits * fabric.SECONDS_TO_MEET
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"a process hangs: {self._said.read_text(errors='replace')[-500:]}")
            time.sleep(0.005)
        status = os.waitstatus_to_exitcode(ended[1])
        return status, self._said.read_text(errors="replace")


class Bench:
    """The undisturbed run, and what is compared with it.

    Args:
        folder: Of the runs; emptied by whoever made it.
        configuration: One of :data:`CONFIGURATIONS`.
    """

    def __init__(self, folder: Path, configuration: str = "plain") -> None:
        self.configuration = configuration
        self._algorithm, self._options = CONFIGURATIONS[configuration]
        torch.set_num_threads(1)
        client_rows.IN_MEMORY_BELOW = 0
        settle()
        self.folder = folder
        self.whole = folder / "whole"
        self.seconds = self.timed(lambda: self.train(self.whole))
        self._parts: dict[int, Path] = {}

    def train(self, root: Path, rounds: int = ROUNDS, **options: Any) -> None:
        """Train, or go on with, the run in ``root``, in this process."""
        options = {"checkpoint_every_n_rounds": 1, "max_rounds": rounds, **self._options(), **options}
        trainer = fit(root, self._algorithm, **{"ckpt_path": "last", **options})
        if trainer._fabric.is_global_zero:
            torch.save(state_of(trainer), Path(trainer.log_dir, "state.pt"))

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
            self.expect(Child(lambda: self.train(root, rounds), self.folder))
        return self._parts[rounds]

    def copy_part(self, rounds: int, root: Path) -> Path:
        """Make a copy of such a run, and return its run folder."""
        shutil.copytree(self.part(rounds), root, dirs_exist_ok=True)
        return only_run(root / "default")

    def resume(self, root: Path, *allowed: int) -> tuple[int, str]:
        """Go on with a run to its end, or to a status that is allowed, too."""
        return self.expect(Child(lambda: self.train(root), root.with_name(root.name + "_said")), *allowed)

    def lost(self, root: Path, whole: Path | None = None) -> str | None:
        """What differs from an undisturbed run; None: nothing, to the bit."""
        return runs_differ(root / "default", (whole or self.whole) / "default")

    def resumed(self, root: Path) -> str | None:
        """Go on to the end, and compare."""
        self.resume(root)
        return self.lost(root)


def runs_differ(folder: Path, whole: Path) -> str | None:
    """How the runs below a folder differ from undisturbed ones; None: in nothing, to the bit."""
    found, expected = (
        [*map(str, sorted(p.relative_to(f) for p in f.rglob("*") if p.is_dir()))] for f in (folder, whole)
    )
    if found != expected:
        return f"there are {found}"
    for path in sorted(whole.rglob("*.*")):
        paths = [root / path.relative_to(whole) for root in (folder, whole)]
        try:
            if path.suffix in (".pt", ".ckpt"):
                # Runs of a study leave only the latter, which holds times as well.
                states = [torch.load(each, weights_only=True) for each in paths]
                assert_equal_trees(*(state.get("state_dict", state) for state in states))
            elif path.suffix in (".csv", ".md"):
                assert_equal_trees(*(without_times(read_csv(each)) for each in paths))
        except AssertionError as error:
            return f"{paths[0]} differs at {error}"
    return None


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


Cases = Callable[["Bench", int, random.Random], Iterator[Case]]
"""Makes at most so many cases, those at chosen places first; none where the machine does not allow the fault."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        cases: Makes its cases.
        count: How many the full form tries in each configuration.
        short: How many the short form tries.
        is_general: Whether it is tried in all configurations; else in the first one.
    """

    cases: Cases
    count: int
    short: int
    is_general: bool


KINDS: dict[str, Kind] = {}


def kind(name: str, count: int, short: int = 1, *, is_general: bool = False) -> Callable[[Cases], Cases]:
    """Register a kind of fault under the name that is given to ``--kind``; see :class:`Kind`."""

    def register(cases: Cases) -> Cases:
        KINDS[name] = Kind(cases, count, short, is_general)
        return cases

    return register
