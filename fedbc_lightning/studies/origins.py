"""Lists the settings of a study that repeats a paper's experiment, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.methods import SECTIONS, Method, Range, full_key, plain_key
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_checks import OWN
from fedbc_lightning.studies.study_run import Run, as_word, flat

Parse = Callable[[Run], Mapping[str, Any]]
"""Function that returns the complete config of a run."""
Origins = dict[str, str]
"""Map from the name of a setting to where its value comes from."""
Settings = Mapping[str, str]
"""Map from the full keys of all settings of a run to their values, as text."""
SettingsOf = Callable[[Method], Mapping[str, Settings]]
"""Function from an algorithm to the settings of its runs in each variant; in no variant if they are not known."""
CHANGED = "changed here"
"""Origin of a setting whose value is another one than that of the study whose origins are shown."""
UNCHECKED = " (not checked)"
"""What is added to an origin if nothing says what the values of that study were."""
SEEDS = "seeds"
"""Name of the number of seeds among the origins; all other names are those of settings of runs."""


def origin_rows(study: Study, settings_of: SettingsOf) -> Rows:
    """Return a header, then a row per setting: name, value, and where the value comes from.

    A setting that all algorithms share is shown without those that have a row of their own.

    Args:
        study: Study, whose ``origins`` name the settings.
        settings_of: Function from an algorithm to the settings of its runs, such as :func:`parsed_settings`.

    Raises:
        ConfigurationError: The study and its runs have no such setting.
    """
    values = _Values(study, settings_of)
    rows = [["setting", "value", "origin"]]
    for name, origin in study.origins.items():
        value = values.text(name)
        if value:  # else the algorithm is left out of this part of the study
            rows.append([name, value, origin])
    return rows


def changed_origins(study: Study, published: Study, parse: Parse) -> Origins:
    """Return the origins of a study that was changed: a value that was given anew is not the paper's.

    Args:
        study: The study as it is to be run.
        published: The study whose origins these are, as its file has it.
        parse: Function that returns the complete config of a run.

    Returns:
        The origins of the settings that the study has, where each value that is not the published study's is marked;
        last come changed settings that have no origin there. A setting that only some of the algorithms change that
        shared it gets one row for each of these.

    Raises:
        ConfigurationError: ``published`` has no such setting, or a run of one of the two cannot be configured.
    """
    ours, theirs = _Values(study, parsed_settings(study, parse)), _Values(published, parsed_settings(published, parse))
    origins = dict(published.origins)
    if SEEDS in origins and study.seed_list != published.seed_list:
        origins[SEEDS] = CHANGED
    for key, names in _changes(ours, theirs).items():
        origins |= dict.fromkeys(_changed_names(key, names, study, theirs), CHANGED)
    return {name: origin for name, origin in origins.items() if ours.has(name) or not theirs.has(name)}


def _changed_names(key: str, algorithms: set[str], study: Study, published: _Values) -> Iterator[str]:
    """Yield how a changed setting is named among the origins: that of all algorithms, or of each that changes it."""
    shared = published.origin_of(key, None)
    sharing = {method.name for method in study.methods if published.origin_of(key, method.name) is None}
    changing = algorithms & sharing
    for name in study.algorithms:
        own = published.origin_of(key, name)
        if name in algorithms and own is not None:
            yield own
    is_of_all = len(sharing) == len(study.methods) and not _is_of_algorithm(key)
    if changing and changing == sharing and (shared is not None or is_of_all):
        yield shared or key
    else:
        yield from (
            f"{name}.{(shared or key).removeprefix('algorithm.')}" for name in study.algorithms if name in changing
        )


def _changes(ours: _Values, theirs: _Values) -> dict[str, set[str]]:
    """Return the keys of the settings that differ between the runs of two studies, each with its algorithms.

    A run is held against the published one of the same algorithm and variant. In a new variant a setting may have the
    value of any published variant, and in a new algorithm that of any published algorithm, except its own settings.
    """
    known = {method.name: theirs.runs(method) for method in theirs.study.methods}
    found: dict[str, set[str]] = {}
    for method in ours.study.methods:
        published = [known[method.name]] if method.name in known else list(known.values())
        for variant, run in ours.runs(method).items():
            others = [runs[variant] for runs in published if variant in runs]
            others = others or [other for runs in published for other in runs.values()]
            given = ours.given(variant, method)
            keys = set.intersection(*(_differing(run, other, given) for other in others))
            if method.name not in known:
                keys = {key for key in keys if not _is_of_algorithm(key)} | {*filter(_is_of_algorithm, given)}
                keys.discard("algorithm")
            for key in sorted(keys):
                found.setdefault(key, set()).add(method.name)
    return found


def _differing(run: Settings, other: Settings, given: set[str]) -> set[str]:
    """Return the keys of settings that differ between two runs.

    Of a class that one of them lacks it is told what the study gives for it, not all that it has.
    """
    keys = {key for key in {*run, *other} - {*OWN} if not _is_equal(run.get(key), other.get(key))}

    def is_of_another_class(key: str) -> bool:
        return any(key.startswith(f"{class_}.") for class_ in keys)

    return {key for key in keys if (key in run and key in other) or key in given or not is_of_another_class(key)}


def _is_equal(value: str | None, other: str | None) -> bool:
    """Return whether two values are the same, also if one is written as 1 and the other as 1.0."""
    if value is None or other is None or value == other:
        return value == other
    try:
        return float(value) == float(other)
    except ValueError:
        return False


def parsed_settings(study: Study, parse: Parse) -> SettingsOf:
    """Return the function from an algorithm to the settings of its runs, for runs that need not exist yet.

    Args:
        study: Study of the runs.
        parse: Function that returns the complete config of a run.
    """
    return partial(_parsed_settings, study, parse)


def _parsed_settings(study: Study, parse: Parse, method: Method) -> Mapping[str, Settings]:
    """Return the settings of a method's runs; the config is read once, without what variants give, where that will do.

    It does not if a variant gives a class, whose settings are known only to the parser, or what the config lacks.

    Raises:
        ConfigurationError: A run cannot be configured.
    """
    runs = {name: study.run(name, method, study.seed_list[0], method.first()) for name in study.variants}
    given = {key for own in study.variants.values() for key in _plain(own)}
    run = next(iter(runs.values()))
    others = {key: value for key, value in run.settings.items() if plain_key(key) not in given}
    shared: dict[str, str] | None
    try:
        shared = dict(flat(parse(replace(run, settings=others))))
    except ConfigurationError:
        shared = None
    if shared is None or not all(
        key in shared and not any(other.startswith(f"{key}.") for other in shared) for key in given
    ):
        return {name: dict(flat(parse(run))) for name, run in runs.items()}
    return {
        name: shared | {key: as_word(value) for key, value in _plain(run.settings).items() if key in given}
        for name, run in runs.items()
    }


def _plain(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return settings by the keys that complete configs have."""
    return {plain_key(key): value for key, value in (given or {}).items()}


def _is_of_algorithm(key: str) -> bool:
    return key.partition(".")[0] == "algorithm"


def _tuned(range_: Range) -> str:
    """Return the text of a range, without the value that stands for it where nothing is tuned."""
    on = ", on a logarithmic scale" if range_.log else ""
    return f"tuned over {as_word(list(range_.grid or [range_.low, range_.high]))}{on}"


class _Values:
    """Looks up the values of settings in a study, and reads the settings of each algorithm's runs once."""

    def __init__(self, study: Study, settings_of: SettingsOf) -> None:
        self.study, self._settings_of = study, settings_of
        self._runs: dict[str, Mapping[str, Settings]] = {}
        self._places = {name: self._place(name) for name in study.origins if name != SEEDS}

    def runs(self, method: Method) -> Mapping[str, Settings]:
        """Return the settings of an algorithm's runs in each variant; that of a tuned one is its range."""
        if method.name not in self._runs:
            tuned = {key: _tuned(range_) for key, range_ in _plain(method.tuned).items()}
            self._runs[method.name] = {variant: {**run, **tuned} for variant, run in self._settings_of(method).items()}
        return self._runs[method.name]

    def given(self, variant: str, method: Method) -> set[str]:
        """Return the keys that the study gives for the runs of an algorithm in a variant."""
        settings = self.study.run(variant, method, self.study.seed_list[0], method.first()).settings
        return {*dict(flat(_plain(settings)))}

    def origin_of(self, key: str, algorithm: str | None) -> str | None:
        """Return the origin's name of a setting, or of a mapping that holds it, of an algorithm or None for all."""
        for name, (owner, full) in self._places.items():
            if owner == algorithm and (full == key or (key.startswith(f"{full}.") and self._is_mapping(full))):
                return name
        return None

    def has(self, name: str) -> bool:
        """Return whether the study has a setting, also if its algorithm is left out."""
        try:
            self.text(name)
        except _NoSuchSettingError:
            return False
        return True

    def text(self, name: str) -> str:
        """Return the value of a setting, or on what it depends.

        Returns:
            The text; ``-`` if no run is known, and an empty one if no algorithm that is left has the setting from here.

        Raises:
            ConfigurationError: The study and its runs have no such setting.
        """
        if name == SEEDS:
            return str(len(self.study.seed_list))
        owner, key = self._place(name)
        own = {other for other, full in self._places.values() if full == key}
        methods = [m for m in self.study.methods if m.name == owner or (owner is None and m.name not in own)]
        known = {(m.name, variant): run for m in methods for variant, run in self.runs(m).items()}
        if not known:
            return "-" if methods else ""
        found = {place: value for place, run in known.items() if (value := _value(run, key)) is not None}
        if not found:
            raise _NoSuchSettingError(f"origins: the runs of this study have no setting '{name}'.")
        return _one_text(found)

    def _place(self, name: str) -> tuple[str | None, str]:
        """Return the algorithm that a setting among the origins is about, None if all share it, and its full key."""
        owner = self.study.algorithm_of(name)
        if owner is None:
            return None, plain_key(name)
        key = plain_key(name.removeprefix(f"{owner}."))
        return owner, key if key in SECTIONS else full_key(key)

    def _is_mapping(self, key: str) -> bool:
        """Return whether a setting has a mapping as its value, and not a class."""
        runs = [run for method in self.study.methods for run in self.runs(method).values()]
        return any(key not in run and _value(run, key) is not None for run in runs)


class _NoSuchSettingError(ConfigurationError):
    """Raised for a setting that the runs of a study do not have."""


def _value(run: Settings, key: str) -> str | None:
    """Return the value of a setting of a run, which may be a mapping; None if there is no such setting."""
    if key in run:
        return run[key]
    inside = {other.removeprefix(f"{key}."): value for other, value in run.items() if other.startswith(f"{key}.")}
    return f"{{{', '.join(f'{part}: {value}' for part, value in inside.items())}}}" if inside else None


def _one_text(values: Mapping[tuple[str, str], str]) -> str:
    """Return the value that all algorithms and variants have, or on which of both it depends."""
    if len({*values.values()}) == 1:
        return next(iter(values.values()))
    by_algorithm, by_variant = dict[str, set[str]](), dict[str, set[str]]()
    for (algorithm, variant), value in values.items():
        by_algorithm.setdefault(algorithm, set()).add(value)
        by_variant.setdefault(variant, set()).add(value)
    if all(len(found) == 1 for found in by_algorithm.values()):
        return "by algorithm"
    return "by variant" if all(len(found) == 1 for found in by_variant.values()) else "by algorithm and variant"
