"""Canonical settings of every algorithm; the battery of this folder runs on each of them."""

from functools import partial
from typing import Any

from helpers import reference

from algorithms.running import Setting
from algorithms.settings_global import SETTINGS_GLOBAL
from algorithms.settings_parts import SETTINGS_CODED, SETTINGS_COMPOSED, SETTINGS_PARTIAL
from algorithms.settings_personal import SETTINGS_PERSONAL
from fedbc_lightning.algorithms import SCAFFOLD, FedAvg, FedBC, FedProx


def _fedbc(name: str, **options: Any) -> Setting:
    return Setting(
        f"fedbc-{name}",
        partial(FedBC, **options),
        partial(reference.fedbc, **options),
        scalars=("dual", "tolerance"),
        vectors=("local_model",),
    )


def _scaffold(name: str, **options: Any) -> Setting:
    expected = {"control": "step_size"} | {key: value for key, value in options.items() if value != "auto"}
    return Setting(
        f"scaffold-{name}",
        partial(SCAFFOLD, **options),
        partial(reference.scaffold, **expected),
        vectors=("control",),
        server=("control",),
    )


SETTINGS: list[Setting] = [
    Setting("fedavg-samples", FedAvg, reference.fedavg),
    Setting("fedavg-uniform", partial(FedAvg, weighting="uniform"), partial(reference.fedavg, weighting="uniform")),
    Setting("fedprox-samples", partial(FedProx, mu=0.3), partial(reference.fedprox, mu=0.3)),
    Setting(
        "fedprox-uniform",
        partial(FedProx, mu=0.3, weighting="uniform"),
        partial(reference.fedprox, mu=0.3, weighting="uniform"),
    ),
    _scaffold("auto"),
    _scaffold("step_size-server_lr", control="step_size", server_lr=0.7),
    _scaffold("gradient_mean", control="gradient_mean"),
    _fedbc("learned", dual_lr=0.05),
    _fedbc("learned-tolerance_lr", dual_lr=0.05, tolerance_lr=0.4, dual_init=0.1),
    _fedbc("fixed", dual_lr=0.05, tolerance=0.5, dual_init=0.2),
    _fedbc("fixed-list-local", dual_lr=0.1, tolerance=[0.1, 0.5, 2.0, 0.3, 1.0], init_from="local"),
    _fedbc("learned-local", dual_lr=0.05, init_from="local"),
    _fedbc("bounds", dual_lr=0.3, tolerance=0.2, dual_init=0.1, dual_min=0.05, dual_max=0.4),
    _fedbc("momentum-client", dual_lr=0.03, tolerance=0.5, dual_momentum=0.5),
    _fedbc("momentum-client-learned", dual_lr=0.03, dual_momentum=0.5),
    _fedbc("momentum-public", dual_lr=0.03, tolerance=0.5, dual_momentum=0.5, dual_momentum_style="public"),
    _fedbc("momentum-public-learned", dual_lr=0.03, dual_momentum=0.5, dual_momentum_style="public"),
    *SETTINGS_GLOBAL,
    *SETTINGS_PERSONAL,
    *SETTINGS_COMPOSED,
    *SETTINGS_PARTIAL,
    *SETTINGS_CODED,
]


def _kind(setting: Setting) -> tuple[Any, ...]:
    """What makes two settings need the same tests of resuming and of several processes."""
    algorithm = setting.build()
    return type(algorithm), type(getattr(algorithm, "robust_rule", None)), setting.scalars, setting.vectors


REPRESENTATIVES: list[Setting] = list({_kind(setting): setting for setting in reversed(SETTINGS)}.values())[::-1]
"""The first setting of every algorithm, of every robust rule with it, and of every form of its state."""

METHODS: list[Setting] = list(
    {(type(s.build()), s.scalars, s.vectors, s.server): s for s in reversed(REPRESENTATIVES)}.values()
)[::-1]
"""The first setting of every algorithm and of every form of its state, whatever its robust rule."""

BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}
