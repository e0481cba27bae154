"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.methods import Method, Range
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.run import Run, as_word, flat
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_checks import OWN

Parse = Callable[[Run], Mapping[str, Any]]
"""Function that returns the complete config of a run."""
Origins = dict[str, str]
"""Map from the name of a setting to where its value comes from."""
Settings = dict[str, str]
"""Map from the full key of a setting of a run to its value, as text."""
Changes = dict[str, set[str]]
"""Map from the full key of a setting to the algorithms for which its value is another one."""
OF_THE_BASE = "as in the base config"
"""Value of a setting in a variant that does not override it, where another one does."""
CHANGED = "changed here"
"""Origin of a setting whose value is another one than that of the study whose origins are shown."""
UNCHECKED = " (not checked)"
"""What is added to an origin if nothing says what the values of that study were."""


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
    ours, theirs = _Values(study, parse), _Values(published, parse)
    origins = dict(published.origins)
    for key, names in _changes(study, published, parse).items():
        listed = [name for name in published.origins if _is_about(name, key, names, theirs)]
        origins |= dict.fromkeys(listed or _names(key, names, study), CHANGED)
    return {name: origin for name, origin in origins.items() if ours.has(name) or not theirs.has(name)}


def _changes(study: Study, published: Study, parse: Parse) -> Changes:
    """Return what differs between the runs of two studies.

    A run is held against the published one of the same algorithm and variant. In a new variant a setting may have the
    value of any published variant, and in a new algorithm that of any published algorithm, except its own settings.
    """
    known = {method.name: method for method in published.methods}
    theirs = {name: _by_variant(published, method, parse) for name, method in known.items()}
    of_all = {variant: [runs[variant] for runs in theirs.values()] for variant in published.variants}
    found: Changes = {}
    for method in study.methods:
        ours, before = _by_variant(study, method, parse), known.get(method.name)
        if before is None:
            keys = {key for key in _differing(ours, of_all) if key.partition(".")[0] != "algorithm"}
            keys |= _plain({**method.settings, **method.tuned}).keys()
        else:
            tuned, tuned_before = _ranges(method), _ranges(before)
            keys = {key for key in {**tuned, **tuned_before} if tuned.get(key) != tuned_before.get(key)}
            keys |= _differing(ours, {variant: [run] for variant, run in theirs[method.name].items()})
        for key in sorted(keys):
            found.setdefault(key, set()).add(method.name)
    return found


def _ranges(method: Method) -> dict[str, Range]:
    """Return the ranges of settings that are tuned, without the values that stand for them where nothing is tuned."""
    return {key: replace(range_, untuned=None) for key, range_ in _plain(method.tuned).items()}


def _differing(ours: Mapping[str, Settings], theirs: Mapping[str, list[Settings]]) -> set[str]:
    """Return the keys of settings that differ from all of the same variant, and in a new variant from all there are.

    A new class stands for all that is inside of it, except the algorithm's, whose settings have origins of their own.
    """
    every = [run for runs in theirs.values() for run in runs]
    keys = set[str]()
    for variant, run in ours.items():
        others = theirs.get(variant, every)
        for key in {*run, *(key for other in others for key in other)} - {*OWN}:
            if all(other.get(key) != run.get(key) for other in others):
                keys.add(key)
    classes = keys - {"algorithm"}
    return {key for key in keys if not any(key.startswith(f"{class_}.") for class_ in classes)}


def _by_variant(study: Study, method: Method, parse: Parse) -> dict[str, Settings]:
    """Return the settings of a method's runs in each variant; the config is read once, without what variants give."""
    runs = {name: study.run(name, method, study.seed_list[0], method.first()) for name in study.variants}
    given = {key for own in study.variants.values() for key in _plain(own)}
    run = next(iter(runs.values()))
    others = {key: value for key, value in run.settings.items() if _plain_key(key) not in given}
    try:
        config = parse(replace(run, settings=others))
    except ConfigurationError:  # the variants give what the config lacks
        config = parse(run)
    shared = dict(flat(config))
    return {
        name: shared | dict(flat({key: value for key, value in _plain(run.settings).items() if key in given}))
        for name, run in runs.items()
    }


def _plain(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return settings by the keys that complete configs have."""
    return {_plain_key(key): value for key, value in (given or {}).items()}


def _plain_key(key: str) -> str:
    return key.replace(".init_args", "")


def _is_about(name: str, key: str, algorithms: Collection[str], published: _Values) -> bool:
    """Return whether an origin is that of a changed setting, of one inside of it, or of a mapping that holds it."""
    owner, full = _owner_and_key(name, published.study)
    if owner is not None and owner not in algorithms:
        return False
    is_inside = full.startswith(f"{key}.") and key != "algorithm"
    return full == key or is_inside or (key.startswith(f"{full}.") and published.is_mapping(name))


def _owner_and_key(name: str, study: Study) -> tuple[str | None, str]:
    """Return the algorithm that a setting among the origins is about, None if all share it, and its full key."""
    owner = next((algorithm for algorithm in study.algorithms if name.startswith(f"{algorithm}.")), None)
    if owner is None:
        return None, _plain_key(name)
    key = _plain_key(name.removeprefix(f"{owner}."))
    return owner, key if "." in key or key == "algorithm" else f"algorithm.{key}"


def _names(key: str, algorithms: Collection[str], study: Study) -> list[str]:
    """Return how a setting is named among the origins: once if all algorithms have the same, else for each."""
    if key.partition(".")[0] != "algorithm" and len(algorithms) == len(study.methods):
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
        self._configs: dict[str, Mapping[str, Any]] = {}

    def has(self, name: str) -> bool:
        """Return whether the study has a setting, also if its algorithm is left out."""
        try:
            self.of(name)
        except _NoSuchSettingError:
            return False
        return True

    def is_mapping(self, name: str) -> bool:
        """Return whether a setting has a mapping as its value, and not a class."""
        return self.has(name) and any(value.startswith("{") for value in self.of(name))

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
        given = [_plain(overrides) for overrides in self.study.variants.values()]
        if key not in _plain(method.settings) and any(key in overrides for overrides in given):  # the former go first
            return {as_word(overrides[key]) if key in overrides else OF_THE_BASE for overrides in given}
        return {self._in_config(method, key, name)}

    def _in_config(self, method: Method, key: str, name: str) -> str:
        """Return a value from the config of a method's runs, which is read once; ``-`` if the config is not known."""
        if method.name not in self._configs:
            variant = next(iter(self.study.variants))
            self._configs[method.name] = self._parse(
                self.study.run(variant, method, self.study.seed_list[0], method.first())
            )
        found: Any = self._configs[method.name]
        if not found:
            return "-"
        for part in key.split("."):
            inside = found.get("init_args") if isinstance(found, Mapping) and part not in found else found
            if not isinstance(inside, Mapping) or part not in inside:
                raise _NoSuchSettingError(f"origins: the runs of this study have no setting '{name}'.")
            found = inside[part]
        return as_word(found["class_path"] if isinstance(found, Mapping) and "class_path" in found else found)
