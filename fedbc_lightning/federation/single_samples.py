"""A check at the first batch of a run that no later batch has one sample which BatchNorm cannot normalise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.private_torch import BatchNorm
from fedbc_lightning.data.datamodule import POOLED

if TYPE_CHECKING:
    from fedbc_lightning.core.local_training import LocalTraining
    from fedbc_lightning.data import FederatedDataModule
    from fedbc_lightning.federation.participation import Participation


class SingleSamples:
    """Checks by the first training batch whether the module's BatchNorm layers can normalise one sample.

    This depends on a layer's input: a feature vector has one value per channel, which torch refuses in training, while
    an image has many.

    Args:
        module: The user's module.
        datamodule: The data module with the clients' data.
        local: Local training of every client; it decides whether a client comes to its last batch.
        participation: Draws the participants of rounds.
        max_rounds: Number of rounds, T.
    """

    def __init__(
        self,
        module: nn.Module,
        datamodule: FederatedDataModule,
        local: LocalTraining,
        participation: Participation,
        max_rounds: int,
    ) -> None:
        self._layers = [child for child in module.modules() if isinstance(child, BatchNorm)]
        self._datamodule, self._local = datamodule, local
        self._participation, self._max_rounds = participation, max_rounds

    @contextmanager
    def watched(self, num_samples: int) -> Iterator[None]:
        """Check the input of the BatchNorm layers in this context, for a batch of ``num_samples``.

        Raises:
            ConfigurationError: A layer will refuse the last batch of some client.
        """

        def look(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
            found = arguments[0] if arguments else None
            if layer.training and isinstance(found, Tensor) and found.numel() <= num_samples * found.size(1):
                self._check(type(layer).__name__)

        handles = [layer.register_forward_pre_hook(look) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check(self, layer: str) -> None:
        client, names = self._find_client(), self._datamodule.client_names
        if client is None:
            return
        who = f"client {client}" + (f" ({names[client]!r})" if names and client != POOLED else "")
        who = "the data of all clients" if client == POOLED else who
        raise ConfigurationError(
            f"data.drop_last: {who} would end an epoch with a batch of one sample, which {layer} cannot normalise in "
            f"training; set drop_last to true, or another batch_size than {self._datamodule.batch_size}."
        )

    def _find_client(self) -> int | None:
        """Return the first client of the run whose last batch has one sample; None if there is no such client."""
        datamodule, local = self._datamodule, self._local
        if datamodule.drop_last:
            return None
        sizes, batch_size = datamodule.num_samples("train"), datamodule.batch_size
        if self._participation.sample(1) == [POOLED]:
            return POOLED if sizes[self._participation.clients].sum() % batch_size == 1 % batch_size else None
        ends = sizes % batch_size == 1 % batch_size
        if local.steps is not None:
            ends &= local.steps * local.accumulate_grad_batches >= datamodule.num_batches()
        single = set(np.flatnonzero(ends).tolist())
        rounds = range(1, self._max_rounds + 1) if single else ()
        sampled = (client for t in rounds for client in self._participation.draw(t).sampled)
        return next((client for client in sampled if client in single), None)
