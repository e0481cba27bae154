"""Differential privacy of z for whole clients: its settings, its part of the channel, and the ε that rounds cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.checks import FINITE, FinitePositive, OpenFraction, at_least, checked
from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.core.errors import ConfigurationError, needs
from fedbc_lightning.core.metric_names import EPSILON
from fedbc_lightning.core.secret import read_secret
from fedbc_lightning.core.seeding import secret_generator
from fedbc_lightning.federation.channel import ChannelPart, Exchange
from fedbc_lightning.federation.participation import ClientSampler, PoissonSampler
from fedbc_lightning.server import ServerCallback, Sums, WeightedAverage
from fedbc_lightning.server.optimizers import ServerAdaptive, ServerMomentum, ServerSGD
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration

# Width of the bins of the privacy loss, in which losses are rounded up, so that ε is an upper bound. A tenth of it
# changed ε by less than 2 % where that was tried, and takes ten times as long in every round (0.2 s).
INTERVAL = 1e-3
# Smallest noise multiplier; with it one round of all clients costs ε = 92 at δ = 1e-5, so less noise hides nothing
LEAST_NOISE = 0.1
# Name of the server's number that holds the bound C if it adapts
CLIP = "privacy_clip"
# Step size η_C of the adaptive bound, as in the paper
CLIP_LR = 0.2
# Noise of the count of updates below the bound, as a fraction of the expected number of clients, as in the paper
COUNT_NOISE = 0.05
# Parts that change the staged z without a further look at the clients, which costs no privacy
ONLY_ON_Z = (ServerSGD, ServerMomentum, ServerAdaptive)


@checked("trainer.privacy")
@dataclass(frozen=True)
class Privacy:
    """Makes z differentially private for whole clients: updates are clipped, and the server adds Gaussian noise.

    Every client takes part in a round with probability q = S/N, independently (Poisson sampling), where S is the
    trainer's ``clients_per_round``; 1.0 takes all. Neighbouring runs differ by one client, whose data are there or not;
    N itself is public.

    Attributes:
        clip: Bound C > 0 of the norm of a client's update w_i − z.
        noise_multiplier: Noise σ ≥ 0.1: the sum of the clipped updates gets noise of standard deviation σC.
        delta: Probability δ, in (0, 1), with which ε may fail to hold; take much less than 1 / N.
        adaptive_clip: Fraction γ, in (0, 1), of updates that C should leave as they are: C then follows the γ-quantile
            of their norms, from ``clip`` on. None keeps C.
        secret: Where a long random text is read that only you know, on which sampling and noise depend beside the
            seed: ``env:NAME``, an environment variable, or ``file:PATH``. Without it they are functions of the seed,
            which can be guessed, and z is for experiments alone.

    Raises:
        ConfigurationError: A value is out of range.

    References:
        McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", Algorithm 1; Andrew et al.
        2021, "Differentially Private Learning with Adaptive Clipping", Algorithm 1.
    """

    clip: FinitePositive
    noise_multiplier: Annotated[float, at_least(LEAST_NOISE), FINITE]
    delta: OpenFraction
    adaptive_clip: OpenFraction | None = None
    secret: str = field(default="", repr=False)  # env:A and file:B may hold the same

    def __post_init__(self) -> None:
        """Check the values."""
        read_secret(self.secret)

    def sampler(self, given: ClientSampler | None) -> ClientSampler:
        """Return the sampler of the rounds.

        Raises:
            ConfigurationError: The user gave one that samples in another way.
        """
        if given is not None and type(given) is not PoissonSampler:
            raise ConfigurationError(
                f"trainer.sampler: {type(given).__name__} does not sample each client independently, on which ε under "
                "trainer.privacy depends; leave the sampler out: it is then PoissonSampler."
            )
        return PoissonSampler(self.secret)


class PrivateMessages(ChannelPart):
    """Bounds what a client can do to z, and adds noise: the Gaussian mechanism on Poisson samples.

    With Δ_i = w_i − z and n̄ = qN, the expected number of clients::

        z ← z + (Σ_{S_t} Δ_i min(1, C / ‖Δ_i‖) + σ C ξ) / n̄,    ξ ~ N(0, I)

    One client changes the sum by at most C, and a fixed n̄ hides how many clients took part. The noise is a function of
    (secret, seed, round) and the same on all processes; whoever knows these can take it off again.

    With a target γ, C follows the γ-quantile of the norms: b is the noisy fraction of updates within C, and
    C ← C exp(−η_C (b − γ)). The updates then get a little more noise, so that both releases together cost σ.

    Args:
        privacy: The settings.
        num_expected: Expected number n̄ of clients in a round.
        num_clients: Number N of clients that may be sampled.

    Attributes:
        num_expected: Expected number n̄ of clients in a round.
        target: Fraction γ of the updates that C should leave as they are, or None for a constant C.
        epsilon: Function from a number of rounds to the ε that they cost.
    """

    hides_participants = True

    def __init__(self, privacy: Privacy, num_expected: int, num_clients: int) -> None:
        self._privacy, self._settings = privacy, f"{privacy}, {num_expected} of {num_clients} clients"
        self.num_expected, self.target = num_expected, privacy.adaptive_clip
        self.epsilon = epsilons(privacy.noise_multiplier, num_expected / num_clients, privacy.delta)
        self._noise_multiplier = privacy.noise_multiplier
        if self.target is not None:
            self._noise_multiplier = update_noise(privacy.noise_multiplier, num_expected)

    def server_parts(self, parts: Sequence[ServerCallback], algorithm: FederatedAlgorithm) -> list[ServerCallback]:
        """Return the server's parts with the mean of clipped updates in place of the mean of the method.

        Raises:
            ConfigurationError: The method takes more from the clients than a sum in which each of them is bounded.
        """
        means = [part for part in parts if type(part) is WeightedAverage and part.by == "uniform" and part.rule is None]
        others = [type(part).__name__ for part in parts if part not in means and type(part) not in ONLY_ON_Z]
        if algorithm.trains_pooled or len(means) != 1 or others:
            raise ConfigurationError(
                f"trainer.privacy: {algorithm} takes more from each client than one sum of bounded updates"
                f"{f' ({others[0]})' if others else ''}, also by its weights if they are not uniform. Take a method "
                "whose clients send their model alone, with uniform weights: FedAvg, FedProx, MOON, FedAvgM, FedAdam, "
                "... with algorithm.weighting: uniform."
            )
        return [ClippedMean(self) if part in means else part for part in parts]

    def check(self, exchange: Exchange) -> None:
        """Refuse what else travels from the clients to the server, and too few clients for an adaptive bound.

        Raises:
            ConfigurationError: Buffers or a scale of gradients travel, or the noise of a count costs too much.
        """
        if exchange.layout.buffer_names and exchange.buffers != "global":
            raise ConfigurationError(
                f"trainer.buffers: under trainer.privacy, '{exchange.buffers}' would send buffers, such as those of "
                "BatchNorm or frozen parameters that training writes, without noise; give global, or take GroupNorm."
            )
        if exchange.scales_gradients:
            raise ConfigurationError(
                "trainer.precision: 16-mixed takes the clients' scale of gradients into the next round, without the "
                "noise of trainer.privacy; use bf16-mixed or 32-true."
            )
        if math.isinf(self._noise_multiplier):
            sigma = self._privacy.noise_multiplier
            raise ConfigurationError(
                f"trainer.privacy.adaptive_clip: with {self.num_expected} clients in a round, the noisy count of "
                f"clipped updates alone costs more than noise_multiplier={sigma:g} allows; give more clients than "
                f"{10 * sigma:g} (trainer.clients_per_round), or leave adaptive_clip out."
            )

    def declare(self, state: StateDeclaration) -> None:
        """Declare the bound C if it adapts."""
        if self.target is not None:
            state.server_scalar(CLIP, self._privacy.clip)

    def bound(self, server: ServerState) -> float:
        """Return the bound C of this round."""
        return self._privacy.clip if self.target is None else float(server[CLIP])

    def receive(self, server: ServerState, sums: Sums) -> None:
        """Add noise to the sum of the clipped updates, and to the count if the bound adapts."""
        draws = secret_generator(read_secret(self._privacy.secret), server.seed, "privacy noise", server.round)
        noise = self._noise_multiplier * self.bound(server) * _normal(draws, server.z.numel())
        sums.add("clipped_update", noise.to(sums.device, sums.dtype))
        if self.target is not None:
            count_noise = COUNT_NOISE * self.num_expected * _normal(draws, 1)
            sums.add("centred_count", count_noise.to(sums.device, sums.dtype))

    def describe(self) -> dict[str, str]:
        """Return what must stay the same in a run, for the ε of all of its rounds to hold."""
        return {"trainer.privacy": self._settings}


class ClippedMean(ServerCallback):
    """Moves z by the sum of clipped updates, over the *expected* number of clients, even if nobody was sampled.

    Updates are clipped where they are summed, in float64, so that a client's bound does not depend on the model's
    precision.

    Args:
        part: The part of the channel that knows the bound, and adds noise to the sums.
    """

    forms_z = True

    def __init__(self, part: PrivateMessages) -> None:
        self._part, self._is_adaptive = part, part.target is not None

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' clipped updates."""
        clip, updates = self._part.bound(server), cohort.w - server.z
        norms = torch.linalg.vector_norm(updates, dim=1, dtype=wide_dtype(updates.device)).cpu().double()
        cohort.record("update_norm", norms)
        cohort.record("weight", cohort.valid.double() / self._part.num_expected)
        norms = cohort.of_valid(norms)
        sums.add_rows("clipped_update", cohort.of_valid(updates), clip / norms.clamp(min=clip))
        if self._is_adaptive:
            # Centred at a half, the count changes by 1/2 with a client instead of 1, which halves its noise.
            sums.add("centred_count", ((norms <= clip).double() - 0.5).sum().to(sums.device, sums.dtype))

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage z, and the bound if it adapts."""
        part = self._part
        server.stage("z", server.z + sums["clipped_update"] / part.num_expected)
        if part.target is not None:
            fraction = sums["centred_count"].cpu().double()[0] / part.num_expected + 0.5
            server.stage(CLIP, part.bound(server) * torch.exp(-CLIP_LR * (fraction - part.target)))

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """Log ε after this round, and the bound of this round if it adapts."""
        server.log(EPSILON, self._part.epsilon(server.round))
        if self._is_adaptive:
            server.log("privacy/clip", self._part.bound(server))


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


def _normal(draws: np.random.Generator, size: int) -> Tensor:
    return torch.from_numpy(draws.standard_normal(size))


def epsilons(noise_multiplier: float, share: float, delta: float) -> Callable[[int], float]:
    """Return a function from a number of rounds to the ε of the Gaussian mechanism on Poisson samples.

    Args:
        noise_multiplier: Noise σ of the sum, as a multiple of its sensitivity.
        share: Probability q with which a client is in a round.
        delta: Probability δ.

    Raises:
        ConfigurationError: dp-accounting is not installed.
    """
    with needs("trainer.privacy needs dp-accounting", "privacy"):
        from dp_accounting.pld import privacy_loss_distribution as distributions
    one = distributions.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=share, value_discretization_interval=INTERVAL
    )

    def epsilon(num_rounds: int) -> float:
        return float(one.self_compose(num_rounds).get_epsilon_for_delta(delta)) if num_rounds else 0.0

    return epsilon
