"""The clients' own models, parameters and buffers: what is kept of them, and what evaluation calls local."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.text import shorten
from fedbc_lightning.engines.base import no_kept_parameters
from fedbc_lightning.evaluation.measurement import ClientModel
from fedbc_lightning.federation.user_methods import checked_model
from fedbc_lightning.state import Cohort, ParameterLayout
from fedbc_lightning.state.declaration import KEPT, BufferPolicy, ClientStore, StagedClient, StateDeclaration

KEEP_LOCAL_MODELS_BELOW = 64 * 2**20
LOCAL_MODEL, LOCAL_BUFFERS, LOCAL_COUNTERS = "local_model", "local_buffers", "local_counters"


def check_kept_parameters(algorithm: FederatedAlgorithm, layout: ParameterLayout) -> None:
    """Say which parameters stay with each client, and by what such a run is judged.

    Raises:
        ConfigurationError: The method cannot leave a part of the model with each client.
    """
    if not algorithm.takes_local_parameters:
        raise no_kept_parameters(str(algorithm))
    names = [entry.name for entry in layout.kept_entries]
    rank_zero_info(
        f"trainer.local_parameters: {layout.num_kept:,} of {layout.num_parameters + layout.num_kept:,} parameters stay "
        f"with each client ({shorten(names, 4)}). No model is everyone's: there is no accuracy/global, and no "
        "accuracy/heldout; judge by accuracy/local."
    )


class LocalModels:
    """Keeps the clients' last models where the method has none of its own, and their buffers where they are local.

    Parameters that stay with their client (``trainer.local_parameters``) are kept in any case. Together with z they are
    a client's own model, unless the method has one, or the last models were asked for.

    Args:
        algorithm: The method.
        layout: The sizes of a model.
        buffers: Policy for buffers.
        keep: Whether the last w_i of every client is kept where the method keeps none; None: if all of them take at
            most 64 MiB, and the clients keep no parameters of their own.
        num_clients: N.
        element_size: Bytes of one number of a model.

    Attributes:
        exist: Whether there is a client model that is "local" in evaluation.
    """

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        layout: ParameterLayout,
        buffers: BufferPolicy,
        keep: bool | None,
        num_clients: int,
        element_size: int,
    ) -> None:
        self._algorithm, self._layout, self._has_local_buffers = algorithm, layout, buffers == "local"
        if keep is None:
            model_bytes = (layout.num_parameters + layout.num_buffers) * element_size
            # By default only what fits into memory: a million models on a disk would be written for one metric.
            keep = num_clients * model_bytes <= KEEP_LOCAL_MODELS_BELOW and not layout.num_kept
        self._keeps_last = keep and not algorithm.has_local_model and not algorithm.trains_pooled
        self._keeps_parameters = layout.num_kept > 0
        self._makes_models = type(algorithm).local_model is not FederatedAlgorithm.local_model
        self.exist = algorithm.has_local_model or self._keeps_last or self._keeps_parameters

    def declare(self, declaration: StateDeclaration) -> None:
        """Declare what is kept for each client."""
        if self._keeps_last:
            declaration.client_model(LOCAL_MODEL)
        if self._keeps_parameters:
            declaration.client_rows(KEPT, "kept")
        if self._has_local_buffers:
            declaration.client_rows(LOCAL_BUFFERS, "buffers")
            declaration.client_rows(LOCAL_COUNTERS, "counters table" if self._layout.changing else "counters")

    def begin(self, cohort: Cohort) -> None:
        """Set each client's start to its stored parameters and buffers, if any."""
        if self._keeps_parameters:
            cohort.start_kept = cohort[KEPT]
        if self._has_local_buffers:
            cohort.start_buffers, cohort.start_counters = cohort["local_buffers"], cohort["local_counters"]

    def end(self, cohort: Cohort) -> None:
        """Stage what is kept of the clients that a cohort has trained."""
        if self._keeps_last:
            cohort.stage(LOCAL_MODEL, cohort.model)
        if self._keeps_parameters:
            cohort.stage(KEPT, cohort.kept)
        if self._has_local_buffers:
            cohort.stage(LOCAL_BUFFERS, cohort.buffers)
            cohort.stage(LOCAL_COUNTERS, cohort.counters)

    def read_from(self, names: Sequence[str]) -> list[str]:
        """Return those of the clients' vectors from which :meth:`staged` makes own models."""
        names = names if self.exist else []
        if not self._keeps_last and self._makes_models:
            return list(names)
        return [name for name in names if name in (LOCAL_MODEL, LOCAL_BUFFERS, LOCAL_COUNTERS, KEPT)]

    def staged(self, model: Tensor, counters: Tensor, clients: ClientStore) -> Callable[[int], ClientModel] | None:
        """Return a function from a client to its own model; None if there are none.

        Args:
            model: The global model (d + b,), as the method gives it.
            counters: Its integer buffers.
            clients: What clients keep.
        """
        if not self.exist:
            return None
        if clients.file_rows is not None:
            clients.file_rows.require()
        algorithm, num_parameters = self._algorithm, self._layout.num_parameters
        model = model.cpu()

        def shared_part(client: int) -> Tensor:
            if self._keeps_last:
                return clients.vector(LOCAL_MODEL, client, staged=True)
            if not algorithm.has_local_model:
                return model
            own = algorithm.local_model(StagedClient(clients, client), model)
            return checked_model(algorithm, "local_model", own, len(model))

        def local_model(client: int) -> ClientModel:
            own = shared_part(client)
            kept = clients.vector(KEPT, client, staged=True) if self._keeps_parameters else None
            if not self._has_local_buffers:
                return ClientModel(own, counters, kept)
            # Under buffers: local, a client's running statistics are its own, whatever model the method gives it.
            own = torch.cat([own[:num_parameters], clients.vector(LOCAL_BUFFERS, client, staged=True)])
            return ClientModel(own, clients.vector(LOCAL_COUNTERS, client, staged=True), kept)

        return local_model

    @property
    def _are_rows(self) -> bool:
        """Whether the models are rows that are kept; else there are none, or the method makes them of other things."""
        return self._keeps_last or (self._algorithm.has_local_model and not self._makes_models)

    def stamps(self, clients: ClientStore) -> Callable[[int], tuple] | None:
        """Return a function from a client to objects that are other ones after its own model was staged.

        It is None where a model depends on more than what was staged for its client.
        """
        if not self._are_rows or (self._layout.num_counters and not self._has_local_buffers):
            return None
        names = [name for name in (LOCAL_MODEL, LOCAL_BUFFERS, LOCAL_COUNTERS, KEPT) if name in clients.names]
        return lambda client: tuple(clients.stamp(name, client) for name in names)

    def staged_weights(self, clients: ClientStore) -> Callable[[Sequence[int]], Tensor] | None:
        """Return a function from K clients to the weights (K, d + p) of :meth:`staged` models; None if not rows."""
        if not self._are_rows:
            return None

        def weights(of: Sequence[int]) -> Tensor:
            rows = clients.gather(LOCAL_MODEL, of, staged=True)[:, : self._layout.num_parameters].contiguous()
            return torch.cat([rows, clients.gather(KEPT, of, staged=True)], dim=1) if self._keeps_parameters else rows

        return weights
