"""Samplers, which choose the clients of a round as a function of (seed, round)."""

from __future__ import annotations

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import numpy_generator, secret_generator


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


class PoissonSampler(ClientSampler):
    """Samples each client with probability S/N, independently of the others, so that a round may have any number.

    ``trainer.privacy`` counts on this. In a round without clients z stays as it is, but for the noise of privacy.

    Args:
        secret: Text on which the draws depend beside the seed, see
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
        rng = secret_generator(self._secret, seed, "sampling", round)
        # The order in which clients take their turns is random, too: the public style of FedBC depends on it.
        order = rng.permutation(num_clients)
        return order[rng.random(num_clients) < num_sampled / num_clients].tolist()


def num_sampled(clients_per_round: int | float, num_clients: int) -> int:
    """Return S: an int is the number itself, a float is a fraction of N (rounded, at least 1), and 1.0 is all.

    Raises:
        ConfigurationError: The number is not in 1..N, or the fraction not in (0, 1].

    Example:
        >>> num_sampled(0.25, 30), num_sampled(10, 30), num_sampled(1.0, 30)
        (8, 10, 30)
    """
    if isinstance(clients_per_round, float):
        if not 0 < clients_per_round <= 1:
            raise ConfigurationError(
                f"trainer.clients_per_round: the fraction {clients_per_round} is not in (0, 1]; "
                "write a number of clients without a decimal point."
            )
        return max(1, round(clients_per_round * num_clients))
    if not 1 <= clients_per_round <= num_clients:
        raise ConfigurationError(
            f"trainer.clients_per_round: got {clients_per_round}, but the data has {num_clients} clients; "
            f"give a number from 1 to {num_clients}, or a fraction such as 0.1."
        )
    return clients_per_round
