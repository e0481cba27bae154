"""A method is one line of a study's tables: an algorithm, its settings, and the ranges of those to tune."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fedbc_lightning.core.checks import Count, above, below, checked
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.study_run import as_word

SECTIONS = ("trainer", "algorithm", "model", "data", "optimizer", "lr_scheduler")


@dataclass(frozen=True)
class Range:
    """The values of one setting from which tuning chooses: a list, or an interval.

    Attributes:
        grid: The values of a list; None for an interval.
        low: Lower end of the interval; None for a list.
        high: Upper end of the interval; None for a list.
        log: Whether the interval is searched on a logarithmic scale.
        untuned: Value that is used when tuning is skipped; None: the base config's, or else the algorithm's default.
    """

    grid: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False
    untuned: Any = None

    @property
    def text(self) -> str:
        """The range in words, without the value that stands for it where nothing is tuned."""
        on = ", on a logarithmic scale" if self.log else ""
        return f"tuned over {as_word(list(self.grid or [self.low, self.high]))}{on}"

    @classmethod
    def read(cls, place: str, value: Mapping[str, Any]) -> Range:
        """Read a range from ``{grid: [...]}`` or ``{low: ..., high: ..., log: ...}``, with or without ``untuned``.

        Raises:
            ConfigurationError: The mapping has neither form, or a value is given twice.
        """
        grid, log, untuned = (value.get(key) for key in ("grid", "log", "untuned"))
        ends = [end for end in (value.get("low"), value.get("high")) if isinstance(end, (int, float))]
        is_grid = set(value) <= {"grid", "untuned"} and isinstance(grid, list) and grid
        is_interval = set(value) <= {"low", "high", "log", "untuned"} and len(ends) == 2 and ends[0] < ends[1]
        if not is_grid and not is_interval:
            raise ConfigurationError(
                f"{place}: got {dict(value)}; tune it by {{grid: [0.01, 0.1]}} or {{low: 0.001, high: 1, log: true}}."
            )
        said = [short(entry) for entry in grid or ()]
        if len(set(said)) < len(said):
            raise ConfigurationError(f"{place}: a value is there twice in {said} (runs are told apart by six digits).")
        if log and ends[0] <= 0:
            raise ConfigurationError(f"{place}: low: {ends[0]} has no logarithm; give one above 0, or leave out log.")
        return cls(tuple(grid), untuned=untuned) if grid else cls(None, ends[0], ends[1], bool(log), untuned)


def is_range(value: Any) -> bool:
    """Return whether a value of the overrides is meant as a range, and not as a setting that is a mapping."""
    return isinstance(value, Mapping) and not {"grid", "low", "high"}.isdisjoint(value)


def full_key(key: str) -> str:
    """Return the full key of an algorithm's setting, which may be given without its section.

    Example:
        >>> full_key("dual_lr"), full_key("model.lr")
        ('algorithm.dual_lr', 'model.lr')
    """
    return key if key.partition(".")[0] in SECTIONS and "." in key else f"algorithm.{key}"


def plain_key(key: str) -> str:
    """Return the full key of a setting as a complete config has it, however it was spelled.

    Example:
        >>> plain_key("model.init_args.lr"), plain_key("model.class_path")
        ('model.lr', 'model')
    """
    return key.replace(".init_args", "").removesuffix(".class_path")


def without(settings: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """Return settings without those that others replace, however their keys are spelled.

    Example:
        >>> without({"mu": 1, "model.lr": 0.1}, ["algorithm.init_args.mu"])
        {'model.lr': 0.1}
    """
    replaced = {plain_key(full_key(str(key))) for key in others}  # keys that are no text are refused later
    return {key: value for key, value in settings.items() if plain_key(full_key(str(key))) not in replaced}


@dataclass(frozen=True)
class Method:
    """One line of the tables: an algorithm with its settings.

    Attributes:
        name: Name of the method in the tables.
        algorithm: Class of the algorithm, as ``--algorithm`` takes it.
        settings: Map from full keys, e.g. ``algorithm.dual_lr`` or ``model.lr``, to values.
        tuned: Map from full keys of the settings to tune to their ranges.
    """

    name: str
    algorithm: str
    settings: dict[str, Any]
    tuned: dict[str, Range]

    @classmethod
    def read(cls, name: str, given: Mapping[str, Any]) -> Method:
        """Read a method from an entry of the study's ``algorithms``.

        Raises:
            ConfigurationError: The entry holds a mapping that is no range.
        """
        settings, tuned = dict[str, Any](), dict[str, Range]()
        for key, value in given.items():
            if key == "algorithm":
                continue
            full = full_key(key)
            if isinstance(value, Mapping) and "class_path" not in value:
                tuned[full] = Range.read(f"algorithms.{name}.{key}", value)
            else:
                settings[full] = value
        return cls(name, str(given.get("algorithm", name)), settings, tuned)

    def untuned(self) -> Method:
        """Return the method with each range replaced by its ``untuned`` value, or left out if there is none."""
        fixed = {key: values.untuned for key, values in self.tuned.items() if values.untuned is not None}
        return replace(self, settings={**self.settings, **fixed}, tuned={})

    def first(self) -> dict[str, Any]:
        """Return one combination of tuned values, for checks before anything is tuned."""
        return next(self.each_value())

    def each_value(self) -> Iterator[dict[str, Any]]:
        """Yield few combinations that contain each value of each grid; a single empty one if nothing is tuned."""
        lists = {key: values.grid or (values.low, values.high) for key, values in self.tuned.items()}
        for k in range(max((len(values) for values in lists.values()), default=1)):
            yield {key: values[min(k, len(values) - 1)] for key, values in lists.items()}

    @property
    def has_interval(self) -> bool:
        """Whether a setting is tuned in an interval, so that there is no list of all combinations."""
        return any(values.grid is None for values in self.tuned.values())

    def grid(self) -> Iterator[dict[str, Any]]:
        """Yield all combinations of the tuned values; a single empty one if nothing is tuned."""
        for values in itertools.product(*(values.grid or () for values in self.tuned.values())):
            yield dict(zip(self.tuned, values, strict=True))


@checked("tuning")
@dataclass
class Tuning:
    """How settings given as ``{grid: ...}`` or ``{low: ..., high: ...}`` are chosen, on validation data only.

    Args:
        val_fraction: Fraction of each client's training data held out for validation while tuning, in (0, 1). The runs
            that are reported train on all of it again (unless their own ``data.val_fraction`` is above 0).
        seeds: Seeds of the tuning runs; the score of a combination is the mean over them.
        max_rounds: T of the tuning runs; None: as in the study. A list, of which the last may be None, is for
            successive halving: all combinations of a grid for the first T, the best third of them for the next, and so
            on. Few rounds favour large steps.
        metric: Metric by which combinations are ranked, after the last round; None: the first of ``metrics`` on
            validation data.
        trials: Number of combinations tried if a setting has an interval (Optuna's TPE); a grid is tried in full.
        skip: Tune nothing: take the ``untuned`` value of each range, or the default where it has none. The study's name
            then ends in ``_untuned``, and every table says so.
    """

    val_fraction: Annotated[float, above(0), below(1)] = 0.2
    seeds: list[int] = field(default_factory=lambda: [0])
    max_rounds: int | list[int | None] | None = None
    metric: str | None = None
    trials: Count = 20
    skip: bool = False

    @property
    def rungs(self) -> list[int | None]:
        """T of the tuning runs, one entry per rung of successive halving; None: as in the study."""
        return list(self.max_rounds) if isinstance(self.max_rounds, list) else [self.max_rounds]


def short(value: Any) -> str:
    """Format a value for a file name.

    Example:
        >>> short(0.001), short(10), short("a b"), short(1e-05)
        ('0.001', '10', 'a b', '1e-05')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value)
