"""Finds and makes run folders, such as ``runs/digits/FedBC-0/``, and tells how to resume their runs."""

from __future__ import annotations

import re
import shlex
from itertools import count
from pathlib import Path

from fedbc_lightning.core.files import CHECKPOINTS, IDENTITY, make_folder, remove, told
from fedbc_lightning.run.lock import NAME, RunLock

LAST = Path(CHECKPOINTS, "last.ckpt")
TABLES = ("metrics.csv", "clients.csv", "evaluation.csv")

_MADE_AT_THE_START = re.compile(
    r"(\.lock|run\.json|config\.yaml|partition\.(json|png|npz)|checkpoints|clients\.bin|"
    r"(metrics|clients|evaluation)\.csv|events\.out\.tfevents\..*)(\.tmp)?|\..*\.tmp"
)


_OF_RUN = re.compile(r"version_\d+|[^\W\d]\w*-\d+(-\d+)?")
"""A method, a seed, and a number from the second run of both on; older versions called their folders ``version_k``."""


def method_of(folder: Path) -> str | None:
    """Return the method that the name of a run folder says; None if it says none.

    Example:
        >>> method_of(Path("runs/digits/FedBC-0-1")), method_of(Path("runs/digits/version_0"))
        ('FedBC', None)
    """
    return folder.name.split("-")[0] if _OF_RUN.fullmatch(folder.name) and "-" in folder.name else None


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders of an experiment; the one whose ``metrics.csv`` was written last is the last."""
    return sorted((path for path in folder.glob("*") if _OF_RUN.fullmatch(path.name) and path.is_dir()), key=_age)


def _age(folder: Path) -> tuple[int, list[int]]:
    """The time at which a run last wrote a row, then the numbers in its name, for runs that have not written any."""
    table = folder / TABLES[0]
    return table.stat().st_mtime_ns if table.is_file() else 0, [int(k) for k in re.findall(r"\d+", folder.name)]


def claim(folder: Path, label: str, lock: RunLock) -> Path:
    """Make and lock the next free run folder; two runs that start at the same time get different ones.

    The folder of a run that ended before its first checkpoint, by a kill or a mistake, is emptied and taken again.

    Args:
        folder: Folder of the experiment, which is made if it is not there.
        label: Name of the folder if it is the first of its kind, such as ``FedBC-0``; others end in ``-1``, ``-2``, ...
        lock: Locks the folder.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    with told(folder.parent):
        make_folder(folder.parent, is_private=True)
        make_folder(folder)
        for k in count():
            path = folder / (f"{label}-{k}" if k else label)
            try:
                make_folder(path, exist_ok=False)
            except FileExistsError:
                if not _is_abandoned(path):
                    continue
            if lock.owner_after_trying(path) is None:
                for left in path.iterdir():  # none of them is the user's
                    if left.name != NAME:
                        remove(left)
                break
    return path


def _is_abandoned(folder: Path) -> bool:
    """Return whether the folder holds only what a run writes before its first checkpoint, at most row 0 of tables."""
    paths = list(folder.rglob("*"))
    names = {path.name for path in paths}
    is_ours = not names or any(name.startswith((NAME, f".{NAME}", IDENTITY)) for name in names)  # its first files
    if not is_ours or any(path.is_symlink() for path in (folder, *paths)):
        return False
    if not all(map(_MADE_AT_THE_START.fullmatch, names)):
        return False
    return all(len((folder / name).read_bytes().splitlines()) <= 2 for name in TABLES[:2] if name in names)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the ``last.ckpt`` that was written last, of any run; None if there is none."""
    found = [p / LAST for p in run_folders(folder) if (p / LAST).is_file()]
    return max(found, key=lambda p: p.stat().st_mtime_ns) if found else None


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder whose ``last.ckpt`` this is, where a resumed run continues; None for other checkpoints.

    A folder below the current one is named from there, as it was when the run began.
    """
    place, folder = checkpoint.resolve(), checkpoint.resolve().parent.parent
    is_run = folder.name.startswith("version_") or any((folder / name).is_file() for name in (NAME, *TABLES))
    if Path(place.parent.name, place.name) != LAST or not is_run:
        return None
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def how_to_resume(last: Path | None) -> str:
    """Return a sentence that tells the user how to resume a run that broke off.

    Args:
        last: Path of the run's ``last.ckpt``, which may not exist; None if the run writes none.
    """
    if last is None or not last.is_file():
        return "There is no checkpoint to go on from."
    return f"Go on by the same command with ckpt_path: {last}"


def how_to_go_on(folder: Path, max_rounds: int | None) -> str | None:
    """Return what the user types to go on with a run: a command, or an argument of ``fit``; None if nothing is saved.

    Args:
        folder: The run folder.
        max_rounds: Number of rounds up to which a run goes on that is complete; None: that which it has.
    """
    if not (folder / LAST).is_file():
        return None
    if not (folder / "config.yaml").is_file():  # a run of FederatedTrainer without a command line
        trainer = "trainer" if max_rounds is None else f"FederatedTrainer(max_rounds={max_rounds}, ...)"
        return f'{trainer}.fit(..., ckpt_path="{(folder / LAST).as_posix()}")'
    more = "" if max_rounds is None else f" --trainer.max_rounds {max_rounds}"
    return f"fedbc-cli fit --ckpt_path {shlex.quote(folder.as_posix())}{more}"
