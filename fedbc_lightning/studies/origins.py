"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.run import Run, as_word, flat
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_checks import OWN

Parse = Callable[[Run], Mapping[str, Any]]
"""Function that returns the complete config of a run."""
Origins = dict[str, str]
"""Map from the name of a setting to where its value comes from."""
Changes = dict[str, set[str]]
"""Map from the full key of a setting to the algorithms for which its value is another one."""
OF_THE_BASE = "as in the base config"
"""Value of a setting in a variant that does not override it, where another one does."""
CHANGED = "changed here"
"""Origin of a setting whose value is another one than that of the study whose origins are shown."""


def changed_origins(study: Study, published: Study, parse: Parse) -> Origins:
    """Return the origins of a study that was changed: a value that was given anew is not the paper's.

    Args:
        study: The study as it is to be run.
        published: The study whose origins these are, as its file has it.
        parse: Function that returns the complete config of a run.

    Returns:
        The origins of the settings that the study has, where each value that is not the published study's is marked;
        last come changed settings that have no origin there.

    Raises:
        ConfigurationError: ``published`` has no such setting, or a run of one of the two cannot be configured.
    """
    values = _Values(study, parse)
    origins = dict(published.origins)
    for key, names in _changes(values, _Values(published, parse)).items():
        listed = [name for name in published.origins if _is_about(name, key, names, published)]
        origins |= dict.fromkeys(listed or _names(key, names, study), CHANGED)
    return {name: origin for name, origin in origins.items() if values.has(name)}


def _changes(ours: _Values, theirs: _Values) -> Changes:
    """Return what differs between the runs of two studies."""
    methods = ours.study.methods
    published = {method.name: method for method in theirs.study.methods}
    of_all = _changed_by_variants(ours.study, theirs.study)
    found: Changes = {key: {method.name for method in methods} for key in of_all}
    for method in methods:
        if method.name in published:
            keys = _changed_by_method(ours, method, theirs, published[method.name])
        else:  # all of it is new
            keys = set(_plain(method.settings))
        for key in keys:
            found.setdefault(key, set()).add(method.name)
    return found


def _changed_by_variants(study: Study, published: Study) -> set[str]:
    """Return keys that variants override with values that the published variants do not have.

    A variant is held against that of the same name, and a new one against all.
    """
    every = {name: _plain(overrides) for name, overrides in published.variants.items()}
    found = set[str]()
    for name, overrides in study.variants.items():
        ours = _plain(overrides)
        meant = [every[name]] if name in every else list(every.values())
        for key in ours.keys() | every.get(name, {}).keys():
            if not any(key in ours and key in theirs and ours[key] == theirs[key] for theirs in meant):
                found.add(key)
    return found


def _changed_by_method(ours: _Values, method: Method, theirs: _Values, published: Method) -> set[str]:
    """Return keys of an algorithm's ranges, and of its complete config in one variant, that differ.

    The variant is one that both studies have; if there is none, what variants override is left out.
    """
    tuned = method.tuned.keys() | published.tuned.keys()
    found = {key for key in tuned if method.tuned.get(key) != published.tuned.get(key)}
    skipped = {*OWN, *tuned}
    variants = [ours.study.variants, theirs.study.variants]
    both = next((name for name in variants[0] if name in variants[1]), None)
    if both is None:
        skipped |= {key for named in variants for given in named.values() for key in _plain(given)}
    mine, meant = dict(flat(ours.config(method, both))), dict(flat(theirs.config(published, both)))
    found |= {key for key in mine.keys() - skipped if mine[key] != meant.get(key)}
    return {key for key in found if not any(key.startswith(f"{class_}.") for class_ in found)}  # a new class is enough


def _plain(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return settings by the keys that complete configs have."""
    return {key.replace(".init_args", ""): value for key, value in (given or {}).items()}


def _is_about(name: str, key: str, algorithms: Collection[str], published: Study) -> bool:
    """Return whether an origin is that of a changed setting, or of one inside of it."""
    owner, full = _owner_and_key(name, published)
    return (owner is None or owner in algorithms) and (full == key or full.startswith(f"{key}."))


def _owner_and_key(name: str, study: Study) -> tuple[str | None, str]:
    """Return the algorithm that a setting among the origins is about, None if all share it, and its full key."""
    owner = next((algorithm for algorithm in study.algorithms if name.startswith(f"{algorithm}.")), None)
    if owner is None:
        return None, name
    key = name.removeprefix(f"{owner}.")
    return owner, key if "." in key else f"algorithm.{key}"


def _names(key: str, algorithms: Collection[str], study: Study) -> list[str]:
    """Return how a setting is named among the origins: once if all algorithms have the same, else for each."""
    if not key.startswith("algorithm.") and len(algorithms) == len(study.methods):
        return [key]
    return [f"{name}.{key.removeprefix('algorithm.')}" for name in study.algorithms if name in algorithms]


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


class _NoSuchSettingError(ConfigurationError):
    """Raised for a setting that the runs of a study do not have."""


class _Values:
    """Looks up the values of settings in a study, and reads the config of each algorithm's runs once."""

    def __init__(self, study: Study, parse: Parse) -> None:
        self.study, self._parse = study, parse
        self._configs: dict[tuple[str, str], Mapping[str, Any]] = {}

    def has(self, name: str) -> bool:
        """Return whether the study has a setting, also if its algorithm is left out."""
        try:
            self.of(name)
        except _NoSuchSettingError:
            return False
        return True

    def of(self, name: str) -> set[str]:
        """Return the values that a setting has in the variants, as text; none if its algorithm is left out.

        Raises:
            ConfigurationError: The study and its runs have no such setting.
        """
        owner, key = _owner_and_key(name, self.study)
        method = next((method for method in self.study.methods if owner in (None, method.name)), None)
        if method is None:
            return set()
        if key in method.tuned:
            range_ = method.tuned[key]
            return {f"tuned over {as_word(range_.grid or [range_.low, range_.high])}"}
        given = [overrides or {} for overrides in self.study.variants.values()]
        if key not in method.settings and any(key in overrides for overrides in given):  # the former go first
            return {as_word(overrides[key]) if key in overrides else OF_THE_BASE for overrides in given}
        return {self._in_config(method, key, name)}

    def config(self, method: Method, variant: str | None = None) -> Mapping[str, Any]:
        """Return the config of an algorithm's runs in a variant, None being the first; it is read once."""
        variant = variant or next(iter(self.study.variants))
        if (method.name, variant) not in self._configs:
            run = self.study.run(variant, method, self.study.seed_list[0], method.first())
            self._configs[method.name, variant] = self._parse(run)
        return self._configs[method.name, variant]

    def _in_config(self, method: Method, key: str, name: str) -> str:
        """Return a value from the config of a method's runs; ``-`` if the config is not known."""
        found: Any = self.config(method)
        if not found:
            return "-"
        for part in key.split("."):
            inside = found.get("init_args") if isinstance(found, Mapping) and part not in found else found
            if not isinstance(inside, Mapping) or part not in inside:
                raise _NoSuchSettingError(f"origins: the runs of this study have no setting '{name}'.")
            found = inside[part]
        return as_word(found["class_path"] if isinstance(found, Mapping) and "class_path" in found else found)
