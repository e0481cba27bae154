"""The primal-dual methods FedADMM (Wang et al. 2022) and FedPD (Zhang et al. 2021)."""

from __future__ import annotations

from torch import Tensor

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import Fraction, Positive
from fedbc_lightning.local import Engine, Linear, Proximal, Term
from fedbc_lightning.server import AugmentedMean, CenterConsensus, ServerCallback, WeightedAverage
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class _PrimalDual(FederatedAlgorithm):
    """Base class with the client's half of FedADMM and FedPD: minimise the augmented Lagrangian, update y_i."""

    has_local_model = True
    scalars_up = 0

    def __init__(self, rho: Positive = 0.01) -> None:
        self.rho = rho

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare x_i and y_i."""
        state.client_model("local_model")
        state.client_vector("multiplier")

    def minimise(self, engine: Engine, cohort: Cohort, center: Tensor) -> Tensor:
        """Train from x_i with ⟨y_i, w⟩ + ρ/2 ‖w − center‖², stage x_i and y_i, and return the new y_i (K, d)."""
        # The gradient of the augmented Lagrangian in x: ∇f_i(x) + y_i + ρ (x − z).
        terms: list[Term] = [Linear(cohort["multiplier"]), Proximal(self.rho, center)]
        engine.solve(cohort, start=cohort["local_model"], terms=terms)
        # The dual step of ADMM: y_i ← y_i + ρ (x_i − z), with the x_i that was just found.
        multiplier = cohort["multiplier"] + self.rho * (cohort.w - center)
        cohort.stage("local_model", cohort.model)
        cohort.stage("multiplier", multiplier)
        return multiplier


class FedADMM(_PrimalDual):
    """FedADMM: the alternating direction method of multipliers, with only some clients in each round.

    Problem:
        min_{z, x_i} (1/N) Σ f_i(x_i)  subject to  x_i = z.

    Update::

        client    from w = x_i each step's gradient gets  y_i + ρ (w − z);    x_i = the last w
                  y_i ← y_i + ρ (x_i − z),    u_i = x_i + y_i / ρ
        server    z ← (1/N) Σ_N u_i   (a client never sampled counts with z⁰)

    State:
        Each client keeps x_i ``local_model`` (N, d + b) and y_i ``multiplier`` (N, d). The server keeps the mean of the
        u_i ``augmented_mean`` (d,) in float64.
    Communication:
        The server sends z; each client sends the change of u_i (y_i is never sent).
    Partial work:
        The partial work of stragglers is used, since the method allows inexact local minimisers.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        With all clients in every round it is FedPD without skips. Its fixed points are those of the mean loss.
    Departures:
        Buffers are the uniform mean over S_t.

    References:
        Wang et al. 2022, "FedADMM: A Federated Primal-Dual Algorithm Allowing Partial Participation", Algorithm 1.

    Args:
        rho: Penalty parameter ρ > 0. If local training stops far from its minimum, a small ρ amplifies y_i in
            u_i = x_i + y_i / ρ.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train around the centre z."""
        self.minimise(engine, cohort, server.z)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, of which the buffers are kept, and the mean of the u_i, which is z."""
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
        Each client keeps x_i ``local_model`` (N, d + b), y_i ``multiplier`` (N, d) and z_i ``center`` (N, d).
    Communication:
        In a round with an exchange, the server sends z and each client sends z_i; in other rounds nothing is sent.
    Partial work:
        Partial work is refused, because every client takes part in full.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        p = 0 is FedADMM with all clients.
    Departures:
        The server throws the coin once per round. The method finds an exact minimiser of the mean loss for p = 0 only.

    References:
        Zhang et al. 2021, "FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data", Algorithm 1.

    Args:
        rho: Penalty parameter ρ > 0 (the paper's 1/η).
        skip_probability: Probability p in [0, 1) that a round has no exchange.

    Raises:
        ConfigurationError: A value is out of range, or ``trainer.clients_per_round`` is less than all clients.
    """

    needs_all_clients = True
    partial_work = "refused"

    def __init__(self, rho: float = 0.01, skip_probability: Fraction = 0.0) -> None:
        super().__init__(rho)
        self.consensus = CenterConsensus(skip_probability)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare z_i in addition to x_i and y_i."""
        super().declare_state(state)
        state.client_vector("center", initial="z")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train around the centre z_i, and stage the new z_i."""
        multiplier = self.minimise(engine, cohort, cohort["center"])
        # z_i = x_i + y_i / ρ minimises the augmented Lagrangian in z for this client alone.
        cohort.stage("center", cohort.w + multiplier / self.rho)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the part that sets z to the mean of the centres in rounds with an exchange."""
        return [self.consensus]

    def num_exchanges(self, server: ServerState) -> int:
        """Return 0 if the exchange of this round is skipped, else 1."""
        # A skipped round costs no bytes; that it is skipped is a function of (seed, round), so plans count it, too.
        return 0 if self.consensus.is_skipped(server) else 1
