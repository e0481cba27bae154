"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.run import Run, as_word
from fedbc_lightning.studies.study import Study

Parse = Callable[[Run], Mapping[str, Any]]
"""Function that returns the complete config of a run."""
Origins = dict[str, str]
"""Map from the name of a setting to where its value comes from."""


CHANGED = "changed here, by overrides"


def changed_origins(
    origins: Mapping[str, str], algorithms: Mapping[str, Any], changed: Collection[str], *, tunes: bool
) -> Origins:
    """Return the origins of a study whose overrides were changed: a value that was given anew is not the paper's.

    Args:
        origins: Map from settings to their origins, as the study's file has it.
        algorithms: The study's algorithms, whose own settings go before overrides.
        changed: Full keys of the overrides that differ from those of the study's file.
        tunes: Whether the values of ranges are chosen by tuning.
    """
    found = dict(origins)
    for name in origins:
        algorithm = next((algorithm for algorithm in algorithms if name.startswith(f"{algorithm}.")), None)
        key = name if algorithm is None else name.removeprefix(f"{algorithm}.")
        own = (algorithms.get(algorithm) or {}).get(key) if algorithm else None
        is_range = isinstance(own, Mapping) and "class_path" not in own
        is_free = own is None or (is_range and not tunes and own.get("untuned") is None)
        if is_free and (key if "." in key else f"algorithm.{key}") in changed:
            found[name] = CHANGED
    return found


def origin_rows(study: Study, parse: Parse) -> Rows:
    """Return a header, then a row per setting: name, value, and where the value comes from.

    Args:
        study: Study, whose ``origins`` name the settings.
        parse: Function that returns the complete config of a run, which has the values that the study does not give;
            an empty one if it is not known.

    Raises:
        ConfigurationError: The study and its runs have no such setting.
    """
    rows = [["setting", "value", "origin"]]
    configs: dict[str, Mapping[str, Any]] = {}
    for name, origin in study.origins.items():
        method, key = _setting(study, name)
        if method is None:  # the algorithm is left out of this part of the study
            continue
        if method.name not in configs:
            first = next(iter(study.variants))
            configs[method.name] = parse(study.run(first, method, study.seed_list[0], method.first()))
        rows.append([name, _value(study, method, key, configs[method.name], name), origin])
    return rows


def _setting(study: Study, name: str) -> tuple[Method | None, str]:
    """Return the method that a setting is about and its full key; of a setting that all share, the first method."""
    for algorithm in study.algorithms:
        if name.startswith(f"{algorithm}."):
            method = next((method for method in study.methods if method.name == algorithm), None)
            key = name.removeprefix(f"{algorithm}.")
            return method, key if "." in key else f"algorithm.{key}"
    return study.methods[0], name


def _value(study: Study, method: Method, key: str, config: Mapping[str, Any], name: str) -> str:
    """Format the value of a setting, or say what it depends on."""
    if key in method.tuned:
        range_ = method.tuned[key]
        return f"tuned over {as_word(range_.grid or [range_.low, range_.high])}"
    if any(key in (overrides or {}) for overrides in study.variants.values()):
        return "by variant"
    if not config:
        return "-"
    found: Any = config
    for part in key.split("."):
        inside = found.get("init_args") if isinstance(found, Mapping) and part not in found else found
        if not isinstance(inside, Mapping) or part not in inside:
            raise ConfigurationError(f"origins: the runs of this study have no setting '{name}'.")
        found = inside[part]
    return as_word(found)
