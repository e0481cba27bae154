"""Choose cases, run them, and hash what they wrote: on a pool of two processes, and then on two processes at once."""

import logging
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from helpers.programs import settle
from helpers.scripts import ROOT

from digests.cases import Case, all_cases
from digests.digest import leaves

NUM_WORKERS = 2
MEMORY = Path("/dev/shm")
"""On Linux a folder in memory: on a disk, most of the time would go into waiting for what is written."""
Result = dict[str, dict[str, str]] | str
"""What :func:`digests.digest.leaves` found, or the message of an error."""


def selected(patterns: list[str]) -> list[Case]:
    """The cases whose name, or whose algorithm's class, fits one of the patterns; all without patterns."""
    return [
        case
        for case in all_cases().values()
        if not patterns or any(fnmatchcase(case.name, pattern) or case.algorithm == pattern for pattern in patterns)
    ]


def prepare() -> None:
    """Compute with one thread, and without pictures and messages."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    settle()


def result_of(case: Case, folder: Path) -> Result:
    """Run a case in a folder of its own below ``folder``, which is removed."""
    place = folder / case.name.replace("/", "-")
    place.mkdir(exist_ok=True)
    try:
        run = case.run(place)
        return leaves(run) if int(os.environ.get("LOCAL_RANK", 0)) == 0 else {}
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            shutil.rmtree(place, ignore_errors=True)


def results(patterns: list[str]) -> Iterator[tuple[str, Result]]:
    """Run the selected cases; yield their names and results as they come.

    Args:
        patterns: See :func:`selected`.
    """
    cases = selected(patterns)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        names = [case.name for case in cases if case.processes == 1]
        context = multiprocessing.get_context("spawn")  # a forked torch would compute with the parent's threads
        with ProcessPoolExecutor(NUM_WORKERS, context, prepare) as pool:
            yield from zip(names, pool.map(_one, names, [folder] * len(names)), strict=True)
        if len(names) < len(cases):
            yield from _on_two_processes(Path(folder), patterns).items()


def _one(name: str, folder: str) -> Result:
    return result_of(all_cases()[name], Path(folder))


def _on_two_processes(folder: Path, patterns: list[str]) -> dict[str, Result]:
    paths = [str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "digests.ranks", str(folder), *patterns]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the runs on two processes failed:\n{done.stderr}")
    return pickle.loads((folder / "results.pkl").read_bytes())
