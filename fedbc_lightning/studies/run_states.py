"""How far a run of a study has come, as its folder says: by a note of its beginning and end, and a row per round.

Processes that do or watch a study need no other word from each other: it makes no difference whether they are workers
of one command, jobs of a cluster, or commands on several machines that share a disk.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.study_run import Run

# File in a run's folder that says which run it is, when it began, and how it has ended.
NOTE = "run.json"
# Number of processes that may die in one round of a run before it counts as failed.
MAX_LOSSES = 2
LOST = f"its process died {MAX_LOSSES} times in one round (killed, or out of memory?)"


@dataclass
class State:
    """The progress of a run.

    Attributes:
        run: The run that this is about.
        status: ``waiting``, ``running``, ``finished`` or ``failed``.
        round: Last round that the run has finished.
        max_rounds: T of the run; None until it has begun.
        seconds: Seconds that the run took in this session.
        error: Reason why the run failed, or None.
    """

    run: Run
    status: str = "waiting"
    round: int = 0
    max_rounds: int | None = None
    seconds: float = 0.0
    error: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the run has neither finished nor failed."""
        return self.status not in ("finished", "failed")

    @property
    def share(self) -> float:
        """Fraction of the run's rounds that are done, in [0, 1]."""
        if not self.is_open:
            return 1.0
        return min(1.0, self.round / self.max_rounds) if self.max_rounds else 0.0

    def look(self, since: float) -> None:
        """Read from the folder how far the run has come.

        Args:
            since: Seconds since the epoch; the run is tried again if it failed before.
        """
        note, record = read_note(self.run.folder), RunRecord.newest(self.run.folder)
        if note.get("is_finished") and record is not None:
            self.status, self.seconds = "finished", note["seconds"] if note.get("ended_at", -1) >= since else 0.0
        elif note.get("error") and note.get("ended_at", since - 1) >= since:
            self.status, self.error = "failed", note["error"]
        elif note:
            self.status = "running" if note.get("began_at", since - 1) >= since else "waiting"
            if record is not None:  # a run that was interrupted has rounds, too
                self.round = record.rounds_written()
                self.max_rounds = self.max_rounds or record.max_rounds


def read_note(folder: Path) -> dict[str, Any]:
    """Read the note in a run's folder; it is empty if there is none.

    Raises:
        ConfigurationError: It was changed so that it cannot be read.
    """
    try:
        return json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigurationError(f"'{folder / NOTE}' cannot be read: {error}; remove that folder.") from None


def has_ended(folder: Path) -> bool:
    """Return whether the note in a folder says that its run has finished, and the run's tables are still there."""
    return read_note(folder).get("is_finished", False) and RunRecord.newest(folder) is not None


def is_finished(run: Run) -> bool:
    """Return whether a run has finished without error, as its note says.

    Raises:
        ConfigurationError: The folder holds a run with other settings, whose numbers do not belong to this study.
    """
    there, here = read_note(run.folder).get("run", {}), run.identity()
    # Settings are compared as texts, configs by a hash: a study whose base was edited must not mix old and new runs.
    for key in dict.fromkeys([*here, *there]) if there else ():
        if here.get(key) != there.get(key):
            raise ConfigurationError(
                f"{run.title}: '{run.folder}' was begun with {key} {there.get(key, 'not given')}, and now it is "
                f"{here.get(key, 'not given')}. Give the study another name, or remove that folder."
            )
    return has_ended(run.folder)


def note_beginning(run: Run, since: float) -> bool:
    """Note that this process begins a run or goes on with it; return False if the run is to be given up.

    Whoever finds a beginning without an end, in a folder that no process has locked, knows that a process has died. If
    the run has not come further since, the next process will die of the same cause.

    Args:
        run: The run, whose folder this process has locked.
        since: Seconds since the epoch when the study was started; older beginnings do not count.
    """
    # The caller holds the lock, so no living process does the run: a beginning without an end is that of a dead one.
    # Only deaths without progress count. A job that a cluster takes away every few hours may be killed a hundred times.
    note, record = read_note(run.folder), RunRecord.newest(run.folder)
    reached = record.rounds_written() if record else 0
    is_lost = note.get("began_at", since - 1) >= since and note.get("round") == reached
    losses = note.get("losses", 0) + 1 if is_lost else 0
    if losses >= MAX_LOSSES:
        note_end(run, error=LOST)
        return False
    _write(run, is_finished=False, began_at=time.time(), round=reached, losses=losses)
    return True


def note_end(run: Run, *, seconds: float = 0.0, error: str | None = None) -> None:
    """Note that a run has finished, or why it has failed.

    Args:
        run: The run.
        seconds: Seconds that it took.
        error: Reason why it failed, in one sentence; None if it finished.
    """
    _write(run, is_finished=error is None, error=error, seconds=round(seconds, 3), ended_at=time.time())


def note_stop(run: Run) -> None:
    """Note that a run was stopped from outside, which is neither an end nor a loss: it waits to go on."""
    _write(run, is_finished=False)


def _write(run: Run, **note: Any) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / NOTE, json.dumps({"run": run.identity(), **note}, indent=1))
