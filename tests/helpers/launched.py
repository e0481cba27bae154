"""A run whose result is larger than a pipe, and what it came to."""

from pathlib import Path
from typing import Any

import torch

from fedbc_lightning import FedBC, FederatedTrainer
from helpers.boring import BoringData, BoringModel, make_model, make_trainer


class Wide(BoringModel):
    """Its state takes more than a megabyte: a pipe holds 64 KiB."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.register_buffer("wide", torch.zeros(300_000))


def train(folder: Path, **settings: Any) -> tuple[FederatedTrainer, Wide]:
    trainer, model = make_trainer(folder, **settings), make_model(Wide)
    trainer.fit(model, BoringData(), FedBC(dual_lr=0.01))
    return trainer, model


def summary(trainer: FederatedTrainer, model: Wide) -> list[Any]:
    weights = [parameter.tolist() for parameter in model.parameters()]
    duals = trainer.clients.scalar("dual").tolist()
    return [weights, duals, float(trainer.callback_metrics["loss/global"]), trainer.current_round]
