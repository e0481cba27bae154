"""Faults of the package itself, which the command must find: a tool that stays green on them proves nothing."""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fedbc_lightning.core import files
from fedbc_lightning.run.identity import Identity
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.run.run_writer import Recorder
from fedbc_lightning.state import file_rows
from fedbc_lightning.studies import study_run

Patches = list[AbstractContextManager[Any]]


def _no_lock() -> Patches:
    """Whoever comes has the run folder."""
    return [patch.object(RunLock, "owner_after_trying", lambda *_: None)]


class Agreeable(int):
    """A number that differs from none; processes of a run send it to each other."""

    def __ne__(self, other: object) -> bool:
        return False


def _no_checksums() -> Patches:
    """The checksums of checkpoints and rows are not looked at."""
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

    def mutant(path: Path, **options: bool) -> AbstractContextManager[Path]:
        return nullcontext(path) if path.suffix == ".ckpt" else replacing(path, **options)

    return [patch.object(files, "replacing", mutant)]


def _no_look() -> Patches:
    """Whoever had the run folder goes on writing."""
    return [patch.object(RunLock, "check", lambda _: None)]


def _any_run() -> Patches:
    """A job that is started again goes on with any of its runs."""
    return [patch.object(Identity, "is_of", lambda *_: True)]


def _begun_is_done() -> Patches:
    """A run of a study that has a folder is not done again."""
    return [patch.object(study_run, "has_ended", lambda folder: RunRecord.newest(folder) is not None)]


MUTANTS: dict[str, tuple[Callable[[], Patches], str | None]] = {
    "no lock": (_no_lock, "two-at-once"),
    "checksums not looked at": (_no_checksums, "flipped-bit"),
    "an unrecorded round is saved": (_unrecorded, "full-for-one-operation"),
    "the checkpoint is written in place": (_in_place, "kill-at-operation"),
    "the lease is not looked at again": (_no_look, "two-at-once"),
    "a requeued job takes any of its runs": (_any_run, None),
    "a run that was begun is done": (_begun_is_done, None),
}
"""Name -> what is patched in this process and its forks, and the kind of fault whose first case must find it.

None: whole scripts and studies find it, which take long, so only the long form looks.
"""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Patch the package."""
    with ExitStack() as stack:
        for each in MUTANTS[name][0]():
            stack.enter_context(each)
        yield
