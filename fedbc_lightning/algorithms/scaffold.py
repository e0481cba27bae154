"""SCAFFOLD (Karimireddy et al. 2020)."""

from __future__ import annotations

from typing import Literal

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import Positive
from fedbc_lightning.local import Engine, Linear
from fedbc_lightning.server import ControlVariates, RobustRule, ServerCallback, ServerSGD, WeightedAverage
from fedbc_lightning.state import Cohort, ServerState


class SCAFFOLD(FederatedAlgorithm):
    """SCAFFOLD: each client's drift is corrected by control variates.

    Problem:
        min_w (1/N) Σ f_i(w), exactly, even if the f_i differ much and clients train long.

    Update::

        client    each step's gradient gets  c − c_i,  from w = z
                  c_i⁺ = c_i − c + (z − w_i) / (K_i η)     (plain SGD), or the mean raw gradient of the K_i steps
        server    c ← c + (1/N) Σ_{S_t} (c_i⁺ − c_i),    z ← z + η_s mean_{S_t}(w_i − z)

    State:
        Each client keeps c_i (N, d) and the server keeps c (d,); both are named ``control`` and start at 0.
    Communication:
        The server sends z and c; each client sends w_i and c_i⁺.
    Partial work:
        The partial work of stragglers is used; K_i is the number of steps that a client has taken.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        With equal clients that all take part in every round, c_i = c and it is FedAvg with uniform weights.
    Departures:
        With momentum or another optimizer, ``control`` is the mean gradient (momentum 0.9 can diverge, 0.5 converges).
        With a scheduler, η is the mean of the step sizes; with several parameter groups, each group has its own η. K_i
        is counted by layer: steps in which a hook has frozen it, or in which another optimizer steps (manual
        optimization), are none of its own. A layer without a step, or with steps of size 0 only, keeps its part of
        c_i. The FedBC code's "Scaffold" is another method, so do not compare with its rows.

    References:
        Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", Algorithm 1,
        options I (mean gradient) and II.

    Args:
        server_lr: Server learning rate η_s (the paper's η_g).
        control: Form of c_i⁺: ``"step_size"`` divides by K_i η, which is exact for plain SGD only (no momentum, weight
            decay, clipping or manual optimization). ``"gradient_mean"`` takes the mean gradient, for any optimizer.
            ``"auto"`` takes ``"step_size"`` with plain SGD, else ``"gradient_mean"``.
        robust_rule: Robust rule by which the server aggregates the w_i; None takes the mean.

    Raises:
        ConfigurationError: ``control="step_size"`` is given with an optimizer other than plain SGD.
    """

    scalars_up = 0

    def __init__(
        self,
        server_lr: Positive = 1.0,
        control: Literal["auto", "step_size", "gradient_mean"] = "auto",
        robust_rule: RobustRule | None = None,
    ) -> None:
        self.server_lr, self.control, self.robust_rule = server_lr, control, robust_rule

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z with the term ⟨c − c_i, w⟩."""
        # g_i(w) − c_i + c of Algorithm 1, line 9: one vector that is constant during local training.
        terms = [Linear(server["control"] - cohort["control"])]
        engine.solve(cohort, start=server.model, terms=terms, record_gradient_mean=self._uses_gradient_mean(engine))

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the control variates, the uniform mean and the server's step, in this order."""
        # c_i⁺ is formed before the mean: it needs the z from which the clients have started.
        control_variates = ControlVariates(self._uses_gradient_mean(engine))
        return [control_variates, WeightedAverage("uniform", self.robust_rule), ServerSGD(self.server_lr)]

    def _uses_gradient_mean(self, engine: Engine) -> bool:
        # (z − w_i) / (K η) is the mean gradient under plain SGD alone (option II); else gradients are recorded.
        return not engine.is_plain_sgd if self.control == "auto" else self.control == "gradient_mean"
