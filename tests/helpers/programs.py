"""Python programs in processes of their own, of which none outlives the test that started it."""

import functools
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from lightning.fabric.plugins.environments import lightning as environment
from lightning.fabric.utilities import registry

from fedbc_lightning.data import partition_report
from helpers.scripts import ROOT

with suppress(ImportError):  # on Windows
    import fcntl

TESTS = ROOT / "tests"
PICTURE_OF = partition_report.partition_png
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c636000000002000148afa4710000000049454e44ae426082"
)
"""In place of the picture of a partition, which takes half a second in each run; tests/partition draws them."""
LEFT_BY_LAUNCHERS = ("LOCAL_RANK", "MASTER_", "NODE_RANK")
START = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
Words = Sequence[object]
"""``[-m module | script] argument ...``"""


def program_environment(**changes: object) -> dict[str, str]:
    """Ours, with one thread, a width of lines, and this package before an installed one, not what a launcher left."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_BY_LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    ours = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": path}
    return kept | ours | {name: str(value) for name, value in changes.items()}


def kill_session(program: Any) -> None:
    """Kill it and all that it has started, whether or not it has ended."""
    program.kill()  # it may have no session yet
    with suppress(ProcessLookupError, PermissionError):  # there is none left
        os.killpg(program.pid, signal.SIGKILL)


def wait_until(is_so: Callable[[], object], program: Any = None, seconds: float = 300.0) -> None:
    """Look again and again, for as long as the process lives."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if program is not None and program.poll() is not None and not is_so():
            pytest.fail(f"it ended before it came to that: {program.finish()}")
        if time.monotonic() > deadline:
            pytest.fail(f"it did not come to that in {seconds:g} s")
        time.sleep(0.01)


def is_over(process: psutil.Process) -> bool:
    """Whether it has ended; the first process of a container may wait for no orphan, of which a zombie is then left."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


# a new Python


class Fresh(subprocess.Popen[str]):
    """One that imports what it uses; for what depends on how Python starts and ends, and on who holds its pipes."""

    def finish(self, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Its exit status, and what it and all that it has started have printed: until the last of them has ended."""
        try:
            out, err = self.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            kill_session(self)
            pytest.fail(f"some process hangs: {self.communicate()}")
        return subprocess.CompletedProcess(self.args, self.returncode, out, err)


@contextmanager
def fresh(words: Words, cwd: Path, **changes: object) -> Iterator[Fresh]:
    """``python`` with these words, killed at the end with all that it has started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        program = Fresh(
            [sys.executable, *map(str, words)],
            cwd=cwd,
            env=program_environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with program:
        try:
            yield program
        finally:
            kill_session(program)


def run_fresh(words: Words, cwd: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    with fresh(words, cwd, **changes) as program:
        return program.finish()


# a fork


class Forked:
    """A fork of a process that has imported torch, Lightning and us, and done nothing since: that wins seconds.

    All forks have the same hash seed, but this process and fresh ones have others: what is to be the same again
    whatever the order of sets is compared with one of these. No ``atexit`` runs in a fork. The ranks and the workers of
    studies that a fork starts are forks, too, unless FRESH_STARTS stands in its environment.
    """

    def __init__(self, words: Words, cwd: Path, files: Mapping[int, Path], environment: Mapping[str, str]):
        self.words = [str(word) for word in words]
        self._files = files
        ensure_preloaded()
        self._process = START.Process(target=_become, args=(self.words, str(cwd), dict(environment), files))
        with patch.object(sys, "path", [*sys.path, str(TESTS)]):  # where this file lies
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._process.exitcode

    returncode = property(poll)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._process.kill()

    def wait(self) -> None:
        """Wait for its end."""
        self._process.join()

    def send_signal(self, number: int) -> None:
        """Send it another one, if it lives."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def _is_open(self) -> bool:
        return any(map(_is_locked, self._files.values()))

    @property
    def printed(self) -> tuple[str, str]:
        """Its standard output and error so far."""
        files = (self._files[1], self._files[2])
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in files)
        return out, err

    def finish(self, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Its exit status, and what it and all that it has started have printed: until the last of them has ended."""
        deadline = time.monotonic() + seconds
        self._process.join(seconds)
        while self.poll() is not None and self._is_open and time.monotonic() < deadline:
            time.sleep(0.01)
        who = "it" if self.poll() is None else "what it has started" if self._is_open else None
        if who is not None:
            kill_session(self)
            pytest.fail(f"{who} hangs: {' '.join(self.words)}\n{self.printed}")
        return subprocess.CompletedProcess(self.words, self.poll(), *self.printed)


class Started(Forked):
    """One that a forked program starts as a command of a new Python, and which prints where that prints."""

    def __init__(self, files: Mapping[int, Path], command: Words, env: Mapping[str, str], cwd: Path | None) -> None:
        super().__init__(command[1:], cwd or Path.cwd(), files, env)
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined] # who waits for its end?
        files[1].with_suffix(f".{self.pid}").touch()  # it has a session of its own


@contextmanager
def forked(
    words: Words, cwd: Path, environment: Mapping[str, str] | None = None, **changes: object
) -> Iterator[Forked]:  # fmt: skip
    """``python`` with these words, killed at the end with all that it has started."""
    with tempfile.TemporaryDirectory() as folder:
        files = {1: Path(folder, "out"), 2: Path(folder, "err")}
        program = Forked(words, cwd, files, program_environment(**changes) if environment is None else environment)
        try:
            yield program
        finally:
            kill_session(program)
            program.wait()
            for path in Path(folder).glob("out.*") if program._is_open else ():
                os.kill(int(path.suffix[1:]), signal.SIGKILL)


def run_python(words: Words, cwd: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    with forked(words, cwd, **changes) as program:
        return program.finish()


def free_port() -> int:
    """A port that nobody has, and that the system gives to nobody until it is used.

    Of those that it gives, 2 in 1000 had gone to a connection a second later, beside two processes that make 90 a
    second; they begin at 32768 in Linux, and at 49152 elsewhere.
    """
    while True:
        with socket.socket() as found, suppress(OSError):
            found.bind(("", random.SystemRandom().randrange(20000, 32000)))
            return found.getsockname()[1]


def settle() -> None:
    """Lightning takes such ports, and reads once which packages offer callbacks: while tests run, none is installed."""
    partition_report.partition_png = lambda datamodule: PIXEL
    environment.find_free_network_port = free_port  # type: ignore[assignment]
    if not hasattr(registry.entry_points, "cache_info"):
        registry.entry_points = functools.cache(registry.entry_points)


def wait_for_no_disk() -> None:
    """A tenth of the time of a small run: only a machine that loses its power shows whether its disk has written."""
    os.fsync = lambda file: None


def run_ranks(words: Words, cwd: Path) -> None:
    """The two processes of one run, to their end, as torchrun starts them; they must succeed."""
    world = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    with ExitStack() as stack:
        places = [{"TORCHELASTIC_RUN_ID": "tests", "RANK": rank, "LOCAL_RANK": rank} | world for rank in (0, 1)]
        programs = [stack.enter_context(forked(words, cwd, **place)) for place in places]
        done = [program.finish() for program in programs]
    assert [process.returncode for process in done] == [0, 0], done


def run_forked(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, check: bool = False,
    stdout: int | None = None, stderr: int | None = None, capture_output: bool = False, text: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """In place of ``subprocess.run`` in a script that starts Python; what is printed is always captured."""
    python, *words = command
    assert python == sys.executable
    with forked(words, Path(cwd or Path.cwd()), env) as program:
        done = program.finish()
    if check:
        done.check_returncode()
    return done


def _is_locked(path: Path) -> bool:
    """Whether a process that :func:`_become` made still prints there, or one that was started by it."""
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def ensure_preloaded() -> None:
    """Start the process that is forked, in a folder where no test looks for processes that were left behind."""
    if sys.platform != "linux":
        return
    here = Path.cwd()
    START.set_forkserver_preload(["helpers.preloaded"])
    os.chdir(ROOT)
    try:
        with patch.dict(os.environ, PYTHONPATH=str(TESTS)):
            forkserver.ensure_running()
    finally:
        os.chdir(here)


def _forks(method: str) -> Any:
    assert method == "spawn"
    ensure_preloaded()
    return START


FORKED_WORKERS = SimpleNamespace(get_context=_forks)
"""In place of ``multiprocessing`` where studies start their workers: forks of a process that has imported torch."""


def _fork_what_it_starts(files: Mapping[int, Path]) -> None:
    """The ranks and the workers of this program are forks, too."""
    from lightning.fabric.strategies.launchers import subprocess_script

    from fedbc_lightning.studies import workers

    if sys.platform == "linux":  # the process that has forked this one forks those
        forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        subprocess_script.subprocess = SimpleNamespace(Popen=partial(Started, files))  # type: ignore[attr-defined]
        workers.multiprocessing = FORKED_WORKERS  # type: ignore[attr-defined]


def take_streams(files: Mapping[int, Path]) -> None:
    """Have these as standard input, output and error; a terminal is then the controlling one."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    for stream, path in files.items():
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
        if not os.isatty(stream):
            fcntl.flock(stream, fcntl.LOCK_SH)  # until it is closed by all


def _become(command: list[str], cwd: str, environment: dict[str, str], files: Mapping[int, Path]) -> None:
    """Be that program from here on."""
    take_streams(files)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup starts ignores it
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    settle()
    # Keys of a terminal are for a group of processes, to which no fork of another process belongs.
    if 0 not in files and "FRESH_STARTS" not in environment:
        _fork_what_it_starts(files)
    torch.seed()
    np.random.seed()
    sys.path[:] = [path for path in sys.path if not path.startswith(str(TESTS))]  # pytest's
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    sys.path.insert(0, cwd if is_module else str(Path(command[0]).resolve().parent))
    try:
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except Exception as error:  # as Python does, with the hook that the program has set
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
