"""The command ``report``, which writes a page about a study or a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from fedbc_lightning.cli.command_arguments import PROG, UsageError
from fedbc_lightning.commands.studies import StudyParser
from fedbc_lightning.report.write import runs_left_out, write_reports

MOST_NAMES = 5
"""Number of older runs that a line names."""

DESCRIPTION = """\
Write one HTML page about a study or a run, from the files in its folder: what came out, tables to sort, curves, λ and γ
by client, every client's accuracy, the split of the data, settings and their origin, cost, hashes, and the command that
repeats it. The page needs no other file and no network. Unfinished runs are named and left out."""


def report(words: list[str]) -> int:
    """Run ``fedbc-cli report``: write a page.

    Args:
        words: Words of the command line after the command.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: No folder is given.
        ConfigurationError: The folder holds neither a study nor a run, or a file in it cannot be read.
    """
    parser = StudyParser(prog=f"{PROG} report", description=DESCRIPTION)
    parser.add_argument("folder", type=str, nargs="?", help="Folder of a study or of a run, e.g. runs/digits.")
    parser.add_argument(
        "--output", "-o", type=str, default=None, help="File to write; by default report.html in the folder."
    )
    given = parser.parse_args(words)
    if given.folder is None:
        raise UsageError(f"of what? {PROG} report FOLDER_OF_A_RUN_OR_STUDY")
    output = None if given.output is None else Path(given.output)
    for file in write_reports(Path(given.folder), output):
        size = file.stat().st_size / 1e6
        Console().print(f"Report:  {file} ({size:.1f} MB)", markup=False, highlight=False, soft_wrap=True)
    others = [run.name for run in runs_left_out(Path(given.folder))]
    if others:
        count = f"{len(others)} older run{'s' * (len(others) > 1)}"
        named = ", ".join(others[:MOST_NAMES]) + f" and {len(others) - MOST_NAMES} more" * (len(others) > MOST_NAMES)
        line = f"It is about the newest run. '{given.folder}' holds {count}: {named}. Give the folder of one: "
        Console().print(
            f"{line}{PROG} report {shlex.quote(str(Path(given.folder, others[0])))}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    return 0
