"""Settings of the methods with one global model, and of the robust rules."""

from collections.abc import Callable
from functools import partial
from typing import Any

from helpers import reference
from helpers import reference_global as loops
from helpers.reference_asynchronous import fedasync_alone, fedbuff_fresh
from helpers.reference_global import fednova

import fedbc_lightning.algorithms as algorithms
from algorithms.running import Setting
from fedbc_lightning.server import robust

EVERYBODY = {"clients_per_round": 5}

RULES: dict[str, tuple[Callable[[], Any], Callable[[], reference.Rule], dict[str, Any]]] = {
    "median": (robust.CoordinateMedian, loops.coordinate_median, {}),
    "trimmed": (partial(robust.TrimmedMean, trim=0.4), partial(loops.trimmed_mean, 0.4), {}),
    "trimmed-default": (robust.TrimmedMean, partial(loops.trimmed_mean, 0.1), {}),
    "krum": (robust.Krum, partial(loops.krum, 1), EVERYBODY),
    "krum-0": (partial(robust.Krum, num_byzantine=0), partial(loops.krum, 0), {"clients_per_round": 4}),
    "multi_krum": (robust.MultiKrum, partial(loops.multi_krum, 1), EVERYBODY),
    "multi_krum-0": (partial(robust.MultiKrum, num_byzantine=0), partial(loops.multi_krum, 0), EVERYBODY),
    # so few sweeps that the stopping rule never decides
    "geometric": (
        partial(robust.GeometricMedian, max_iter=4, rtol=1e-12),
        partial(loops.geometric_median, max_iter=4, rtol=1e-12),
        {},
    ),
    "geometric-smooth": (
        partial(robust.GeometricMedian, smoothing=0.7, max_iter=6, rtol=1e-12),
        partial(loops.geometric_median, smoothing=0.7, max_iter=6, rtol=1e-12),
        {},
    ),
    "clipping": (partial(robust.CenteredClipping, radius=0.3), partial(loops.centered_clipping, 0.3), {}),
    "clipping-3": (
        partial(robust.CenteredClipping, radius=0.2, num_iterations=3),
        partial(loops.centered_clipping, 0.2, 3),
        {},
    ),
    "norm_bound": (partial(robust.NormBound, bound=0.4), partial(loops.norm_bound, 0.4), {}),
}
"""Name -> the package's rule, the loop's, and the trainer's options."""


def _case(
    name: str, build: Callable[..., Any], loop: Callable[..., Any], declared: dict[str, tuple[str, ...]], **options: Any
) -> Setting:
    return Setting(name, partial(build, **options), partial(loop, **options), **declared)


def _robust(
    method: str,
    rule: str,
    build: Callable[..., Any],
    loop: Callable[..., Any],
    declared: dict[str, tuple[str, ...]] | None = None,
    **options: Any,
) -> Setting:
    make, make_loop, trainer = RULES[rule]
    declared = {"server": (), **(declared or {})}
    if rule.startswith("clipping"):
        declared["server"] += ("clipping_center",)
    return Setting(
        f"{method}-{rule}",
        lambda: build(robust_rule=make(), **options),
        loops.with_rule(loop, make_loop, **options),
        options=trainer,
        **declared,
    )


FEDBC = {"scalars": ("dual", "tolerance"), "vectors": ("local_model",)}
PERFEDBC = {"scalars": ("dual", "tolerance")}  # starts from z and is evaluated from z: nothing reads an x_i
SCAFFOLD = {"vectors": ("control",), "server": ("control",)}
FEDOPT = {"server": ("momentum", "second_moment")}
MOMENTUM = {"server": ("momentum",)}
FEDDYN = {"vectors": ("correction",), "server": ("correction",)}
FEDADMM = {"vectors": ("local_model", "multiplier"), "server": ("augmented_mean",)}
FEDPD = {"vectors": ("local_model", "multiplier", "center")}
ADAGRAD = partial(loops.fedopt, kind="adagrad", server_lr=0.1, beta1=0.0)
PREVIOUS = {"server": ("previous_z",)}
LINE_SEARCH = {"scalars": ("last_step",)}


def _finetune(name: str, finetune: dict[str, Any], **options: Any) -> Setting:
    """Training is FedBC's, whatever the evaluation does."""
    build = partial(algorithms.FedBCFineTune, **finetune, **options)
    return Setting(f"fedbcfinetune-{name}", build, partial(reference.fedbc, **options), **FEDBC)


def _perfedbc(name: str, finetune: dict[str, Any] | None = None, **options: Any) -> Setting:
    build = partial(algorithms.PerFedBC, **(finetune or {}), **options)
    return Setting(f"perfedbc-{name}", build, partial(loops.perfedbc, **options), **PERFEDBC)


def _fedopt(kind: str, name: str, **options: Any) -> Setting:
    build = {"adagrad": algorithms.FedAdagrad, "adam": algorithms.FedAdam, "yogi": algorithms.FedYogi}[kind]
    loop = ADAGRAD if kind == "adagrad" else partial(loops.fedopt, kind=kind)
    return Setting(f"fed{kind}-{name}", partial(build, **options), partial(loop, **options), **FEDOPT)


def _fedexp(name: str, average_last_two: bool = True, **options: Any) -> Setting:
    build = partial(algorithms.FedExP, average_last_two=average_last_two, **options)
    declared = PREVIOUS if average_last_two else {}
    return Setting(f"fedexp-{name}", build, partial(loops.fedexp, **options), **declared)


def _fedpd(name: str, **options: Any) -> Setting:
    build, loop = partial(algorithms.FedPD, **options), partial(loops.fedpd, **options)
    return Setting(f"fedpd-{name}", build, loop, options=EVERYBODY, **FEDPD)


_fedavgm = partial(_case, build=algorithms.FedAvgM, loop=loops.fedavgm, declared=MOMENTUM)
_qfedavg = partial(_case, build=algorithms.QFedAvg, loop=loops.qfedavg, declared={})
_feddyn = partial(_case, build=algorithms.FedDyn, loop=loops.feddyn, declared=FEDDYN)
_fedadmm = partial(_case, build=algorithms.FedADMM, loop=loops.fedadmm, declared=FEDADMM)
_fedlils = partial(_case, build=algorithms.FedLiLS, loop=loops.fedlils, declared=LINE_SEARCH)
_fedlilu = partial(_case, build=algorithms.FedLiLU, loop=loops.fedlilu, declared=MOMENTUM)
_rfa = partial(_case, build=algorithms.RFA, loop=loops.rfa, declared={})
_robust_fedavg = partial(_robust, "fedavg", build=algorithms.FedAvg, loop=loops.fedavg)
_robust_fedbc = partial(
    _robust, "fedbc", build=algorithms.FedBC, loop=reference.fedbc, declared=FEDBC, dual_lr=0.05, tolerance=0.5
)
_robust_scaffold = partial(
    _robust, "scaffold", build=algorithms.SCAFFOLD, loop=reference.scaffold, declared=SCAFFOLD, server_lr=0.7
)

SETTINGS_GLOBAL: list[Setting] = [
    Setting(
        "fedbuff",
        partial(algorithms.FedBuff, 2, server_lr=0.7),
        partial(fedbuff_fresh, server_lr=0.7),
        scalars=("version",),
        options={"clients_per_round": 2},
    ),
    Setting(
        "fedasync",
        partial(algorithms.FedAsync, mixing=0.7, rho=0.3),
        partial(fedasync_alone, mixing=0.7, rho=0.3),
        options={"clients_per_round": 1},
    ),
    Setting("fednova-samples", algorithms.FedNova, fednova),
    _case("fednova-uniform", algorithms.FedNova, fednova, {}, weighting="uniform"),
    _finetune("learned", {}, dual_lr=0.05),
    _finetune(
        "fixed-local",
        {"finetune_lr": 0.3, "finetune_batch_size": 2, "finetune_split": "test"},
        dual_lr=0.1,
        tolerance=[0.1, 0.5, 2.0, 0.3, 1.0],
        init_from="local",
    ),
    _finetune("momentum", {}, dual_lr=0.03, dual_momentum=0.5, dual_momentum_style="public", dual_max=0.4),
    _perfedbc("default", dual_lr=0.05),
    _perfedbc("fast", dual_lr=0.05, inner_lr=0.2, outer_lr=0.15, dual_init=0.3),
    _perfedbc("two-inner", dual_lr=0.1, inner_lr=0.1, outer_lr=0.2, num_inner_steps=2, tolerance=0.5),
    _perfedbc(
        "momentum",
        {"finetune_batch_size": 3, "finetune_split": "test"},
        dual_lr=0.03,
        inner_lr=0.2,
        outer_lr=0.1,
        dual_momentum=0.5,
        dual_momentum_style="public",
        dual_min=0.02,
        dual_max=0.4,
        dual_init=0.1,
    ),
    _fedavgm("fedavgm-default"),
    _fedavgm("fedavgm-uniform", server_lr=0.5, momentum=0.5, weighting="uniform"),
    _fedopt("adagrad", "default"),
    _fedopt("adagrad", "momentum", server_lr=0.5, beta1=0.6, tau=0.1, weighting="uniform"),
    _fedopt("adam", "default"),
    _fedopt("adam", "fast", server_lr=0.2, beta1=0.5, beta2=0.8, tau=0.1, weighting="uniform"),
    _fedopt("yogi", "default"),
    _fedopt("yogi", "fast", server_lr=0.2, beta1=0.5, beta2=0.7, tau=0.3, weighting="uniform"),
    _qfedavg("qfedavg-default"),
    _qfedavg("qfedavg-zero", q=0.0),
    _qfedavg("qfedavg-two-lipschitz", q=2.0, lipschitz=3.0),
    _qfedavg("qfedavg-half", q=0.5),
    _qfedavg("qfedavg-public", q=1.5, style="public"),
    _feddyn("feddyn-default"),
    _feddyn("feddyn-strong", alpha=0.5),
    _fedadmm("fedadmm-default"),
    _fedadmm("fedadmm-strong", rho=0.5),
    _fedpd("default"),
    _fedpd("strong", rho=0.5),
    _fedpd("skipping", rho=0.5, skip_probability=0.6),
    _fedexp("default"),
    _fedexp("large-epsilon", epsilon=0.5, average_last_two=False),
    _fedexp("public", style="public"),
    _fedexp("public-epsilon", style="public", epsilon=0.1, average_last_two=False),
    _fedlils("fedlils-max"),
    _fedlils("fedlils-convex", server_step="convex"),
    _fedlils("fedlils-uniform", sufficient_decrease=0.4, shrink=0.6, growth=4.0, max_step=0.9, weighting="uniform"),
    # 100 tries lead nowhere: the step of 1e-6
    _fedlils("fedlils-failing", sufficient_decrease=0.5, shrink=0.9999),
    _fedlilu("fedlilu-default"),
    _fedlilu("fedlilu-fast", server_lr=0.8, server_momentum=0.3, weight_decay=0.05, weighting="uniform"),
    _fedlilu("fedlilu-clipped", server_lr=6.0, server_momentum=0.2, weight_decay=0.01),
    _rfa("rfa-samples", max_iter=4),
    _rfa("rfa-uniform", max_iter=7, smoothing=0.5, weighting="uniform"),
    *(_robust_fedavg(rule) for rule in RULES if rule != "krum"),
    _robust("fedavg-uniform", "median", algorithms.FedAvg, loops.fedavg, weighting="uniform"),
    _robust("fedavg-uniform", "multi_krum", algorithms.FedAvg, loops.fedavg, weighting="uniform"),
    *(_robust_fedbc(rule) for rule in ("median", "trimmed", "geometric", "clipping-3")),
    # Krum needs all five: no dual may be 0
    _robust_fedbc("multi_krum", dual_min=0.02, dual_init=0.1),
    *(_robust_scaffold(rule) for rule in ("median", "trimmed", "krum", "geometric-smooth", "clipping", "norm_bound")),
    _robust("fedprox", "median", algorithms.FedProx, loops.fedprox, mu=0.3),
    _robust("fedavgm", "trimmed", algorithms.FedAvgM, loops.fedavgm, MOMENTUM),
    _robust("fedadam", "norm_bound", algorithms.FedAdam, partial(loops.fedopt, kind="adam"), FEDOPT),
    _robust("fedyogi", "clipping", algorithms.FedYogi, partial(loops.fedopt, kind="yogi"), FEDOPT),
    _robust("perfedbc", "median", algorithms.PerFedBC, loops.perfedbc, PERFEDBC, dual_lr=0.05, outer_lr=0.1),
    _robust("fedbcfinetune", "trimmed", algorithms.FedBCFineTune, reference.fedbc, FEDBC, dual_lr=0.05),
    _robust("fedadagrad", "median", algorithms.FedAdagrad, ADAGRAD, FEDOPT),
    _robust("feddyn", "median", algorithms.FedDyn, loops.feddyn, FEDDYN, alpha=0.5),
    _robust("feddyn", "krum", algorithms.FedDyn, loops.feddyn, FEDDYN, alpha=0.5),
    _robust("fedlils", "geometric", algorithms.FedLiLS, loops.fedlils, LINE_SEARCH),
    _robust("fedlilu", "trimmed", algorithms.FedLiLU, loops.fedlilu, MOMENTUM),
]
