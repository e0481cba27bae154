"""The primal-dual methods FedADMM (Wang et al. 2022) and FedPD (Zhang et al. 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import check_at_least, check_share
from fedbc_lightning.local import Linear, Proximal, Term
from fedbc_lightning.server import AugmentedMean, CenterConsensus, ServerCallback, WeightedAverage
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class _PrimalDual(FederatedAlgorithm):
    """The client's half of both: the augmented Lagrangian around a centre, then the multiplier."""

    has_local_model = True
    scalars_up = 0

    def __init__(self, rho: float = 0.01) -> None:
        check_at_least("algorithm.rho", rho, 0, strict=True)
        self.rho = rho

    def declare_state(self, state: StateDeclaration) -> None:
        """x_i and y_i."""
        state.client_model("local_model")
        state.client_vector("multiplier")

    def minimise(self, engine: Engine, cohort: Cohort, center: Tensor) -> Tensor:
        """Train from x_i with ⟨y_i, w⟩ + ρ/2 ‖w − center‖²; stage x_i and y_i; the new y_i (K, d)."""
        terms: list[Term] = [Linear(cohort.multiplier), Proximal(self.rho, center)]
        engine.solve(cohort, start=cohort.local_model, terms=terms)
        multiplier = cohort.multiplier + self.rho * (cohort.w - center)
        cohort.stage("local_model", cohort.model)
        cohort.stage("multiplier", multiplier)
        return multiplier


class FedADMM(_PrimalDual):
    """FedADMM: the alternating direction method of multipliers, with part of the clients in each round.

    Problem:
        min_{z, x_i} (1/N) Σ f_i(x_i)  subject to  x_i = z.

    Update::

        client    from w = x_i each step's gradient gets  y_i + ρ (w − z);    x_i = the last w
                  y_i ← y_i + ρ (x_i − z),    u_i = x_i + y_i / ρ
        server    z ← (1/N) Σ_N u_i   (a client never sampled counts with z⁰)

    State:
        x_i ``local_model`` (N, d + b), y_i ``multiplier`` (N, d); the mean of the u_i ``augmented_mean`` (d,) in
        float64.
    Communication:
        z down; the change of u_i up (y_i never travels).
    Partial work:
        Used: the method allows inexact local minimisers.
    Local model:
        x_i.
    Degenerate cases:
        None that is another method; its fixed points are those of the mean loss. All clients: FedPD without skips.
    Departures:
        Buffers: uniform mean over S_t.

    References:
        Wang et al. 2022, "FedADMM: A Federated Primal-Dual Algorithm Allowing Partial Participation", Algorithm 1.

    Args:
        rho: ρ; where local training stops far from its minimum, a small one amplifies y_i in u_i = x_i + y_i / ρ.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Around z."""
        self.minimise(engine, cohort, server.z)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """The mean, for buffers, and the mean of the u_i."""
        return [WeightedAverage(by="uniform"), AugmentedMean(self.rho)]


class FedPD(_PrimalDual):
    """FedPD: ADMM in which rounds of communication are skipped at random.

    Problem:
        min_{z, x_i} (1/N) Σ f_i(x_i)  subject to  x_i = z.

    Update::

        client    from w = x_i each step's gradient gets  y_i + ρ (w − z_i);    x_i = the last w
                  y_i ← y_i + ρ (x_i − z_i),    z_i ← x_i + y_i / ρ
        server    with probability 1 − p:  z = z_i ← mean_j z_j;   with probability p: nothing is sent

    State:
        x_i ``local_model`` (N, d + b), y_i ``multiplier`` (N, d), z_i ``center`` (N, d).
    Communication:
        z down and z_i up in rounds with an exchange, nothing in the others.
    Partial work:
        Refused: every client takes part in full.
    Local model:
        x_i.
    Degenerate cases:
        p = 0 is FedADMM with all clients.
    Departures:
        The coin is thrown by the server once per round. An exact minimiser of the mean loss only for p = 0.

    References:
        Zhang et al. 2021, "FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data", Algorithm 1.

    Args:
        rho: ρ (the paper's 1/η).
        skip_probability: p, the probability that a round has no exchange.

    Raises:
        ConfigurationError: A value outside its range; ``trainer.clients_per_round`` below all.
    """

    needs_all_clients = True
    partial_work = "refused"

    def __init__(self, rho: float = 0.01, skip_probability: float = 0.0) -> None:
        super().__init__(rho)
        check_share("algorithm.skip_probability", skip_probability)
        self.consensus = CenterConsensus(skip_probability)

    def declare_state(self, state: StateDeclaration) -> None:
        """z_i too."""
        super().declare_state(state)
        state.client_vector("center", initial="z")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Around z_i, which then moves."""
        multiplier = self.minimise(engine, cohort, cohort.center)
        cohort.stage("center", cohort.w + multiplier / self.rho)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """The mean of the centres, or nothing."""
        return [self.consensus]

    def num_exchanges(self, server: ServerState) -> int:
        """None in a skipped round."""
        return 0 if self.consensus.is_skipped(server) else 1
