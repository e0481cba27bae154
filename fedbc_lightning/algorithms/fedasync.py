"""FedAsync (Xie et al. 2019)."""

from __future__ import annotations

from fedbc_lightning.algorithms.base import FederatedAlgorithm, PartialWork
from fedbc_lightning.core.checks import FiniteNotNegative, NotNegative, Share
from fedbc_lightning.local import Engine, Proximal
from fedbc_lightning.server import MixedModels, ServerCallback, Staleness
from fedbc_lightning.server.arrived_updates import StalenessKind
from fedbc_lightning.state import Cohort, ServerState


class FedAsync(FederatedAlgorithm):
    """FedAsync: clients train asynchronously, and z moves towards every model as it arrives.

    Problem:
        min_w Σ f_i(w) / N: one model for all clients, without waiting for slow ones.

    Update::

        client    starts from the present z as soon as one of the S places is free
                  w_i ← E epochs on f_i(w) + ρ/2 ‖w − z‖² from z,  and sends w_i when its time is over
        server    for every model that arrives:  z ← (1 − α_t) z + α_t w_i,    α_t = α s(τ_i)
                  τ_i: updates of z since client i started
                  s(τ) = 1,  (1 + τ)^−a,  or  1 if τ ≤ b and 1 / (a (τ − b) + 1) otherwise

    State:
        Each client keeps the model that it has on its way, and the version of z from which it started. A round is one
        update of z. S is the trainer's ``clients_per_round``, the number of clients in training at a time;
        ``trainer.system`` says how long each takes, and without it every local step takes one second.
    Communication:
        The server sends z to a client that starts; a client that arrives sends w_i.
    Partial work:
        There is none: nobody waits, so deadlines and stragglers are refused; slow clients are those of
        ``trainer.system``.
    Local model:
        A client's own model is its last w_i, from its start on.
    Degenerate cases:
        With S = 1, α = 1 and ρ = 0 it is FedAvg with one client in a round.
    Departures:
        A model that arrives before z has changed has τ = 0, so that its weight is α; counted from the update that it
        is part of, as the indices in the paper's Algorithm 1 may be read, it would be 1. Clients are sampled as in
        FedAvg among those who are not in training, and the time of arrival is that of the simulated clock, where the
        paper draws the staleness.

    References:
        Xie et al. 2019, "Asynchronous Federated Optimization", Algorithm 1 and section 5.2.

    Args:
        mixing: Weight α of a fresh model, in (0, 1].
        rho: Strength ρ ≥ 0 of the pull to z.
        staleness: Factor of the weight by staleness: ``"constant"``, ``"polynomial"`` or ``"hinge"``.
        staleness_a: Exponent or slope a ≥ 0.
        staleness_b: Staleness b ≥ 0 from which on a hinge falls.

    Raises:
        ConfigurationError: A value is out of range.
    """

    scalars_up = 0
    partial_work: PartialWork = "refused"
    buffer_size = 1

    def __init__(
        self,
        mixing: Share = 0.6,
        rho: NotNegative = 0.005,
        staleness: StalenessKind = "polynomial",
        staleness_a: FiniteNotNegative = 0.5,
        staleness_b: FiniteNotNegative = 4.0,
    ) -> None:
        self.mixing, self.rho = mixing, rho
        self.staleness = Staleness(staleness, staleness_a, staleness_b)

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z with the term ρ/2 ‖w − z‖²."""
        # Option I of the paper has ρ = 0; with it, the client solves h(x) = f_i(x) + ρ/2 ‖x − z‖² of the z it received.
        terms = [Proximal(self.rho, server.z)] if self.rho else []
        engine.solve(cohort, start=server.model, terms=terms)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the step towards each model that arrives."""
        return [MixedModels(self.mixing, self.staleness)]
