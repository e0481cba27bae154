"""Settings of methods from parts, of those in which each client keeps a part of the model, and with coded messages."""

from functools import partial
from typing import Any

import numpy as np
from helpers import reference, reference_codecs, reference_global, reference_partial

from algorithms.running import Setting
from fedbc_lightning import Codecs, server
from fedbc_lightning.algorithms import Centralized, ComposedAlgorithm, FedAvg, FedBABU, FedBC, FedRep
from fedbc_lightning.local import LinearTerm, ProximalTerm


def _fedbc(**options: Any) -> ComposedAlgorithm:
    terms = [ProximalTerm("dual", factor=2.0)]
    return ComposedAlgorithm([server.DualAscent(0.05, tolerance=0.5), server.WeightedAverage("dual")], terms, **options)


def _scaffold() -> ComposedAlgorithm:
    terms = [LinearTerm(server={"control": 1.0}, client={"control": -1.0})]
    parts = [server.ControlVariates(gradient_mean=False), server.WeightedAverage("uniform"), server.ServerSGD(0.7)]
    return ComposedAlgorithm(parts, terms)


def _mixed() -> ComposedAlgorithm:
    median = server.GeometricMedian(max_iter=4, rtol=1e-12)
    parts = [
        server.DualAscent(0.05, tolerance=0.5),
        server.WeightedAverage("dual", median),
        server.ServerAdaptive("adam", lr=0.1),
    ]
    return ComposedAlgorithm(parts, [ProximalTerm(0.2)])


SETTINGS_COMPOSED = [
    Setting("centralized", Centralized, reference_global.centralized),
    Setting(
        "composed-fedbc",
        _fedbc,
        lambda *args: reference.fedbc(*args, dual_lr=0.05, tolerance=0.5),
        scalars=("dual", "tolerance"),
    ),
    Setting(
        "composed-fedbc-local",
        lambda: _fedbc(init_from="local"),
        lambda *args: reference.fedbc(*args, dual_lr=0.05, tolerance=0.5, init_from="local"),
        scalars=("dual", "tolerance"),
        vectors=("local_model",),
    ),
    Setting(
        "composed-scaffold",
        _scaffold,
        lambda *args: reference.scaffold(*args, server_lr=0.7),
        vectors=("control",),
        server=("control",),
    ),
    Setting(
        "composed-mixed",
        _mixed,
        reference_global.mixed,
        scalars=("dual", "tolerance"),
        server=("momentum", "second_moment"),
    ),
]


IS_HEAD = np.array([False, True, True, True])
KEEPS_TAIL = {"local_parameters": ["tail"]}


def _fedrep(name: str, head_epochs: int, **options: Any) -> Setting:
    return Setting(
        f"fedrep-{name}",
        partial(FedRep, head_epochs, **options),
        partial(reference_partial.fedrep, head_epochs=head_epochs, is_head=IS_HEAD, **options),
        vectors=("local_parameters",),
        options=KEEPS_TAIL,
    )


SETTINGS_PARTIAL = [
    _fedrep("samples", 2),
    _fedrep("uniform", 3, weighting="uniform"),
    Setting(
        "fedbabu",
        FedBABU,
        partial(reference_partial.fedrep, head_epochs=0, is_head=IS_HEAD),
        vectors=("local_parameters",),
        options=KEEPS_TAIL,
    ),
]


CODERS: dict[str, tuple[Any, reference_codecs.Coder]] = {
    "TopK": (server.TopK(0.5), reference_codecs.top_k(2)),
    "TopK-alone": (server.TopK(0.5, error_feedback=False), reference_codecs.top_k(2)),
    "QSGD": (server.QSGD(3, bucket_size=3), reference_codecs.qsgd(3, 3)),
    "Sign": (server.Sign(), reference_codecs.sign),
    "BFloat16": (server.BFloat16(), reference_codecs.bfloat16),
    "Float8": (server.Float8(), reference_codecs.float8),
}


def coded(up: str, down: str | None = None, dual_lr: float | None = None) -> Setting:
    """FedAvg, or FedBC with a dual step, whose clients send by one codec and receive by another."""
    (codec, coder), (broadcast, its_coder) = CODERS[up], CODERS[down] if down else (None, None)
    memory = ("coding_error",) if codec.error_feedback else ()
    return Setting(
        f"{'fedavg' if dual_lr is None else 'fedbc'}-coded-{up}",
        FedAvg if dual_lr is None else partial(FedBC, dual_lr=dual_lr, dual_init=0.1),
        partial(reference_codecs.coded, up=coder, down=its_coder, has_memory=bool(memory), dual_lr=dual_lr),
        scalars=() if dual_lr is None else ("dual", "tolerance"),
        vectors=memory if dual_lr is None else ("local_model", *memory),
        options={"codec": Codecs(codec, broadcast)},
    )


SETTINGS_CODED = [coded("TopK", "QSGD"), coded("Sign", "Float8", dual_lr=0.05)]
