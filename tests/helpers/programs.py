"""Python programs run to their end in processes of their own, which need not import torch and Lightning again."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

import torch

from helpers.command_line import program_environment
from helpers.scripts import ROOT

TESTS = str(ROOT / "tests")
PRELOADED = ["fedbc_lightning.cli.federated", "fedbc_lightning.engines.lockstep", "torch.utils.tensorboard"]
START = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
"""Seconds are won where a process is a fork of one that has imported all that, and done nothing since."""


def run_python(words: Sequence[str | Path], cwd: Path, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """``python`` with these words, ``[-m module | script] argument ...``; its output, and its exit status.

    What depends on how Python starts and ends (its imports, ``atexit``), on signals, or on several processes of one run
    takes ``subprocess``.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        if sys.platform == "linux":
            _ensure_preloaded()
        process = START.Process(target=_become, args=(command, str(cwd), program_environment(), (str(out), str(err))))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _ensure_preloaded() -> None:
    """Start that one in a folder where no test looks for processes that were left behind."""
    here = Path.cwd()
    START.set_forkserver_preload(PRELOADED)
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)


def _become(command: list[str], cwd: str, environment: dict[str, str], files: tuple[str, str]) -> None:
    """Be that program from here on."""
    for stream, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.path[:] = [path for path in sys.path if not path.startswith(TESTS)]  # pytest's
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    sys.path.insert(0, cwd if is_module else str(Path(command[0]).resolve().parent))
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")
