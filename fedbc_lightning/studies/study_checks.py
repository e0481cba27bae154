"""The checks of a study's arguments, each of one idea; a message names the argument, its value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.studies.methods import SECTIONS, Tuning, check_keys
from fedbc_lightning.studies.numbers import UNITS, is_share
from fedbc_lightning.studies.study_run import as_word, slug

OWN = ("trainer.default_root_dir", "trainer.name", "trainer.seed", "seed_everything", "ckpt_path")
"""Keys that the study sets itself for each run."""

COLUMNS = ("variant", "algorithm", "seed", "status", "report", "round", "rounds", "bytes_up", "bytes_down", "seconds",
           "error", "folder")  # fmt: skip
"""Columns of ``results.csv`` besides the metrics."""


def check_numbers(**numbers: int | None) -> None:
    """Refuse numbers below 1.

    Raises:
        ConfigurationError: A number is given and below 1.
    """
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigurationError(f"{name}: got {number}; give 1 or more.")


def check_tuning(tuning: Tuning) -> None:
    """Check the seeds, the numbers of rounds and the validation data of tuning.

    Raises:
        ConfigurationError: There are no seeds, the numbers of rounds do not ascend, or there is no validation data.
    """
    if not tuning.seeds:
        raise ConfigurationError("tuning.seeds: none given; give e.g. [0].")
    if not tuning.rungs or None in tuning.rungs[:-1]:
        raise ConfigurationError("tuning.max_rounds: give T, null, or a list such as [25, 100, null], null last.")
    rungs = [rounds for rounds in tuning.rungs if rounds is not None]
    if rungs != sorted(set(rungs)):
        raise ConfigurationError(f"tuning.max_rounds: got {rungs}; give them ascending: longer for fewer runs.")
    if not 0 < tuning.val_fraction < 1:
        raise ConfigurationError(f"tuning.val_fraction: got {tuning.val_fraction}; give 0.2, say.")


def check_metrics(metrics: list[str], better: Mapping[str, str], tuning_metric: str | None) -> None:
    """Check the names of the reported metrics, and the directions in which metrics are better.

    Raises:
        ConfigurationError: A metric is missing, there twice or a column anyway, or a direction is none.
    """
    if not metrics:
        raise ConfigurationError("metrics: none given; give names as in metrics.csv, e.g. [accuracy/global].")
    twice = next((name for name in metrics if metrics.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"metrics: '{twice}' is there twice.")
    taken = next((name for name in metrics if name in COLUMNS), None)
    if taken is not None:
        raise ConfigurationError(f"metrics: '{taken}' is a column of results.csv anyway; leave it out.")
    for name, said in better.items():
        if name not in {*metrics, tuning_metric}:
            meant = did_you_mean(name, metrics, f"there is: {', '.join(metrics)}")
            raise ConfigurationError(f"better: '{name}' is not among the metrics; {meant}")
        if said not in ("lower", "higher"):
            raise ConfigurationError(f"better.{name}: got {said!r}; give lower or higher.")


def check_targets(axis: str, targets: Mapping[str, list[float]], metrics: list[str]) -> None:
    """Check the values whose costs are told, and the axis on which they are.

    Raises:
        ConfigurationError: The axis is unknown or has no values, values are those of a metric that is not reported, or
            a share is above 1.
    """
    if axis not in UNITS:
        raise ConfigurationError(f"axis: got {axis!r}; give {' or '.join(UNITS)}.")
    if axis != "rounds" and not targets:
        raise ConfigurationError(f"axis: {axis} is for targets, and none are given; give {{{metrics[0]}: [0.9]}}, say.")
    for name in targets:
        if name not in metrics:
            meant = did_you_mean(name, metrics, f"there is: {', '.join(metrics)}")
            raise ConfigurationError(f"targets: '{name}' is not among the metrics; {meant}")
        above = next((value for value in targets[name] if is_share(name) and value > 1), None)
        if above is not None:
            raise ConfigurationError(
                f"targets.{name}: got {above:g}, which is {100 * above:g} %; write {above / 100:g} for {above:g} %."
            )


def check_settings(place: str, given: Mapping[str, Any] | None) -> None:
    """Check the keys of settings that several runs get.

    Raises:
        ConfigurationError: A key is no text, a section holds nested keys, or a key is one that the study itself gives
            to its runs.
    """
    given = given or {}
    check_keys(place, given)
    nested = [key for key in given if key in SECTIONS and not _is_class(given[key])]
    if nested:
        raise ConfigurationError(f"{place}.{nested[0]}: give full keys, e.g. {{{nested[0]}.max_rounds: 10}}.")
    taken = [key for key in given if key in OWN]
    if taken:
        raise ConfigurationError(f"{place}: the study itself gives {taken[0]} to its runs; leave it out.")


def check_places(overrides: Mapping[str, Any], algorithms: Iterable[str]) -> None:
    """Check that each key of the overrides begins with a section, or with the name of an algorithm.

    Raises:
        ConfigurationError: One does not, or is such a name alone.
    """
    names = [*SECTIONS, *algorithms]
    for key in overrides:
        section = key.partition(".")[0]
        if section in SECTIONS or any(key.startswith(f"{name}.") for name in names):
            continue
        if key in names:
            raise ConfigurationError(f"overrides.{key}: give full keys, e.g. {{{key}.model.lr: 0.1}}.")
        meant = did_you_mean(section, names, f"there is: {', '.join(names)}")
        raise ConfigurationError(f"overrides: '{key}' begins with no section and no algorithm; {meant}")


def _is_class(value: Any) -> bool:
    """Return whether a section is given as a class, by its name or with ``class_path``."""
    return isinstance(value, str) or (isinstance(value, Mapping) and "class_path" in value)


def check_folder_names(kind: str, names: Iterable[Any]) -> None:
    """Check that each name is text, and that no two of them would share a folder.

    Raises:
        ConfigurationError: A name is no text, or two names differ only in what a folder's name leaves out.
    """
    folders: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str):
            said = as_word(name)
            raise ConfigurationError(f"{kind}: the name {said} is no text; quote it: '{said}'.")
        other = folders.setdefault(slug(name), name)
        if other != name:
            raise ConfigurationError(f"{kind}: '{other}' and '{name}' would share a folder; rename one.")
