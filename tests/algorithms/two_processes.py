"""Run as a script: every registry entry on as many processes as asked for, z and state to one file per rank.

``python -m algorithms.two_processes FOLDER DEVICES``
"""

import sys
from collections.abc import Container
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from helpers.quadratics import QuadraticData, QuadraticModule
from helpers.user_modules import BatchNormClassifier, MetricsClassifier, UserData

from algorithms.registry import BY_NAME, METHODS, SETTINGS
from algorithms.running import QUIET
from fedbc_lightning import FederatedTrainer, Privacy
from fedbc_lightning.algorithms import FedAvg

AFTER_MORE_ROUNDS = {"fedavg-samples", "scaffold-auto", "fedbc-learned", "fedbc-momentum-client", "fedbuff"}
VECTORIZED = ("fedavg-samples", "scaffold-auto", "fedbc-learned")
PARTED = ("fedavg-samples", "fedbc-learned")
"""Settings that also run with a part of the model that stays with each client."""
EACH_KIND = {
    *AFTER_MORE_ROUNDS, "qfedavg-default", "rfa-samples", "fedadmm-default", "fedlils-max", "moon", "perfedavg",
    "pfedme", "ditto", "l2gd", "fedgeomed_plus", "centralized", "fedrep-samples", "fedbc-coded-Sign",
}  # fmt: skip
"""Settings that together exchange all kinds of messages, where another test runs all settings."""


def state_of(trainer: Any, setting: Any) -> dict[str, torch.Tensor]:
    """z and the named state after a fit."""
    out = {"z": trainer.server.z}
    out |= {name: trainer.clients.scalar(name) for name in setting.scalars}
    for name in setting.vectors:
        out[name] = torch.stack([trainer.clients.vector(name, client) for client in range(5)])
    out |= {f"server_{name}": trainer.server[name] for name in setting.server}
    return {name: value.to("cpu", copy=True) for name, value in out.items()}


def run_vectorized(folder: Path, name: str, options: dict[str, Any], stops: list[int]) -> dict[str, torch.Tensor]:
    """All five clients in cohorts on each rank, resumed after each stop but the last."""
    setting = BY_NAME[name]
    place = {"default_root_dir": str(folder), "engine": "vectorized", "enable_checkpointing": len(stops) > 1}
    for stop in stops:
        own = {"clients_per_round": 5, "max_rounds": stop, "checkpoint_every_n_rounds": 1}
        trainer = FederatedTrainer(**QUIET | options | place | dict(setting.options) | own)
        data = QuadraticData(batch_size=2)
        trainer.fit(QuadraticModule(), data, setting.build(), "last" if stop > stops[0] else None)
    return state_of(trainer, setting)


def run_all(
    folder: Path, devices: int, accelerator: str = "cpu", names: Container[str] = BY_NAME, **more: Any
) -> dict[str, dict[str, torch.Tensor]]:
    """Registry entries in float64 for one round, some for 4, in cohorts too, and two user modules in float32."""
    results: dict[str, dict[str, torch.Tensor]] = {}
    options: dict[str, Any] = {"clients_per_round": 3, "local_epochs": 2, "seed": 1, "devices": devices}
    options |= {"accelerator": accelerator, **more}
    for setting in [setting for setting in METHODS if setting.name in names]:
        for rounds in (1, 4) if setting.name in AFTER_MORE_ROUNDS else (1,):
            place = {"default_root_dir": str(folder / f"{setting.name}-{rounds}-{devices}"), "max_rounds": rounds}
            trainer = FederatedTrainer(**QUIET | options | place | dict(setting.options))
            data = QuadraticData(batch_size=2)
            trainer.fit(QuadraticModule(), datamodule=data, algorithm=setting.build())
            results[f"{setting.name} after {rounds}"] = state_of(trainer, setting)
    for name in VECTORIZED:
        for rounds in (1, 4):
            results[f"{name} vectorized after {rounds}"] = run_vectorized(folder / f"{name}-v{rounds}-{devices}", name,
                                                                          options, [rounds])  # fmt: skip
        results[f"{name} resumed after 4"] = run_vectorized(folder / f"{name}-r-{devices}", name, options, [2, 4])
    for name in PARTED:
        place = {"default_root_dir": str(folder / f"{name}-parted-{devices}"), "local_parameters": ["tail"]}
        trainer = FederatedTrainer(**QUIET | options | place | {"max_rounds": 1})
        trainer.fit(QuadraticModule(), QuadraticData(batch_size=2), BY_NAME[name].build())
        kept = torch.stack([trainer.clients.vector("local_parameters", client) for client in range(5)])
        results[f"{name} parted after 1"] = {"z": trainer.server.z.cpu().clone(), "kept": kept}
    if find_spec("dp_accounting"):  # the noise of privacy is the same on all processes
        place = {"default_root_dir": str(folder / f"private-{devices}"), "max_rounds": 1}
        trainer = FederatedTrainer(**QUIET | options | place, privacy=Privacy(0.5, 0.7, 1e-3))
        trainer.fit(QuadraticModule(), QuadraticData(), FedAvg("uniform"))
        results["private after 1"] = {"z": trainer.server.z.cpu().clone()}
    for module_class in (BatchNormClassifier, MetricsClassifier):
        torch.manual_seed(0)
        module, name = module_class(), module_class.__name__
        place = {"default_root_dir": str(folder / f"{name}-{devices}"), "max_rounds": 1, "precision": "32-true"}
        trainer = FederatedTrainer(**QUIET | options | place)
        trainer.fit(module, datamodule=UserData((9, 17, 5, 12, 8), test_size=3), algorithm=SETTINGS[0].build())
        results[f"{name} after 1"] = {key: value.clone() for key, value in module.state_dict().items()}
        results[f"{name} metrics"] = {
            key: torch.as_tensor(value).double()
            for key, value in trainer.callback_metrics.items()
            if not key.startswith("time/")
        }
    return results


def main(folder: Path, devices: int, accelerator: str = "cpu", names: Container[str] = BY_NAME) -> None:
    """What each process does."""
    found = run_all(folder, devices, accelerator, names)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(found, folder / f"results-{devices}-rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
