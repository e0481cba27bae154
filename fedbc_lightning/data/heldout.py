"""Clients that are held out: they never train, and a model is only tested on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbc_lightning.core import seeding
from fedbc_lightning.core.errors import ConfigurationError, did_you_mean

# Setting data.heldout_clients: a number of clients, a fraction of them, their names or numbers, or None
Heldout = int | float | Sequence[str | int] | None

WHERE = "data.heldout_clients"


def find_heldout(asked: Heldout, num_clients: int, names: Sequence[str] | None, seed: int) -> np.ndarray:
    """Return the clients that are held out, which are drawn by the seed alone unless they are listed.

    Args:
        asked: A number of clients, a fraction of them in (0, 1), or a list of names or numbers; None or 0: no client.
        num_clients: Number of all clients, N.
        names: Names of the clients; None if they have none.
        seed: Seed of the draw, the one by which the data are dealt.

    Returns:
        The numbers of the clients, int64, ascending.

    Raises:
        ConfigurationError: The value is impossible, a listed client does not exist, or no client would train.

    Example:
        >>> find_heldout(["b", 0], 3, ["a", "b", "c"], seed=0).tolist(), len(find_heldout(0.2, 10, None, seed=0))
        ([0, 1], 2)
    """
    # False is equal to 0, but no number of clients: it is refused below.
    if asked is None or (asked == 0 and not isinstance(asked, bool)):
        return np.zeros(0, dtype=np.int64)
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        found = _listed(asked, num_clients, names)
    else:
        count = _count(asked, num_clients)
        found = seeding.numpy_generator(seed, "heldout clients").choice(num_clients, count, replace=False).tolist()
    if len(found) >= num_clients:
        raise ConfigurationError(f"{WHERE}: all {num_clients} clients are held out, so that nobody trains; list fewer.")
    return np.sort(np.array(found, dtype=np.int64))


def _count(asked: object, num_clients: int) -> int:
    """Return how many clients a number or a fraction holds out, at least one."""
    if isinstance(asked, float) and 0 < asked < 1:
        # At least one, or there would be no metric of them; not all, or nobody would train
        return min(max(1, round(asked * num_clients)), num_clients - 1)
    if isinstance(asked, int) and not isinstance(asked, bool) and 0 < asked < num_clients:
        return asked
    raise ConfigurationError(
        f"{WHERE}: got {asked!r}; give a fraction in (0, 1), a whole number from 1 to {num_clients - 1} (the data has "
        f"{num_clients} clients), or a list of clients' names or numbers."
    )


def _listed(asked: Sequence[str | int], num_clients: int, names: Sequence[str] | None) -> list[int]:
    """Return the numbers of listed clients; a text is a name, or else a number."""
    numbers = {str(client): client for client in range(num_clients)}
    # Names go before numbers: a writer may be called "7" and be client 3.
    numbers |= {name: client for client, name in enumerate(names or ())}
    found = list[int]()
    for one in asked:
        number = numbers.get(one) if isinstance(one, str) else one
        if isinstance(number, bool) or not isinstance(number, int) or number not in range(num_clients):
            hint = did_you_mean(str(one), names or (), f"give names, or numbers from 0 to {num_clients - 1}.")
            raise ConfigurationError(f"{WHERE}: there is no client {one!r}; {hint}")
        if number in found:
            raise ConfigurationError(f"{WHERE}: client {one!r} is listed twice; list each client once.")
        found.append(number)
    return found
