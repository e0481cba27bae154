"""FedLi: step sizes from line searches, at the clients (FedLi-LS) or at the server (FedLi-LU)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import Fraction, NotNegative, OpenFraction, Positive, at_least
from fedbc_lightning.local import Armijo, Engine
from fedbc_lightning.server import FrankWolfe, LargestClientStep, ServerCallback
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class FedLiLS(FedAvg):
    """FedLi-LS: clients find each step size by an Armijo line search.

    Problem:
        min_w Σ (n_i / n) f_i(w), without a learning rate to tune. The default server step η_s, the paper's, can make z
        diverge with several local epochs: on ``synthetic.yaml`` (E = 5) the global loss is 21 after 8 rounds, and 0.95
        with ``server_step="convex"``.

    Update::

        client    each step on one batch B, g = ∇f_B(w):  w ← w − η g  with the largest tried η that has
                  f_B(w − η g) ≤ f_B(w) − c η ‖g‖²;    tried: η₀, bη₀, b²η₀, ...,
                  η₀ = min(η_max, η_prev γ_r^(1 / batches per epoch)),  η_prev = 1 at the round's start
        server    z ← z − η_s Δ̄,    η_s = the largest of the clients' last η ("max"), or 1 ("convex")

    State:
        Each client keeps its last η, ``last_step`` (N,), a column of ``clients.csv``; no later round depends on it.
    Communication:
        The server sends z; each client sends w_i and its last η.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        No choice of the arguments gives another method.
    Departures:
        The default η_s is the paper's; the public code has η_s = 1. Trials see the gradient's batch and random state,
        and do not change buffers. After 100 failed trials the step is 1e-6, and η_prev is the last η that was tried. If
        ‖g‖ < 1e-8 there is no step; a client without any step does not count in η_s, and one with a loss that is NaN or
        infinite has no part in the round. A trial may exceed its bound by four roundings of the loss, because otherwise
        η would shrink without end near an optimum in float32.
        torchmetrics objects that ``training_step`` updates see the trials, too. The weight decay of torch's SGD is part
        of f_B and g; nothing else of the model's optimizer is used.

    References:
        "Towards Hyper-parameter-free Federated Learning", FedLi-LS; Vaswani et al. 2019.

    Args:
        server_step: Server step size: ``"max"`` takes the largest of the clients' last η, the paper's heuristic;
            ``"convex"`` takes η_s = 1; try it if the loss of z rises.
        sufficient_decrease: Fraction c > 0 of the decrease that a linear model predicts.
        shrink: Factor b in (0, 1) on η after each failed trial.
        growth: Factor γ_r ≥ 1 by which η may grow over an epoch.
        max_step: Largest step size η_max > 0.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    partial_work = "used"

    def __init__(
        self,
        server_step: Literal["max", "convex"] = "max",
        sufficient_decrease: Positive = 0.1,
        shrink: OpenFraction = 0.9,
        growth: Annotated[float, at_least(1)] = 2.0,
        max_step: Positive = 10.0,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self.scalars_up += int(server_step == "max")
        self.server_step = server_step
        self.solver = Armijo(sufficient_decrease, shrink, growth, max_step)

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError if the trainer or the model asks for anything but plain SGD steps."""
        engine.check_solver("FedLi-LS", self.solver)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the last accepted step size, and the column that tells who has searched for one."""
        state.client_scalar("last_step", 1.0)
        state.client_message("has_searched", "column")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z with line searches, and stage each client's last step size."""
        engine.solve(cohort, start=server.model, solver=self.solver)
        # A client whose gradient is 0 has tried no step; its η = 1 would win the maximum of the server.
        has_searched = self.solver.has_searched[:, 0]
        cohort.stage("last_step", torch.where(has_searched, self.solver.accepted[:, 0], cohort["last_step"]))
        cohort.record("has_searched", has_searched.double())

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, and then the server's step."""
        return [*super().server_callbacks(engine), *([LargestClientStep()] if self.server_step == "max" else [])]


class FedLiLU(FedAvg):
    """FedLi-LU: the server finds its step size by a Deep-Frank-Wolfe step from the clients' losses.

    Problem:
        min_w Σ (n_i / n) f_i(w) + (wd/2) ‖w‖².

    Update::

        client    w_i ← E epochs of the user's optimizer from z;  its mean over batches of the loss before each step
        server    δ = Δ̄,  F = Σ p_i loss_i,  r = wd z,    γ = clip((F − η_s ⟨δ, r⟩) / (η_s ‖δ‖² + 1e-5), 0, 1)
                  z ← z − η_s (r + γ δ);    m ← μ_s m − η_s γ (δ + r),    z ← z + μ_s m

    State:
        The server keeps m ``momentum`` (d,), which starts at 0.
    Communication:
        The server sends z; each client sends w_i, n_i and its loss.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        η_s = 1, μ_s = 0, wd = 0 with γ = 1 is FedAvg.
    Departures:
        r = 0 for parameters that the model's optimizer does not train. The defaults are the public code's. With its
        η_s = 0.01 a round moves z by 1 % of the mean update, so give a larger ``server_lr`` for few rounds.

    References:
        "Towards Hyper-parameter-free Federated Learning", FedLi-LU; Berrada et al. 2019, "Deep Frank-Wolfe".

    Args:
        server_lr: Server learning rate η_s.
        server_momentum: Server momentum μ_s.
        weight_decay: Weight decay wd.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    partial_work = "used"

    def __init__(
        self,
        server_lr: Positive = 0.01,
        server_momentum: Fraction = 0.9,
        weight_decay: NotNegative = 1e-5,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self.scalars_up += 1
        self.frank_wolfe = FrankWolfe(server_lr, server_momentum, weight_decay)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, and then the Deep-Frank-Wolfe step."""
        return [*super().server_callbacks(engine), self.frank_wolfe]
