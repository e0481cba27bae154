"""An algorithm that is assembled from parts, in YAML or in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedbc_lightning.algorithms.base import FederatedAlgorithm, usual_name
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine, Solver, TermFactory
from fedbc_lightning.server import DualAscent, ServerCallback
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class ComposedAlgorithm(FederatedAlgorithm):
    """Composed: a method that is assembled from terms, a solver and server parts, without a line of Python.

    Problem:
        The parts determine the problem.

    Update::

        client    from w = z or x_i: default local training, or the solver's steps, with all terms in the gradient
        server    the parts, in their order: first what reads the clients (DualAscent), then one WeightedAverage, which
                  may have a robust rule, then server optimizers

    State:
        The parts declare their state; with ``init_from: local`` each client also keeps x_i ``local_model`` (N, d + b).
    Communication:
        The server sends one model, each client sends one model, and parts may add vectors (ControlVariates adds one in
        each direction).
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        WeightedAverage without terms is FedAvg. ProximalTerm(coefficient=dual, factor=2), DualAscent and
        WeightedAverage(by=dual) are FedBC.
    Departures:
        A composed method follows no paper.

    References:
        Each part cites its own paper.

    Args:
        server_callbacks: The server's parts, in order.
        terms: Terms that are added to every client's loss: ``ProximalTerm``, ``LinearTerm``.
        init_from: Start of local training: ``"global"`` starts at z, ``"local"`` at the client's own last w.
        solver: Solver whose steps replace the user's optimizer, e.g. ``Armijo``; None takes the user's optimizer.

    Raises:
        ConfigurationError: There is not exactly one aggregation, or the parts cannot work in this order.
    """

    def __init__(
        self,
        server_callbacks: list[ServerCallback],
        terms: list[TermFactory] | None = None,
        init_from: Literal["global", "local"] = "global",
        solver: Solver | None = None,
    ) -> None:
        _check_parts(server_callbacks, solver, bool(terms))
        self.parts, self.terms, self.init_from, self.solver = server_callbacks, terms or [], init_from, solver
        self.has_local_model = init_from == "local"
        self.sends_update = init_from == "global"

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError if there is a solver, and the trainer asks for what its steps ignore."""
        if self.solver is not None:
            engine.check_solver(type(self.solver).__name__, self.solver)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare x_i if local training starts from it."""
        if self.init_from == "local":
            state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train with the terms from z or x_i, and stage x_i if it is kept."""
        start = server.model if self.init_from == "global" else cohort["local_model"]
        terms = [term.bind(cohort, server) for term in self.terms]
        records_mean = any(getattr(part, "gradient_mean", False) for part in self.parts)
        engine.solve(cohort, start, terms, solver=self.solver, record_gradient_mean=records_mean)
        if self.init_from == "local":
            cohort.stage("local_model", cohort.model)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the parts as they were given."""
        return self.parts

    def __str__(self) -> str:
        """Return the usual name and the names of the parts."""
        solver = [self.solver] if self.solver is not None else []
        return f"{usual_name(type(self))}: {', '.join(map(_describe, [*solver, *self.terms, *self.parts]))}"


def _describe(part: object) -> str:
    rule = getattr(part, "rule", None)
    return type(part).__name__ + (f"({type(rule).__name__})" if rule is not None else "")


def _check_parts(parts: Sequence[ServerCallback], solver: Solver | None, has_terms: bool) -> None:
    # The order of parts is their meaning: weights, then z, then what changes z.
    where = [k for k, part in enumerate(parts) if part.forms_z]
    if len(where) != 1:
        raise ConfigurationError(
            f"algorithm.server_callbacks: {len(where)} parts that form z; give exactly one, e.g. WeightedAverage."
        )
    for k, part in enumerate(parts):
        name = type(part).__name__
        if part.messages:
            raise ConfigurationError(
                f"algorithm.server_callbacks: {name} needs the clients to send '{part.messages[0]}', which no term or "
                "solver does; write the method's client half in Python."
            )
        if (part.follows_aggregation and k < where[0]) or (isinstance(part, DualAscent) and k > where[0]):
            raise ConfigurationError(
                f"algorithm.server_callbacks: {name} stands at the wrong place; what computes weights comes before the "
                "aggregation, and what changes the aggregated z after it."
            )
    if solver is not None and has_terms and not solver.takes_terms:
        raise ConfigurationError(
            f"algorithm.solver: {type(solver).__name__} cannot be combined with terms; leave one of them out."
        )
