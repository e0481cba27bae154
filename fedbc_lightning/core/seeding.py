"""Randomness as a function of (seed, purpose, round, client, epoch, step), so that no generator state is saved."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch

_PACK = struct.Struct("<6q").pack


def derive(seed: int, purpose: str, round: int = -1, client: int = -1, epoch: int = -1, step: int = -1) -> int:
    """Return the seed of one random draw; equal arguments give equal seeds on every machine.

    Args:
        seed: Seed of the run.
        purpose: Name of what is drawn, e.g. ``"shuffle"``; draws with different purposes are independent.
        round: Round 1..T, or -1 if the draw does not depend on the round.
        client: Client 0..N-1, or -1 if the draw does not depend on the client.
        epoch: Local epoch, from 0, or -1 if the draw does not depend on the epoch.
        step: Local step, from 0, or -1 if the draw does not depend on the step.

    Returns:
        An integer in [0, 2**63), a range that the generators of torch, NumPy and Python all accept.

    Example:
        >>> derive(0, "shuffle", round=1, client=3) == derive(0, "shuffle", round=1, client=3)
        True
        >>> derive(0, "shuffle", round=1, client=3) == derive(0, "augment", round=1, client=3)
        False
    """
    # BLAKE2 mixes all bits, so that neighbouring seeds, rounds and clients get unrelated streams; sums or products of
    # them would collide. The shift keeps the result below 2**63, the largest seed of torch's generators.
    message = _PACK(seed, round, client, epoch, step, len(purpose)) + purpose.encode()
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little") >> 1


def generator(
    seed: int, purpose: str, round: int = -1, client: int = -1, epoch: int = -1, step: int = -1
) -> torch.Generator:
    """Return a new CPU :class:`torch.Generator`, seeded with :func:`derive` of the same arguments."""
    return torch.Generator().manual_seed(derive(seed, purpose, round, client, epoch, step))


def permutation(size: int, seed: int, purpose: str, round: int = -1, client: int = -1, epoch: int = -1) -> torch.Tensor:
    """Return a random permutation of 0..size-1, ``(size,)`` int64, seeded with :func:`derive` of the others."""
    return torch.randperm(size, generator=generator(seed, purpose, round, client, epoch))


def numpy_generator(seed: int, purpose: str, round: int = -1, client: int = -1) -> np.random.Generator:
    """Return a new :class:`numpy.random.Generator`, seeded with :func:`derive` of the same arguments."""
    return np.random.default_rng(derive(seed, purpose, round, client))


def secret_generator(secret: bytes, seed: int, purpose: str, round: int) -> np.random.Generator:
    """Return a generator that depends on a secret text, too; it has 128 bits of key, where a seed has 32.

    Args:
        secret: Text that whoever sees the draws does not know.
        seed: Seed of the run.
        purpose: Name of what is drawn.
        round: Round 1..T.
    """
    key = blake2b(secret, digest_size=32).digest()
    digest = blake2b(f"{seed} {round} {purpose}".encode(), key=key, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def global_seed() -> int:
    """Return the seed of ``seed_everything``, from the environment variable ``PL_GLOBAL_SEED``, or 0 if it is unset."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def seed_globals(seed: int, device: torch.device) -> None:
    """Seed the generators that user code draws from: torch on the CPU and on ``device``, ``random``, ``numpy.random``.

    ``torch.manual_seed`` would visit every device of the machine on each call (98 us against 1 us).
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


class Generators:
    """Snapshot of the states of the generators that :func:`seed_globals` seeds; :meth:`restore` puts them back.

    Args:
        device: Device whose generator is included, besides the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._device, self._torch = device, torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def __eq__(self, other: object) -> bool:
        """Return whether the states are equal, i.e. nothing was drawn between the two snapshots."""
        return isinstance(other, Generators) and self._bytes() == other._bytes()

    __hash__ = None  # type: ignore[assignment]

    def _bytes(self) -> tuple:
        name, keys, *rest = self._numpy
        tensors = [state.numpy().tobytes() for state in (self._torch, self._cuda) if state is not None]
        return self._python, name, np.asarray(keys).tobytes(), rest, tensors

    def restore(self) -> None:
        """Put the generators back into the saved states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


@contextmanager
def preserved_globals(device: torch.device) -> Iterator[None]:
    """Restore the caller's global generators on leaving the context, whatever was drawn inside."""
    before = Generators(device)
    try:
        yield
    finally:
        before.restore()
