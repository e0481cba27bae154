"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.run import Run, as_word
from fedbc_lightning.studies.study import Study

Parse = Callable[[Run], Mapping[str, Any]]
"""Function that returns the complete config of a run."""


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
