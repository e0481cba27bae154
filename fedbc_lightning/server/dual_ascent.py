"""FedBC's multipliers: dual ascent on λ_i, and on the tolerance γ_i."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.checks import check_at_least, check_choice, check_finite, check_share
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ClientStore, ServerState, StateDeclaration

log = logging.getLogger(__name__)


class DualAscent(ServerCallback):
    """Raises λ_i of a client that strayed from z beyond its tolerance, lowers it of one that stayed within.

    With z the model that the client received and the old λ_i on the right::

        λ_i ← clip(λ_i + α_λ (‖w_i − z‖² − γ_i), λ_min, λ_max)      (FedBC, eq. 11)
        γ_i ← γ_i + α_γ λ_i

    With momentum m both brackets are replaced by a velocity v ← m v + bracket that each client keeps.

    Args:
        dual_lr: α_λ; 0 freezes λ_i. The paper's grid: 1e-7 ... 1e-2.
        dual_init: λ_i at the start.
        tolerance: ``"learned"``: γ_i starts at 0 and follows the ascent above. A number: γ for all clients, fixed. A
            list of N numbers: γ_i, fixed.
        tolerance_lr: α_γ; None: the same as ``dual_lr``. Only with ``tolerance="learned"``.
        dual_min: λ_min.
        dual_max: λ_max.
        dual_momentum: m (the public code: 0.5).
        dual_momentum_style: ``"client"``: a client's velocity moves only when it takes part. ``"public"``: as in the
            public code, after each sampled client in turn *every* client's velocity decays and moves its λ_i and γ_i
            (absent clients coast, v is not reset at the clip; a client that turns out non-finite counts as a turn).

    Raises:
        ConfigurationError: A value outside its range; ``tolerance_lr`` with a fixed tolerance.
    """

    def __init__(
        self,
        dual_lr: float,
        dual_init: float = 0.0,
        tolerance: float | list[float] | Literal["learned"] = "learned",
        tolerance_lr: float | None = None,
        dual_min: float = 0.0,
        dual_max: float = math.inf,
        dual_momentum: float = 0.0,
        dual_momentum_style: Literal["client", "public"] = "client",
    ) -> None:
        check_choice("algorithm.dual_momentum_style", dual_momentum_style, ("client", "public"))
        check_at_least("algorithm.dual_lr", dual_lr, 0)
        check_at_least("algorithm.tolerance_lr", tolerance_lr or 0.0, 0)
        for name, value in (("dual_lr", dual_lr), ("dual_init", dual_init), ("tolerance_lr", tolerance_lr or 0.0)):
            check_finite(f"algorithm.{name}", value)
        check_at_least("algorithm.dual_min", dual_min, 0)
        check_at_least("algorithm.dual_max (with dual_min as its lower bound)", dual_max, dual_min)
        check_share("algorithm.dual_momentum", dual_momentum)
        if not dual_min <= dual_init <= dual_max:
            raise ConfigurationError(
                f"algorithm.dual_init: got {dual_init}; it must lie in [dual_min, dual_max] = [{dual_min}, {dual_max}]."
            )
        is_learned = tolerance == "learned"
        if not is_learned and tolerance_lr is not None:
            raise ConfigurationError("algorithm.tolerance_lr: a fixed tolerance has none; use tolerance: learned.")
        start = 0.0 if tolerance == "learned" else tolerance
        for value in start if isinstance(start, list) else [start]:
            check_at_least("algorithm.tolerance", value, 0)
        self.tolerance_init = start
        self.dual_lr, self.dual_init = dual_lr, dual_init
        self.tolerance_lr = (dual_lr if tolerance_lr is None else tolerance_lr) if is_learned else 0.0
        self.dual_min, self.dual_max = dual_min, dual_max
        self.momentum, self.style = dual_momentum, dual_momentum_style
        self._warned = False

    def declare_state(self, state: StateDeclaration) -> None:
        """λ_i and γ_i, and their velocities if there is momentum."""
        state.client_scalar("dual", self.dual_init)
        state.client_scalar("tolerance", self.tolerance_init)
        for name in self._names[2:]:
            state.client_scalar(name)

    def step(self, state: dict[str, Tensor], dual_gradient: Tensor | float, tolerance_gradient: Tensor | float) -> None:
        """One ascent step on ``state`` (names as declared, any shape), in place."""
        if self.momentum:
            state["dual_velocity"] = dual_gradient = self.momentum * state["dual_velocity"] + dual_gradient
            state["tolerance_velocity"] = tolerance_gradient = (
                self.momentum * state["tolerance_velocity"] + tolerance_gradient
            )
        if self.dual_lr:  # 0 freezes, also against an infinite tolerance
            state["dual"] = (state["dual"] + self.dual_lr * dual_gradient).clamp(self.dual_min, self.dual_max)
        state["tolerance"] = state["tolerance"] + self.tolerance_lr * tolerance_gradient

    def coast(self, state: dict[str, Tensor], turns: int | Sequence[int]) -> None:
        """What other clients' turns do to clients' state (n,) in the public style: so many steps each of gradient 0."""
        number = torch.as_tensor(turns)
        for turn in range(int(number.max())):
            before, moves = dict(state), turn < number
            self.step(state, 0.0, 0.0)
            for name, value in state.items():
                state[name] = torch.where(moves, value, before[name])

    def state(self, cohort: Cohort) -> dict[str, Tensor]:
        """A cohort's multipliers as they stand at its turn, (K,) each."""
        state = {name: getattr(cohort, name) for name in self._names}
        if self.style == "public":
            self.coast(state, cohort.positions)
        return state

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """The dual step of the clients that have just trained."""
        distance = (cohort.w - server.z).to(sums.dtype).square().sum(dim=1).cpu().double()
        cohort.record("distance", distance)
        state = self.state(cohort)
        self.step(state, distance - state["tolerance"], state["dual"])
        if self.style == "public":
            self.coast(state, [len(server.ids) - 1 - position for position in cohort.positions])
        for name, value in state.items():
            cohort.stage(name, value)

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """In the public style the absent clients coast."""
        if self.style != "public":
            return
        state = {name: clients.scalar(name) for name in self._names}
        self.coast(state, len(server.ids))
        trained = torch.tensor([record["client"] for record in server.valid_records])
        for name, values in state.items():
            values[trained] = clients.staged_scalar(name)[trained]
            clients.stage_all(name, values)

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """Log λ over S_t; warn once when a few clients carry the whole mean."""
        dual = clients.staged_scalar("dual")[[record["client"] for record in server.valid_records]]
        square_sum = dual.square().sum()
        effective = (dual.sum().square() / square_sum).item() if square_sum > 0 else 0.0
        server.log("dual/min", dual.min().item())
        server.log("dual/max", dual.max().item())
        server.log("dual/effective_number", effective)
        if effective < min(2, len(dual)) and not self._warned:
            self._warned = True
            state = "all 0: z is their uniform mean" if effective == 0 else f"{effective:.2f} clients' worth of weight"
            rank_zero_only(log.warning)(
                f"The λ of the {len(dual)} sampled clients are {state}. A smaller algorithm.dual_lr makes the "
                "weights more even, a larger one lets λ grow from 0 sooner (said once; see dual/effective_number).",
            )

    @property
    def _names(self) -> tuple[str, ...]:
        names = ("dual", "tolerance")
        return (*names, "dual_velocity", "tolerance_velocity") if self.momentum else names
