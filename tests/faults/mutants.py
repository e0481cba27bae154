"""Faults of the package itself, which the command must find: a tool that stays green on them proves nothing."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fedbc_lightning.core import files
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run_writer import Recorder
from fedbc_lightning.state import file_rows

Patches = list[AbstractContextManager[Any]]


def _no_lock() -> Patches:
    """Whoever comes has the run folder."""
    return [patch.object(RunLock, "owner_after_trying", lambda *_: None)]


def _no_checksums() -> Patches:
    """The checksums of checkpoints and rows are not looked at."""

    class Agreeable(int):
        def __ne__(self, other: object) -> bool:
            return False

    checksum = file_rows.checksum
    of_rows = patch.object(file_rows, "checksum", lambda row: Agreeable(checksum(row)))
    return [patch.object(zipfile.ZipFile, "testzip", lambda _: None), of_rows]


def _unrecorded() -> Patches:
    """A round is saved whose rows are not in the tables."""
    save = Recorder.save

    def mutant(self: Recorder) -> None:
        self._recorded_round = self._run.progress.finished_round
        save(self)

    return [patch.object(Recorder, "save", mutant)]


def _in_place() -> Patches:
    """The checkpoint is written into the file that is there."""

    replacing = files.replacing

    def mutant(path: Path) -> AbstractContextManager[Path]:
        return nullcontext(path) if path.suffix == ".ckpt" else replacing(path)

    return [patch.object(files, "replacing", mutant)]


MUTANTS: dict[str, tuple[Callable[[], Patches], str]] = {
    "no lock": (_no_lock, "two-at-once"),
    "checksums not looked at": (_no_checksums, "flipped-bit"),
    "an unrecorded round is saved": (_unrecorded, "full-for-one-operation"),
    "the checkpoint is written in place": (_in_place, "kill-at-operation"),
}
"""Name -> what is patched in this process and its forks, and the kind of fault whose first case must find it."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Patch the package."""
    with ExitStack() as stack:
        for each in MUTANTS[name][0]():
            stack.enter_context(each)
        yield
