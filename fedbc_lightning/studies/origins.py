"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.methods import SECTIONS, Method, full_key, plain_key
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run, as_word, flat

# Map from the full keys of all settings of a run to their values, as text.
Settings = Mapping[str, str]
# Function from an algorithm to the settings of its runs in each variant; in no variant if they are not known.
SettingsOf = Callable[[Method], Mapping[str, Settings]]
# Origin of a setting that was given anew, so that the published study's origin does not hold for it.
CHANGED = "changed here"
# What is added to all origins of a study whose algorithms, variants or base were given anew.
UNCHECKED = " (not checked)"
# Name of the number of seeds among the origins; all other names are those of settings of runs.
SEEDS = "seeds"


def origin_rows(study: Study, settings_of: SettingsOf) -> Rows:
    """Return a header, then a row per setting: name, value, and where the value comes from.

    A setting that all algorithms share is shown without those that have a row of their own.

    Args:
        study: Study, whose ``origins`` name the settings.
        settings_of: Function from an algorithm to the settings of its runs, such as that of :func:`parsed_settings`.

    Raises:
        ConfigurationError: The study and its runs have no such setting.
    """
    runs = {method.name: _with_ranges(method, settings_of(method)) for method in study.methods}
    places = {name: place_of(study, name) for name in study.origins if name != SEEDS}
    rows = [["setting", "value", "origin"]]
    for name, origin in study.origins.items():
        if name == SEEDS:
            rows.append([name, str(len(study.seed_list)), origin])
            continue
        owner, key = places[name]
        own = {other for other, full in places.values() if full == key and other is not None}
        shown = [other for other in runs if other == owner or (owner is None and other not in own)]
        known = {(other, variant): run for other in shown for variant, run in runs[other].items()}
        found = {place: value for place, run in known.items() if (value := _value(run, key)) is not None}
        if known and not found:
            raise ConfigurationError(f"origins: the runs of this study have no setting '{name}'.")
        if shown:  # else the algorithm is left out of this part of the study
            rows.append([name, _one_text(found) if found else "-", origin])
    return rows


def mark_changes(study: Study, keys: Iterable[str], *, has_other_seeds: bool, has_other_runs: bool) -> dict[str, str]:
    """Return the origins of a study whose published form was changed: what was given anew is not the paper's.

    Args:
        study: The study as it is to be run.
        keys: Keys of the overrides that differ from the published study's.
        has_other_seeds: Whether its seeds differ.
        has_other_runs: Whether its base, algorithms, variants or factors differ, so that any setting may.
    """
    origins = {
        name: origin.removesuffix(UNCHECKED) + UNCHECKED * has_other_runs for name, origin in study.origins.items()
    }
    if SEEDS in origins and has_other_seeds:
        origins[SEEDS] = CHANGED
    places = {name: place_of(study, name) for name in study.origins if name != SEEDS}
    for key in keys:
        owner, full = place_of(study, key)
        # An override for all does not reach an algorithm whose own settings have the key.
        keeping = {
            method.name for method in study.methods if full in map(plain_key, {**method.settings, **method.tuned})
        }
        same = [name for name, (other, place) in places.items() if place == full
                and (other == owner or (owner is None and other not in keeping))]  # fmt: skip
        origins |= dict.fromkeys(same or [key], CHANGED)
    return origins


def parsed_settings(study: Study, parse: Callable[[Run], Mapping[str, Any]]) -> SettingsOf:
    """Return the function from an algorithm to the settings of its runs, for runs that need not exist yet.

    Args:
        study: Study of the runs.
        parse: Function that returns the complete config of a run.
    """
    varied = {plain_key(key) for own in study.variants.values() for key in own or {}}

    def settings_of(method: Method) -> dict[str, Settings]:
        runs = {name: study.run(name, method, study.seed_list[0], method.first()) for name in study.variants}
        plain = {name: {plain_key(key): value for key, value in run.settings.items()} for name, run in runs.items()}
        first = next(iter(runs.values()))
        try:  # A config takes a tenth of a second to parse, and a study may have 30 variants of 5 algorithms.
            shared = dict(flat(parse(replace(first, settings=_without(first.settings, varied)))))
        except ConfigurationError:  # the variants give what the config lacks
            return {name: dict(flat(parse(run))) for name, run in runs.items()}
        return {name: shared | dict(flat(_only(given, varied))) for name, given in plain.items()}

    return settings_of


def _without(settings: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if plain_key(key) not in keys}


def _only(settings: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in keys}


def place_of(study: Study, name: str) -> tuple[str | None, str]:
    """Return the algorithm that a setting is about, None if all share it, and its full key."""
    owner = study.algorithm_of(name)
    if owner is None:
        return None, plain_key(name)
    key = plain_key(name.removeprefix(f"{owner}."))
    return owner, key if key in SECTIONS else full_key(key)


def _with_ranges(method: Method, runs: Mapping[str, Settings]) -> dict[str, Settings]:
    """Return the settings of runs, of which a tuned one is shown as its range."""
    tuned = {plain_key(key): range_.text for key, range_ in method.tuned.items()}
    return {variant: {**run, **tuned} for variant, run in runs.items()}


def _value(run: Settings, key: str) -> str | None:
    """Return the value of a setting of a run, which may be a mapping; None if there is no such setting."""
    if key in run:
        return run[key]
    inside = {other.removeprefix(f"{key}."): value for other, value in run.items() if other.startswith(f"{key}.")}
    return f"{{{', '.join(f'{part}: {value}' for part, value in inside.items())}}}" if inside else None


def _one_text(values: Mapping[tuple[str, str], str]) -> str:
    """Return the value that all algorithms and variants have, or on which of both it depends."""
    if len({*values.values()}) == 1:
        return next(iter(values.values()))
    for word, place in (("algorithm", 0), ("variant", 1)):
        if len({(names[place], value) for names, value in values.items()}) == len({names[place] for names in values}):
            return f"by {word}"
    return "by algorithm and variant"


def check_precedence(study: Study, keys: Iterable[str]) -> None:
    """Refuse overrides that reach no run, and warn of those that do not reach all.

    Args:
        study: The study, reduced to what is run.
        keys: Keys of overrides that were given anew, so that whoever gave them expects them to count.

    Raises:
        ConfigurationError: No run takes the value of an override.
    """
    given = _own(study)
    for key in keys:
        owner, plain = study.algorithm_of(key), plain_key(key)
        if owner is not None:
            if owner not in given:
                raise ConfigurationError(f"overrides: {key}: {owner} is left out here; leave the key out, too.")
            continue
        algorithms = [name for name, own in given.items() if plain in own]
        variants = [name for name, own in study.variants.items() if plain in map(plain_key, own or {})]
        if len(algorithms) == len(given) or len(variants) == len(study.variants):
            each = {f"{name}.{plain.removeprefix('algorithm.')}": study.overrides[key] for name in given}
            raise ConfigurationError(
                f"overrides: {key}: no run takes it, since each algorithm or variant has its own; choose others, or "
                f"name the algorithms: {as_word(each)}"
            )
        if algorithms or variants:
            warnings.warn(f"overrides: {key}: {', '.join([*algorithms, *variants])}: own value kept", stacklevel=2)


def _own(study: Study) -> dict[str, set[str]]:
    """Return the full keys of the settings that each algorithm has of its own, given or tuned."""
    return {method.name: {plain_key(key) for key in (*method.settings, *method.tuned)} for method in study.methods}
