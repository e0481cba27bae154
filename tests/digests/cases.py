"""Every run whose numbers are hashed, by name: ``setting[+variant]/engine/type/processes``.

Each setting of the registry (which has every method of the package) is run in both engines, if the vectorized one takes
it, and in both types. One of each kind runs on two processes as well, and with BatchNorm. The variants change the
trainer or the module, for a few settings. The command line has cases of its own.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from algorithms.registry import BY_NAME, REPRESENTATIVES, SETTINGS
from algorithms.running import Setting
from helpers.scripts import ROOT

from digests.runs import train
from fedbc_lightning import Codecs, Diurnal, Lognormal, PoissonSampler, Privacy, System
from fedbc_lightning.algorithms import L2GD, MOON
from fedbc_lightning.callbacks import ByzantineClients
from fedbc_lightning.federation.participation import Stragglers
from fedbc_lightning.server import QSGD, BFloat16, TopK

TYPES = {"float32": torch.float32, "float64": torch.float64}
NEED_PLAIN_SGD = ("scaffold-step_size-server_lr", "composed-scaffold")
SEQUENTIAL, BOTH = ("sequential",), ("sequential", "vectorized")


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: The name of its line.
        algorithm: The name of the algorithm's class.
        run: Trains in a folder, and returns the run folder.
        processes: The number of processes.
    """

    name: str
    algorithm: str
    run: Callable[[Path], Path]
    processes: int = 1


@dataclass(frozen=True)
class Variant:
    """What is changed of a run.

    Attributes:
        module: Arguments of the module.
        trainer: Makes arguments of the trainer.
        more: Arguments of :func:`digests.runs.train`.
        engines: The engines that take it.
        types: The types that it is run in.
        settings: The names of the settings that are run with it.
        processes: The numbers of processes that it is run on.
    """

    module: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[], Mapping[str, Any]] = dict
    more: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = BOTH
    types: tuple[str, ...] = tuple(TYPES)
    settings: tuple[str, ...] = ("fedbc-learned-local", "scaffold-auto")
    processes: tuple[int, ...] = (1,)


def _clock(**options: Any) -> System:
    """Devices of unequal speed, and links so slow that the size of a message counts."""
    return System(compute=Lognormal(1.0), bandwidth_up=100.0, bandwidth_down=200.0, **options)


def _private(**options: Any) -> Privacy:
    os.environ["FEDBC_DIGESTS_SECRET"] = "x"
    return Privacy(0.5, delta=1e-3, secret="env:FEDBC_DIGESTS_SECRET", **options)


PLAIN = Variant()
BATCH_NORM = Variant({"batch_norm": True}, engines=SEQUENTIAL, settings=tuple(one.name for one in REPRESENTATIVES))

VARIANTS: dict[str, Variant] = {
    "batch_norm": BATCH_NORM,
    "buffers-local": Variant({"batch_norm": True}, lambda: {"buffers": "local"}, engines=SEQUENTIAL, processes=(1, 2)),
    "buffers-global": Variant({"batch_norm": True}, lambda: {"buffers": "global"}, engines=SEQUENTIAL),
    "adam": Variant({"adam": True}),
    "dropout": Variant({"dropout": 0.3}),
    "step-schedule": Variant({"schedule": "step"}, engines=SEQUENTIAL),
    "continued-schedule": Variant(
        {"schedule": "epoch"}, lambda: {"local_schedules": "continue"}, engines=SEQUENTIAL, processes=(1, 2)
    ),
    "round-schedule": Variant({"schedule": "round"}),
    "clipped": Variant(trainer=lambda: {"gradient_clip_val": 0.2}),
    "clipped-values": Variant(trainer=lambda: {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "accumulated": Variant(trainer=lambda: {"accumulate_grad_batches": 2}, engines=SEQUENTIAL),
    "bfloat16": Variant(trainer=lambda: {"client_dtype": "bfloat16"}),
    "autocast": Variant(trainer=lambda: {"precision": "bf16-mixed"}, engines=SEQUENTIAL, types=("float32",)),
    "kept": Variant(trainer=lambda: {"keep_local_models": True, "eval_clients": 2}, settings=("fedavg-samples",)),
    "attacked": Variant(
        trainer=lambda: {"callbacks": [ByzantineClients(0.4)]}, engines=SEQUENTIAL, settings=("fedavg-median",)
    ),
    # 600 steps of one shape a round: enough for both engines to record them, and to replay the recording
    "recorded": Variant(
        trainer=lambda: {"local_epochs": None, "local_steps": 300},
        settings=("fedavg-samples", "fedbc-learned", "scaffold-auto"),
    ),
    "resumed": Variant(
        more={"stops": (1, 2)},
        settings=("fedbc-learned-local", "scaffold-auto", "fedadam-fast", "apfl-adaptive", "fedexp-default"),
        processes=(1, 2),
    ),
    # 1,100 clients with 17,152 weights each are more than 64 MiB: their rows lie in clients.bin
    "rows": Variant({"num_features": 64, "hidden": 256}, lambda: {"clients_per_round": 4, "eval_clients": 3},
                    {"num_clients": 1100}, processes=(1, 2)),
    "private": Variant(trainer=lambda: {"privacy": _private(noise_multiplier=0.7)}, types=("float32",),
                       settings=("fedavg-uniform", "fedadam-fast"), processes=(1, 2)),
    "private-adaptive": Variant(trainer=lambda: {"privacy": _private(noise_multiplier=0.14, adaptive_clip=0.5)},
                                types=("float32",), settings=("fedavg-uniform",)),
    "poisson": Variant(trainer=lambda: {"sampler": PoissonSampler()}, types=("float64",)),
    "stragglers": Variant(trainer=lambda: {"stragglers": Stragglers(0.4, 0.3, "dropped"), "clients_per_round": 5},
                          types=("float64",)),
    "deadline": Variant(trainer=lambda: {"system": _clock(deadline=16.0), "clients_per_round": 5},
                        types=("float64",), processes=(1, 2)),
    "deadline-partial": Variant(
        trainer=lambda: {"system": _clock(deadline=6.0, late="partial", availability=Diurnal(share=0.6, period=20.0)),
                         "stragglers": Stragglers(0.4), "codec": Codecs(TopK(0.3), BFloat16())},
        types=("float64",), settings=("fedprox-samples", "fedbc-learned")),
    # Asynchronous: the clock decides who arrives, and a codec how long a message takes
    "clock": Variant(trainer=lambda: {"system": _clock(availability=Diurnal(share=0.6, period=20.0)),
                                      "clients_per_round": 3},
                     types=("float64",), settings=("fedbuff", "fedasync"), processes=(1, 2)),
    "clock-coded": Variant(trainer=lambda: {"system": _clock(), "codec": Codecs(QSGD(7), BFloat16()),
                                            "clients_per_round": 4},
                           more={"stops": (1, 2)}, types=("float64",), settings=("fedbuff",)),
}  # fmt: skip

COMMANDS: dict[str, tuple[str, str]] = {
    "stragglers": ("FedProx", "--config digits.yaml --algorithm FedProx --trainer.stragglers.fraction 0.5 "
                   "--trainer.stragglers.dropout 0.1 --trainer.local_epochs 3"),
    "composed": ("ComposedAlgorithm", "--config synthetic.yaml --config algorithms/composed.yaml "
                 "--trainer.eval_clients 5"),
}  # fmt: skip
"""Name -> the algorithm, and arguments of ``fedbc-cli fit``."""


def all_cases() -> dict[str, Case]:
    """Every case by its name, those on one process first."""
    found = [*_methods(), *_variants(), *_command_lines()]
    return {case.name: case for case in sorted(found, key=lambda case: case.processes)}


def _methods() -> Iterator[Case]:
    for setting in SETTINGS:
        yield from _cases(setting, "", PLAIN, 1)
    for setting in REPRESENTATIVES:
        yield from _cases(setting, "", PLAIN, 2)


def _variants() -> Iterator[Case]:
    for name, variant in VARIANTS.items():
        for setting in variant.settings:
            for processes in variant.processes:
                yield from _cases(BY_NAME[setting], f"+{name}", variant, processes)


def _cases(setting: Setting, suffix: str, variant: Variant, processes: int) -> Iterator[Case]:
    algorithm = setting.build()
    for engine in variant.engines:
        if engine == "vectorized" and isinstance(algorithm, (L2GD, MOON)):
            continue  # refused: each client draws from components of its own, or a layer's output is read
        for name in variant.types:
            run = partial(_run, setting, variant, engine, TYPES[name], processes)
            yield Case(f"{setting.name}{suffix}/{engine}/{name}/{processes}", type(algorithm).__name__, run, processes)


def _run(setting: Setting, variant: Variant, engine: str, dtype: torch.dtype, processes: int, root: Path) -> Path:
    module = variant.module | {"plain": setting.name in NEED_PLAIN_SGD}
    trainer = {"engine": engine, "devices": processes} | dict(setting.options) | dict(variant.trainer())
    return train(root, setting.build, dtype, module, trainer, **variant.more)


def _command_lines() -> Iterator[Case]:
    for name, (algorithm, words) in COMMANDS.items():
        for precision, dtype in (("32-true", "float32"), ("64-true", "float64")):
            run = partial(_run_command, [*words.split(), "--trainer.precision", precision])
            yield Case(f"command-{name}/sequential/{dtype}/1", algorithm, run)


def _run_command(words: list[str], root: Path) -> Path:
    fixed = "--trainer.max_rounds 3 --trainer.devices 1 --trainer.accelerator cpu --trainer.logger false"
    words = ["-m", "fedbc_lightning", "fit", *words, *fixed.split(), "--trainer.default_root_dir", str(root)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return next(root.glob("*/*-0"))
