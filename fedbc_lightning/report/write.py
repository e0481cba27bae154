"""Finds out what a folder holds, and writes the page about it."""

from __future__ import annotations

from pathlib import Path

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.report.page import render
from fedbc_lightning.report.run_page import run_page
from fedbc_lightning.report.study_page import study_page
from fedbc_lightning.run.folder import run_folders
from fedbc_lightning.studies.study_record import RECORD

# Name of the page in the folder that it is about, where nothing else is said.
NAME = "report.html"


def write_reports(folder: Path, output: Path | None = None) -> list[Path]:
    """Write the page about a study or a run, and return the files.

    A study of which several tables of a paper were computed has a page for each of them.

    Args:
        folder: Folder of a study, of a table of a paper in it, of a run, or of all runs of one name (the newest).
        output: File to write; None: ``report.html`` in the folder.

    Raises:
        ConfigurationError: The folder holds neither, one of its files cannot be read, or the page cannot be written.
    """
    places = find(folder)
    if output is not None and len(places) > 1:
        among = ", ".join(str(place) for place in places)
        raise ConfigurationError(f"--output: '{folder}' has several pages; give one of {among}.")
    files = []
    for place in places:
        page = study_page(place) if (place / RECORD).is_file() else run_page(place)
        file = output or place / NAME
        try:
            write_text(file, render(page))
        except OSError as error:
            raise ConfigurationError(f"--output: cannot write '{file}': {error.strerror}.") from None
        files.append(file)
    return files


def find(folder: Path) -> list[Path]:
    """Return the folders that have a page of their own: those with ``study.json``, or one run.

    Raises:
        ConfigurationError: There is no such folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"'{folder}' is no folder; give that of a study or of a run.")
    if (folder / RECORD).is_file():
        return [folder]
    parts = sorted(path.parent for path in folder.glob(f"*/{RECORD}"))
    runs = next((folder / "runs").glob("*/*/seed_*"), None)
    if parts and runs is not None:
        return parts
    if (folder / "metrics.csv").is_file():
        return [folder]
    begun = _begun(folder)
    if begun:
        return begun[-1:]
    if runs is not None:
        raise ConfigurationError(
            f"'{folder}' has runs, but no {RECORD}, which older versions did not write: give the command that runs the "
            "study again; it repeats no finished run, and writes that file."
        )
    raise ConfigurationError(
        f"'{folder}' is neither a study nor a run: there is no {RECORD}, no metrics.csv, and no folder of a run in it."
    )


def runs_left_out(folder: Path) -> list[Path]:
    """Return the older runs of a folder of all runs of one name, whose page is about the newest; the newest first."""
    begun = _begun(folder)
    return begun[-2::-1] if begun and find(folder) == begun[-1:] else []


def _begun(folder: Path) -> list[Path]:
    """Return the run folders that hold a row at least, the newest last."""
    return [run for run in run_folders(folder) if (run / "metrics.csv").is_file()]
