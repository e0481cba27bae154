"""Which clients take part in a round and how much each one trains, as functions of (seed, round)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.seeding import derive, numpy_generator
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.datamodule import POOLED
from fedbc_lightning.federation.sampling import ClientSampler, num_sampled
from fedbc_lightning.federation.system import Stragglers
from fedbc_lightning.state import Arrival


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
    def ids(self) -> list[int]:
        """The sampled clients whose work the server uses, in the order of sampling."""
        return [client for client in self.sampled if client not in self.missing]


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

    Raises:
        ConfigurationError: The settings do not fit the data or the method.
    """

    def __init__(
        self, datamodule: FederatedDataModule, algorithm: FederatedAlgorithm, local: LocalTraining,
        sampler: ClientSampler, clients_per_round: int | float, stragglers: Stragglers | None, seed: int,
    ) -> None:  # fmt: skip
        self._algorithm, self.local, self.sampler = algorithm, local, sampler
        self.stragglers, self.seed = stragglers, seed
        self.clients, self.num_batches = datamodule.training_clients, datamodule.num_batches()
        self._num_clients = len(self.clients)
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
        is_right = len(set(ids)) == len(ids) and all(0 <= client < num_clients for client in ids)
        if not is_right or not (ids or self.sampler.may_be_empty):
            raise ConfigurationError(
                f"trainer.sampler: {type(self.sampler).__name__} returned {ids[:10]} for round {round}; it must "
                f"return distinct clients from 0 to {num_clients - 1}."
            )
        if self._algorithm.needs_all_clients and len(ids) < self._num_clients:
            raise ConfigurationError(
                f"trainer.sampler: {type(self.sampler).__name__} returned {len(ids)} clients for round {round}; "
                f"{type(self._algorithm).__name__} takes all {self._num_clients}."
            )
        return ids if num_clients == len(self.num_batches) or not ids else clients[ids].tolist()

    def draw(self, round: int, clients: np.ndarray | None = None) -> Participants:
        """Return the sampled clients of a round, the stragglers among them, and those that send nothing.

        Args:
            round: Number of the round, 1..T.
            clients: The clients who are there, ascending; None takes all that train.
        """
        sampled, late, absent = self.sample(round, clients), set[int](), set[int]()
        if self.stragglers is not None:
            late, absent = self.stragglers.draw(sampled, self.seed, round)
        missing = dict.fromkeys(absent, "absent")
        if late and self._partial_work() == "dropped":
            missing |= dict.fromkeys(late, "straggler")
        shortened = {client: self._late_training(round, client) for client in late}
        return Participants(sampled, shortened, missing, {}, None)

    def _partial_work(self) -> str:
        assert self.stragglers is not None
        asked = self.stragglers.partial_work
        return self._algorithm.partial_work if asked == "method" else asked

    def num_steps(self, ids: list[int]) -> list[int]:
        """Return how many steps each of the clients `ids` is asked to take in a round."""
        return [self.local.num_steps(int(self.num_batches[i])) if i != POOLED else 1 for i in ids]

    @property
    def most_batches(self) -> int:
        """Number of batches per epoch of the largest client that may be sampled."""
        return int(self.num_batches[self.clients].max())

    def asked(self, client: int, late: Mapping[int, LocalTraining]) -> int:
        """Return how many steps a client is asked to take, where some clients train for less than the others."""
        if client not in late:
            return self.num_steps([client])[0]
        return late[client].num_steps(int(self.num_batches[client]))

    def _late_training(self, round: int, client: int) -> LocalTraining:
        """Return the shortened local training of a straggler in a round."""
        # By client: how much a straggler does must not depend on who else is late.
        rng = numpy_generator(self.seed, "partial work", round, client)
        return self.local.shortened(int(self.num_batches[client]), rng)


def deal(steps: list[int], num_ranks: int) -> list[list[int]]:
    """Return the positions of each rank's clients; they are dealt longest first, each to the least loaded rank.

    Args:
        steps: Number of steps of each client.
        num_ranks: Number of ranks.

    Example:
        >>> deal([5, 1, 3], 2), deal([5, 1, 3], 1)
        ([[0], [2, 1]], [[0, 1, 2]])
    """
    if num_ranks == 1:
        return [list(range(len(steps)))]
    loads, shares = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    # Longest first onto the least loaded rank: at most 4/3 of the optimum (Graham 1969), and the same on all ranks.
    for position in sorted(range(len(steps)), key=lambda k: (-steps[k], k)):
        rank = loads.index(min(loads))
        loads[rank] += steps[position]
        shares[rank].append(position)
    return shares
