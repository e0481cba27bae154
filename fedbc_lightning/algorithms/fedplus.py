"""Fed+ (Kundu et al.): FedAvg+, FedGeoMed+, FedCoMed+, and Fed+ with any penalty."""

from __future__ import annotations

from typing import Any, Literal

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import NotNegative, UnitInterval
from fedbc_lightning.local import AbsoluteNorm, Engine, MixWith, Norm, Penalty, SquaredNorm
from fedbc_lightning.server import ServerCallback, SmoothedAverage
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class FedPlus(FederatedAlgorithm):
    """Fed+: clients need not agree on one model; a penalty says in which norm and how far each may be from z.

    Problem:
        min_{z, x_i, θ_i} Σ f_i(x_i) + σ/2 ‖x_i − z − θ_i‖² + Ψ(θ_i).

    Update::

        client    θ_i = prox_{Ψ/σ}(x_i − z),  from w = (1 − l) x_i + l z;
                  each step of the user's optimizer  w ← κ (w − η g_i(w)) + (1 − κ)(z + θ_i),   κ = 1 / (1 + ησ)
        server    from z = mean w_i until it rests:  z ← z + mean(w_i − z − θ_i),   θ_i = prox_{Ψ/σ}(w_i − z)

    State:
        Each client keeps x_i ``local_model`` (N, d + b), its last w.
    Communication:
        The server sends z; each client sends w_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        l = 1 and θ ≡ 0 (δ = ∞) with the server's mean is FedProx(σ) with uniform weights and step κη. l = 1 and σ = 0
        with the mean is FedAvg with uniform weights. l = 0 and σ = 0 gives the x_i of Local.
    Departures:
        The mixing comes after the step of whatever optimizer the model has, and κ takes the learning rate of that step.
        The server's mean is over S_t (``over: sampled``), or over all N stored x_i (``over: all``) as in Algorithm 1,
        line 12. The sweeps are accelerated (``server/smoothed_center.py``) and end at a minimiser; if the minimisers of
        a coordinate form an interval (the median of an even number), it may be another point than the paper's.

    References:
        Kundu et al., "Robustness and Personalization in Federated Learning: A Unified Approach via Regularization",
        Algorithm 1.

    Args:
        sigma: Strength σ ≥ 0 of the pull; the paper chooses it so that κ lies in [0.9, 0.999].
        penalty: Penalty Ψ: ``SquaredNorm``, ``Norm``, ``AbsoluteNorm``, or ``Layerwise``, which takes another penalty
            for each pattern of parameter names.
        mixing: Weight l in [0, 1] of z at the start of local training, where 1 − l is the weight of x_i.
        over: Clients whose centre the server takes: ``"sampled"`` for the round's clients, ``"all"`` for all N.

    Raises:
        ConfigurationError: A value is out of range, or a pattern matches no parameter.
    """

    has_local_model = True
    scalars_up = 0
    sends_update = False

    def __init__(
        self,
        sigma: NotNegative,
        penalty: Penalty,
        mixing: UnitInterval = 0.0,
        over: Literal["sampled", "all"] = "sampled",
    ) -> None:
        self.sigma, self.mixing = sigma, mixing
        self.average = SmoothedAverage(penalty, over)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare x_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train with mixing towards z + θ_i, and stage the result as x_i."""
        away = cohort["local_model"][:, : server.z.numel()] - server.z
        # z + θ_i with θ_i = prox_{Ψ/σ}(x_i − z): it is worked out once, of the x_i of the last round, and stays as it
        # is during the local steps.
        target = server.z + self.average.bound.prox(away)
        # l = 1 starts from z as FedAvg does, l = 0 from the client's own model; buffers are mixed like parameters.
        own, shared = cohort["local_model"], server.model.expand(len(cohort), -1)
        start = shared if self.mixing == 1 else own
        if 0 < self.mixing < 1:  # 0 times the -inf of a buffer is no number
            start = (1 - self.mixing) * own + self.mixing * shared
        # The pull towards the centre is a step of its own behind each optimizer step, as in Algorithm 1, not a term of
        # the gradient: momentum does not see it.
        engine.solve(cohort, start, after_step=MixWith(self.sigma, target) if self.sigma else None)
        cohort.stage("local_model", cohort.model)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the part that sets z to the smoothed centre."""
        return [self.average]


class FedAvgPlus(FedPlus):
    """FedAvg+: Fed+ whose clients keep a fraction of their difference from z; the server takes the mean.

    Problem:
        min_{z, x_i, θ_i} Σ f_i(x_i) + σ/2 ‖x_i − z − θ_i‖² + (σδ/2) ‖θ_i‖².

    Update::

        client    θ_i = (x_i − z) / (1 + δ),  from w = (1 − l) x_i + l z;
                  each step of the user's optimizer  w ← κ (w − η g_i(w)) + (1 − κ)(z + θ_i),   κ = 1 / (1 + ησ)
        server    z ← mean w_i

    State:
        Each client keeps x_i ``local_model`` (N, d + b).
    Communication:
        The server sends z; each client sends w_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        l = 1 and δ = ∞ is FedProx(σ) with uniform weights and step κη. l = 1 and σ = 0 is FedAvg with uniform weights.
        l = 0 and σ = 0 is Local.
    Departures:
        The mixing comes after the step of whatever optimizer the model has, and κ takes the learning rate of that step.

    References:
        Kundu et al., Fed+, section 4.

    Args:
        sigma: Strength σ ≥ 0 of the pull; the paper chooses it so that κ = 1 / (1 + ησ) lies in [0.9, 0.999].
        delta: Strength δ ≥ 0 of the penalty; the paper takes 0.001.
        **fedplus: The arguments ``mixing`` and ``over`` of Fed+.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, sigma: float, delta: float = 0.001, **fedplus: Any) -> None:
        super().__init__(sigma, SquaredNorm(delta), **fedplus)


class FedGeoMedPlus(FedPlus):
    """FedGeoMed+: Fed+ whose server takes a δ-smoothed geometric median.

    Problem:
        min_{z, x_i, θ_i} Σ f_i(x_i) + σ/2 ‖x_i − z − θ_i‖² + σδ ‖θ_i‖.

    Update::

        client    θ_i = max(0, 1 − δ / ‖x_i − z‖)(x_i − z), 0 at 0,  from w = (1 − l) x_i + l z;
                  each step of the user's optimizer  w ← κ (w − η g_i(w)) + (1 − κ)(z + θ_i),   κ = 1 / (1 + ησ)
        server    from z = mean w_i until it rests:  z ← z + mean(w_i − z − θ_i),   θ_i = the same of w_i − z

    State:
        Each client keeps x_i ``local_model`` (N, d + b).
    Communication:
        The server sends z; each client sends w_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        With δ = ∞, θ = 0 and the server takes the mean, as FedAvg+ with δ = ∞.
    Departures:
        The mixing comes after the step of whatever optimizer the model has, and κ takes the learning rate of that step.
        The sweeps are accelerated (``server/smoothed_center.py``) and end at a minimiser; if the minimisers of a
        coordinate form an interval (the median of an even number), it may be another point than the paper's.

    References:
        Kundu et al., Fed+, section 4.

    Args:
        sigma: Strength σ ≥ 0 of the pull; the paper chooses it so that κ = 1 / (1 + ησ) lies in [0.9, 0.999].
        delta: Length δ ≥ 0 of the penalty; the paper takes 0.1.
        **fedplus: The arguments ``mixing`` and ``over`` of Fed+.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, sigma: float, delta: float = 0.1, **fedplus: Any) -> None:
        super().__init__(sigma, Norm(delta), **fedplus)


class FedCoMedPlus(FedPlus):
    """FedCoMed+: Fed+ whose server takes a δ-smoothed median of each coordinate.

    Problem:
        min_{z, x_i, θ_i} Σ f_i(x_i) + σ/2 ‖x_i − z − θ_i‖² + σδ ‖θ_i‖₁.

    Update::

        client    θ_i = sign(v) max(|v| − δ, 0) with v = x_i − z, by coordinate,  from w = (1 − l) x_i + l z;
                  each step of the user's optimizer  w ← κ (w − η g_i(w)) + (1 − κ)(z + θ_i),   κ = 1 / (1 + ησ)
        server    from z = mean w_i until it rests:  z ← z + mean(w_i − z − θ_i),   θ_i = the same of w_i − z

    State:
        Each client keeps x_i ``local_model`` (N, d + b).
    Communication:
        The server sends z; each client sends w_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        With δ = ∞, θ = 0 and the server takes the mean, as FedAvg+ with δ = ∞.
    Departures:
        The max{0, ·} printed in the paper drops negative coordinates of θ; here they are kept. The mixing comes after
        the step of whatever optimizer the model has, and κ takes the learning rate of that step. The sweeps are
        accelerated (``server/smoothed_center.py``) and end at a minimiser; if the minimisers of a coordinate form an
        interval (the median of an even number), it may be another point than the paper's.

    References:
        Kundu et al., Fed+, section 4.

    Args:
        sigma: Strength σ ≥ 0 of the pull; the paper chooses it so that κ = 1 / (1 + ησ) lies in [0.9, 0.999].
        delta: Length δ ≥ 0 of the penalty; the paper takes 0.1.
        **fedplus: The arguments ``mixing`` and ``over`` of Fed+.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, sigma: float, delta: float = 0.1, **fedplus: Any) -> None:
        super().__init__(sigma, AbsoluteNorm(delta), **fedplus)
