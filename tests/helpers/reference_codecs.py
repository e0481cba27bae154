"""NumPy loop for FedAvg and FedBC with coded messages, from the papers' formulas alone; no code of the package."""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from helpers.reference import Logged, Run, outer_loop

Coder = Callable[[np.ndarray, Callable[[], np.ndarray]], np.ndarray]
"""A vector (d,), and a function that draws d uniform numbers -> what is read of it (d,)."""


def top_k(number: int) -> Coder:
    def code(vector: np.ndarray, draw: Any) -> np.ndarray:
        largest = sorted(range(len(vector)), key=lambda j: -abs(vector[j]))[:number]
        return np.array([value if j in largest else 0.0 for j, value in enumerate(vector)])

    return code


def qsgd(levels: int, bucket: int) -> Coder:
    def code(vector: np.ndarray, draw: Any) -> np.ndarray:
        read, uniform = np.zeros_like(vector), draw()
        for start in range(0, len(vector), bucket):
            norm = np.sqrt((vector[start : start + bucket] ** 2).sum())
            for j in range(start, min(start + bucket, len(vector))):
                place = levels * abs(vector[j]) / norm
                lower = np.floor(place)
                level = lower + (uniform[j] >= 1 - (place - lower))
                read[j] = norm * np.sign(vector[j]) * level / levels
        return read

    return code


def sign(vector: np.ndarray, draw: Any) -> np.ndarray:
    scale = sum(map(abs, vector)) / len(vector)
    return np.array([-scale if value < 0 else scale for value in vector])


def bfloat16(vector: np.ndarray, draw: Any) -> np.ndarray:
    """The upper 16 bits of a float32, to nearest, ties to even."""
    bits = vector.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32).astype(vector.dtype)


E4M3 = np.array([
    2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    for exponent in range(16) for mantissa in range(8) if (exponent, mantissa) != (15, 7)
])  # fmt: skip
"""The 127 values of the format that are not negative, by their codes."""


def float8(vector: np.ndarray, draw: Any) -> np.ndarray:
    scale, read = np.abs(vector).max() / 448, []
    for value in vector:
        distances = np.abs(E4M3 - abs(value / scale))
        nearest = np.flatnonzero(distances == distances.min())
        read.append(np.sign(value) * scale * E4M3[nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0]])
    return np.array(read)


def uniform(size: int, seed: int, purpose: str, round: int, client: int = -1) -> Callable[[], np.ndarray]:
    """The documented draws of a message: a hash of what they depend on seeds torch's generator."""
    words = [seed, round, client, -1, -1, len(purpose)]
    message = b"".join(word.to_bytes(8, "little", signed=True) for word in words) + purpose.encode()
    number = int.from_bytes(blake2b(message, digest_size=8).digest(), "little") >> 1

    def draw() -> np.ndarray:
        generator = torch.Generator().manual_seed(number)
        return torch.rand(size, generator=generator, dtype=torch.float64).numpy()

    return draw


@outer_loop
def coded(
    run: Run,
    z: np.ndarray,
    up: Coder | None = None,
    down: Coder | None = None,
    has_memory: bool = False,
    dual_lr: float | None = None,
    dual_init: float = 0.1,
) -> Logged:
    """FedAvg by samples; with ``dual_lr`` FedBC with learned tolerances, whose server sees the coded updates."""
    x, error = run.each(z), np.zeros((len(run.clients), len(z)))
    dual, tolerance = np.full(len(run.clients), dual_init), np.zeros(len(run.clients))
    for t, sampled in run.rounds:
        received, sent = z, []
        if down is not None:
            received = down(z, uniform(len(z), run.local.steps.seed, "coded broadcast", t))
        for i in sampled:
            pull = 2 * dual[i] if dual_lr is not None else 0.0
            x[i] = run.train(t, i, received, lambda w, p=pull, c=received: p * (w - c)).w
            update = x[i] - received + error[i]
            read = update if up is None else up(update, uniform(len(z), run.local.steps.seed, "coded update", t, i))
            if has_memory:
                error[i] = update - read
            sent.append(z + read)
            if dual_lr is not None:
                distance, old = ((sent[-1] - z) ** 2).sum(), dual[i]
                dual[i] = max(0.0, old + dual_lr * (distance - tolerance[i]))
                tolerance[i] += dual_lr * old
        weights = run.shares(sampled, "samples") if dual_lr is None else dual[sampled] / dual[sampled].sum()
        z = weights @ np.stack(sent)
        yield {"z": z, "local_model": x, "coding_error": error, "dual": dual, "tolerance": tolerance}
