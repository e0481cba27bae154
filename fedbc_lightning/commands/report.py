"""The command ``report``, which writes a page about a study or a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from fedbc_lightning.cli.arguments import PROG, UsageError
from fedbc_lightning.commands.studies import StudyParser
from fedbc_lightning.report.write import write_reports

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
    return 0
