"""Measures how far a client's model moves when it takes the server's model."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.evaluation.measurement import ClientModel
from fedbc_lightning.run.trainer_attributes import RunView


class AggregationMoves(Callback):
    """Logs how far a client's model moves when it takes the server's, and how far it moves in local training.

    ``clients.csv`` gets two columns with Euclidean distances over all shared parameters: ``train_moved_by_server``,
    from the client's previous own model to the model from which its local training starts, and
    ``train_moved_by_training``, from there to the model with which it ends. In a client's first round its own model is
    still the initial one.

    Raises:
        ConfigurationError: The clients' models are not kept.

    References:
        Kundu et al., Fed+, Figure 1. In the paper every client takes part in every round; here several rounds of the
        server may lie between a client's last model and its next start.
    """

    def on_client_start(self, trainer: RunView, pl_module: LightningModule, client: int) -> None:
        """Log the distance from the client's previous own model to its starting point."""
        self._start = trainer.layout.read().clone()
        own = own_model(trainer, client).model[: self._start.numel()]
        _log_distance(pl_module, "moved_by_server", self._start, own)

    def on_client_end(self, trainer: RunView, pl_module: LightningModule, client: int) -> None:
        """Log the distance from the client's starting point to its trained model."""
        _log_distance(pl_module, "moved_by_training", trainer.layout.read(), self._start)


def own_model(trainer: RunView, client: int) -> ClientModel:
    """Return a client's own model on the CPU, as of the last committed round.

    Raises:
        ConfigurationError: The clients' models are not kept.
    """
    local = trainer.federation.models().local
    if local is None:
        raise ConfigurationError("trainer.keep_local_models: the clients' models are not kept; set it to true.")
    own = local(client)
    return own._replace(model=own.model.cpu())


@torch.no_grad()
def _log_distance(module: LightningModule, name: str, one: Tensor, other: Tensor) -> None:
    module.log(name, torch.linalg.vector_norm(one.cpu() - other.cpu()))
