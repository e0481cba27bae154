"""Clients as users write them: by name, or by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean


def find_clients(written: Iterable[str | int], num_clients: int, names: Sequence[str] | None, where: str) -> list[int]:
    """Return the numbers of clients, each of which is written as its name or its number.

    Args:
        written: The clients; a text is a name, or else a number.
        num_clients: Number of all clients, N.
        names: Names of the clients; None if they have none.
        where: Where the clients are written, for the message.

    Raises:
        ConfigurationError: There is no such client.

    Example:
        >>> find_clients(["b ", "0", 2, "7"], 3, ["a", "b ", "7"], "data.heldout_clients")
        [1, 0, 2, 2]
    """
    # Names go before numbers: a writer may be called "7" and be client 3.
    numbers = {str(k): k for k in range(num_clients)} | {name: k for k, name in enumerate(names or ())}
    found = list[int]()
    for one in written:
        number = numbers.get(one, numbers.get(one.strip())) if isinstance(one, str) else one
        if isinstance(number, bool) or not isinstance(number, Integral) or number not in range(num_clients):
            hint = did_you_mean(str(one), names or (), f"give names, or numbers from 0 to {num_clients - 1}.")
            raise ConfigurationError(f"{where}: there is no client {one!r}; {hint}")
        found.append(int(number))
    return found
