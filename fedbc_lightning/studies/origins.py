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
    """Return a header, then a row per setting: name, its values, and where they come from.

    A setting that all algorithms share is shown without those that have a row of their own, and a tuned one as its
    range.

    Args:
        study: Study, whose ``origins`` name the settings.
        records: Finished runs by variant, algorithm and seed, whose configs have the values.
    """
    tuned = {m.name: {plain_key(key): values.text for key, values in m.tuned.items()} for m in study.methods}
    configs = [(name, dict(flat(run.config)) | tuned[name]) for (_, name, _), run in records.items()]
    places = {name: _place(study, name) for name in study.origins}
    rows = [["setting", "value", "origin"]]
    for name, origin in study.origins.items():
        owner, key = places[name]
        own = {other for other, full in places.values() if full == key and other is not None}
        shown = [m.name for m in study.methods if m.name == owner or (owner is None and m.name not in own)]
        values = dict.fromkeys(config[key] for method, config in configs if method in shown and key in config)
        if name == SEEDS:
            values = {str(study.num_seeds): None}
        if shown:  # else the algorithm is left out of this part of the study
            rows.append([name, ", ".join(values) or "-", origin])
    return rows


def _place(study: Study, name: str) -> tuple[str | None, str]:
    """Return the algorithm that a setting is about, None if all share it, and its full key."""
    owner = study.algorithm_of(name)
    if owner is None:
        return None, plain_key(name)
    key = plain_key(name.removeprefix(f"{owner}."))
    return owner, key if key in SECTIONS else full_key(key)


def check_precedence(study: Study, keys: Iterable[str]) -> None:
    """Refuse overrides that reach no run, and warn of those that do not reach all.

    Args:
        study: The study, reduced to what is run.
        keys: Keys of overrides that were given anew, so that whoever gave them expects them to count.

    Raises:
        ConfigurationError: No run takes the value of an override.
    """
    # Ranges of the overrides have become the methods' own, and ranges that are not tuned are gone.
    algorithms = {
        method.name: {plain_key(full_key(key)) for key in study.own_settings(method.name)}
        & {*map(plain_key, [*method.settings, *method.tuned])}
        for method in study.methods
    }
    variants = {name: {*map(plain_key, settings or {})} for name, settings in study.variants.items()}
    for key in keys:
        owner, plain = study.algorithm_of(key), plain_key(key)
        if owner is not None:
            if owner not in algorithms:
                raise ConfigurationError(f"overrides: {key}: {owner} is left out here; leave the key out, too.")
            continue
        kept = [[name for name, own in kind.items() if plain in own] for kind in (algorithms, variants)]
        if len(kept[0]) == len(algorithms) or len(kept[1]) == len(variants):
            each = {f"{name}.{plain.removeprefix('algorithm.')}": study.given["overrides"][key] for name in algorithms}
            raise ConfigurationError(
                f"overrides: {key}: no run takes it, since each algorithm or variant has its own; choose others, or "
                f"name the algorithms: {as_word(each)}"
            )
        if any(kept):
            warnings.warn(f"overrides: {key}: {', '.join([*kept[0], *kept[1]])}: own value kept", stacklevel=2)
