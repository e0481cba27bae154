"""Which clients take part in a round and how much each one trains, as functions of (seed, round)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.checks import Fraction, checked
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.secret import read_secret
from fedbc_lightning.core.seeding import derive, numpy_generator, secret_generator
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.datamodule import POOLED
from fedbc_lightning.state import Arrival


class ClientSampler:
    """Base class of samplers; derive your own class from it and give it as ``trainer.sampler``.

    Attributes:
        may_be_empty: Whether a round may be without any client.
    """

    may_be_empty = False

    def __call__(self, num_clients: int, num_sampled: int, seed: int, round: int) -> list[int]:
        """Return the distinct clients of one round, in the order of their turns, from the arguments alone.

        A client is meant by its place, from 0 on, among those that can be sampled, in ascending order of their numbers.
        Place and number differ if some clients are held out, are not there by ``trainer.system.availability``, or are
        in training in an asynchronous method; the place of a client may then change from round to round.

        Args:
            num_clients: Number of clients that can be sampled; N if all train, are there, and are idle.
            num_sampled: Number of clients to sample, S or fewer, at most ``num_clients``.
            seed: The run's seed.
            round: Number of the round, 1..T.
        """
        raise NotImplementedError


class UniformSampler(ClientSampler):
    """Samples S of the N clients uniformly and without replacement, independently in every round.

    Example:
        >>> UniformSampler()(10, 3, seed=0, round=1) == UniformSampler()(10, 3, seed=0, round=1)
        True
        >>> sorted(UniformSampler()(4, 4, seed=0, round=1))
        [0, 1, 2, 3]
    """

    def __call__(self, num_clients: int, num_sampled: int, seed: int, round: int) -> list[int]:
        """Return S distinct clients in random order."""
        return numpy_generator(seed, "sampling", round).choice(num_clients, num_sampled, replace=False).tolist()


@checked("trainer.sampler")
class PoissonSampler(ClientSampler):
    """Samples each client with probability S/N, independently of the others, so that a round may have any number.

    ``trainer.privacy`` counts on this. In a round without clients z stays as it is, but for the noise of privacy.

    Args:
        secret: Where a text is read on which the draws depend beside the seed, see
            :class:`~fedbc_lightning.federation.privacy.Privacy`.

    Example:
        >>> len({len(PoissonSampler()(100, 10, seed=0, round=t)) for t in range(1, 9)}) > 1
        True
        >>> sorted(PoissonSampler()(4, 4, seed=0, round=1))
        [0, 1, 2, 3]
    """

    may_be_empty = True

    def __init__(self, secret: str = "") -> None:
        self._secret = secret

    def __call__(self, num_clients: int, num_sampled: int, seed: int, round: int) -> list[int]:
        """Return the clients of a round in random order."""
        rng = secret_generator(read_secret(self._secret), seed, "sampling", round)
        # The order in which clients take their turns is random, too: the public style of FedBC depends on it.
        return rng.permutation(num_clients)[rng.random(num_clients) < num_sampled / num_clients].tolist()


def num_sampled(clients_per_round: int | float, num_clients: int) -> int:
    """Return S: an int is the number itself, a float is a fraction of N (rounded, at least 1), and 1.0 is all.

    Raises:
        ConfigurationError: The number is not in 1..N, or the fraction not in (0, 1].

    Example:
        >>> num_sampled(0.25, 30), num_sampled(10, 30), num_sampled(1.0, 30)
        (8, 10, 30)
    """
    is_fraction = isinstance(clients_per_round, float)
    if not (0 < clients_per_round <= 1 if is_fraction else 1 <= clients_per_round <= num_clients):
        raise ConfigurationError(
            f"trainer.clients_per_round: got {clients_per_round}; give a number of clients from 1 to {num_clients}, "
            "without a decimal point, or a fraction in (0, 1], such as 0.1."
        )
    return max(1, round(clients_per_round * num_clients)) if is_fraction else int(clients_per_round)


@checked("trainer.stragglers")
@dataclass(frozen=True)
class Stragglers:
    """Lets a fraction of the sampled clients do less work in every round, and another fraction not answer at all.

    The choice is a function of (seed, round). There are round(fraction x S) stragglers and round(dropout x S) absent
    clients; halves are rounded up, and stragglers are drawn first.

    Attributes:
        fraction: Fraction of the sampled clients, in [0, 1), that are stragglers. Each trains a number of epochs drawn
            from 1..E-1, or a number of steps if E = 1 or training is counted in steps. FedProx takes 0.5, Fed+ 0.9.
        dropout: Fraction of the sampled clients, in [0, 1), that vanish after they were sampled. They receive z, send
            nothing and keep their state (``status=absent`` in ``clients.csv``).
        partial_work: Treatment of a straggler's work. ``"method"`` leaves it to the method (FedAvg drops it, as in the
            FedProx paper; the others use it); ``"used"`` and ``"dropped"`` (``status=straggler``) hold for any method.

    Raises:
        ConfigurationError: A fraction is not in [0, 1), or both together take more than all clients.

    References:
        Li et al. 2020, "Federated Optimization in Heterogeneous Networks", section 5.2.
    """

    fraction: Fraction = 0.0
    dropout: Fraction = 0.0
    partial_work: Literal["method", "used", "dropped"] = "method"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.fraction + self.dropout > 1:
            raise ConfigurationError(
                f"trainer.stragglers: fraction {self.fraction:g} + dropout {self.dropout:g} is more than all clients."
            )

    def draw(self, ids: list[int], seed: int, round: int) -> tuple[set[int], set[int]]:
        """Return the stragglers and the absent clients among the sampled clients.

        Example:
            >>> late, absent = Stragglers(fraction=0.5, dropout=0.25).draw([3, 1, 4, 5], seed=0, round=1)
            >>> len(late), len(absent), late & absent
            (2, 1, set())
        """
        order = numpy_generator(seed, "stragglers", round).permutation(sorted(ids)).tolist()
        num_late, num_absent = (int(part * len(ids) + 0.5) for part in (self.fraction, self.dropout))
        return set(order[:num_late]), set(order[num_late : num_late + num_absent])


class Participants(NamedTuple):
    """The clients sampled in a round, and those of them that report late or not at all.

    Attributes:
        sampled: The clients that receive z, in the order of sampling.
        late: The sampled clients that train for less than they were asked to -> their local training.
        missing: The sampled clients that send nothing -> ``absent``, or ``straggler`` if their work is dropped.
        seconds: Simulated seconds in which each client receives, trains and sends; empty without a clock.
        ended: Simulated seconds from the start of the run to the end of the round; None without a clock.
        arrivals: The updates that arrive in the round, in their order; None where a round waits for its own clients.
        before: Hash of the participants of all rounds before; 0 without a clock.
        after: The same with this round.
    """

    sampled: list[int]
    late: dict[int, LocalTraining]
    missing: dict[int, str]
    seconds: dict[int, float]
    ended: float | None
    arrivals: list[Arrival] | None = None
    before: int = 0
    after: int = 0

    @property
    def positions(self) -> list[int]:
        """Places among the sampled clients of those whose work the server uses."""
        return [position for position, client in enumerate(self.sampled) if client not in self.missing]

    @property
    def ids(self) -> list[int]:
        """The sampled clients whose work the server uses, in the order of sampling."""
        return [self.sampled[position] for position in self.positions]


class Participation:
    """Draws the participants of rounds, without a clock.

    Args:
        datamodule: The data module, after its set-up.
        algorithm: The method, which may need all clients or refuse partial work.
        local: Local training that every client is asked for.
        sampler: Sampler that chooses the clients of a round.
        clients_per_round: Number of clients per round, or a fraction of N.
        stragglers: Settings of the clients that do less than asked, or vanish; None if there are no such clients.
        seed: The run's seed.

    Attributes:
        local: Local training that every client is asked for.
        sampler: Sampler that chooses the clients of a round.
        stragglers: Settings of the clients that do less than asked; None if there are no such clients.
        seed: The run's seed.
        num_sampled: Number of clients sampled in a round, S.
        num_batches: Number of batches per epoch of each client, int64 (N,).
        clients: The clients that may be sampled, int64, ascending: all but those that are held out.
        most_batches: Number of batches per epoch of the largest client that may be sampled.
        largest: That client.

    Raises:
        ConfigurationError: The settings do not fit the data or the method.
    """

    def __init__(
        self,
        datamodule: FederatedDataModule,
        algorithm: FederatedAlgorithm,
        local: LocalTraining,
        sampler: ClientSampler,
        clients_per_round: int | float,
        stragglers: Stragglers | None,
        seed: int,
    ) -> None:
        self._algorithm, self.local, self.sampler = algorithm, local, sampler
        self.stragglers, self.seed = stragglers, seed
        self.clients, self.num_batches = datamodule.training_clients, datamodule.num_batches()
        self._num_clients, self.most_batches = len(self.clients), int(self.num_batches[self.clients].max())
        self.largest = int(self.clients[self.num_batches[self.clients].argmax()])
        self.num_sampled = num_sampled(clients_per_round, self._num_clients)
        name = type(algorithm).__name__
        if algorithm.needs_all_clients and self.num_sampled < self._num_clients:
            raise ConfigurationError(
                f"trainer.clients_per_round: {name} takes all {self._num_clients} clients in every round; give 1.0."
            )
        if stragglers is not None and (algorithm.partial_work == "refused" or algorithm.trains_pooled):
            raise ConfigurationError(
                f"trainer.stragglers: {name} allows neither partial work nor absent clients; leave stragglers out."
            )

    def sample(
        self, round: int, clients: np.ndarray | None = None, number: int | None = None, draw: int = 0
    ) -> list[int]:
        """Return the clients that the sampler chooses for a round.

        Args:
            round: Number of the round, 1..T.
            clients: The clients who are there, ascending; None takes all that train.
            number: Number of clients to sample; None takes that of a round.
            draw: Number of the draws before this one in the round.

        Raises:
            ConfigurationError: The sampler returned clients that do not exist, or too few for the method.
        """
        if self._algorithm.trains_pooled:
            return [POOLED]
        clients = self.clients if clients is None else clients
        num_clients = len(clients)
        # Draw 0 has the run's own seed, so that synchronous rounds sample as they did before there were several draws.
        seed = derive(self.seed, "sampling", round, step=draw) if draw else self.seed
        ids = self.sampler(num_clients, min(number or self.num_sampled, num_clients), seed, round)
        least = self._num_clients if self._algorithm.needs_all_clients else int(not self.sampler.may_be_empty)
        if len(set(ids)) < max(len(ids), least) or not all(0 <= client < num_clients for client in ids):
            raise ConfigurationError(
                f"trainer.sampler: {type(self.sampler).__name__} returned {ids[:10]} for round {round}; "
                f"{type(self._algorithm).__name__} takes {least} or more distinct clients from 0 to {num_clients - 1}."
            )
        return ids if num_clients == len(self.num_batches) or not ids else clients[ids].tolist()

    def draw(self, round: int, clients: np.ndarray | None = None) -> Participants:
        """Return the sampled clients of a round, the stragglers among them, and those that send nothing.

        Args:
            round: Number of the round, 1..T.
            clients: The clients who are there, ascending; None takes all that train.
        """
        sampled, late, missing = self.sample(round, clients), set[int](), dict[int, str]()
        if self.stragglers is not None:
            late, absent = self.stragglers.draw(sampled, self.seed, round)
            missing = dict.fromkeys(absent, "absent")
            asked = self.stragglers.partial_work
            if (self._algorithm.partial_work if asked == "method" else asked) == "dropped":
                missing |= dict.fromkeys(late, "straggler")
        # By client: how much a straggler does must not depend on who else is late.
        shortened = {
            client: self.local.shortened(
                int(self.num_batches[client]), numpy_generator(self.seed, "partial work", round, client)
            )
            for client in late
        }
        return Participants(sampled, shortened, missing, {}, None)

    def num_steps(self, ids: list[int], late: Mapping[int, LocalTraining] = MappingProxyType({})) -> list[int]:
        """Return how many steps each of the clients `ids` is asked to take in a round, where `late` train for less."""
        return [late.get(i, self.local).num_steps(int(self.num_batches[i])) if i != POOLED else 1 for i in ids]


def deal(steps: list[int], paces: Sequence[float]) -> list[list[int]]:
    """Return the positions of each rank's clients; they are dealt longest first, each to the rank that ends first.

    Args:
        steps: Number of steps of each client.
        paces: Seconds that each rank takes for a step, or equal numbers.

    Example:
        >>> deal([5, 1, 3], [1, 1]), deal([5, 1, 3], [1]), deal([3, 3, 3, 3, 3], [1, 5])
        ([[0], [2, 1]], [[0, 1, 2]], [[0, 1, 2, 3], [4]])
    """
    if len(paces) == 1:
        return [list(range(len(steps)))]
    loads, shares = [0 for _ in paces], [list[int]() for _ in paces]
    # Longest first, as with equal paces that is at most 4/3 of the optimum (Graham 1969), and the same on all ranks.
    for position in sorted(range(len(steps)), key=lambda k: (-steps[k], k)):
        ends = [((load + steps[position]) * pace, load) for load, pace in zip(loads, paces, strict=True)]
        rank = ends.index(min(ends))
        loads[rank] += steps[position]
        shares[rank].append(position)
    return shares


def paces_after(paces: Sequence[float], taken: Sequence[tuple[float, int]]) -> list[float]:
    """Return the seconds for a step of each rank after a round, all 0 until one has trained.

    A rank of which nothing is known counts as the fastest. One that has trained nobody in this round seems a tenth
    faster than before, so that it gets a client again by and by.

    Args:
        paces: What was known before the round.
        taken: Seconds and steps of each rank in the round.

    Example:
        >>> paces_after([0, 0, 0], [(6, 3), (4, 1), (0, 0)]), paces_after([2, 4, 2], [(6, 3), (0, 0), (4, 1)])
        ([2.0, 4.0, 2.0], [2.0, 3.6, 4.0])
        >>> deal([5, 1, 3], [0, 0])  # equal numbers
        [[0], [2, 1]]
    """
    found = [seconds / steps if steps else 0.9 * pace for pace, (seconds, steps) in zip(paces, taken, strict=True)]
    fastest = min((each for each in found if each), default=0.0)
    return [each or fastest for each in found]
