"""The mean of clipped updates with Gaussian noise, which makes z differentially private for whole clients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.core.metric_names import EPSILON
from fedbc_lightning.core.seeding import secret_generator
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ClientStore, ServerState, StateDeclaration

CLIP = "privacy_clip"
CLIP_LR = 0.2
"""Step size η_C of the adaptive bound, as in the paper."""
COUNT_NOISE = 0.05
"""Noise of the count of updates below the bound, as a fraction of the expected number of clients, as in the paper."""


class PrivateMean(ServerCallback):
    """Moves z by the clipped updates with noise, over the *expected* number of clients, even if nobody was sampled.

    With Δ_i = w_i − z and n̄ = qN, the expected number of clients::

        z ← z + (Σ_{S_t} Δ_i min(1, C / ‖Δ_i‖) + σ C ξ) / n̄,    ξ ~ N(0, I)

    One client changes the sum by at most C, and a fixed n̄ hides how many clients took part. The noise is a function of
    (secret, seed, round) and the same on all processes; whoever knows these can take it off again.

    With a target γ, C follows the γ-quantile of the norms: b is the noisy fraction of updates within C, and
    C ← C exp(−0.2 (b − γ)). The noise of that count is 0.05 n̄; that of the updates grows to
    (σ⁻² − (0.1 n̄)⁻²)^(−1/2), so that both together cost what σ alone would.

    Args:
        clip: Bound C of an update's norm; the first one if it adapts.
        noise_multiplier: Noise σ, as a multiple of C.
        num_expected: Expected number n̄ of clients in a round.
        target: Fraction γ of the updates that C should leave as they are, or None for a constant C.
        epsilon: Function from a number of rounds to the ε that they cost.
        secret: Text on which the noise depends beside the seed.

    References:
        McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", Algorithm 1; Andrew et al.
        2021, "Differentially Private Learning with Adaptive Clipping", Algorithm 1.
    """

    forms_z = True

    def __init__(
        self, clip: float, noise_multiplier: float, num_expected: float, target: float | None,
        epsilon: Callable[[int], float], secret: str,
    ) -> None:  # fmt: skip
        self._secret = secret
        self.clip, self.num_expected, self.target, self.epsilon = clip, num_expected, target, epsilon
        self.noise_multiplier = noise_multiplier
        if target is not None:
            self.noise_multiplier = update_noise(noise_multiplier, num_expected)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the bound C if it adapts."""
        if self.target is not None:
            state.server_scalar(CLIP, self.clip)

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sum of the clipped updates, and the count of updates within the bound, minus a half for each."""
        sums.declare("clipped_update", server.z.numel())
        if self.target is not None:
            sums.declare("centred_count")

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' clipped updates."""
        clip, updates = self._bound(server), cohort.w - server.z
        norms = torch.linalg.vector_norm(updates, dim=1, dtype=wide_dtype(updates.device)).cpu().double()
        cohort.record("update_norm", norms)
        cohort.record("weight", cohort.valid.double() / self.num_expected)
        norms = cohort.of_valid(norms)
        sums.add_rows("clipped_update", cohort.of_valid(updates), clip / norms.clamp(min=clip))
        if self.target is not None:
            sums.add("centred_count", ((norms <= clip).double() - 0.5).sum().to(sums.device, sums.dtype))

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage z, and the bound if it adapts."""
        clip, draws = self._bound(server), secret_generator(self._secret, server.seed, "privacy noise", server.round)
        noise = self.noise_multiplier * clip * _normal(draws, server.z.numel())
        step = (sums["clipped_update"] + noise.to(sums.dtype).to(sums.device)) / self.num_expected
        server.stage("z", server.z + step)
        if self.target is not None:
            count_noise = COUNT_NOISE * self.num_expected * _normal(draws, 1)[0]
            fraction = (sums["centred_count"].cpu().double()[0] + count_noise) / self.num_expected + 0.5
            server.stage(CLIP, clip * torch.exp(-CLIP_LR * (fraction - self.target)))

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """Log ε after this round, and the bound of this round if it adapts."""
        server.log(EPSILON, self.epsilon(server.round))
        if self.target is not None:
            server.log("privacy/clip", self._bound(server))

    def _bound(self, server: ServerState) -> float:
        return self.clip if self.target is None else float(server[CLIP])


def _normal(draws: np.random.Generator, size: int) -> Tensor:
    return torch.from_numpy(draws.standard_normal(size))


def update_noise(noise_multiplier: float, num_expected: float) -> float:
    """Return the noise of the updates that, with that of the count, costs what `noise_multiplier` alone would.

    Two Gaussian mechanisms on one sample with multipliers a and b are one with (a⁻² + b⁻²)^(−1/2). The centred count
    changes by 1/2 with a client, so that its multiplier is 2 · 0.05 n̄. The result is infinite or not real, returned as
    infinity, where the count alone costs more.

    Example:
        >>> round(update_noise(1.0, 20.0), 4), update_noise(2.0, 20.0)
        (1.1547, inf)
    """
    left = noise_multiplier**-2 - (2 * COUNT_NOISE * num_expected) ** -2
    return float("inf") if left <= 0 else left**-0.5
