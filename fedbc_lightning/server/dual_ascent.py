"""The server's half of FedBC: dual ascent on the multipliers λ_i, and steps of the tolerances γ_i."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedbc_lightning.core.checks import FINITE, FiniteNotNegative, Fraction, NotNegative
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class DualAscent(ServerCallback):
    """Raises λ_i of a client whose w_i is farther from z than its tolerance allows, and lowers it otherwise.

    z is the model that the client received, and the right-hand sides take the old λ_i::

        λ_i ← clip(λ_i + α_λ (‖w_i − z‖² − γ_i), λ_min, λ_max)      (FedBC, eq. 11)
        γ_i ← γ_i + α_γ λ_i

    With momentum m, each step size multiplies a velocity v ← m v + (‖w_i − z‖² − γ_i) or v ← m v + λ_i in place of the
    factor above; each client keeps both velocities.

    Args:
        dual_lr: Step size α_λ; 0 freezes λ_i. The paper's grid is 1e-7 to 1e-2.
        dual_init: Start value of λ_i.
        tolerance: ``"learned"`` starts γ_i at 0 and updates it as above. A number fixes one γ for all clients, a list
            of N numbers fixes γ_i for each client.
        tolerance_lr: Step size α_γ; None takes ``dual_lr``. It is allowed with ``tolerance="learned"`` only.
        dual_min: Lower bound λ_min.
        dual_max: Upper bound λ_max.
        dual_momentum: Momentum m; the public code takes 0.5.
        dual_momentum_style: ``"client"`` changes a client's velocity only in rounds in which it takes part.
            ``"public"`` does as the public code: after each sampled client in turn, *every* client's velocity decays
            and moves its λ_i and γ_i. There, absent clients move on with their velocity, v is not reset at the clip,
            and a sampled client that drops out still counts as a turn.

    Raises:
        ConfigurationError: A value is out of range, or ``tolerance_lr`` is given with a fixed tolerance.
    """

    def __init__(
        self,
        dual_lr: FiniteNotNegative,
        dual_init: Annotated[float, FINITE] = 0.0,
        tolerance: NotNegative | list[NotNegative] | Literal["learned"] = "learned",
        tolerance_lr: FiniteNotNegative | None = None,
        dual_min: NotNegative = 0.0,
        dual_max: NotNegative = math.inf,
        dual_momentum: Fraction = 0.0,
        dual_momentum_style: Literal["client", "public"] = "client",
    ) -> None:
        if not dual_min <= dual_init <= dual_max:
            raise ConfigurationError(
                f"algorithm.dual_init: got {dual_init}; it must lie in [dual_min, dual_max] = [{dual_min}, {dual_max}]."
            )
        is_learned = tolerance == "learned"
        if not is_learned and tolerance_lr is not None:
            raise ConfigurationError("algorithm.tolerance_lr: a fixed tolerance has none; use tolerance: learned.")
        self.tolerance_init = 0.0 if tolerance == "learned" else tolerance
        self.dual_lr, self.dual_init = dual_lr, dual_init
        self.tolerance_lr = (dual_lr if tolerance_lr is None else tolerance_lr) if is_learned else 0.0
        self.dual_min, self.dual_max = dual_min, dual_max
        self.momentum, self.style = dual_momentum, dual_momentum_style

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare λ_i and γ_i, and their velocities if there is momentum."""
        state.client_scalar("dual", self.dual_init)
        state.client_scalar("tolerance", self.tolerance_init)
        for name in self._names[2:]:
            state.client_scalar(name)

    def step(self, state: dict[str, Tensor], dual_gradient: Tensor | float, tolerance_gradient: Tensor | float) -> None:
        """Take one ascent step on the values in ``state`` (names as declared, any shape), in place."""
        if self.momentum:
            # Heavy-ball ascent; both velocities are those of the ascent directions, so λ and γ share one coefficient.
            state["dual_velocity"] = dual_gradient = self.momentum * state["dual_velocity"] + dual_gradient
            state["tolerance_velocity"] = tolerance_gradient = (
                self.momentum * state["tolerance_velocity"] + tolerance_gradient
            )
        if self.dual_lr:  # 0 x inf would be NaN if the tolerance is infinite
            state["dual"] = (state["dual"] + self.dual_lr * dual_gradient).clamp(self.dual_min, self.dual_max)
        state["tolerance"] = state["tolerance"] + self.tolerance_lr * tolerance_gradient

    def coast(self, state: dict[str, Tensor], turns: int | Sequence[int]) -> None:
        """Take `turns` steps of gradient 0 on clients' state (n,): what other clients' turns do in the public style."""
        # The public code updates the multipliers of all clients at each turn of one: with momentum they coast on their
        # velocities, though their gradient is 0.
        number = torch.as_tensor(turns)
        for turn in range(int(number.max())):
            before, moves = dict(state), turn < number
            self.step(state, 0.0, 0.0)
            for name, value in state.items():
                state[name] = torch.where(moves, value, before[name])

    def state(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return the multipliers (K,) of a cohort as they are when its clients' turns come."""
        state = {name: cohort[name] for name in self._names}
        if self.style == "public":
            self.coast(state, cohort.positions)
        return state

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Take the dual step of the clients that have just trained."""
        # ∂L/∂λ_i = ‖w_i − z‖² − γ_i. As ∂L/∂γ_i = −λ_i, a descent step in γ_i adds λ_i: tolerances grow where the
        # constraint hurts.
        distance = cohort.squared_distance(server.z).cpu().double()
        cohort.record("distance", distance)
        state = self.state(cohort)
        self.step(state, distance - state["tolerance"], state["dual"])
        if self.style == "public":
            self.coast(state, [len(server.sampled) - 1 - position for position in cohort.positions])
        for name, value in state.items():
            cohort.stage(name, value)

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """In the public style, move the multipliers of the absent clients on with their velocities."""
        if self.style != "public":
            return
        state = {name: clients.scalar(name) for name in self._names}
        self.coast(state, len(server.sampled))
        trained = torch.tensor([record["client"] for record in server.valid_records])
        for name, values in state.items():
            values[trained] = clients.scalar(name, staged=True)[trained]
            clients.stage_all(name, values)

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """Log λ over S_t, and warn once if by the effective number fewer than two, or half of them, carry the mean."""
        # (Σλ)² / Σλ², the effective number of clients that carry the mean: 1 if one λ dwarfs all others.
        dual = clients.scalar("dual", staged=True)[[record["client"] for record in server.valid_records]]
        square_sum = dual.square().sum()
        effective = (dual.sum().square() / square_sum).item() if square_sum > 0 else 0.0
        server.log("dual/min", dual.min().item())
        server.log("dual/max", dual.max().item())
        server.log("dual/effective_number", effective)
        if effective < min(2, len(dual) / 2):
            state = "all 0: z is their uniform mean" if effective == 0 else f"{effective:.2f} clients' worth of weight"
            server.warn_once(
                "effective number of λ",
                f"round {server.round}: the λ of the {len(dual)} sampled clients are {state}. In the first rounds that "
                "may pass. If λ has fallen back towards 0, algorithm.dual_lr is too large for a run of this length; if "
                "one client moves much further than the others, algorithm.dual_min and dual_max bound their ratio "
                "(said once; see dual/effective_number).",
            )

    @property
    def _names(self) -> tuple[str, ...]:
        names = ("dual", "tolerance")
        return (*names, "dual_velocity", "tolerance_velocity") if self.momentum else names
