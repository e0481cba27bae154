"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.methods import SECTIONS, full_key, plain_key
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import as_word, flat

# What is added to all origins of a study of which something was given anew.
UNCHECKED = " (not checked)"
# Name of the number of seeds among the origins; all other names are those of settings of runs.
SEEDS = "seeds"


def origin_rows(study: Study, records: Mapping[tuple[str, str, int], RunRecord]) -> Rows:
    """Return a header, then a row per setting: name, value, and where the value comes from.

    A setting that all algorithms share is shown without those that have a row of their own, and a tuned one as its
    range.

    Args:
        study: Study, whose ``origins`` name the settings.
        records: Finished runs by variant, algorithm and seed, whose configs have the values.
    """
    runs = {(name, variant): dict(flat(run.config)) for (variant, name, _), run in records.items()}
    for method in study.methods:
        tuned = {plain_key(key): range_.text for key, range_ in method.tuned.items()}
        runs |= {place: {**run, **tuned} for place, run in runs.items() if place[0] == method.name}
    places = {name: _place(study, name) for name in study.origins if name != SEEDS}
    rows = [["setting", "value", "origin"]]
    for name, origin in study.origins.items():
        if name == SEEDS:
            rows.append([name, str(len(study.seed_list)), origin])
            continue
        owner, key = places[name]
        own = {other for other, full in places.values() if full == key and other is not None}
        shown = [m.name for m in study.methods if m.name == owner or (owner is None and m.name not in own)]
        values = {place: value for place, run in runs.items() if place[0] in shown and (value := _value(run, key))}
        if shown:  # else the algorithm is left out of this part of the study
            rows.append([name, _one_text(values) if values else "-", origin])
    return rows


def _place(study: Study, name: str) -> tuple[str | None, str]:
    """Return the algorithm that a setting is about, None if all share it, and its full key."""
    owner = study.algorithm_of(name)
    if owner is None:
        return None, plain_key(name)
    key = plain_key(name.removeprefix(f"{owner}."))
    return owner, key if key in SECTIONS else full_key(key)


def _value(run: Mapping[str, str], key: str) -> str | None:
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
    given = {method.name: {*map(plain_key, [*method.settings, *method.tuned])} for method in study.methods}
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
