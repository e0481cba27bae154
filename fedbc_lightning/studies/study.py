"""A study is a base config × algorithms × variants × seeds; this module turns it into runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fedbc_lightning.core.checks import Count, Share, above, below, checked
from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.files import refuse_url
from fedbc_lightning.core.machine import num_cores
from fedbc_lightning.core.metric_names import is_lower_better, is_of_validation, on_split
from fedbc_lightning.studies.methods import SECTIONS, Method, Tuning, is_range, plain_key, short, without
from fedbc_lightning.studies.numbers import is_share
from fedbc_lightning.studies.paper import Paper
from fedbc_lightning.studies.statistics import Report, can_choose
from fedbc_lightning.studies.study_run import Run, slug

# Keys that the study sets itself for each run.
OWN = ("trainer.default_root_dir", "trainer.name", "trainer.seed", "seed_everything", "ckpt_path")

# Settings of algorithms or variants by the names of these
SettingsByName = dict[str, dict[str, Any] | None]


@checked("study")
@dataclass
class Study:
    """Algorithms × variants × seeds on one base config; every run is an ordinary run of ``fit``.

    Within one variant and seed all algorithms get the same partition, initial model and sampled clients, so their
    differences can be taken pair by pair.

    Args:
        base: Config of ``fit``, or a list of configs that are layered; shipped configs are found by name.
        algorithms: Map from the name in the tables to settings. Keys are the algorithm's own options; ``algorithm``
            names the algorithm if the name in the tables does not; keys of other sections are written in full, e.g.
            ``model.lr``. A value ``{grid: [...]}`` or ``{low: ..., high: ..., log: true}`` is tuned.
        overrides: Map from full keys to values for all runs, e.g. ``trainer.max_rounds: 100``, where neither a variant
            nor the algorithm has a value of its own; ``<algorithm>.<setting>``, e.g. ``FedBC.dual_lr: 0.001``, is for
            that algorithm alone, and replaces its own value. A range, e.g. ``model.lr: {grid: [0.1, 1]}``, is tuned
            for each algorithm that has no value of its own.
        variants: Map from the name of a variant to its overrides, e.g. ``E = 5: {trainer.local_epochs: 5}``.
        factors: List of mappings like ``variants``, whose levels are crossed; given in place of ``variants``. The name
            of a variant is the names of its levels, joined by a comma; tables have the last factor in their columns.
        only: Names of algorithms, variants or levels of factors to keep; the rest is left out. If no name of a kind is
            given, all of that kind is kept.
        seeds: Number of seeds (5 means 0 to 4), or a list of seeds.
        reference: Algorithm that the others are compared with; None: the first.
        metrics: Metrics that are reported, the most important first; names as in ``metrics.csv``.
        better: Map from a metric to the better direction, ``lower`` or ``higher``, for metrics whose name does not tell
            it: loss, error, rmse and the like are better low, all others high.
        report: Round that is reported: ``last``; ``mean_of_last_tenth``, the mean over the evaluated rounds in the last
            tenth of the run, for models that swing with the sampled clients; ``best_on_validation`` (needs
            ``data.val_fraction``); or ``best_on_test``, which selects on the test data, as much published code does,
            and is marked in every table.
        axis: What the tables of ``targets`` count: ``rounds``, ``bytes``, ``seconds`` of training, or
            ``simulated_seconds``, which needs ``trainer.system``.
        targets: Map from metrics to values, e.g. ``{accuracy/global: [0.8, 0.9]}`` for 80 and 90 %; a table tells what
            each algorithm costs until it first reaches them. Curves are drawn against all axes in any case.
        tuning: Choice of tuned settings on validation data.
        confidence: Confidence level of the intervals, in (0, 1).
        papers: Map from a name to a table of a paper, whose numbers are shown beside ours.
        origins: Map from a setting to where its value comes from, such as ``paper`` or ``public code``, for a study
            that repeats an experiment; a table shows settings, values and origins. A setting of one algorithm is named
            ``<algorithm>.<setting>``, e.g. ``FedBC.dual_momentum``, another one by its full key, e.g. ``model.lr``.
        scale: Fraction of the rounds (also while tuning) and of the seeds to run, in (0, 1], rounded up; at least two
            seeds remain of two or more, since one has no interval. Below 1 the study's name ends in ``_scale_<scale>``,
            and every table says so.
        workers: Number of processes that do runs; None: one per GPU, or without a GPU one per core that this process
            may use.
        threads: Number of CPU threads of each run. The last digit of a number may depend on it, so it is not derived
            from the number of cores.
        backend: Where the runs are done: ``here``, in processes of this machine; ``slurm``, in jobs that are submitted
            to SLURM (needs the extra ``cluster``); ``local``, in the same jobs as processes of this machine, to try
            them; or ``ray``, in tasks of Ray, one for each run (needs the extra ``ray``).
        jobs: Number of jobs that are submitted, as an array. Each does one run after another on each of its GPUs, or
            cores (or with ``workers`` processes), until none is left.
        resources: What each job asks for, by submitit's names, e.g. ``{timeout_min: 240, gpus_per_node: 1,
            slurm_partition: gpu}``, or each task of Ray by Ray's, e.g. ``{num_cpus: 4, num_gpus: 0.5}``. A job that is
            preempted, or whose time of 240 minutes by default is up, is requeued and goes on.
        strict: Whether runs of other code, data or versions in the study's folder are refused, and not warned of.
        out: Folder that holds the study; it is written to ``<out>/<name>``.
        name: Name of the study; None: that of the study's file, without its suffix.
    """

    base: str | list[str]
    algorithms: SettingsByName
    overrides: dict[str, Any] = field(default_factory=dict)
    variants: SettingsByName = field(default_factory=lambda: {"all": {}})
    factors: list[SettingsByName] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    seeds: int | list[int] = 3
    reference: str | None = None
    metrics: list[str] = field(default_factory=lambda: ["accuracy/global", "accuracy/local"])
    better: dict[str, Literal["lower", "higher"]] = field(default_factory=dict)
    report: Report = "last"
    axis: Literal["rounds", "bytes", "seconds", "simulated_seconds"] = "rounds"
    targets: dict[str, list[float]] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    confidence: Annotated[float, above(0), below(1)] = 0.95
    papers: dict[str, Paper] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    scale: Share = 1.0
    workers: Count | None = None
    threads: Count = 1
    backend: Literal["here", "slurm", "local", "ray"] = "here"
    jobs: Count = 1
    resources: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    out: str = "studies"
    name: str | None = None

    def __post_init__(self) -> None:
        self.given = asdict(self)  # as plain values, before factors are crossed and names completed
        self.part = ""  # table or figure of a paper to which the study is reduced
        self._cross()
        self._check_settings()
        for_all = {key: value for key, value in self.overrides.items() if self.algorithm_of(key) is None}
        ranges = {key: value for key, value in for_all.items() if is_range(value)}
        own = {name: self.own_settings(name) for name in self.algorithms}
        self.methods = [Method.read(name, without(ranges, own[name]) | own[name]) for name in own]
        self.overrides = without(for_all, ranges)
        self.is_untuned = self.tuning.skip and any(method.tuned for method in self.methods)
        if self.is_untuned:
            self.methods = [method.untuned() for method in self.methods]
        self.name = self.name or "study"
        self._check()
        # The name says what is left out, so that the whole study has another folder.
        self.name += f"_scale_{self.scale:g}" * (self.scale != 1) + "_untuned" * self.is_untuned
        self.narrow(self.only)

    def _cross(self) -> None:
        """Set the variants to all combinations of the factors' levels; variants alone are the levels of one factor.

        Raises:
            ConfigurationError: A factor has no levels, variants are given as well, or two levels set the same key.
        """
        factors = self.factors or [self.variants]
        for factor in factors:
            check_folder_names("factors" if self.factors else "variants", factor)
        refuse({
            "variants: one has no levels; give e.g. {E = 1: {trainer.local_epochs: 1}}.": not all(factors),
            "variants: given beside factors; put them in a factor, or cross them by hand.":
                bool(self.factors) and self.variants not in ({}, {"all": {}}),
        })  # fmt: skip
        self.variants, self.levels = {}, dict[str, tuple[str, ...]]()
        for chosen in itertools.product(*(factor.items() for factor in factors)):
            name = ", ".join(level for level, _ in chosen)
            keys = [key for _, settings in chosen for key in settings or {}]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            refuse({f"factors: two levels of '{name}' set {twice}.": twice is not None})
            self.levels[name] = tuple(level for level, _ in chosen)
            self.variants[name] = {key: value for _, settings in chosen for key, value in (settings or {}).items()}
        # Names of the whole study, which :meth:`narrow` compares with after it has left something out.
        self._factors = [set(self.levels), *map(set, factors)]
        self._names = list(dict.fromkeys([*self.algorithms, *self.levels, *itertools.chain(*factors)]))

    def _check_settings(self) -> None:
        """Check the keys of overrides, variants and algorithms.

        Raises:
            ConfigurationError: A key holds nested keys, or is one that the study itself gives to its runs; or one of
                the overrides begins with neither a section nor the name of an algorithm.
        """
        check_folder_names("algorithms", self.algorithms)
        of_variants = {f"variants.{name}": settings or {} for name, settings in self.variants.items()}
        for place, settings in {"overrides": self.overrides, **of_variants}.items():
            for key, value in settings.items():
                inner = list(value) if isinstance(value, Mapping) else []
                is_class = isinstance(value, str) or "class_path" in inner
                refuse({
                    f"{place}.{key}: give full keys, e.g. {key}.{inner[0] if inner else 'lr'}.":
                        key in self.algorithms or (key in SECTIONS and not is_class),
                    f"{place}: the study itself gives {key} to its runs; leave it out.": key in OWN,
                })  # fmt: skip
        in_variants = {plain_key(key) for settings in self.variants.values() for key in settings or {}}
        for key, value in self.overrides.items():
            if self.algorithm_of(key) is None:
                check_known("overrides", [key.partition(".")[0]], [*SECTIONS, *self.algorithms])
                refuse({f"overrides.{key}: a range, of which variants have values; leave it, or them, out.":
                    is_range(value) and plain_key(key) in in_variants})  # fmt: skip

    def algorithm_of(self, key: str) -> str | None:
        """Return the algorithm that a key such as ``mu 1.5.mu`` is for, the longest name of several; None: for all."""
        if key.partition(".")[0] in SECTIONS:
            return None
        # "mu 1.5.mu" belongs to the algorithm "mu 1.5", not to "mu 1".
        return max((name for name in self.algorithms if key.startswith(f"{name}.")), key=len, default=None)

    def own_settings(self, name: str) -> dict[str, Any]:
        """Return the settings of an algorithm, of which those in the overrides that name it replace its own."""
        anew = {key.removeprefix(f"{name}."): value for key, value in self.given["overrides"].items()
                if self.algorithm_of(key) == name}  # fmt: skip
        return without(self.algorithms[name] or {}, anew) | anew

    def _check(self) -> None:
        """Check what a study is asked for beyond the types and bounds of its arguments.

        Raises:
            ConfigurationError: It cannot be done, or names what the study does not have.
        """
        refuse_url(self.out, "out: ")
        metrics, tuning, seeds = self.metrics, self.tuning, self.seed_list
        rungs = [rounds for rounds in tuning.rungs if rounds is not None]
        refuse({
            "algorithms: none given; give e.g. {FedAvg: {}, FedBC: {dual_lr: 0.001}}.": not self.algorithms,
            f"seeds: got {self.seeds}; give a number from 1 on, or different seeds from 0 on.":
                not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0,
            f"name: '{self.name}' is no name of a folder; give the folder above it as out.":
                Path(str(self.name)).name != self.name or self.name == "..",
            "metrics: give different names as in metrics.csv, e.g. [accuracy/global].":
                not metrics or len(set(metrics)) < len(metrics),
            f"axis: {self.axis} is for targets, and none are given.": self.axis != "rounds" and not self.targets,
            f"targets: got {self.targets}; give shares of accuracies, such as 0.9 for 90 %.":
                any(value > 1 for name, values in self.targets.items() if is_share(name) for value in values),
            "tuning.seeds: none given; give e.g. [0].": not tuning.seeds,
            f"tuning.max_rounds: got {tuning.max_rounds}; give T, null, or an ascending list such as [25, 100, null].":
                not tuning.rungs or None in tuning.rungs[:-1] or rungs != sorted(set(rungs)),
            "tuning.max_rounds: an interval is searched with one T; a list of them is for grids.":
                len(tuning.rungs) > 1 and any(method.has_interval for method in self.methods),
        })  # fmt: skip
        refuse({
            f"tuning.metric: '{self.tuning_metric}' is not measured on validation data; give e.g. accuracy/val_global.":
                any(method.tuned for method in self.methods) and not is_of_validation(self.tuning_metric),
            f"report: {self.report}: '{metrics[0]}', the first of metrics, is not measured on test data; put one first "
            "that is, e.g. accuracy/global.":
                self.report.startswith("best_on_") and not can_choose(self.report, metrics[0]),
        })  # fmt: skip
        check_known("reference", [self.reference] if self.reference else [], self.algorithms)
        check_known("targets", self.targets, metrics)
        check_known("better", self.better, [*metrics, str(tuning.metric)])
        for name, paper in self.papers.items():
            check_known(f"papers.{name}.metric", [paper.metric], metrics)
            check_known(f"papers.{name}", paper.names, self._names)

    def narrow(self, names: Iterable[str]) -> None:
        """Keep only the named algorithms, variants and levels; a kind of which none is named is kept whole.

        Raises:
            ConfigurationError: The study has nothing of a given name, or nothing is left of it.
        """
        wanted = set(names)
        check_known("only", sorted(wanted), self._names)
        if not wanted.isdisjoint(self.algorithms):
            self.methods = [method for method in self.methods if method.name in wanted]
        for name, levels in list(self.levels.items()):
            kinds = zip((name, *levels), self._factors, strict=True)
            if not all(level in wanted or wanted.isdisjoint(kind) for level, kind in kinds):
                del self.levels[name], self.variants[name]
        if not self.variants or not self.methods:
            part = f"{self.part}, which needs {', '.join(sorted(wanted))}" if self.part else "the study"
            raise ConfigurationError(f"only: {', '.join(self.only)}: leaves nothing of {part}.")

    def as_config(self) -> dict[str, Any]:
        """Return the study as a config of ``compare``, with the algorithms, variants and papers that are left of it."""
        only = self.method_names if len(self.methods) < len(self.algorithms) else []
        only += self.variants if len(self.variants) < len(self._factors[0]) else []
        return self.given | {"only": only, "papers": {name: self.given["papers"][name] for name in self.papers}}

    def is_lower_better(self, metric: str) -> bool:
        """Return whether small values of a metric are good: as ``better`` says, else by the metric's name."""
        said = self.better.get(metric) or self.better.get(on_split(metric, "test"))
        return is_lower_better(metric) if said is None else said == "lower"

    @property
    def tuning_metric(self) -> str:
        """Metric by which tuning ranks combinations."""
        return self.tuning.metric or on_split(self.metrics[0], "val")

    @property
    def seed_list(self) -> list[int]:
        """The seeds that are run; ``scale`` keeps the first of them."""
        seeds = list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)
        return seeds[: max(2, self._shrunk(len(seeds)))]

    @property
    def num_seeds(self) -> int:
        """Number of seeds that are run."""
        return len(self.seed_list)

    @property
    def method_names(self) -> list[str]:
        """Names of the algorithms that are left of the study."""
        return [method.name for method in self.methods]

    @property
    def has_one_variant(self) -> bool:
        """Whether there is one variant alone, which has no name."""
        return list(self.variants) == ["all"]

    @property
    def num_workers(self) -> int:
        """Number of processes that do runs, on this machine or in each job: one for each GPU, or else for each core."""
        if self.workers is not None:
            return self.workers
        if self.has_jobs:
            return int(self.resources.get("gpus_per_node") or self.resources.get("cpus_per_task") or 1)
        import torch  # here, because reading a study must not wait for the import

        return torch.cuda.device_count() or num_cores()

    @property
    def has_jobs(self) -> bool:
        """Whether the runs are done in jobs that are submitted."""
        return self.backend in ("slurm", "local")

    @property
    def folder(self) -> Path:
        """Folder of the study."""
        return Path(self.out) / str(self.name)

    @property
    def results_folder(self) -> Path:
        """Folder of the tables and figures; a single table or figure of a paper has a folder of its own."""
        return self.folder / self.part

    @property
    def reference_name(self) -> str:
        """Algorithm that the others are compared with; the first if the study's own reference is left out."""
        names = self.method_names
        return self.reference if self.reference in names else names[0]

    @property
    def num_comparisons(self) -> int:
        """Number of comparisons with the reference by one metric, whether their runs have finished or not."""
        return len(self.variants) * (len(self.methods) - 1)

    def blocks(self, shown: Collection[str] = ()) -> dict[str, dict[str, str]]:
        """Return the layout of the variants in tables: label of a block of rows -> column -> variant.

        The last factor is in the columns. A factor with one level left is in neither rows nor columns, see
        :attr:`fixed`.

        Args:
            shown: Levels that a variant must have to be in the table; labels do not name them.
        """
        unsaid, found = {*shown, *self.fixed}, dict[str, dict[str, str]]()
        for name, (*levels, column) in self.levels.items():
            if {*levels, column}.issuperset(shown):
                label = ", ".join(level for level in levels if level not in unsaid)
                found.setdefault(label, {})[column] = name
        return found

    @property
    def fixed(self) -> list[str]:
        """Levels that all variants share, except that of the last factor."""
        *others, _ = zip(*self.levels.values(), strict=True)
        return [place[0] for place in others if len(set(place)) == 1]

    def run(self, variant: str, method: Method, seed: int, chosen: Mapping[str, Any] | None = None) -> Run:
        """Return a run that is reported, with the values that tuning chose."""
        settings = {**self.overrides, **(self.variants[variant] or {}), **method.settings, **(chosen or {})}
        if self.scale != 1:
            rounds = settings.get("trainer.max_rounds")
            if not isinstance(rounds, int):
                raise ConfigurationError(f"scale: trainer.max_rounds: got {rounds!r}; give a number in overrides.")
            settings["trainer.max_rounds"] = self._shrunk(rounds)
        folder = self.folder / "runs" / slug(variant) / slug(method.name) / f"seed_{seed}"
        configs = [self.base] if isinstance(self.base, str) else list(self.base)
        return Run(variant, method.name, seed, method.algorithm, configs, settings, folder)

    def runs(self, chosen: Mapping[tuple[str, str], Mapping[str, Any]] | None = None) -> list[Run]:
        """Return all runs that are reported, ordered by seed so that the tables of a partial study can compare.

        Args:
            chosen: Values that tuning chose, by variant and algorithm; None: the first that it tries.
        """
        return [
            self.run(variant, method, seed, (chosen or {}).get((variant, method.name), method.first()))
            for seed in self.seed_list
            for variant in self.variants
            for method in self.methods
        ]

    def trial(self, variant: str, method: Method, seed: int, tried: Mapping[str, Any], rung: int = 0) -> Run:
        """Return a run that tries values on validation data, for the T of one rung of :attr:`Tuning.rungs`."""
        # Test data must not choose anything: a trial is scored on data that are held out of the training data.
        chosen = {**tried, "data.val_fraction": self.tuning.val_fraction, "trainer.eval_test": False}
        if self.tuning.rungs[rung] is not None:
            chosen["trainer.max_rounds"] = self.tuning.rungs[rung]
        run = self.run(variant, method, seed, chosen)
        if run.settings.get("algorithm.finetune_split") == "test":  # nor may a model be fine-tuned on them
            run.settings["algorithm.finetune_split"] = "train"
        values = ",".join(f"{key.rpartition('.')[2]}={short(value)}" for key, value in tried.items())
        folder = self.folder / "tuning" / slug(variant) / slug(method.name) / slug(values)
        return replace(run, folder=folder / f"rung_{rung}" / f"seed_{seed}", tried=values)

    def _shrunk(self, count: int) -> int:
        """Scale a number and round it up."""
        return math.ceil(round(count * self.scale, 9))


# checks of arguments beyond their types and bounds


def refuse(problems: Mapping[str, bool]) -> None:
    """Raise the first problem that there is.

    Args:
        problems: Map from a message to whether it is so.

    Raises:
        ConfigurationError: There is a problem.
    """
    for message, is_so in problems.items():
        if is_so:
            raise ConfigurationError(message)


def check_known(place: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check that names are among those that the study has.

    Raises:
        ConfigurationError: One is not; the message has the nearest one.
    """
    for name in names:
        if name not in known:
            meant = did_you_mean(name, [*known], f"there is: {', '.join(known)}")
            raise ConfigurationError(f"{place}: the study has no '{name}'; {meant}")


def check_folder_names(kind: str, names: Iterable[str]) -> None:
    """Check that no two names would share a folder.

    Raises:
        ConfigurationError: Two names differ only in what a folder's name leaves out.
    """
    folders: dict[str, str] = {}
    for name in names:
        other = folders.setdefault(slug(name), name)
        refuse({f"{kind}: '{other}' and '{name}' would share a folder; rename one.": other != name})
