"""Differential privacy of z for whole clients: its settings, what it refuses, and the ε that rounds cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.checks import check_at_least, check_finite, check_share
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.federation.sampling import ClientSampler, PoissonSampler
from fedbc_lightning.server import ServerCallback, WeightedAverage
from fedbc_lightning.server.optimizers import ServerAdaptive, ServerMomentum, ServerSGD
from fedbc_lightning.server.private_mean import PrivateMean, update_noise
from fedbc_lightning.state.declaration import BufferPolicy
from fedbc_lightning.state.layout import ParameterLayout

INTERVAL = 1e-3
"""Width of the bins of the privacy loss, in which losses are rounded up, so that ε is an upper bound. A tenth of it
changed ε by less than 2 % where that was tried, and takes ten times as long in every round (0.2 s)."""
LEAST_NOISE = 0.1
"""Smallest noise multiplier; with it one round of all clients costs ε = 92 at δ = 1e-5, so less noise hides nothing."""
ONLY_ON_Z = (ServerSGD, ServerMomentum, ServerAdaptive)
"""Parts that change the staged z without a further look at the clients, which costs no privacy."""


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
        secret: Long random text that only you know, on which sampling and noise depend beside the seed. Without it
            they are functions of the seed, which can be guessed, and z is for experiments alone.

    Raises:
        ConfigurationError: A value is out of range.

    References:
        McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", Algorithm 1; Andrew et al.
        2021, "Differentially Private Learning with Adaptive Clipping", Algorithm 1.
    """

    clip: float
    noise_multiplier: float
    delta: float
    adaptive_clip: float | None = None
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Check the values."""
        check_at_least("trainer.privacy.clip", self.clip, 0, strict=True)
        check_finite("trainer.privacy.clip", self.clip)
        check_at_least("trainer.privacy.noise_multiplier", self.noise_multiplier, LEAST_NOISE)
        check_finite("trainer.privacy.noise_multiplier", self.noise_multiplier)
        for name, value in (("delta", self.delta), ("adaptive_clip", self.adaptive_clip)):
            if value is not None:
                check_share(f"trainer.privacy.{name}", value)
                check_at_least(f"trainer.privacy.{name}", value, 0, strict=True)

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

    def parts(
        self, parts: Sequence[ServerCallback], algorithm: FederatedAlgorithm, num_sampled: int, num_clients: int
    ) -> list[ServerCallback]:
        """Return the server's parts with a private mean in place of the mean of the method.

        Args:
            parts: The parts of the method.
            algorithm: The method.
            num_sampled: Expected number S of clients in a round.
            num_clients: Number N of clients that may be sampled.

        Raises:
            ConfigurationError: The method takes more from the clients than a sum in which each of them is bounded.
        """
        problem = _problem(parts, algorithm)
        if problem:
            raise ConfigurationError(
                f"trainer.privacy: {algorithm} {problem}. Take a method whose clients send their model alone, with "
                "uniform weights: FedAvg, FedProx, MOON, FedAvgM, FedAdam, ... with algorithm.weighting: uniform."
            )
        if self.adaptive_clip is not None and math.isinf(update_noise(self.noise_multiplier, num_sampled)):
            raise ConfigurationError(
                f"trainer.privacy.adaptive_clip: with {num_sampled} clients in a round, the noisy count of clipped "
                f"updates alone costs more than noise_multiplier={self.noise_multiplier:g} allows; give more clients "
                f"than {10 * self.noise_multiplier:g} (trainer.clients_per_round), or leave adaptive_clip out."
            )
        epsilon = epsilons(self.noise_multiplier, num_sampled / num_clients, self.delta)
        mean = PrivateMean(self.clip, self.noise_multiplier, num_sampled, self.adaptive_clip, epsilon, self.secret)
        return [mean if isinstance(part, WeightedAverage) else part for part in parts]

    def check(self, layout: ParameterLayout, buffers: BufferPolicy, *, scales_gradients: bool) -> None:
        """Refuse what else travels from the clients to the server.

        Args:
            layout: The model's parameters and buffers.
            buffers: Policy for buffers.
            scales_gradients: Whether the clients of a round decide about the next one's scale of gradients.

        Raises:
            ConfigurationError: Buffers or a scale travel.
        """
        if (layout.num_buffers or layout.read_counters().numel()) and buffers != "global":
            raise ConfigurationError(
                f"trainer.buffers: under trainer.privacy, '{buffers}' would send buffers, such as those of BatchNorm "
                "or frozen parameters that training writes, without noise; give global, or take GroupNorm."
            )
        if scales_gradients:
            raise ConfigurationError(
                "trainer.precision: 16-mixed takes the clients' scale of gradients into the next round, without the "
                "noise of trainer.privacy; use bf16-mixed or 32-true."
            )

    def describe(self, num_sampled: int, num_clients: int) -> str:
        """Return what must stay the same in a run, for the ε of all of its rounds to hold."""
        return f"{self}, {num_sampled} of {num_clients} clients"


def epsilons(noise_multiplier: float, share: float, delta: float) -> Callable[[int], float]:
    """Return a function from a number of rounds to the ε of the Gaussian mechanism on Poisson samples.

    Args:
        noise_multiplier: Noise σ of the sum, as a multiple of its sensitivity.
        share: Probability q with which a client is in a round.
        delta: Probability δ.

    Raises:
        ConfigurationError: dp-accounting is not installed.
    """
    try:
        from dp_accounting.pld import privacy_loss_distribution as distributions
    except ImportError as error:
        raise ConfigurationError(
            "trainer.privacy needs dp-accounting: pip install 'fedbc-lightning[privacy]'"
        ) from error
    one = distributions.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=share, value_discretization_interval=INTERVAL
    )

    def epsilon(num_rounds: int) -> float:
        return float(one.self_compose(num_rounds).get_epsilon_for_delta(delta)) if num_rounds else 0.0

    return epsilon


def _problem(parts: Sequence[ServerCallback], algorithm: FederatedAlgorithm) -> str:
    """Return why the method cannot train privately; empty if it can."""
    means = [part for part in parts if type(part) is WeightedAverage]
    others = [part for part in parts if type(part) not in (WeightedAverage, *ONLY_ON_Z)]
    if algorithm.trains_pooled:
        return "trains on the data of all clients together"
    if others:
        name = type(others[0]).__name__
        return f"forms z by {name}, which takes more from each client than one sum of bounded updates"
    if len(means) != 1:
        return "does not form z by one mean"
    if means[0].rule is not None:
        return f"takes {type(means[0].rule).__name__}, and how much one client can move such a rule is not bounded"
    if means[0].by == "samples":
        return "weights clients by their numbers of samples, which are not bounded, and which the total gives away"
    if means[0].by != "uniform":
        return f"weights clients by their '{means[0].by}', which are not bounded, and which the total gives away"
    return ""
