"""A study's folder says what was asked for, so that it can be read again without the files it was configured with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.studies.methods import Tuning
from fedbc_lightning.studies.paper import Claim, Paper
from fedbc_lightning.studies.study import Study

RECORD = "study.json"
"""File beside a study's tables that holds its settings."""


def write_record(study: Study, command: str | None) -> None:
    """Write ``study.json`` beside the study's tables.

    Args:
        study: The study, which may have been reduced to the part that a table of a paper needs.
        command: Command line that runs the study; None if it was made in Python.
    """
    content = {
        "command": command,
        "part": study.part,
        "algorithms": [method.name for method in study.methods],
        "variants": list(study.variants),
        "papers": list(study.papers),
        "study": study.given,
    }
    write_text(study.results_folder / RECORD, json.dumps(content, indent=1, default=str) + "\n")


def read_record(folder: Path) -> tuple[Study, str | None]:
    """Read ``study.json``, and return the study, with its folder where it lies now, and its command.

    Args:
        folder: Folder with the study's tables.

    Raises:
        ConfigurationError: The file was changed so that it is no study.
    """
    path = folder / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        study = _study(content["study"])
        study.narrow([*content["algorithms"], *content["variants"]])
        study.papers = {name: study.papers[name] for name in content["papers"]}
        study.part, command = content["part"], content["command"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"'{path}' is not what a study writes ({type(error).__name__}: {error}); give the command that runs the "
            "study again: it writes the file anew, and repeats no finished run."
        ) from None
    home = folder.resolve().parent if study.part else folder.resolve()
    study.out, study.name = str(home.parent), home.name  # the folder may have been moved or renamed
    return study, command


def _study(given: dict[str, Any]) -> Study:
    """Return the study that was made from these arguments."""
    papers = {}
    for name, paper in given["papers"].items():
        claims = [Claim(**claim) for claim in paper["claims"]]
        papers[name] = Paper(**paper | {"claims": claims})
    return Study(**given | {"papers": papers, "tuning": Tuning(**given["tuning"])})
