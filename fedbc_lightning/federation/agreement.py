"""What a server and its clients elsewhere have in common: the values that are sent to all, and a hash of the rest."""

from __future__ import annotations

from torch import Tensor

from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.messages import form_of

# What clients are sent to evaluate: the global model, and the one of which their own are made, as hooks around an
# evaluation may change the first
EVALUATED = ("z", "counters", "own z", "own counters")


def form(federation: Federation, frozen: dict[str, str]) -> str:
    """Return the hash of what the federation at the server and those at the clients must have in common.

    Args:
        federation: One of them.
        frozen: Hashes of its frozen parameters as they were before round 1.
    """
    found, layout = federation.fingerprint, federation.layout
    data = found["partition"]["number of clients"], found["partition"]["sha256 of the indices"]
    own = {name: value for name, value in frozen.items() if name not in layout.written}
    # Noise of privacy is the server's; that secret is none of the clients'.
    rest = {name: value for name, value in found.items() if name not in ("partition", "trainer.privacy")}
    return form_of(data, rest, federation.agreed, layout.written, layout.changing, own)


def values_for_clients(federation: Federation) -> dict[str, Tensor]:
    """Return the values of the server, by name, that clients of a round are sent."""
    return {name: federation.server[name] for name in ("z", "buffers", "counters", *federation.declaration.for_clients)}
