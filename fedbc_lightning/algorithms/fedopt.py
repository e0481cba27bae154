"""Server optimizers on FedAvg's pseudo-gradient (Reddi et al. 2021): FedAvgM, FedAdagrad, FedAdam, FedYogi."""

from __future__ import annotations

from typing import Any, Literal

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import Fraction, Positive
from fedbc_lightning.local import Engine
from fedbc_lightning.server import ServerAdaptive, ServerCallback, ServerMomentum, ServerOptimizer


class _FedOpt(FedAvg):
    """Base class of FedAvg with a server optimizer after the mean."""

    partial_work = "used"
    server_optimizer: ServerOptimizer

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, and then the server's step."""
        # The mean comes first: the optimizer takes z − mean, which is −Δ_t of the paper, for a gradient.
        return [*super().server_callbacks(engine), self.server_optimizer]


class FedAvgM(_FedOpt):
    """FedAvgM: FedAvg with momentum at the server.

    Problem:
        min_w Σ (n_i / n) f_i(w), with less oscillation from round to round.

    Update::

        client    w_i ← E epochs of the user's optimizer from z
        server    m ← β m − Δ̄,    z ← z + η_s m,    Δ̄ = Σ p_i (z − w_i)

    State:
        The server keeps m ``momentum`` (d,), which starts at 0.
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        β = 0, η_s = 1 is FedAvg.
    Departures:
        No departure from the paper is known.

    References:
        Reddi et al. 2021, "Adaptive Federated Optimization"; Hsu et al. 2019.

    Args:
        server_lr: Server learning rate η_s. The papers' grid is 1e-3 to 10 in steps of 10^0.5.
        momentum: Momentum β.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, server_lr: Positive = 1.0, momentum: Fraction = 0.9, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.server_optimizer = ServerMomentum(server_lr, momentum)


class FedAdagrad(_FedOpt):
    """FedAdagrad: FedAvg with Adagrad at the server.

    Problem:
        min_w Σ (n_i / n) f_i(w); every parameter has its own step size.

    Update::

        client    w_i ← E epochs of the user's optimizer from z
        server    m ← β₁ m − (1 − β₁) Δ̄,    v ← v + Δ̄²,    z ← z + η_s m / (√v + τ),    Δ̄ = Σ p_i (z − w_i)

    State:
        The server keeps m ``momentum`` (d,), which starts at 0, and v ``second_moment`` (d,), which starts at τ².
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        No choice of the arguments gives another method.
    Departures:
        No bias correction, as in the paper.

    References:
        Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

    Args:
        server_lr: Server learning rate η_s. The paper's grid is 1e-3 to 10 in steps of 10^0.5.
        beta1: Decay rate β₁ of m; the paper takes 0.
        tau: Degree of adaptivity τ. The paper's grid is 1e-5 to 1e-1.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, server_lr: Positive = 0.1, beta1: Fraction = 0.0, tau: Positive = 1e-3, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.server_optimizer = ServerAdaptive("adagrad", server_lr, beta1, tau=tau)


class FedAdam(_FedOpt):
    """FedAdam: FedAvg with Adam at the server.

    Problem:
        min_w Σ (n_i / n) f_i(w); every parameter has its own step size, in which old rounds are forgotten.

    Update::

        client    w_i ← E epochs of the user's optimizer from z
        server    m ← β₁ m − (1 − β₁) Δ̄,    v ← β₂ v + (1 − β₂) Δ̄²,    z ← z + η_s m / (√v + τ)

    State:
        The server keeps m ``momentum`` (d,), which starts at 0, and v ``second_moment`` (d,), which starts at τ².
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        No choice of the arguments gives another method.
    Departures:
        No bias correction, as in the paper.

    References:
        Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

    Args:
        server_lr: Server learning rate η_s. The paper's grid is 1e-3 to 10 in steps of 10^0.5.
        beta1: Decay rate β₁ of m.
        beta2: Decay rate β₂ of v.
        tau: Degree of adaptivity τ. The paper's grid is 1e-5 to 1e-1.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    _kind: Literal["adam", "yogi"] = "adam"

    def __init__(
        self,
        server_lr: Positive = 0.01,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.99,
        tau: Positive = 1e-3,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self.server_optimizer = ServerAdaptive(self._kind, server_lr, beta1, beta2, tau)


class FedYogi(FedAdam):
    """FedYogi: FedAdam whose second moment moves by a step of bounded size.

    Problem:
        min_w Σ (n_i / n) f_i(w); v falls slowly after rare large pseudo-gradients.

    Update::

        client    w_i ← E epochs of the user's optimizer from z
        server    m ← β₁ m − (1 − β₁) Δ̄,    v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²),    z ← z + η_s m / (√v + τ)

    State:
        The server keeps m ``momentum`` (d,), which starts at 0, and v ``second_moment`` (d,), which starts at τ².
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        No choice of the arguments gives another method.
    Departures:
        No bias correction, as in the paper.

    References:
        Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

    Args:
        server_lr: Server learning rate η_s. The paper's grid is 1e-3 to 10 in steps of 10^0.5.
        beta1: Decay rate β₁ of m.
        beta2: Decay rate β₂ of v.
        tau: Degree of adaptivity τ. The paper's grid is 1e-5 to 1e-1.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    _kind = "yogi"
