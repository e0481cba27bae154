"""Tells which overrides reach the runs of a study: what a variant or an algorithm gives itself goes first."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.methods import plain_key
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import as_word


def check_precedence(study: Study, keys: Iterable[str]) -> None:
    """Refuse overrides that reach no run, and warn of those that do not reach all.

    Args:
        study: The study, reduced to what is run.
        keys: Keys of overrides that were given anew, so that whoever gave them expects them to count.

    Raises:
        ConfigurationError: No run takes the value of an override.
    """
    for key in keys:
        owner = study.algorithm_of(key)
        if owner is not None:
            if owner not in [method.name for method in study.methods]:
                raise ConfigurationError(f"overrides: {key}: {owner} is left out here; leave the key out, too.")
            continue
        plain = plain_key(key)
        algorithms = [method.name for method in study.methods if plain in _own({**method.settings, **method.tuned})]
        variants = [name for name, own in study.variants.items() if plain in _own(own or {})]
        if len(algorithms) == len(study.methods):
            each = {f"{name}.{plain.removeprefix('algorithm.')}": study.overrides[key] for name in algorithms}
            raise ConfigurationError(
                f"overrides: {key}: no run takes it, since each algorithm has its own, given or tuned; to replace "
                f"that, name the algorithms: {as_word(each)}"
            )
        if len(variants) == len(study.variants):
            raise ConfigurationError(
                f"overrides: {key}: no run takes it, since each variant has its own; give --variants (for factors: "
                "--factors) with other values, or choose among them with --only."
            )
        if algorithms or variants:
            warnings.warn(f"overrides: {key}: {', '.join([*algorithms, *variants])}: own value kept", stacklevel=2)


def _own(given: Iterable[str]) -> set[str]:
    return {plain_key(key) for key in given}
