"""What a study is: a base config × algorithms × variants × seeds, and the runs that it stands for."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import yaml

from fedbc_lightning.cli.arguments import find_config
from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.studies.paper import Paper

SECTIONS = ("trainer", "algorithm", "model", "data", "optimizer", "lr_scheduler")
OWN = ("trainer.default_root_dir", "trainer.name", "trainer.seed", "seed_everything", "ckpt_path")
"""What the study itself gives to each run."""

Report = Literal["last", "best_on_validation", "best_on_test"]


@dataclass(frozen=True)
class Range:
    """Values to be tuned: a list, or an interval.

    Attributes:
        grid: The values, or None.
        low: Lower end of the interval, or None; ``high`` the upper one.
        high: See there.
        log: Whether the interval is searched on a logarithmic scale.
        untuned: The value where tuning is left out; None: the algorithm's own default, or the base config's.
    """

    grid: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False
    untuned: Any = None

    @classmethod
    def read(cls, place: str, value: Mapping[str, Any]) -> Range:
        """From ``{grid: [...]}`` or ``{low: ..., high: ..., log: ...}``, each with or without ``untuned``.

        Raises:
            ConfigurationError: Neither of the two, or a value twice.
        """
        grid, untuned = value.get("grid"), value.get("untuned")
        if set(value) - {"untuned"} == {"grid"} and isinstance(grid, list) and grid:
            said = [short(entry) for entry in grid]
            twice = next((entry for entry in said if said.count(entry) > 1), None)
            if twice is not None:
                raise ConfigurationError(f"{place}: {twice} is there twice (runs are told apart by six digits).")
            return cls(grid=tuple(grid), untuned=untuned)
        low, high, log = value.get("low"), value.get("high"), bool(value.get("log"))
        is_interval = set(value) <= {"low", "high", "log", "untuned"}
        if is_interval and isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high:
            if low > 0 or not log:
                return cls(low=float(low), high=float(high), log=log, untuned=untuned)
            raise ConfigurationError(f"{place}: low: {low} has no logarithm; give a value above 0, or leave out log.")
        raise ConfigurationError(
            f"{place}: got {dict(value)}; to tune it give {{grid: [0.01, 0.1]}} or {{low: 0.001, high: 1.0, log: "
            "true}."
        )


@dataclass(frozen=True)
class Method:
    """One line of the tables: an algorithm with its settings.

    Attributes:
        name: In the tables.
        algorithm: The class, as ``--algorithm`` takes it.
        settings: Full keys, e.g. ``algorithm.dual_lr`` or ``model.lr``, with their values.
        tuned: Full keys of what is tuned.
    """

    name: str
    algorithm: str
    settings: dict[str, Any]
    tuned: dict[str, Range]

    @classmethod
    def read(cls, name: str, given: Any) -> Method:
        """From an entry of ``algorithms``.

        Raises:
            ConfigurationError: It is no mapping, or holds a mapping that is no range.
        """
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"algorithms.{name}: got {given!r}; give its settings, e.g. {{mu: 0.1}}, or {{}}.")
        settings, tuned = dict[str, Any](), dict[str, Range]()
        for key, value in given.items():
            if key == "algorithm":
                continue
            full = key if key.partition(".")[0] in SECTIONS and "." in key else f"algorithm.{key}"
            if isinstance(value, Mapping) and "class_path" not in value:
                tuned[full] = Range.read(f"algorithms.{name}.{key}", value)
            else:
                settings[full] = value
        return cls(name, str(given.get("algorithm", name)), settings, tuned)

    def untuned(self) -> Method:
        """The same without ranges."""
        fixed = {key: values.untuned for key, values in self.tuned.items() if values.untuned is not None}
        return replace(self, settings={**self.settings, **fixed}, tuned={})

    def grid(self) -> Iterator[dict[str, Any]]:
        """All combinations of the tuned values; one empty one where nothing is tuned."""
        for values in itertools.product(*(values.grid or () for values in self.tuned.values())):
            yield dict(zip(self.tuned, values, strict=True))


@dataclass
class Tuning:
    """How settings given as ``{grid: ...}`` or ``{low: ..., high: ...}`` are chosen, on validation data alone.

    Args:
        val_fraction: Of each client's training data that becomes validation data while tuning. The runs that are
            reported train on all of it again (unless their own ``data.val_fraction`` is above 0).
        seeds: Seeds of the runs that choose, averaged over.
        max_rounds: T of these runs; None: as in the study. A list, of which the last may be None, halves successively:
            all combinations of a grid for the first T, the best third for the next, and so on. Few rounds favour large
            steps.
        metric: What is looked at, after the last round; None: the first of ``metrics`` on validation data.
        trials: Combinations that are tried where something is an interval (Optuna's TPE); a grid is tried in full.
        skip: Try nothing: take the ``untuned`` value of each range, or the default where it has none. The study then
            has a name of its own, and every table says so.
    """

    val_fraction: float = 0.2
    seeds: list[int] = field(default_factory=lambda: [0])
    max_rounds: int | list[int | None] | None = None
    metric: str | None = None
    trials: int = 20
    skip: bool = False

    @property
    def rungs(self) -> list[int | None]:
        """T of the runs that tune, of one choice after the other."""
        return list(self.max_rounds) if isinstance(self.max_rounds, list) else [self.max_rounds]


@dataclass
class Study:
    """Algorithms × variants × seeds on one base config; every run is an ordinary run of ``fit``.

    Within one variant and seed all algorithms get the same partition, initial model and sampled clients, so their
    differences can be taken pair by pair.

    Args:
        base: Config of ``fit``, or several that are layered; shipped ones are found by name.
        algorithms: Name in the tables -> settings. Keys are the algorithm's own options; ``algorithm`` names it if the
            name in the tables does not; other sections by full key, e.g. ``model.lr``. A value ``{grid: [...]}`` or
            ``{low: ..., high: ..., log: true}`` is tuned.
        overrides: Full key -> value, for all runs, e.g. ``trainer.max_rounds: 100``.
        variants: Name -> overrides of that variant, e.g. ``E = 5: {trainer.local_epochs: 5}``.
        factors: In place of ``variants``: several such mappings, whose levels are crossed. The levels' names, joined by
            a comma, are the variant's; tables have the last factor in their columns.
        only: Names of algorithms, variants or levels of factors: the rest is left out. None of a kind: all of it.
        seeds: A number of seeds (5: 0 to 4), or the seeds.
        reference: The algorithm that the others are compared with; None: the first.
        metrics: What is reported, the most important first; names as in ``metrics.csv``.
        report: Which round: ``last``, ``best_on_validation`` (needs ``data.val_fraction``), or ``best_on_test``, which
            looks at the answers, as much published code does, and is marked in every table.
        tuning: See :class:`Tuning`.
        confidence: Of the intervals.
        papers: Name -> what a table of a paper says of the same; shown beside.
        scale: Below 1: so many of the rounds (also while tuning) and of the seeds, rounded up, but two seeds if there
            are two: one has no interval. The study then has a name of its own, and every table says so.
        workers: Runs at a time; None: one per GPU, or one per core where there is none.
        threads: Of each run on a CPU; numbers may depend on it in the last digit, so it is not derived from the cores.
        out: The study lies in ``<out>/<name>``.
        name: See there; None: that of the study's file.
    """

    base: str | list[str]
    algorithms: dict[str, dict[str, Any] | None]
    overrides: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any] | None] = field(default_factory=lambda: {"all": {}})
    factors: list[dict[str, dict[str, Any] | None]] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    seeds: int | list[int] = 3
    reference: str | None = None
    metrics: list[str] = field(default_factory=lambda: ["global/test_accuracy", "local/test_accuracy"])
    report: Report = "last"
    tuning: Tuning = field(default_factory=Tuning)
    confidence: float = 0.95
    papers: dict[str, Paper] = field(default_factory=dict)
    scale: float = 1.0
    workers: int | None = None
    threads: int = 1
    out: str = "studies"
    name: str | None = None

    def __post_init__(self) -> None:
        if not self.algorithms:
            raise ConfigurationError("algorithms: none given; give e.g. {FedAvg: {}, FedBC: {dual_lr: 0.001}}.")
        self.variants = dict(self.variants)
        self.levels = self._cross() if self.factors else {name: (name,) for name in self.variants}
        for kind, names_given in (("algorithms", list(self.algorithms)), ("variants", list(self.variants))):
            odd = next((name for name in names_given if not isinstance(name, str)), None)
            if odd is not None:
                raise ConfigurationError(f"{kind}: the name {odd!r} is no text; quote it: '{odd}'.")
        for name, count in (("workers", self.workers), ("threads", self.threads)):
            if count is not None and count < 1:
                raise ConfigurationError(f"{name}: got {count}; give 1 or more.")
        if not self.tuning.seeds:
            raise ConfigurationError("tuning.seeds: none given; give e.g. [0].")
        if not self.tuning.rungs or None in self.tuning.rungs[:-1]:
            raise ConfigurationError("tuning.max_rounds: give T, null, or a list such as [25, 100, null], null last.")
        if not self.metrics:
            raise ConfigurationError("metrics: none given; give names as in metrics.csv, e.g. [global/test_accuracy].")
        if not 0 < self.scale <= 1:
            raise ConfigurationError(f"scale: got {self.scale}; give a share of the rounds and seeds, above 0 up to 1.")
        seeds = self.seed_list
        if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ConfigurationError(f"seeds: got {self.seeds}; give a number from 1 on, or different seeds from 0 on.")
        if self.reference is not None and self.reference not in self.algorithms:
            raise ConfigurationError(
                f"reference: '{self.reference}' is not among the algorithms {', '.join(self.algorithms)}."
            )
        if not 0 < self.confidence < 1:
            raise ConfigurationError(f"confidence: got {self.confidence}; give a share between 0 and 1, e.g. 0.95.")
        if not 0 < self.tuning.val_fraction < 1:
            raise ConfigurationError(f"tuning.val_fraction: got {self.tuning.val_fraction}; give 0.2, say.")
        for place, given in (("overrides", self.overrides), *((f"variants.{k}", v) for k, v in self.variants.items())):
            nested = [key for key in given or {} if key in SECTIONS and not _is_class((given or {})[key])]
            if nested:
                raise ConfigurationError(f"{place}.{nested[0]}: give full keys, e.g. {{{nested[0]}.max_rounds: 10}}.")
            taken = [key for key in given or {} if key in OWN]
            if taken:
                raise ConfigurationError(f"{place}: the study itself gives {taken[0]} to its runs; leave it out.")
        for kind in ("algorithms", "variants"):
            names: dict[str, str] = {}
            for name in getattr(self, kind):
                other = names.setdefault(slug(name), name)
                if other != name:
                    raise ConfigurationError(f"{kind}: '{other}' and '{name}' would share a folder; rename one.")
        self.part = ""
        self.methods = [Method.read(name, given) for name, given in self.algorithms.items()]
        self.is_untuned = self.tuning.skip and any(method.tuned for method in self.methods)
        if self.is_untuned:
            self.methods = [method.untuned() for method in self.methods]
        self.name = (self.name or "study") + ("" if self.scale == 1 else f"_scale_{self.scale:g}")
        self.name += "_untuned" if self.is_untuned else ""
        for name, paper in self.papers.items():
            paper.check(f"papers.{name}", list(self.algorithms), list(self.levels.values()), self.metrics)
        self._variants = set(self.levels)
        self._factors = [set(place) for place in zip(*self.levels.values(), strict=True)]
        self._names = list(
            dict.fromkeys(
                [*self.algorithms, *self.levels, *(level for names in self.levels.values() for level in names)]
            )
        )
        self.narrow(self.only)

    def _cross(self) -> dict[str, tuple[str, ...]]:
        """Make the variants that the factors stand for; the levels of each.

        Raises:
            ConfigurationError: There are other variants, or two levels set the same key.
        """
        if not all(self.factors):
            raise ConfigurationError("factors: one has no levels; give e.g. [{E = 1: {trainer.local_epochs: 1}}].")
        if self.variants != {"all": {}}:
            raise ConfigurationError("variants: given beside factors; put them in a factor, or cross them by hand.")
        self.variants, levels = {}, {}
        for chosen in itertools.product(*(factor.items() for factor in self.factors)):
            settings: dict[str, Any] = {}
            for level, given in chosen:
                twice = sorted(settings.keys() & (given or {}).keys())
                if twice:
                    raise ConfigurationError(f"factors: '{level}' sets {twice[0]}, as a level of another factor does.")
                settings |= given or {}
            name = ", ".join(level for level, _ in chosen)
            self.variants[name], levels[name] = settings, tuple(level for level, _ in chosen)
        return levels

    def narrow(self, names: Iterable[str]) -> None:
        """Leave out what is not named: algorithms, variants, levels of factors; no name of a kind keeps all of it.

        Raises:
            ConfigurationError: The study never had a name, or nothing is left.
        """
        wanted = set(names)
        for name in sorted(wanted - set(self._names)):
            near = difflib.get_close_matches(name, self._names, n=1)
            meant = f"did you mean '{near[0]}'?" if near else f"there is: {', '.join(self._names)}"
            raise ConfigurationError(f"only: '{name}' is no algorithm, variant or level here; {meant}")
        if wanted & set(self.algorithms):
            self.methods = [method for method in self.methods if method.name in wanted]
        for name, levels in list(self.levels.items()):
            kinds = [(name, self._variants), *zip(levels, self._factors, strict=True)]
            if not all(level in wanted or not wanted & kind for level, kind in kinds):
                del self.levels[name], self.variants[name]
        if not self.variants or not self.methods:
            raise ConfigurationError(f"only: {', '.join(sorted(wanted))}: nothing of the study is left.")

    @property
    def seed_list(self) -> list[int]:
        """The seeds, as many as the scale leaves."""
        seeds = list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)
        return seeds[: max(2, self._shrunk(len(seeds)))]

    @property
    def folder(self) -> Path:
        """Where everything lies."""
        return Path(self.out) / str(self.name)

    @property
    def results_folder(self) -> Path:
        """Where its tables and figures lie: those of a table or figure of a paper by themselves."""
        return self.folder / self.part if self.part else self.folder

    @property
    def reference_name(self) -> str:
        """The algorithm that the others are compared with; the first where the study's own is left out."""
        names = [method.name for method in self.methods]
        return self.reference if self.reference in names else names[0]

    @property
    def configs(self) -> list[str]:
        """The base configs."""
        return [self.base] if isinstance(self.base, str) else list(self.base)

    def blocks(self, shown: Collection[str] = ()) -> dict[str, dict[str, str]]:
        """How tables lay out the variants: label of a block of rows -> column -> variant.

        The last factor is in the columns. A factor of which one level is left is in neither, see :attr:`fixed`.

        Args:
            shown: Levels that a variant must have to be in the table.
        """
        *others, _ = [len(set(place)) > 1 for place in zip(*self.levels.values(), strict=True)]
        found: dict[str, dict[str, str]] = {}
        for name, (*levels, column) in self.levels.items():
            if not set(shown) <= {*levels, column}:
                continue
            label = ", ".join(
                level for level, varies in zip(levels, others, strict=True) if varies and level not in shown
            )
            found.setdefault(label, {})[column] = name
        return found

    @property
    def fixed(self) -> list[str]:
        """The levels that all variants have, but for the last factor's."""
        *others, _ = zip(*self.levels.values(), strict=True)
        return [place[0] for place in others if len(set(place)) == 1]

    def run(self, variant: str, method: Method, seed: int, chosen: Mapping[str, Any] | None = None) -> Run:
        """One run that is reported, with the values that tuning chose."""
        settings = {**self.overrides, **(self.variants[variant] or {}), **method.settings, **(chosen or {})}
        self._shrink(settings)
        folder = self.folder / "runs" / slug(variant) / slug(method.name) / f"seed_{seed}"
        return Run(variant, method.name, seed, method.algorithm, self.configs, settings, folder)

    def trial(self, variant: str, method: Method, seed: int, tried: Mapping[str, Any], rung: int = 0) -> Run:
        """One run that tries values on validation data, for the rounds of a rung of :attr:`Tuning.rungs`."""
        settings = {**self.overrides, **(self.variants[variant] or {}), **method.settings, **tried}
        settings["data.val_fraction"] = self.tuning.val_fraction
        if settings.get("algorithm.finetune_split") == "test":  # a trial sees no test data
            settings["algorithm.finetune_split"] = "train"
        max_rounds = self.tuning.rungs[rung]
        if max_rounds is not None:
            settings["trainer.max_rounds"] = max_rounds
        self._shrink(settings)
        values = ",".join(f"{key.rpartition('.')[2]}={short(value)}" for key, value in tried.items())
        folder = self.folder / "tuning" / slug(variant) / slug(method.name) / slug(values)
        folder = folder / f"rung_{rung}" / f"seed_{seed}"
        return Run(variant, method.name, seed, method.algorithm, self.configs, settings, folder, values)

    def _shrink(self, settings: dict[str, Any]) -> None:
        """Give a run as many of its rounds as the scale leaves."""
        if self.scale == 1:
            return
        rounds = settings.get("trainer.max_rounds")
        if not isinstance(rounds, int):
            raise ConfigurationError("scale: the study must say trainer.max_rounds in its overrides.")
        settings["trainer.max_rounds"] = self._shrunk(rounds)

    def _shrunk(self, count: int) -> int:
        """So many of them as the scale leaves, rounded up."""
        return math.ceil(round(count * self.scale, 9))


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Attributes:
        variant: Its name.
        method: Name of the algorithm in the tables.
        seed: Of everything.
        algorithm: The class.
        configs: Of ``fit``.
        settings: Full key -> value, over the configs.
        folder: It lies there, in ``version_0``.
        tried: The values that a run of tuning tries; empty: it is a run that is reported.
    """

    variant: str
    method: str
    seed: int
    algorithm: str
    configs: list[str]
    settings: dict[str, Any]
    folder: Path
    tried: str = ""

    @property
    def title(self) -> str:
        """For messages."""
        return " / ".join([self.variant, self.method, *([self.tried] if self.tried else []), f"seed {self.seed}"])

    def words(self) -> list[str]:
        """The command line of ``fit`` but for ``--ckpt_path``."""
        words = ["fit"]
        for config in self.configs:
            words += ["--config", str(find_config(config))]
        words += ["--algorithm", self.algorithm, "--seed_everything", str(self.seed)]
        words += [f"--{key}={as_word(value)}" for key, value in self.settings.items()]
        own = {"default_root_dir": self.folder.parent, "name": self.folder.name, "enable_progress_bar": "false"}
        return words + [f"--trainer.{key}={value}" for key, value in own.items()]

    def identity(self) -> dict[str, str]:
        """What makes it this run and no other, wherever its folder lies; the configs by their texts."""
        texts = dict(digest(find_config(config)) for config in self.configs)
        settings = {key: as_word(value) for key, value in self.settings.items()}
        return {**texts, "algorithm": self.algorithm, "seed": str(self.seed), **settings}


def _is_class(value: Any) -> bool:
    """Whether a section is given as a class, by its name or with ``class_path``."""
    return isinstance(value, str) or (isinstance(value, Mapping) and "class_path" in value)


def digest(config: Path | str) -> tuple[str, str]:
    """What a config is called, and a hash of its text."""
    name, text = (config.name, config.read_text(encoding="utf-8")) if isinstance(config, Path) else ("text", config)
    return f"config {name}", sha256(text.encode()).hexdigest()[:12]


def as_word(value: Any) -> str:
    """A value as a word of a command line, in YAML.

    Example:
        >>> as_word(1e-05), as_word(None), as_word([1, 2]), as_word(True), as_word("a")
        ('1.0e-05', 'null', '[1, 2]', 'true', 'a')
    """
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return text.removesuffix("...").strip()


def short(value: Any) -> str:
    """A value in a file name.

    Example:
        >>> short(0.001), short(10), short("a b"), short(1e-05)
        ('0.001', '10', 'a b', '1e-05')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def slug(name: str) -> str:
    """A name as that of a folder.

    Example:
        >>> slug("E = 5"), slug("FedGeoMed+"), slug("C=1, e=1.2")
        ('E_=_5', 'FedGeoMed+', 'C=1_e=1.2')
    """
    return re.sub(r"[^\w.+=-]+", "_", name).strip("_") or "_"
