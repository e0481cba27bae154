"""The commands that are about many runs."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import NoReturn

import yaml
from jsonargparse import ArgumentParser

from fedbc_lightning.cli.arguments import CONFIG_OPTIONS, PROG, UsageError, find_config, option_values
from fedbc_lightning.cli.messages import condense
from fedbc_lightning.studies.compare import Comparison
from fedbc_lightning.studies.study import Study


class StudyParser(ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """See the base class; exit status 2."""
        keys = [action.dest for action in self._actions]
        sys.stderr.write(f"{PROG}: error: {condense(message, keys, {})}\n")
        self.exit(2)


def study_parser() -> StudyParser:
    """Of ``compare``."""
    parser = StudyParser(prog=f"{PROG} compare", description=(Study.__doc__ or "").partition("\n\n")[0])
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
    words = list(words)
    names = []
    for position, value in option_values(words, CONFIG_OPTIONS):
        path = find_config(value)
        words[position] = words[position].removesuffix(value) + str(path)
        if Path(path).is_file():
            _check_keys(Path(path))
            names.append(Path(path).stem)
    parser = study_parser()
    given = parser.parse_args(words)
    if given.name is None:
        given.name = names[-1] if names else "study"
    given.pop("config", None)
    built = parser.instantiate_classes(given)
    study = Study(**{key: built[key] for key in Study.__dataclass_fields__})
    return 0 if Comparison(study).run() else 1


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
