"""An algorithm = declared state + the client's half + the server's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fedbc_lightning.local import FineTuning
from fedbc_lightning.server import ServerCallback
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StagedClient, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine

PartialWork = Literal["used", "dropped", "refused"]


class FederatedAlgorithm:
    """Base class of all methods: says what is kept, what a client does, and what the server makes of it.

    A method never indexes clients, loops over them or asks which engine runs it.

    Attributes:
        vectors_down: Model-sized vectors that a client receives in an exchange, beside those that the server's parts
            declare; the first comes with the buffers.
        vectors_up: Model-sized vectors that it sends, likewise.
        scalars_up: Numbers that it sends beside them (4 bytes each).
        partial_work: What becomes of a straggler's work: ``"used"``, ``"dropped"``, or ``"refused"``: the method has no
            such thing.
        needs_all_clients: Whether every client takes part in every round.
        trains_pooled: Whether one pseudo-client (-1) that holds all data trains in place of the clients.
        has_local_model: Whether :meth:`local_model` is "local" in evaluation; else that is the last w_i, if kept.
        fine_tuning: What is done to a client's own model before it is evaluated, or None.
    """

    vectors_down: int = 1
    vectors_up: int = 1
    scalars_up: int = 1
    partial_work: PartialWork = "used"
    needs_all_clients: bool = False
    trains_pooled: bool = False
    has_local_model: bool = False
    fine_tuning: FineTuning | None = None

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError, before training, if the method cannot run so."""

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare what outlives a round beside what the server's parts declare themselves."""

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train the cohort's clients: one or more calls of ``engine.solve``; stage client state."""
        raise NotImplementedError(f"{type(self).__name__} must define client_update(engine, cohort, server)")

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """The server's parts, in order. Called once per run; ``engine`` tells what optimizer the clients use."""
        raise NotImplementedError(f"{type(self).__name__} must define server_callbacks(engine)")

    def num_exchanges(self, server: ServerState) -> int:
        """How often a client and the server exchange messages in this round."""
        return 1

    def num_steps(self, server: ServerState, asked: int) -> int:
        """How many steps a client takes in this round for which the trainer asks for so many."""
        return asked

    def local_model(self, client: StagedClient, model: Tensor) -> Tensor:
        """A client's own model (d + b,) for evaluation, from its state and the global model (d + b,)."""
        return client["local_model"]

    def global_model(self, server: ServerState) -> Tensor:
        """The global model (d + b,) for evaluation."""
        return server.staged_model

    def __str__(self) -> str:
        """The usual name, and the robust rule if there is one."""
        rule = getattr(self, "robust_rule", None)
        return usual_name(type(self)) + (f" + {type(rule).__name__}" if rule is not None else "")


def usual_name(cls: type) -> str:
    """What stands before the colon of the first line of a class's own docstring; else the class's name.

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
