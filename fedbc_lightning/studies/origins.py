"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.run import Run, as_word, flat
from fedbc_lightning.studies.study import Study

Parse = Callable[[Run], Mapping[str, Any]]
"""Function that returns the complete config of a run."""
Origins = dict[str, str]
"""Map from the name of a setting to where its value comes from."""
Changes = dict[str, set[str]]
"""Map from the full key of a setting to the algorithms for which its value is another one."""
NOT_OF_THE_EXPERIMENT = {"trainer.default_root_dir", "trainer.name", "trainer.enable_progress_bar"}
"""Settings that a study gives each run, and that make no difference to its numbers."""
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
    changed = _changes(study, published, parse)
    origins = dict(published.origins)
    for key, names in changed.items():
        listed = [name for name in published.origins if _is_about(name, key, names, published)]
        origins |= dict.fromkeys(listed or _names(key, names, study), CHANGED)
    values = _Values(study, parse)
    return {name: origin for name, origin in origins.items() if values.has(name)}


def _changes(study: Study, published: Study, parse: Parse) -> Changes:
    """Return what differs between the runs of two studies."""
    theirs = {method.name: method for method in published.methods}
    of_all = _changed_by_variants(study, published)
    found: Changes = {key: {method.name for method in study.methods} for key in of_all}
    for method in study.methods:
        if method.name in theirs:
            keys = _changed_by_method(study, method, published, theirs[method.name], parse)
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


def _changed_by_method(study: Study, method: Method, published: Study, theirs: Method, parse: Parse) -> set[str]:
    """Return keys of an algorithm's ranges, and of its complete config in one variant, that differ.

    The variant is one that both studies have; if there is none, what variants override is left out.
    """
    tuned = method.tuned.keys() | theirs.tuned.keys()
    found = {key for key in tuned if method.tuned.get(key) != theirs.tuned.get(key)}
    skipped = NOT_OF_THE_EXPERIMENT | tuned
    both = next((name for name in study.variants if name in published.variants), None)
    if both is None:
        skipped |= {key for owner in (study, published) for given in owner.variants.values() for key in _plain(given)}
    seed = study.seed_list[0]
    ours, meant = (
        dict(flat(parse(owner.run(both or next(iter(owner.variants)), mine, seed, mine.first()))))
        for owner, mine in ((study, method), (published, theirs))
    )
    found |= {key for key in ours.keys() - skipped if ours[key] != meant.get(key)}
    return {key for key in found if not any(key.startswith(f"{class_}.") for class_ in found)}  # a new class is enough


def _plain(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return settings by the keys that complete configs have."""
    return {key.replace(".init_args", ""): value for key, value in (given or {}).items()}


def _is_about(name: str, key: str, algorithms: Collection[str], published: Study) -> bool:
    """Return whether an origin is that of a changed setting, or of one inside of it."""
    owner = next((method for method in published.algorithms if name.startswith(f"{method}.")), None)
    if owner is not None and owner not in algorithms:
        return False
    full = name if owner is None else name.removeprefix(f"{owner}.")
    full = full if "." in full else f"algorithm.{full}"
    return full == key or full.startswith(f"{key}.")


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
        self._study, self._parse = study, parse
        self._configs: dict[str, Mapping[str, Any]] = {}

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
                raise _NoSuchSettingError(f"origins: the runs of this study have no setting '{name}'.")
            found = inside[part]
        return as_word(found["class_path"] if isinstance(found, Mapping) and "class_path" in found else found)
