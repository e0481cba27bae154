"""The base class of algorithms, which consist of declared state, the client's half and the server's parts."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fedbc_lightning.core.checks import Checked
from fedbc_lightning.local import Engine, FineTuning
from fedbc_lightning.server import ServerCallback
from fedbc_lightning.state import Cohort, ServerState, StagedClient, StateDeclaration

PartialWork = Literal["used", "dropped", "refused"]


class FederatedAlgorithm(Checked):
    """Base class of all methods, which define the state that is kept, the clients' work and the server's work.

    A method never indexes clients, loops over them or asks which engine runs it.

    Attributes:
        vectors_up: Number of model-sized vectors that a client sends in an exchange, without those that the server's
            parts declare; the first vector comes with the buffers.
        sends_update: Whether the clients train the shared model from the z that they receive, so that what they send is
            an update of it, which can be coded (``trainer.codec``).
        scalars_up: Number of scalars that a client sends in an exchange (4 bytes each).
        partial_work: Treatment of a straggler's partial work: ``"used"``, ``"dropped"``, or ``"refused"`` if the method
            allows no stragglers.
        needs_all_clients: Whether every client takes part in every round.
        trains_pooled: Whether one pseudo-client (-1) that holds all data trains in place of the clients.
        takes_local_parameters: Whether a part of the model may stay with each client (``trainer.local_parameters``); a
            method with a solver refuses that by itself.
        has_local_model: Whether evaluation takes :meth:`local_model` as a client's own model; otherwise it takes the
            client's last w_i, if that is kept.
        fine_tuning: Fine-tuning step on a client's own model before it is evaluated, or None.
        buffer_size: Number K of updates that end a round of a method whose clients train asynchronously: the round's
            clients start, and other updates arrive (``server.arrivals``). None: a round waits for its own clients.
    """

    section = "algorithm"
    vectors_up: int = 1
    scalars_up: int = 1
    sends_update: bool = True
    partial_work: PartialWork = "used"
    needs_all_clients: bool = False
    trains_pooled: bool = False
    takes_local_parameters: bool = True
    has_local_model: bool = False
    fine_tuning: FineTuning | None = None
    buffer_size: int | None = None

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError, before training, if the method cannot run with this engine and its settings."""

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the state that the method keeps between rounds; the server's parts declare their own state."""

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train the cohort's clients by calls of ``engine.solve``, here once from z, and stage their state."""
        engine.solve(cohort, start=server.model)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the server's parts in order; this is called once per run, with the engine that trains the clients."""
        raise NotImplementedError(f"{type(self).__name__} must define server_callbacks(engine)")

    def num_exchanges(self, server: ServerState) -> int:
        """Return how often a client and the server exchange messages in this round."""
        return 1

    def num_steps(self, server: ServerState, asked: int) -> int:
        """Return how many steps a client takes in this round if the trainer asks for `asked` steps."""
        return asked

    def local_model(self, client: StagedClient, model: Tensor) -> Tensor:
        """Return a client's own model (d + b,) for evaluation, from its state and the global model (d + b,)."""
        return client["local_model"]

    def global_model(self, server: ServerState) -> Tensor:
        """Return the global model (d + b,) for evaluation."""
        return server.staged_model

    def __str__(self) -> str:
        """Return the method's usual name, and the name of its robust rule if there is one."""
        rule = getattr(self, "robust_rule", None)
        return usual_name(type(self)) + (f" + {type(rule).__name__}" if rule is not None else "")


def usual_name(cls: type) -> str:
    """Return the usual name of a class: the text before the colon in the first line of its docstring, or its name.

    Docstrings of base classes do not count.

    Example:
        >>> class MultiKrum:
        ...     '''Multi-Krum: the mean of the clients with the lowest scores.'''
        >>> class Mine(MultiKrum):
        ...     pass
        >>> usual_name(MultiKrum), usual_name(Mine)
        ('Multi-Krum', 'Mine')
    """
    name, colon, _ = (vars(cls).get("__doc__") or "").strip().partition(": ")
    return name if colon and len(name) <= 30 and "\n" not in name else cls.__name__
