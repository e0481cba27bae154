"""Settings of the personalised methods (ALGORITHMS section 3) for the battery of this folder."""

from collections.abc import Callable
from functools import partial
from typing import Any

from helpers import reference_personal as personal
from helpers.reference_personal import absolute_norm, layerwise, moon, norm, squared_norm

from algorithms.running import Setting
from fedbc_lightning.algorithms import (
    APFL,
    L2GD,
    L2SGD,
    L2SGD2,
    MOON,
    Ditto,
    FedAvgPlus,
    FedCoMedPlus,
    FedGeoMedPlus,
    FedPlus,
    L2SGDPlus,
    L2SGDPlusPlus,
    Local,
    PerFedAvg,
    PFedMe,
)
from fedbc_lightning.local import AbsoluteNorm, Layerwise, Norm, SquaredNorm
from fedbc_lightning.server.robust import CoordinateMedian

LOCAL_MODEL = {"vectors": ("local_model",)}
HEAD, TAIL = slice(0, 1), slice(1, None)


def _same(name: str, build: Callable[..., Any], reference: Callable[..., Any], state: Any, **options: Any) -> Setting:
    """The class and the loop take the same options."""
    return Setting(name, partial(build, **options), partial(reference, **options), **state)


def _median(name: str, build: Callable[..., Any], reference: Callable[..., Any], state: Any, **options: Any) -> Setting:
    """With uniform weights and the coordinate median as the server's rule."""
    options = {"weighting": "uniform"} | options
    return Setting(
        f"{name}-median",
        lambda: build(robust_rule=CoordinateMedian(), **options),
        partial(reference, median=True, **options),
        **state,
    )


_perfedavg = partial(_same, build=PerFedAvg, reference=personal.perfedavg, state={})
_pfedme = partial(_same, build=PFedMe, reference=personal.pfedme, state=LOCAL_MODEL)
_ditto = partial(_same, build=Ditto, reference=personal.ditto, state=LOCAL_MODEL)
_apfl = partial(_same, build=APFL, reference=personal.apfl, state=LOCAL_MODEL | {"scalars": ("mixture",)})


def _l2(name: str, build: Callable[..., Any], method: str, **options: Any) -> Setting:
    vectors, server = ("local_model",), ()
    if method in ("l2sgd2", "l2sgd+", "l2sgd++"):
        vectors += ("coupling_table",)
    if method in ("l2sgd+", "l2sgd++"):
        server += ("gradient_mean",)
    return Setting(
        name,
        partial(build, **options),
        partial(personal.l2, method=method, **options),
        vectors=vectors,
        server=server,
        options={"clients_per_round": 1.0},
    )


def _plus(name: str, build: Callable[[], Any], prox: personal.Prox, **options: Any) -> Setting:
    """Fed+: the penalty is part of ``build``; the sweeps end at steps of 1e-8, which the package makes otherwise."""
    reference = partial(personal.fedplus, prox=prox, **options)
    return Setting(name, partial(build, **options), reference, **LOCAL_MODEL, tolerance=1e-6)


SETTINGS_PERSONAL = [
    _same("moon", partial(MOON, "features"), moon, LOCAL_MODEL),
    _same("moon-uniform", partial(MOON, "features"), moon, LOCAL_MODEL, mu=5.0, temperature=0.2, weighting="uniform"),
    Setting("local", Local, personal.local_only, **LOCAL_MODEL),
    _perfedavg("perfedavg", outer_lr=0.05),
    _perfedavg("perfedavg-inner_lr", inner_lr=0.2, outer_lr=0.1),
    _perfedavg("perfedavg-hessian_free", inner_lr=0.2, outer_lr=0.1, variant="hessian_free"),
    _perfedavg("perfedavg-uniform", inner_lr=0.1, outer_lr=0.1, weighting="uniform"),
    _median("perfedavg", PerFedAvg, personal.perfedavg, {}, inner_lr=0.1, outer_lr=0.1),
    _pfedme("pfedme", penalty=15.0, personal_lr=0.005),
    _pfedme("pfedme-penalty", penalty=2.0, personal_lr=0.1, num_inner_steps=3),
    _pfedme("pfedme-server_lr", penalty=2.0, personal_lr=0.1, server_lr=0.6),
    _pfedme("pfedme-samples", penalty=2.0, personal_lr=0.1, num_inner_steps=1, weighting="samples"),
    _median("pfedme", PFedMe, personal.pfedme, LOCAL_MODEL, penalty=2.0, personal_lr=0.1, server_lr=0.8),
    _ditto("ditto"),
    _ditto("ditto-penalty", penalty=0.7, weighting="uniform"),
    _ditto("ditto-personal_epochs", penalty=0.4, personal_epochs=2),
    _median("ditto", Ditto, personal.ditto, LOCAL_MODEL, penalty=0.4),
    _apfl("apfl"),
    _apfl("apfl-mixture", mixture=0.2, weighting="uniform"),
    _apfl("apfl-adaptive", adaptive=True),
    _apfl("apfl-adaptive-clipped", mixture=0.9, adaptive=True, weighting="uniform"),
    _median("apfl", APFL, personal.apfl, LOCAL_MODEL | {"scalars": ("mixture",)}, mixture=0.7, adaptive=True),
    _l2("l2gd", L2GD, "l2gd", penalty=0.5, probability=0.3, lr=0.3),
    _l2("l2gd-often", L2GD, "l2gd", penalty=2.0, probability=0.7, lr=0.2),
    _l2("l2sgd", L2SGD, "l2sgd", penalty=0.5, probability=0.3, lr=0.2),
    _l2("l2sgd2", L2SGD2, "l2sgd2", penalty=0.5, probability=0.3, lr=0.2),
    _l2("l2sgd2-often", L2SGD2, "l2sgd2", penalty=1.0, probability=0.6, lr=0.2),
    _l2("l2sgd_plus", L2SGDPlus, "l2sgd+", penalty=0.5, probability=0.3, lr=0.2),
    _l2("l2sgd_plus-often", L2SGDPlus, "l2sgd+", penalty=1.0, probability=0.6, lr=0.2),
    _l2("l2sgd_plus_plus", L2SGDPlusPlus, "l2sgd++", penalty=0.5, probability=0.3, lr=0.1, num_sampled=2),
    _l2("l2sgd_plus_plus-often", L2SGDPlusPlus, "l2sgd++", penalty=1.0, probability=0.6, lr=0.1, num_sampled=3),
    _l2("l2sgd_plus_plus-all", L2SGDPlusPlus, "l2sgd++", penalty=0.5, probability=0.3, lr=0.2, num_sampled=5),
    _plus("fedavg_plus", FedAvgPlus, squared_norm(0.001), sigma=0.5),
    _plus("fedavg_plus-all", partial(FedAvgPlus, delta=0.3), squared_norm(0.3), sigma=0.5, mixing=0.4, over="all"),
    _plus("fedgeomed_plus", partial(FedGeoMedPlus, delta=0.6), norm(0.6), sigma=0.5),
    _plus("fedgeomed_plus-all", partial(FedGeoMedPlus, delta=0.5), norm(0.5), sigma=1.0, mixing=0.3, over="all"),
    _plus("fedgeomed_plus-mixing", partial(FedGeoMedPlus, delta=1.0), norm(1.0), sigma=0.2, mixing=1.0),
    _plus("fedcomed_plus", FedCoMedPlus, absolute_norm(0.1), sigma=0.5),
    _plus("fedcomed_plus-all", partial(FedCoMedPlus, delta=0.4), absolute_norm(0.4), sigma=1.0, mixing=0.3, over="all"),
    _plus("fedplus-squared", partial(FedPlus, penalty=SquaredNorm(0.5)), squared_norm(0.5), sigma=0.5, mixing=0.2),
    _plus("fedplus-norm", partial(FedPlus, penalty=Norm(0.7)), norm(0.7), sigma=0.5, over="all"),
    _plus("fedplus-absolute", partial(FedPlus, penalty=AbsoluteNorm(0.5)), absolute_norm(0.5), sigma=0.5),
    _plus(
        "fedplus-layerwise",
        partial(FedPlus, penalty=Layerwise({"h*": AbsoluteNorm(0.4)}, default=Norm(0.8))),
        layerwise((HEAD, absolute_norm(0.4)), (TAIL, norm(0.8))),
        sigma=0.5,
        mixing=0.2,
    ),
    _plus(
        "fedplus-layerwise-all",
        partial(FedPlus, penalty=Layerwise({"tail": SquaredNorm(0.2), "*": AbsoluteNorm(0.3)}, default=Norm(9.0))),
        layerwise((HEAD, absolute_norm(0.3)), (TAIL, squared_norm(0.2))),
        sigma=0.5,
        over="all",
    ),
]
