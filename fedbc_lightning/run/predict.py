"""Runs ``predict_step`` of the global model, or of a client's own, on a data loader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.twins import overrides
from fedbc_lightning.data.datamodule import POOLED
from fedbc_lightning.run.export import choose_model, find_client

if TYPE_CHECKING:
    from fedbc_lightning.trainer.trainer import FederatedTrainer


@dataclass
class Prediction:
    """Predicts with one model of a run, as :meth:`FederatedTrainer.predict` asks.

    Attributes:
        client: Number or name of the client whose own model predicts; None: the global model.
        dataloaders: Batches; None: ``predict_dataloader`` of the user's data module or model where one is overridden,
            else the test data of that client, or of all.
    """

    client: str | int | None
    dataloaders: Iterable[Any] | None

    def run(self, trainer: FederatedTrainer, path: Path | None) -> list[Any]:
        """Return the value of ``predict_step`` for each batch, on the CPU; the module holds z afterwards.

        Args:
            trainer: Trainer that has been set up and restored.
            path: Checkpoint from which the trainer was restored, or None.

        Raises:
            ConfigurationError: The client or the model does not exist, or there is nothing to predict on.
        """
        client = None if self.client is None else find_client(self.client, trainer.datamodule)
        evaluator, federation = trainer.evaluator, trainer.federation
        owner = POOLED if client is None else client
        loader = _of_the_user(trainer) if self.dataloaders is None else self.dataloaders
        if loader is None:
            loader = evaluator.loader("test", owner)
        if loader is None:
            raise ConfigurationError("dataloaders: there is no test data to predict on; give a DataLoader.")
        if isinstance(loader, (list, tuple)) and any(isinstance(part, DataLoader) for part in loader):
            if len(loader) > 1:
                raise ConfigurationError(
                    "dataloaders: several were given; give one DataLoader, and call predict for each."
                )
            loader = loader[0]
        model, counters = choose_model(trainer, client)
        trainer.hooks.call_callbacks("setup", "predict")
        trainer.hooks.call_module("on_predict_model_eval")
        trainer.hooks.call("on_predict_start")
        with evaluator.evaluating("predict", trainer.finished_round):
            federation.bench.load(model, counters)
            trainer.shim.set(predicting=True, predict_dataloaders=loader)
            evaluator.seed_client(owner, trainer.finished_round)
            predictions = list(self._steps(trainer, loader))
            trainer.shim.set(predicting=False)
        trainer.hooks.call("on_predict_end")
        federation.load_global()
        return predictions

    def _steps(self, trainer: FederatedTrainer, loader: Iterable[Any]) -> Iterable[Any]:
        user, hooks = trainer.user, trainer.hooks
        step, cpu = user.module.predict_step, torch.device("cpu")
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        user.start_collecting()
        hooks.call("on_predict_epoch_start")
        for batch_idx, raw in enumerate(loader):
            batch = user.to_device(raw)
            hooks.call("on_predict_batch_start", batch, batch_idx)
            with user.autocast():
                output = step(*((batch, batch_idx) if takes_index else (batch,)))
            hooks.call("on_predict_batch_end", output, batch, batch_idx)
            yield move_data_to_device(output, cpu)
        hooks.call("on_predict_epoch_end")


def _of_the_user(trainer: FederatedTrainer) -> Iterable[Any] | None:
    """What ``predict_dataloader`` gives, as under lightning.Trainer: the data module's, else the model's; or None."""
    data, model = trainer.datamodule.users_module, trainer.user.module
    if overrides(data, "predict_dataloader", DataHooks):
        if data is not trainer.datamodule:
            data.setup("predict")  # a wrapped module has been set up for training
        return data.predict_dataloader()
    return model.predict_dataloader() if overrides(model, "predict_dataloader", DataHooks) else None
