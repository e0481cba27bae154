"""The clients' own models and buffers: what is kept of them, and what evaluation calls local."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.federation.own_code import checked_model
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import BufferPolicy, ClientStore, ServerState, StagedClient, StateDeclaration
from fedbc_lightning.state.layout import ParameterLayout

KEEP_LOCAL_MODELS_BELOW = 64 * 2**20
LOCAL_MODEL, LOCAL_BUFFERS, LOCAL_COUNTERS = "local_model", "local_buffers", "local_counters"


class LocalModels:
    """Keeps the clients' last models where the method has none of its own, and their buffers where they are local.

    Args:
        algorithm: The method.
        layout: The sizes of a model.
        buffers: Policy for buffers.
        keep: Whether the last w_i of every client is kept where the method keeps none; None: if all of them take at
            most 64 MiB.
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
            keep = num_clients * model_bytes <= KEEP_LOCAL_MODELS_BELOW
        self._keeps_last = keep and not algorithm.has_local_model and not algorithm.trains_pooled
        self.exist = algorithm.has_local_model or self._keeps_last

    def declare(self, declaration: StateDeclaration) -> None:
        """Declare what is kept for each client."""
        if self._keeps_last:
            declaration.client_model(LOCAL_MODEL)
        if self._has_local_buffers:
            declaration.client_buffers(LOCAL_BUFFERS)
            declaration.client_counters(LOCAL_COUNTERS)

    def begin(self, cohort: Cohort) -> None:
        """Let the clients of a cohort start from their own buffers, where these are local."""
        if self._has_local_buffers:
            cohort.start_buffers, cohort.start_counters = cohort["local_buffers"], cohort["local_counters"][0]

    def stage(self, cohort: Cohort) -> None:
        """Stage what is kept of the clients that a cohort has trained."""
        if self._keeps_last:
            cohort.stage(LOCAL_MODEL, cohort.model)
        if self._has_local_buffers:
            cohort.stage(LOCAL_BUFFERS, cohort.buffers)
            cohort.stage(LOCAL_COUNTERS, cohort.counters[None].expand(len(cohort), -1))

    def staged(self, server: ServerState, clients: ClientStore) -> Callable[[int], tuple[Tensor, Tensor]] | None:
        """Return a function from a client to its own model (d + b,) and integer buffers; None if there are none."""
        if not self.exist:
            return None
        if clients.file_rows is not None:
            clients.file_rows.require()
        algorithm, num_parameters = self._algorithm, self._layout.num_parameters
        model, counters = algorithm.global_model(server).cpu(), server.staged("counters")

        def local_model(client: int) -> tuple[Tensor, Tensor]:
            if self._keeps_last:
                own = clients.staged_vector(LOCAL_MODEL, client)
            else:
                own = algorithm.local_model(StagedClient(clients, client), model)
                own = checked_model(algorithm, "local_model", own, len(model))
            if not self._has_local_buffers:
                return own, counters
            own = torch.cat([own[:num_parameters], clients.staged_vector(LOCAL_BUFFERS, client)])
            return own, clients.staged_vector(LOCAL_COUNTERS, client)

        return local_model
