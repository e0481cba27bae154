"""Loopless local gradient descent (Hanzely & Richtárik 2020): L2GD, L2SGD, L2SGD2, L2SGD+, L2SGD++."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import Count, NotNegative, OpenFraction, Positive
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine, LooplessSteps
from fedbc_lightning.server import MeanMessage, ServerCallback, WeightedAverage
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class Coin(ServerCallback):
    """Throws the coin that shows 1 with probability p; all clients see the same throws.

    A round begins with the 1s after the last exchange and ends with the 0s before the next one. The lengths of both
    runs are drawn at once, from geometric distributions.

    Args:
        probability: Probability p in (0, 1) of a 1.
    """

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def num_zeros(self, server: ServerState) -> int:
        """Return the number of local steps in this round."""
        # A run of 0s between two 1s is geometric: one draw in place of a coin for each step.
        return int(server.rng("coin").geometric(self.probability))

    def num_ones(self, server: ServerState) -> int:
        """Return the number of aggregation steps that follow the exchange of the round before."""
        if server.round == 1:
            return 0  # all x_i are equal to x̄, so aggregation steps would change nothing
        # The 1s belong to the round before, whose coin is drawn again here: no state needs to be kept.
        rng = server.rng("coin", rounds_ago=1)
        rng.geometric(self.probability)  # skips the draw of that round's 0s, as num_zeros made it
        return int(rng.geometric(1 - self.probability))

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """Log the numbers of local steps and of aggregation steps."""
        server.log("coin/local_steps", self.num_zeros(server))
        server.log("coin/aggregation_steps", self.num_ones(server))


class L2GD(FederatedAlgorithm):
    """L2GD: personal models tied to their mean; a coin decides between a gradient step and a step to the mean.

    Problem:
        min_{x_1 ... x_N} (1/N) Σ f_i(x_i) + (λ/2N) Σ ‖x_i − x̄‖².

    Update::

        coin 0 (prob. 1 − p)    x_i ← x_i − α / (N(1 − p)) ∇f_i(x_i)
        coin 1 (prob. p)        x_i ← x_i − αλ / (Np) (x_i − x̄)

    State:
        Each client keeps x_i ``local_model`` (N, d + b); z is x̄.
    Communication:
        Where a 1 follows a 0, each client sends x_i and the server sends x̄; that exchange ends a round. A 1 that
        follows a 1 needs no exchange.
    Partial work:
        Partial work is refused, because every client takes part in every step.
    Local model:
        A client's own model is x_i at the exchange.
    Degenerate cases:
        λ = 0 is Local with full gradients.
    Departures:
        A round has one exchange: it consists of the 1s after the last exchange and of the 0s before the next one. So
        the iterates are those of Algorithm 1 at its exchanges, and ``max_rounds`` counts exchanges. The number of steps
        does not depend on the trainer's epochs. The steps are plain steps of size α; of the model's optimizer only the
        weight decay of torch's SGD is used. Buffers stay with the clients' models; the server has their mean.

    References:
        Hanzely & Richtárik 2020, "Federated Learning of a Mixture of Global and Local Models", Algorithm 1.

    Args:
        penalty: Strength λ ≥ 0 of the pull to the mean.
        probability: Probability p in (0, 1) of a 1; p* = λ / (L + λ) needs the fewest exchanges.
        lr: Step size α ≤ N / (2 max{L / (1 − p), λ / p}), where L is the smoothness of the f_i.

    Raises:
        ConfigurationError: A value is out of range, or ``trainer.clients_per_round`` is less than all clients.
    """

    has_local_model = True
    needs_all_clients = True
    partial_work = "refused"
    scalars_up = 0
    sends_update = False
    is_stochastic = False
    has_coupling_table = False
    has_gradient_table = False
    num_sampled: int | None = None

    def __init__(self, penalty: NotNegative, probability: OpenFraction, lr: Positive) -> None:
        self.penalty, self.lr = penalty, lr
        self.coin = Coin(probability)

    def check(self, engine: Engine) -> None:
        """Check the settings, and log that the coin decides the number of local steps.

        Raises:
            ConfigurationError: ``num_sampled`` is above N, or the trainer or the model asks for other than plain steps.
        """
        name = type(self).__name__
        num_clients = len(engine.datamodule.training_clients)
        if self.num_sampled is not None and self.num_sampled > num_clients:
            raise ConfigurationError(
                f"algorithm.num_sampled: got {self.num_sampled} of {num_clients} clients; give at most {num_clients}."
            )
        engine.check_solver(name, LooplessSteps)
        rank_zero_info(
            f"{name} throws a coin for its local steps, {1 / self.coin.probability:.1f} per round on average: "
            "trainer.local_epochs and local_steps are not used."
        )

    def num_steps(self, server: ServerState, asked: int) -> int:
        """Return the number of local steps that the coin shows, whatever the trainer asks for."""
        return self.coin.num_zeros(server)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare x_i and, if the variant has them, Ψ_i and J_i."""
        state.client_model("local_model")
        if self.has_coupling_table:
            state.client_vector("coupling_table")
        if self.has_gradient_table:
            state.client_table("gradient_table")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Take the aggregation steps since the last exchange, then the local steps, and stage x_i, Ψ_i and J_i."""
        p, num_parameters = self.coin.probability, server.z.numel()
        # J_i holds the last gradient of every component f_ij; its mean is what control variates subtract.
        table = self._table(engine, cohort) if self.has_gradient_table else None
        x, coupling = self._aggregate(cohort, server, 0.0 if table is None else table.mean(dim=1))
        solver = LooplessSteps(
            self.coin.num_zeros(server), self.lr, p, engine.datamodule.training_clients,
            coupling if self.has_coupling_table else 0.0, self.is_stochastic, table, self.num_sampled,
        )  # fmt: skip
        start = torch.cat([x, cohort["local_model"][:, num_parameters:]], dim=1)
        engine.solve(cohort, start, solver=solver)
        cohort.stage("local_model", cohort.model)
        if self.has_coupling_table:
            cohort.stage("coupling_table", coupling)
        if table is not None:
            cohort.stage("gradient_table", table)
            cohort.messages["gradient_mean"] = table.mean(dim=1)

    def _aggregate(self, cohort: Cohort, server: ServerState, gradient_mean: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return x_i and Ψ_i, (K, d) each, after the run of 1s.

        A client knows x̄ from the exchange. In these steps the pulls to x̄ and the Ψ_i cancel in the mean, so x̄ moves by
        mean(J̄) only, which the server sends; therefore no further exchange is needed.
        """
        # α of the paper multiplies the gradient of the mean over N clients, so each client's step has α / N.
        p, alpha, center = self.coin.probability, self.lr / server.num_clients, server.z
        x = cohort["local_model"][:, : center.numel()]
        coupling = cohort["coupling_table"] if self.has_coupling_table else torch.zeros_like(x)
        for _ in range(self.coin.num_ones(server)):
            # ∇ψ_i(x) = λ (x_i − x̄); x̄ itself stays in all aggregation steps but for the common drift below.
            pull = self.penalty * (x - center)
            correction = (1 / p - 1) * coupling if self.has_coupling_table else 0.0
            x = x - alpha * (pull / p - correction + gradient_mean)
            coupling = pull
            if self.has_gradient_table:
                # Every x_i moves by −α Ĵ_i; the mean of these is what x̄ moves by, and clients know it from the server.
                center = center - alpha * server["gradient_mean"]
        return x, coupling

    def _table(self, engine: Engine, cohort: Cohort) -> Tensor:
        """Return a copy of J_i, (K, m, d), which is zero before the first round."""
        (client,) = cohort.ids
        if cohort["gradient_table"].shape[1]:
            return cohort["gradient_table"].clone()
        num_components = len(engine.component_shares(client))
        return cohort["coupling_table"].new_zeros(1, num_components, cohort["coupling_table"].shape[1])

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean x̄, the mean of the J̄_i if the variant has them, and the coin."""
        of_tables = [MeanMessage("gradient_mean")] if self.has_gradient_table else []
        return [WeightedAverage(by="uniform"), *of_tables, self.coin]


class L2SGD(L2GD):
    """L2SGD: L2GD with the gradient of one component (one batch) in place of the full gradient.

    Problem:
        min_{x_1 ... x_N} (1/N) Σ f_i(x_i) + (λ/2N) Σ ‖x_i − x̄‖², where f_i is the mean of components f_ij.

    Update::

        coin 0    x_i ← x_i − α / (N(1 − p)) ∇f_ij(x_i),  j drawn
        coin 1    x_i ← x_i − αλ / (Np) (x_i − x̄)

    State:
        Each client keeps x_i ``local_model`` (N, d + b).
    Communication:
        Where a 1 follows a 0, each client sends x_i and the server sends x̄; that exchange ends a round.
    Partial work:
        Partial work is refused, because every client takes part in every step.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        With one component per client it is L2GD.
    Departures:
        The components of a client are its training data in its own order, cut into batches of ``data.batch_size`` (1
        gives samples, as in the paper). The method stalls at a noise floor that falls with α. The departures of L2GD
        apply, too.

    References:
        Hanzely & Richtárik 2020, appendix: local SGD without variance reduction.

    Args:
        penalty: Strength λ ≥ 0 of the pull to the mean.
        probability: Probability p in (0, 1) of a 1.
        lr: Step size α.

    Raises:
        ConfigurationError: A value is out of range, or ``trainer.clients_per_round`` is less than all clients.
    """

    is_stochastic = True


class L2SGD2(L2SGD):
    """L2SGD2: L2SGD with the variance of the coin reduced, but not that of the components.

    Problem:
        min_{x_1 ... x_N} (1/N) Σ f_i(x_i) + (λ/2N) Σ ‖x_i − x̄‖², where f_i is the mean of components f_ij.

    Update::

        coin 0    x_i ← x_i − α (∇f_ij(x_i) / (N(1 − p)) + Ψ_i / N)
        coin 1    x_i ← x_i − α (λ (x_i − x̄) / (Np) − (1/p − 1) Ψ_i / N);    Ψ_i ← λ (x_i − x̄)  (x_i before the step)

    State:
        Each client keeps x_i ``local_model`` (N, d + b) and Ψ_i ``coupling_table`` (N, d).
    Communication:
        Where a 1 follows a 0, each client sends x_i and the server sends x̄; that exchange ends a round.
    Partial work:
        Partial work is refused, because every client takes part in every step.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        No choice of the arguments gives another method.
    Departures:
        The departures of L2SGD apply; this method stalls, too.

    References:
        Hanzely & Richtárik 2020, appendix: shifted local SGD.

    Args:
        penalty: Strength λ ≥ 0 of the pull to the mean.
        probability: Probability p in (0, 1) of a 1.
        lr: Step size α.

    Raises:
        ConfigurationError: A value is out of range, or ``trainer.clients_per_round`` is less than all clients.
    """

    has_coupling_table = True


class L2SGDPlus(L2SGD2):
    """L2SGD+: L2SGD with all variance reduced, so that it converges linearly to the exact minimiser.

    Problem:
        min_{x_1 ... x_N} (1/N) Σ f_i(x_i) + (λ/2N) Σ ‖x_i − x̄‖², where f_i is the mean of components f_ij.

    Update::

        coin 0    x_i ← x_i − α ((∇f_ij(x_i) − J_ij) / (N(1 − p)) + J̄_i / N + Ψ_i / N);    J_ij ← ∇f_ij(x_i)
        coin 1    x_i ← x_i − α (λ (x_i − x̄) / (Np) − (1/p − 1) Ψ_i / N + J̄_i / N);    Ψ_i ← λ (x_i − x̄)

    State:
        Each client keeps x_i ``local_model`` (N, d + b), Ψ_i ``coupling_table`` (N, d) and J_i ``gradient_table``
        (m_i, d). The server keeps the mean of the J̄_i ``gradient_mean`` (d,). All tables start at 0.
    Communication:
        Once per run of 1s, each client sends x_i and J̄_i, and the server sends x̄ and mean(J̄); with both, a client
        computes x̄ in the whole run.
    Partial work:
        Partial work is refused, because every client takes part in every step.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        No choice of the arguments gives another method.
    Departures:
        The departures of L2SGD apply, except that this method does not stall.

    References:
        Hanzely & Richtárik 2020, Algorithm 2.

    Args:
        penalty: Strength λ ≥ 0 of the pull to the mean.
        probability: Probability p in (0, 1) of a 1; the best is p* = (4λ + μ) / (4λ + 4L̃ + (m + 1) μ), where L̃ is the
            smoothness of the f_ij.
        lr: Step size α ≤ N min{(1 − p) / (4L̃ + μm), p / (4λ + μ)}.

    Raises:
        ConfigurationError: A value is out of range, or ``trainer.clients_per_round`` is less than all clients.
    """

    has_gradient_table = True


class L2SGDPlusPlus(L2SGDPlus):
    """L2SGD++: L2SGD+ in which only some clients evaluate a gradient in each local step.

    Problem:
        min_{x_1 ... x_N} (1/N) Σ f_i(x_i) + (λ/2N) Σ ‖x_i − x̄‖², where f_i is the mean of components f_ij.

    Update::

        coin 0    every client  x_i ← x_i − α (J̄_i + Ψ_i) / N;  the S sampled ones besides
                  x_i ← x_i − α (N/S)(∇f_ij(x_i) − J_ij) / (N(1 − p)),    J_ij ← ∇f_ij(x_i)
        coin 1    every client  x_i ← x_i − α (λ (x_i − x̄) / (Np) − (1/p − 1) Ψ_i / N + J̄_i / N);  Ψ_i ← λ (x_i − x̄)

    State:
        Each client keeps x_i ``local_model`` (N, d + b), Ψ_i ``coupling_table`` (N, d) and J_i ``gradient_table``
        (m_i, d). The server keeps the mean of the J̄_i ``gradient_mean`` (d,). All tables start at 0.
    Communication:
        Once per run of 1s, each client sends x_i and J̄_i, and the server sends x̄ and mean(J̄).
    Partial work:
        Partial work is refused, because every client takes part in every step.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        S = N is L2SGD+.
    Departures:
        The departures of L2SGD+ apply. A client that no local step of a round samples has no training loss in that
        round.

    References:
        Hanzely & Richtárik 2020, appendix: L2SGD++.

    Args:
        penalty: Strength λ ≥ 0 of the pull to the mean.
        probability: Probability p in (0, 1) of a 1.
        lr: Step size α.
        num_sampled: Number S of clients that evaluate a gradient in one local step.

    Raises:
        ConfigurationError: A value is out of range, or ``trainer.clients_per_round`` is less than all clients.
    """

    def __init__(self, penalty: float, probability: float, lr: float, num_sampled: Count) -> None:
        super().__init__(penalty, probability, lr)
        self.num_sampled = num_sampled
