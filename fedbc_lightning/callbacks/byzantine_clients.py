"""Simulates attacking clients, to test robust aggregation rules."""

from __future__ import annotations

from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.checks import Fraction, NotNegative, checked
from fedbc_lightning.core.seeding import generator, numpy_generator
from fedbc_lightning.federation.participation import num_sampled
from fedbc_lightning.run.trainer_attributes import RunView


@checked("trainer.callbacks: ByzantineClients")
class ByzantineClients(Callback):
    """Lets a fixed part of the clients replace their trained w_i before sending it; they keep it as their own, too.

    The attackers are a function of the seed. With u = w_i − z::

        sign_flip    w_i ← z − scale · u
        random       w_i ← z + scale · ‖u‖ · a random direction

    Args:
        fraction: Fraction of all N clients that attack, in [0, 1).
        attack: Kind of the attack, ``"sign_flip"`` or ``"random"``.
        scale: Length of the sent update as a multiple of ‖u‖.

    Raises:
        ConfigurationError: A value lies outside its range.

    Example:
        >>> ByzantineClients(fraction=0.2, attack="sign_flip", scale=5.0).clients(num_clients=10, seed=0)
        [1, 2]
    """

    def __init__(
        self, fraction: Fraction = 0.2, attack: Literal["sign_flip", "random"] = "sign_flip", scale: NotNegative = 1.0
    ) -> None:
        self.fraction, self.attack, self.scale = fraction, attack, scale

    def clients(self, num_clients: int, seed: int) -> list[int]:
        """Return the indices of the attackers in ascending order."""
        count = num_sampled(self.fraction, num_clients) if self.fraction else 0
        return sorted(numpy_generator(seed, "byzantine").choice(num_clients, count, replace=False).tolist())

    def on_fit_start(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Draw the attackers and print their indices."""
        trained = trainer.datamodule.training_clients
        self._attackers = trained[self.clients(len(trained), trainer.seed)].tolist()
        rank_zero_info(
            f"{len(self._attackers)} of {len(trained)} clients attack "
            f"({self.attack} x {self.scale:g}): {', '.join(map(str, self._attackers))}."
        )

    @torch.no_grad()
    def on_client_end(self, trainer: RunView, pl_module: LightningModule, client: int) -> None:
        """Replace an attacker's model by the one that it sends."""
        if client not in self._attackers:
            return
        z = trainer.server.z
        update = trainer.layout.read() - z
        sent = -update
        if self.attack == "random":
            rng = generator(trainer.seed, "byzantine update", trainer.current_round, client)
            sent = torch.randn(z.shape, generator=rng, dtype=torch.float64).to(update)
            sent *= torch.linalg.vector_norm(update) / torch.linalg.vector_norm(sent)
        trainer.federation.bench.row[: len(z)].copy_(z + self.scale * sent)  # the module's parameters are views of it
