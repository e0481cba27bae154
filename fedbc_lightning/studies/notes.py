"""The note in a run's folder: which run of a study it is, and whether it has finished or failed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.study_run import Run

NOTE = "run.json"
"""File in a run's folder that says which run it is, and whether it has finished without error."""


def write_note(run: Run, *, is_finished: bool, error: str | None = None) -> None:
    """Write into a run's folder which run it is, and how it has ended.

    Args:
        run: The run.
        is_finished: Whether it has finished without error.
        error: Reason why it failed, or None.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    note: dict[str, Any] = {"is_finished": is_finished, "run": run.identity()}
    if error is not None:
        note |= {"error": error, "failed_at": time.time()}
    write_text(run.folder / NOTE, json.dumps(note, indent=1))


def is_finished(run: Run) -> bool:
    """Return whether a run has finished without error, as its note says.

    Raises:
        ConfigurationError: The folder holds a run with other settings, whose numbers do not belong to this study.
    """
    path = run.folder / NOTE
    if not path.is_file():
        return False
    there, here = json.loads(path.read_text(encoding="utf-8"))["run"], run.identity()
    for key in dict.fromkeys([*here, *there]):
        if here.get(key) != there.get(key):
            raise ConfigurationError(
                f"{run.title}: '{run.folder}' was begun with {key} {there.get(key, 'not given')}, and now it is "
                f"{here.get(key, 'not given')}. Give the study another name, or remove that folder."
            )
    return has_ended(run.folder)


def failure(run: Run, since: float) -> str | None:
    """Return why a run has failed at or after a time, as its note says; None if it has not.

    Args:
        run: The run.
        since: Seconds since the epoch. What failed before is tried again.
    """
    path = run.folder / NOTE
    note = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return note["error"] if note.get("failed_at", since - 1) >= since else None


def has_ended(folder: Path) -> bool:
    """Return whether the note in a folder says that its run has finished, and the run's tables are still there."""
    return (
        json.loads((folder / NOTE).read_text(encoding="utf-8"))["is_finished"] and RunRecord.newest(folder) is not None
    )
