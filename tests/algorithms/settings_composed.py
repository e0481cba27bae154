"""Canonical settings of algorithms assembled from parts, and of the central baseline."""

from __future__ import annotations

from typing import Any

from helpers import reference, reference_global

from algorithms.setting import Setting
from fedbc_lightning.algorithms import Centralized, ComposedAlgorithm
from fedbc_lightning.local import LinearTerm, ProximalTerm
from fedbc_lightning.server import (
    ControlVariates,
    DualAscent,
    GeometricMedian,
    ServerAdaptive,
    ServerSGD,
    WeightedAverage,
)


def _fedbc(**options: Any) -> ComposedAlgorithm:
    terms = [ProximalTerm("dual", factor=2.0)]
    return ComposedAlgorithm([DualAscent(0.05, tolerance=0.5), WeightedAverage("dual")], terms, **options)


def _scaffold() -> ComposedAlgorithm:
    terms = [LinearTerm(server={"control": 1.0}, client={"control": -1.0})]
    parts = [ControlVariates(gradient_mean=False), WeightedAverage("uniform"), ServerSGD(0.7)]
    return ComposedAlgorithm(parts, terms)


def _mixed() -> ComposedAlgorithm:
    median = GeometricMedian(max_iter=4, rtol=1e-12)
    parts = [DualAscent(0.05, tolerance=0.5), WeightedAverage("dual", median), ServerAdaptive("adam", lr=0.1)]
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
