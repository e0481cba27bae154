"""Runs ``predict_step`` of the global model, or of a client's own, on a data loader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.data.datamodule import POOLED
from fedbc_lightning.run.export import choose_model, find_client
from fedbc_lightning.run.run import Run


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

    def predict(self, run: Run) -> list[Any]:
        """Return the value of ``predict_step`` for each batch, on the CPU; the module holds z afterwards.

        Args:
            run: Run that has been set up, and restored if there is a checkpoint.

        Raises:
            ConfigurationError: The client or the model does not exist, or there is nothing to predict on.
        """
        client = None if self.client is None else find_client(self.client, run.datamodule)
        evaluator, federation = run.evaluator, run.federation
        owner = POOLED if client is None else client
        loader = _of_the_user(run) if self.dataloaders is None else self.dataloaders
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
        chosen = choose_model(run, client)
        run.hooks.call_callbacks("setup", "predict")
        run.hooks.call_module("on_predict_model_eval")
        run.hooks.call("on_predict_start")
        with evaluator.evaluating("predict", run.progress.finished_round):
            federation.bench.load(chosen.model, chosen.counters, kept=chosen.kept)
            run.shim.set(predicting=True, predict_dataloaders=loader)
            evaluator.seed_client(owner, run.progress.finished_round)
            predictions = list(self._steps(run, loader))
            run.shim.set(predicting=False)
        run.hooks.call("on_predict_end")
        federation.load_global()
        return predictions

    def _steps(self, run: Run, loader: Iterable[Any]) -> Iterable[Any]:
        user, hooks = run.user, run.hooks
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


def _of_the_user(run: Run) -> Iterable[Any] | None:
    """What ``predict_dataloader`` gives, as under lightning.Trainer: the data module's, else the model's; or None."""
    data, model = run.datamodule.users_module, run.user.module
    if overrides(data, "predict_dataloader", DataHooks):
        if data is not run.datamodule:
            data.setup("predict")  # a wrapped module has been set up for training
        return data.predict_dataloader()
    return model.predict_dataloader() if overrides(model, "predict_dataloader", DataHooks) else None
