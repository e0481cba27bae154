"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

from collections import defaultdict
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


Changes = dict[str, set[str]]
"""Map from the full key of a setting to the algorithms for which its value is another one."""


def _changes(study: Study, published: Study, parse: Parse) -> Changes:
    """Return what differs between the runs of two studies.

    The complete configs of one run of each algorithm are compared, of a variant that both studies have, and all else
    that the runs are made of: the other variants' overrides, and the ranges of what is tuned.
    """
    found: Changes = defaultdict(set)
    names = {method.name for method in study.methods}
    both = [name for name in study.variants if name in published.variants]
    of_variants = {key for owner in (study, published) for given in owner.variants.values() for key in _plain(given)}
    for variant in study.variants:
        ours, theirs = _plain(study.variants[variant]), _plain(published.variants.get(variant))
        known = [_plain(given) for given in published.variants.values()]
        for key in ours.keys() | theirs.keys():
            meant = [theirs] if variant in both else known
            if not any(key in given and key in ours and given[key] == ours[key] for given in meant):
                found[key] |= names
    methods = {method.name: method for method in published.methods}
    for method in study.methods:
        other = methods.get(method.name)
        if other is None:  # all of it is new; the settings of its algorithm have no origin
            for key in _plain(method.settings):
                found[key].add(method.name)
            continue
        tuned = method.tuned.keys() | other.tuned.keys()
        differing = {key for key in tuned if method.tuned.get(key) != other.tuned.get(key)}
        first = both[0] if both else None
        configs = [
            dict(flat(parse(owner.run(first or next(iter(owner.variants)), mine, study.seed_list[0], mine.first()))))
            for owner, mine in ((study, method), (published, other))
        ]
        skipped = NOT_OF_THE_EXPERIMENT | tuned | (set() if first else of_variants)
        for key in configs[0].keys() - skipped:
            if configs[0][key] != configs[1].get(key):
                differing.add(key)
        for key in differing:
            if not any(key.startswith(f"{class_}.") for class_ in differing):  # a new class has other settings
                found[key].add(method.name)
    return found


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
