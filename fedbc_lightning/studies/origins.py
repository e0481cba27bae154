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
Origins = dict[str, str]
"""Map from the name of a setting to where its value comes from."""


CHANGED = "changed here"
"""Origin of a setting whose value is another one than that of the study whose origins are shown."""


def changed_origins(study: Study, published: Study, parse: Parse) -> Origins:
    """Return the origins of a study that was changed: a value that was given anew is not the paper's.

    Args:
        study: The study as it is to be run.
        published: The study whose origins these are, as its file has it.
        parse: Function that returns the complete config of a run.

    Returns:
        The origins of the settings that the study has, where a value that ``published`` does not have is marked.

    Raises:
        ConfigurationError: ``published`` has no such setting, or a run of one of the two cannot be configured.
    """
    found = dict[str, str]()
    ours, theirs = _Values(study, parse), _Values(published, parse)
    for name, origin in published.origins.items():
        meant = theirs.of(name)
        try:
            is_changed = not ours.of(name) <= meant
        except ConfigurationError:  # e.g. a setting of a model or an algorithm that was replaced
            continue
        found[name] = CHANGED if is_changed else origin
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
    values = _Values(study, parse)
    rows = [["setting", "value", "origin"]]
    for name, origin in study.origins.items():
        found = values.of(name)
        if found:  # else the algorithm is left out of this part of the study
            rows.append([name, found.pop() if len(found) == 1 else "by variant", origin])
    return rows


class _Values:
    """Looks up the values of settings in a study, and reads the config of each algorithm's runs once."""

    def __init__(self, study: Study, parse: Parse) -> None:
        self._study, self._parse = study, parse
        self._configs: dict[str, Mapping[str, Any]] = {}

    def of(self, name: str) -> set[str]:
        """Return the values that a setting has in the variants, as text; none if its algorithm is left out.

        Raises:
            ConfigurationError: The study and its runs have no such setting.
        """
        method, key = self._setting(name)
        if method is None:
            return set()
        if key in method.tuned:
            range_ = method.tuned[key]
            return {f"tuned over {as_word(range_.grid or [range_.low, range_.high])}"}
        given = [overrides or {} for overrides in self._study.variants.values()]
        found = set[str]()
        if key not in method.settings:  # these go before a variant's
            found = {as_word(overrides[key]) for overrides in given if key in overrides}
        if not found or not all(key in overrides for overrides in given):
            found.add(self._in_config(method, key, name))
        return found

    def _setting(self, name: str) -> tuple[Method | None, str]:
        """Return the method that a setting is about and its full key; of one that all share, the first method."""
        for algorithm in self._study.algorithms:
            if name.startswith(f"{algorithm}."):
                method = next((method for method in self._study.methods if method.name == algorithm), None)
                key = name.removeprefix(f"{algorithm}.")
                return method, key if "." in key else f"algorithm.{key}"
        return self._study.methods[0], name

    def _in_config(self, method: Method, key: str, name: str) -> str:
        """Return a value from the config of a method's runs in the first variant; ``-`` if the config is not known."""
        if method.name not in self._configs:
            first = next(iter(self._study.variants))
            run = self._study.run(first, method, self._study.seed_list[0], method.first())
            self._configs[method.name] = self._parse(run)
        found: Any = self._configs[method.name]
        if not found:
            return "-"
        for part in key.split("."):
            inside = found.get("init_args") if isinstance(found, Mapping) and part not in found else found
            if not isinstance(inside, Mapping) or part not in inside:
                raise ConfigurationError(f"origins: the runs of this study have no setting '{name}'.")
            found = inside[part]
        return as_word(found)
