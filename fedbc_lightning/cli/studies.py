"""The commands that are about many runs."""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import yaml
from jsonargparse import ArgumentParser
from rich.console import Console

from fedbc_lightning.cli.arguments import CONFIG_OPTIONS, PROG, UsageError, find_config, option_values
from fedbc_lightning.cli.messages import condense
from fedbc_lightning.cli.plan_report import print_study_plan
from fedbc_lightning.studies.compare import Comparison
from fedbc_lightning.studies.fedbc_figures import figure_3, figure_4
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.partition_tables import table_4, table_5
from fedbc_lightning.studies.plan import plan_study
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.tables import show


class StudyParser(ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """See the base class; exit status 2."""
        keys = [action.dest for action in self._actions]
        sys.stderr.write(f"{PROG}: error: {condense(message, keys, {})}\n")
        self.exit(2)


def study_parser(command: str = "compare") -> StudyParser:
    """Of ``compare`` and of ``plan``."""
    parser = StudyParser(prog=f"{PROG} {command}", description=(Study.__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--config", "-c", action="config", help="Study in YAML; several are layered.")
    parser.add_class_arguments(Study, None, as_group=False)
    return parser


def compare(words: list[str]) -> int:
    """``fedbc-cli compare``.

    Args:
        words: What follows it.

    Returns:
        The exit status: 0, or 1 where a run failed.

    Raises:
        ConfigurationError: The study cannot be done as it is given.
    """
    return 0 if Comparison(read_study("compare", words)).run() else 1


def plan(words: list[str]) -> int:
    """``fedbc-cli plan`` of a study.

    Args:
        words: What follows it.

    Returns:
        The exit status, 0.

    Raises:
        ConfigurationError: The study cannot be done as it is given.
    """
    print_study_plan(plan_study(read_study("plan", words)))
    return 0


def read_study(command: str, words: list[str]) -> Study:
    """The study that the words after a command describe.

    Raises:
        ConfigurationError: It cannot be done as it is given.
        UsageError: A config is not there, or has a key that no study has.
    """
    words = list(words)
    names = []
    for position, value in option_values(words, CONFIG_OPTIONS):
        path = find_config(value)
        words[position] = words[position].removesuffix(value) + str(path)
        if Path(path).is_file():
            _check_keys(Path(path))
            names.append(Path(path).stem)
    parser = study_parser(command)
    given = parser.parse_args(words)
    if given.name is None:
        given.name = names[-1] if names else "study"
    given.pop("config", None)
    built = parser.instantiate_classes(given)
    return Study(**{key: built[key] for key in Study.__dataclass_fields__})


REPRODUCTIONS: dict[str, str | Callable[[], tuple[str, Rows]]] = {
    "table1": "studies/fedbc_table1.yaml",
    "table4": table_4,
    "table5": table_5,
    "figure3": "studies/fedbc_figures.yaml",
    "figure4": "studies/fedbc_figures.yaml",
}
"""What ``reproduce`` takes: the study behind a table or figure of a paper, or what computes it without training."""

FIGURES = {"figure3": figure_3, "figure4": figure_4}
"""What draws a figure from its study."""


def reproduce(words: list[str]) -> int:
    """``fedbc-cli reproduce``: tables of the papers.

    Args:
        words: Names, then options of the study, e.g. ``--scale 0.1``.

    Returns:
        The exit status: 0, or 1 where a run failed.

    Raises:
        UsageError: An unknown name, or none.
    """
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(names) :]
    known = ", ".join(REPRODUCTIONS)
    if not names and {"-h", "--help"} & set(options):
        print(f"usage: {PROG} reproduce NAME... [--scale SHARE] [options of {PROG} compare]\n\nnames: {known}")
        return 0
    for name in names:
        if name not in REPRODUCTIONS:
            near = difflib.get_close_matches(name, REPRODUCTIONS, n=1)
            meant = f"did you mean '{near[0]}'?" if near else f"there is: {known}"
            raise UsageError(f"nothing to reproduce is called '{name}'; {meant}")
    if not names:
        raise UsageError(f"what? {PROG} reproduce {next(iter(REPRODUCTIONS))} [--scale 0.1]; there is: {known}")
    status = 0
    for name in names:
        what = REPRODUCTIONS[name]
        if not isinstance(what, str):
            show(Console(), *what())
            continue
        comparison = Comparison(read_study("reproduce", ["--config", what, *options]))
        status = max(status, 0 if comparison.run() else 1)
        if name in FIGURES:
            for file in FIGURES[name](comparison.study, comparison.states, comparison.study.folder / "figures"):
                Console().print(f"{name}:  {file}", highlight=False, soft_wrap=True)
    return status


def _check_keys(path: Path) -> None:
    """Raise for a key that no study has; the parser passes over one that holds nothing but empty mappings.

    Raises:
        UsageError: There is one.
    """
    known = list(Study.__dataclass_fields__)
    for key in yaml.safe_load(path.read_text(encoding="utf-8")):
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            meant = f"did you mean '{near[0]}'?" if near else f"a study has {', '.join(known)}"
            raise UsageError(f"{path}: unknown key '{key}': {meant}")
