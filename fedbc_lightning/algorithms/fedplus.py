"""Fed+ (Kundu et al.): FedAvg+, FedGeoMed+, FedCoMed+, and a rule of one's own per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import check_at_least, check_choice, check_share
from fedbc_lightning.local import AbsoluteNorm, MixWith, Norm, Penalty, SquaredNorm
from fedbc_lightning.server import ServerCallback, SmoothedAverage
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class FedPlus(FederatedAlgorithm):
    """Fed+: clients need not agree on one model; a penalty says how, and how far, each may stay away from z.

    Problem:
        min_{z, x_i, θ_i} Σ f_i(x_i) + σ/2 ‖x_i − z − θ_i‖² + Ψ(θ_i).

    Update::

        client    θ_i = prox_{Ψ/σ}(x_i − z),  from w = (1 − l) x_i + l z;
                  each step of the user's optimizer  w ← κ (w − η g_i(w)) + (1 − κ)(z + θ_i),   κ = 1 / (1 + ησ)
        server    from z = mean w_i until it rests:  z ← z + mean(w_i − z − θ_i),   θ_i = prox_{Ψ/σ}(w_i − z)

    State:
        x_i ``local_model`` (N, d + b), the client's last w.
    Communication:
        z down; w_i up.
    Partial work:
        Used.
    Local model:
        x_i.
    Degenerate cases:
        l = 1, θ ≡ 0 (δ = ∞), server mean: FedProx(σ) with uniform weights and step κη. l = 1, σ = 0, mean: FedAvg
        with uniform weights. l = 0, σ = 0: the x_i of Local.
    Departures:
        The mixing follows the step of whatever optimizer the model has; κ from the step's own learning rate. The
        server's mean is over S_t (``over: sampled``), or over all N stored x_i as Algorithm 1 line 12 has it. The
        sweeps are sped up (``server/smoothed_center.py``) and end at a minimiser; where that is an interval of a
        coordinate (a median of an even number) it need not be the paper's point of it.

    References:
        Kundu et al., "Robustness and Personalization in Federated Learning: A Unified Approach via Regularization",
        Algorithm 1.

    Args:
        sigma: σ ≥ 0; the paper chooses it so that κ lies in [0.9, 0.999].
        penalty: Ψ: ``SquaredNorm``, ``Norm``, ``AbsoluteNorm``, or ``Layerwise``: another for each pattern of
            parameter names.
        mixing: l in [0, 1]: where local training starts, from x_i (0) to z (1).
        over: ``"sampled"``: the server's centre is that of the round's clients. ``"all"``: of all N.

    Raises:
        ConfigurationError: A value outside its range; a pattern that matches no parameter.
    """

    has_local_model = True
    scalars_up = 0

    def __init__(
        self, sigma: float, penalty: Penalty, mixing: float = 0.0, over: Literal["sampled", "all"] = "sampled"
    ) -> None:
        check_at_least("algorithm.sigma", sigma, 0)
        check_share("algorithm.mixing", mixing, closed=True)
        check_choice("algorithm.over", over, ("sampled", "all"))
        self.sigma, self.mixing = sigma, mixing
        self.average = SmoothedAverage(penalty, over)

    def declare_state(self, state: StateDeclaration) -> None:
        """x_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Local training with mixing towards z + θ_i."""
        away = cohort.local_model[:, : server.z.numel()] - server.z
        target = server.z + self.average.bound.prox(away)
        start = (1 - self.mixing) * cohort.local_model + self.mixing * server.model
        engine.solve(cohort, start, after_step=MixWith(self.sigma, target) if self.sigma else None)
        cohort.stage("local_model", cohort.model)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """The smoothed centre."""
        return [self.average]


class FedAvgPlus(FedPlus):
    """FedAvg+: Fed+ whose clients keep a share of their way from z; the server takes the mean.

    Problem:
        min_{z, x_i, θ_i} Σ f_i(x_i) + σ/2 ‖x_i − z − θ_i‖² + (σδ/2) ‖θ_i‖².

    Update::

        client    θ_i = (x_i − z) / (1 + δ),  from w = (1 − l) x_i + l z;
                  each step of the user's optimizer  w ← κ (w − η g_i(w)) + (1 − κ)(z + θ_i),   κ = 1 / (1 + ησ)
        server    z ← mean w_i

    State:
        x_i ``local_model`` (N, d + b).
    Communication:
        z down; w_i up.
    Partial work:
        Used.
    Local model:
        x_i.
    Degenerate cases:
        l = 1, δ = ∞: FedProx(σ) with uniform weights and step κη. l = 1, σ = 0: FedAvg with uniform weights. l = 0,
        σ = 0: Local.
    Departures:
        The mixing follows the step of whatever optimizer the model has; κ from the step's own learning rate.

    References:
        Kundu et al., Fed+, section 4.

    Args:
        sigma: σ; the paper chooses it so that κ = 1 / (1 + ησ) lies in [0.9, 0.999].
        delta: δ; 0.001 in the paper.
        mixing: l in [0, 1]: where local training starts, from x_i (0) to z (1).
        over: ``"sampled"``: the mean of the round's clients. ``"all"``: of all N.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def __init__(
        self, sigma: float, delta: float = 0.001, mixing: float = 0.0, over: Literal["sampled", "all"] = "sampled"
    ) -> None:
        super().__init__(sigma, SquaredNorm(delta), mixing, over)


class FedGeoMedPlus(FedPlus):
    """FedGeoMed+: Fed+ whose server takes a δ-smoothed geometric median.

    Problem:
        min_{z, x_i, θ_i} Σ f_i(x_i) + σ/2 ‖x_i − z − θ_i‖² + σδ ‖θ_i‖.

    Update::

        client    θ_i = max(0, 1 − δ / ‖x_i − z‖)(x_i − z), 0 at 0,  from w = (1 − l) x_i + l z;
                  each step of the user's optimizer  w ← κ (w − η g_i(w)) + (1 − κ)(z + θ_i),   κ = 1 / (1 + ησ)
        server    from z = mean w_i until it rests:  z ← z + mean(w_i − z − θ_i),   θ_i = the same of w_i − z

    State:
        x_i ``local_model`` (N, d + b).
    Communication:
        z down; w_i up.
    Partial work:
        Used.
    Local model:
        x_i.
    Degenerate cases:
        δ = ∞: θ = 0 and the mean, as FedAvg+ with δ = ∞.
    Departures:
        The mixing follows the step of whatever optimizer the model has; κ from the step's own learning rate. The
        sweeps are sped up (``server/smoothed_center.py``) and end at a minimiser; where that is an interval of a
        coordinate (a median of an even number) it need not be the paper's point of it.

    References:
        Kundu et al., Fed+, section 4.

    Args:
        sigma: σ; the paper chooses it so that κ = 1 / (1 + ησ) lies in [0.9, 0.999].
        delta: δ; 0.1 in the paper.
        mixing: l in [0, 1]: where local training starts, from x_i (0) to z (1).
        over: ``"sampled"``: the median of the round's clients. ``"all"``: of all N.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def __init__(
        self, sigma: float, delta: float = 0.1, mixing: float = 0.0, over: Literal["sampled", "all"] = "sampled"
    ) -> None:
        super().__init__(sigma, Norm(delta), mixing, over)


class FedCoMedPlus(FedPlus):
    """FedCoMed+: Fed+ whose server takes a δ-smoothed median of each coordinate.

    Problem:
        min_{z, x_i, θ_i} Σ f_i(x_i) + σ/2 ‖x_i − z − θ_i‖² + σδ ‖θ_i‖₁.

    Update::

        client    θ_i = sign(v) max(|v| − δ, 0) with v = x_i − z, by coordinate,  from w = (1 − l) x_i + l z;
                  each step of the user's optimizer  w ← κ (w − η g_i(w)) + (1 − κ)(z + θ_i),   κ = 1 / (1 + ησ)
        server    from z = mean w_i until it rests:  z ← z + mean(w_i − z − θ_i),   θ_i = the same of w_i − z

    State:
        x_i ``local_model`` (N, d + b).
    Communication:
        z down; w_i up.
    Partial work:
        Used.
    Local model:
        x_i.
    Degenerate cases:
        δ = ∞: θ = 0 and the mean, as FedAvg+ with δ = ∞.
    Departures:
        The paper's printed max{0, ·} drops the negative side of θ. The mixing follows the step of whatever optimizer
        the model has. The sweeps are sped up (``server/smoothed_center.py``) and end at a minimiser; where that is an
        interval of a coordinate (a median of an even number) it need not be the paper's point of it.

    References:
        Kundu et al., Fed+, section 4.

    Args:
        sigma: σ; the paper chooses it so that κ = 1 / (1 + ησ) lies in [0.9, 0.999].
        delta: δ; 0.1 in the paper.
        mixing: l in [0, 1]: where local training starts, from x_i (0) to z (1).
        over: ``"sampled"``: the median of the round's clients. ``"all"``: of all N.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def __init__(
        self, sigma: float, delta: float = 0.1, mixing: float = 0.0, over: Literal["sampled", "all"] = "sampled"
    ) -> None:
        super().__init__(sigma, AbsoluteNorm(delta), mixing, over)
