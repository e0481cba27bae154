"""The commands on many runs: ``compare``, ``plan`` of a study, ``reproduce`` and ``report``."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedbc_lightning.cli.classes import load
from fedbc_lightning.cli.command_arguments import CONFIG_OPTIONS, PROG, find_config, option_values
from fedbc_lightning.cli.overview import columns
from fedbc_lightning.cli.parser import FederatedArgumentParser
from fedbc_lightning.cli.printed_tables import show
from fedbc_lightning.core.errors import ConfigurationError, UsageError, did_you_mean
from fedbc_lightning.core.files import url_of
from fedbc_lightning.core.printing import Console
from fedbc_lightning.core.secret import check_settings
from fedbc_lightning.pages.pages import report
from fedbc_lightning.papers.reproductions import REPRODUCTIONS
from fedbc_lightning.studies.compare import Comparison
from fedbc_lightning.studies.drawing import save
from fedbc_lightning.studies.methods import SECTIONS, without
from fedbc_lightning.studies.origins import UNCHECKED, check_precedence
from fedbc_lightning.studies.parsed_runs import check_data_files
from fedbc_lightning.studies.results import StudyRecord, finished
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_plan import plan_study, print_study_plan

REPORT = """\
Write one HTML page about a study or a run, from the files in its folder: what came out, tables to sort, curves, λ and γ
by client, every client's accuracy, the split of the data, settings and their origin, cost, hashes, and the command that
repeats it. The page needs no other file and no network. Unfinished runs are named and left out."""


def command_parser(command: str) -> FederatedArgumentParser:
    """Return the parser of a command that takes a study, or of ``report``."""
    description = REPORT if command == "report" else (Study.__doc__ or "").partition("\n\n")[0]
    parser = FederatedArgumentParser(prog=f"{PROG} {command}", description=description)
    if command == "report":
        parser.add_argument("folder", type=str, nargs="?", help="Folder of a study or of a run, e.g. runs/digits.")
        parser.add_argument("--output", "-o", type=str, help="File to write; by default report.html in the folder.")
    else:
        parser.add_argument("--config", "-c", action="config", help="Study in YAML; several are layered.")
        parser.add_class_arguments(Study, None, as_group=False)
    return parser


def compare_command(words: list[str]) -> int:
    """Run ``fedbc-cli compare``: do a study and print its tables.

    Args:
        words: Words of the command line after the command.

    Returns:
        The exit status: 0, or 1 where a run failed.

    Raises:
        ConfigurationError: The study cannot be run as configured.
    """
    return 0 if Comparison(read_study("compare", words), command=shlex.join([PROG, "compare", *words])).run() else 1


def plan_command(words: list[str]) -> int:
    """Run ``fedbc-cli plan`` for a study: print its estimated cost.

    Args:
        words: Words of the command line after the command.

    Returns:
        The exit status, 0.

    Raises:
        ConfigurationError: The study cannot be run as configured.
    """
    study = read_study("plan", words)
    print_study_plan(study, plan_study(study))
    return 0


def read_study(command: str, words: list[str], part: str = "") -> Study:
    """Build the study that the words after a command describe; with ``--print_config`` print it and end.

    Args:
        command: Name of the command.
        words: Words of the command line after the command, and for ``reproduce`` after the names.
        part: Name of the table or figure of a paper to whose part the study is reduced; empty: none.

    Raises:
        ConfigurationError: The study cannot be run as configured.
        SystemExit: The study was printed.
        UsageError: A config does not exist, or has an unknown key.
    """
    printed = [word for word in words if word.partition("=")[0] == "--print_config"]
    words = [word for word in words if word not in printed]
    layers, names, typed = list[dict[str, Any]](), [], dict[str, Any]()
    for position, value in option_values(words, CONFIG_OPTIONS):
        path = find_config(value)
        words[position] = words[position].removesuffix(value) + str(path)
        layers.append(_read(path))
        names += [path.stem] if isinstance(path, Path) else []
    for _, value in option_values(words, ("--overrides",)):
        given = load(value)
        typed |= given if isinstance(given, dict) else {}  # the parser refuses what is none
    options = {re.split(r"[=.]", word[2:])[0]: True for word in words if word.startswith("--")}
    study = _build(command_parser(command), words, [*layers, {"overrides": typed}], names)
    _mark_changes(study, [*layers, options])
    if part:
        study.part = part
        REPRODUCTIONS[part].narrow(study)
    if "reference" in options and study.reference not in (None, study.reference_name):
        left = ", ".join(study.method_names)
        raise ConfigurationError(f"reference: '{study.reference}' is left out; there is: {left}.")
    layered = [key for content in layers[1:] for key in content.get("overrides", {})]
    for_all = [key for key in layered if study.algorithm_of(key) is None]  # of others the algorithm may be left out
    check_precedence(study, dict.fromkeys([*for_all, *typed]))
    if printed:  # not by the parser: overrides are merged and parts chosen here, after it
        plain = json.loads(json.dumps(study.as_config(), default=str))
        check_settings(plain)
        print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")
        raise SystemExit(0)
    return study


def _build(parser: FederatedArgumentParser, words: list[str], layers: list[dict[str, Any]], names: list[str]) -> Study:
    """Build the study of a command line; overrides of all its layers, and algorithms of its files, are merged by key.

    Args:
        parser: Parser of the command.
        words: Words of the command line after the command.
        layers: Content of each config, then what the words override.
        names: Names of the configs that are files; the last is that of a study that has no other.
    """
    merged: dict[str, dict[str, Any]] = {"algorithms": {}, "overrides": {}}
    for content, key in itertools.product(layers, merged):
        of_layer = content.get(key)
        if isinstance(of_layer, dict):  # the parser refuses what is none
            merged[key] = without(merged[key], of_layer) | of_layer
    parser.words = words
    given = parser.parse_args(words)
    for key, default in Study.__dataclass_fields__.items():
        if given[key] is None and default.default is not None:
            raise UsageError(f"{key}: got null; leave the key out, or give a value.")
    given.name = given.name or (names[-1] if names else "study")
    given.pop("config", None)
    settings = {key: given[key] for key in ("variants", "factors")}  # the runs build these, and algorithms
    settings["overrides"] = given["overrides"] | merged["overrides"]
    typed = [load(value) for _, value in option_values(words, ("--algorithms",))]  # replaces those of all files
    settings["algorithms"] = typed[-1] if typed else merged["algorithms"] | given["algorithms"]
    built = parser.instantiate_classes(given)
    return Study(**{key: built[key] for key in Study.__dataclass_fields__} | settings)


def _mark_changes(study: Study, layers: list[dict[str, Any]]) -> None:
    """Say of all origins that they are not checked, if layers above the published study or the command line change it.

    Which settings of which runs a change reaches is not worked out: the paper's numbers are those of the whole study.
    """
    changed = set[str]()
    for content in layers:
        changed = set() if content.get("origins") else changed | set(content)
    if changed & {"base", "algorithms", "variants", "factors", "overrides", "seeds", "scale"}:
        marked = {name: origin.removesuffix(UNCHECKED) + UNCHECKED for name, origin in study.origins.items()}
        study.origins = study.given["origins"] = marked


def reproduce(*names: str, **settings: Any) -> list[Comparison]:
    """Compute tables and figures of the papers; tables without a study are printed.

    The files of all data sets are looked for, and downloaded where that is possible, before any run begins.

    Args:
        *names: Names as ``fedbc-cli reproduce --help`` lists them, e.g. ``table1``.
        **settings: Arguments of :class:`Study` that replace those of the shipped studies, e.g. ``scale=0.1``.

    Returns:
        The comparisons, which have run, of those names that have a study.

    Raises:
        ConfigurationError: A study cannot be run as configured.
        UsageError: A name is unknown, or none is given.
    """
    options = [f"--{key}={json.dumps(value)}" for key, value in settings.items()]
    return [comparison for comparison, _ in _reproduced(names, options)]


def reproduce_command(words: list[str]) -> int:
    """Run ``fedbc-cli reproduce``, see :func:`reproduce`.

    Args:
        words: Names of tables and figures, then options of the study, e.g. ``--scale 0.1``.

    Returns:
        The exit status: 0, or 1 where a run failed.
    """
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(names) :]
    if words in (["-h"], ["--help"]):
        print(f"usage: {PROG} reproduce NAME... [--scale SHARE] [options of {PROG} compare]\n\nnames:")
        print(columns({name: known.what for name, known in REPRODUCTIONS.items()}))
        return 0
    return max((not is_whole for _, is_whole in _reproduced(names, options)), default=0)


def _reproduced(names: Sequence[str], options: list[str]) -> Iterator[tuple[Comparison, bool]]:
    """Yield each comparison that has run, and whether all of its runs finished."""
    for name in names:
        if name not in REPRODUCTIONS:
            meant = did_you_mean(name, REPRODUCTIONS, f"there is: {', '.join(REPRODUCTIONS)}")
            raise UsageError(f"nothing to reproduce is called '{name}'; {meant}")
    if not names:
        raise UsageError(f"what? {PROG} reproduce {next(iter(REPRODUCTIONS))} [--scale 0.1]; {PROG} reproduce --help")
    studies = {
        name: read_study("reproduce", ["--config", known.study, *options], part=name)  # finds mistakes before any run
        for name in names if (known := REPRODUCTIONS[name]).study is not None
    }  # fmt: skip
    if options and not studies:
        raise UsageError(f"{' '.join(names)}: computed without a study, so there is nothing for {options[0]} to change")
    for study in studies.values():
        check_data_files(study)
    for name in names:
        known = REPRODUCTIONS[name]
        if known.compute is not None:
            show(Console(), *known.compute())
            continue
        comparison = Comparison(studies[name], command=shlex.join([PROG, "reproduce", name, *options]))
        is_whole = comparison.run()
        if known.draw is not None and finished(comparison.states):
            figure = known.draw(StudyRecord(studies[name], None, comparison.states))
            for file in save(figure, studies[name].results_folder / "figures", name.replace("-", "_")):
                Console().print(f"{name}:  {file}", highlight=False, soft_wrap=True)
        yield comparison, is_whole


def _read(path: Path | str) -> dict[str, Any]:
    """Read the content of a study's file, or of its text; it is empty if it is no YAML, which the parser refuses.

    Raises:
        UsageError: It is the config of one run.
    """
    content = load(path if isinstance(path, str) else path.read_text(encoding="utf-8"))
    content = content if isinstance(content, dict) else {}
    key = next((key for key in content if key in ("seed_everything", *SECTIONS)), None)
    if key is not None:
        file = path if isinstance(path, Path) else "--config"
        raise UsageError(f"{file} is the config of one run ({key}: ...), not of a study: {PROG} fit --config {path}")
    return content


def report_command(words: list[str]) -> int:
    """Run ``fedbc-cli report``: write a page about a study or a run.

    Args:
        words: Words of the command line after the command.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: No folder is given.
        ConfigurationError: The folder holds neither a study nor a run, or a file in it cannot be read.
    """
    given = command_parser("report").parse_args(words)
    if given.folder is None:
        raise UsageError(f"of what? {PROG} report FOLDER_OF_A_RUN_OR_STUDY")
    for file in report(given.folder, given.output):
        Console().print(f"Report:  {url_of(file) or file}", markup=False, highlight=False, soft_wrap=True)
    return 0
