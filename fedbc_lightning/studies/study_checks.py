"""Checks of a study's arguments beyond their types and bounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.studies.methods import SECTIONS, Tuning, check_keys
from fedbc_lightning.studies.numbers import is_share
from fedbc_lightning.studies.study_run import slug

# Keys that the study sets itself for each run.
OWN = ("trainer.default_root_dir", "trainer.name", "trainer.seed", "seed_everything", "ckpt_path")

COLUMNS = ("variant", "algorithm", "seed", "status", "report", "round", "rounds", "bytes_up", "bytes_down", "seconds",
           "error", "folder")  # fmt: skip
"""Columns of ``results.csv`` besides the metrics."""


def refuse(problems: Mapping[str, bool]) -> None:
    """Raise the first problem that there is.

    Args:
        problems: Map from a message to whether it is so.

    Raises:
        ConfigurationError: There is a problem.
    """
    for message, is_so in problems.items():
        if is_so:
            raise ConfigurationError(message)


def check_known(place: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check that names are among those that the study has.

    Raises:
        ConfigurationError: One is not; the message has the nearest one.
    """
    for name in names:
        if name not in known:
            meant = did_you_mean(name, [*known], f"there is: {', '.join(known)}")
            raise ConfigurationError(f"{place}: the study has no '{name}'; {meant}")


def check_tuning(tuning: Tuning) -> None:
    """Check the numbers of rounds of tuning, which ascend from one rung to the next.

    Raises:
        ConfigurationError: They do not, or there are no seeds.
    """
    rungs = [rounds for rounds in tuning.rungs if rounds is not None]
    refuse({
        "tuning.seeds: none given; give e.g. [0].": not tuning.seeds,
        f"tuning.max_rounds: got {tuning.max_rounds}; give T, null, or an ascending list such as [25, 100, null].":
            not tuning.rungs or None in tuning.rungs[:-1] or rungs != sorted(set(rungs)),
    })  # fmt: skip


def check_metrics(metrics: list[str], targets: Mapping[str, list[float]], axis: str) -> None:
    """Check the names of the reported metrics, and the values whose costs are reported.

    Raises:
        ConfigurationError: A metric is missing, there twice or a column anyway, or a target is none.
    """
    check_known("targets", targets, metrics)
    above = [value for name, values in targets.items() for value in values if is_share(name) and value > 1]
    refuse({
        "metrics: give different names as in metrics.csv, e.g. [accuracy/global].":
            not metrics or len(set(metrics)) < len(metrics),
        f"metrics: got {metrics}; leave out columns that results.csv has anyway.": not set(COLUMNS).isdisjoint(metrics),
        f"axis: {axis} is for targets, and none are given.": axis != "rounds" and not targets,
        f"targets: got {', '.join(f'{value:g}' for value in above)}; give shares, such as 0.9 for 90 %.": bool(above),
    })  # fmt: skip


def check_settings(place: str, given: Mapping[str, Any]) -> None:
    """Check the keys of settings that several runs get.

    Raises:
        ConfigurationError: A key is no text, a section holds nested keys, or a key is one that the study itself gives
            to its runs.
    """
    check_keys(place, given)
    for key, value in given.items():
        is_class = isinstance(value, str) or (isinstance(value, Mapping) and "class_path" in value)
        refuse({
            f"{place}.{key}: give full keys, e.g. {{{key}.max_rounds: 10}}.": key in SECTIONS and not is_class,
            f"{place}: the study itself gives {key} to its runs; leave it out.": key in OWN,
        })  # fmt: skip


def check_places(overrides: Mapping[str, Any], algorithms: Iterable[str]) -> None:
    """Check that each key of the overrides begins with a section, or with the name of an algorithm.

    Raises:
        ConfigurationError: One does not, or is such a name alone.
    """
    names = [*SECTIONS, *algorithms]
    for key in overrides:
        refuse({f"overrides.{key}: give full keys, e.g. {{{key}.model.lr: 0.1}}.": key in names[len(SECTIONS) :]})
        if not any(f"{key}.".startswith(f"{name}.") for name in names):
            check_known("overrides", [key.partition(".")[0]], names)


def check_folder_names(kind: str, names: Iterable[Any]) -> None:
    """Check that each name is text, and that no two of them would share a folder.

    Raises:
        ConfigurationError: A name is no text, or two names differ only in what a folder's name leaves out.
    """
    folders: dict[str, str] = {}
    check_keys(kind, dict.fromkeys(names))
    for name in names:
        other = folders.setdefault(slug(name), name)
        refuse({f"{kind}: '{other}' and '{name}' would share a folder; rename one.": other != name})
