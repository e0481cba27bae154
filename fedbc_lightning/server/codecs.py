"""Codecs: how a vector is written into fewer bytes, what is read from them, and how many bytes they are.

A codec is a function of one vector (d,) and of random draws, so that a client's message depends neither on the clients
that are trained beside it nor on the process that trains it. Plain numbers in a message, such as a norm, have the
precision of z: 4 bytes, or 8 under ``trainer.precision: 64-true``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedbc_lightning.core.checks import Checked, Count, Share
from fedbc_lightning.core.devices import wide_dtype

LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


class Codec(Checked, ABC):
    """Base class of codecs; your own codec overrides :meth:`decoded` and :meth:`num_bytes`.

    Attributes:
        error_feedback: Whether each client keeps what its message has lost, and adds it to its next update.
        is_for_models: Whether what is read is near to the vector itself, so that z can be sent in it.
    """

    section = "trainer.codec"
    error_feedback: bool = False
    is_for_models: bool = False

    @abstractmethod
    def decoded(self, vector: Tensor, draws: torch.Generator) -> Tensor:
        """Return what the receiver reads of a vector (d,), in the same dtype and on the same device.

        Args:
            vector: The vector, d ≥ 1 finite numbers.
            draws: Generator on the CPU for whatever is random.
        """

    @abstractmethod
    def num_bytes(self, size: int, number_bytes: int) -> int:
        """Return the exact number of bytes of a message.

        Args:
            size: Number d of elements of the vector.
            number_bytes: Bytes of one number in the precision of z.
        """

    def __repr__(self) -> str:
        """Return the codec as it is written in Python."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class TopK(Codec):
    """Sends the k elements of largest magnitude and their places, k = max(1, round(fraction d)); the others are 0.

    A message holds k numbers in the precision of z, and the places: k indices of ⌈log2 d⌉ bits each, packed, or one bit
    for each of the d elements, whichever is shorter. Which elements of equal magnitude are sent is left to torch.

    Stich et al. 2018, "Sparsified SGD with Memory", Algorithm 1 (Mem-SGD with top_k); Basu et al. 2019,
    "Qsparse-local-SGD", Algorithm 1, for updates of several local steps.

    Args:
        fraction: Fraction of the elements that is sent, in (0, 1].
        error_feedback: Whether each client adds what it has not sent to its next update.

    Raises:
        ConfigurationError: The fraction is out of range.
    """

    def __init__(self, fraction: Share, error_feedback: bool = True) -> None:
        self.fraction, self.error_feedback = fraction, error_feedback

    def num_sent(self, size: int) -> int:
        """Return k for d elements.

        Example:
            >>> TopK(0.01).num_sent(4810), TopK(0.01).num_sent(4), TopK(0.3).num_sent(6)
            (48, 1, 2)
        """
        return max(1, round(self.fraction * size))

    def decoded(self, vector: Tensor, draws: torch.Generator) -> Tensor:
        """Return the vector with all but the k elements set to 0."""
        # sorted=False saves a sort of k elements, which the receiver does not need.
        places = vector.abs().topk(self.num_sent(len(vector)), sorted=False).indices
        return torch.zeros_like(vector).index_copy_(0, places, vector[places])

    def num_bytes(self, size: int, number_bytes: int) -> int:
        """Return the bytes of k numbers and of their places.

        Example:
            >>> TopK(0.01).num_bytes(4810, 4)  # 48 x 4, and 48 x 13 bits
            270
        """
        num_sent = self.num_sent(size)
        return num_sent * number_bytes + _packed(min(num_sent * (size - 1).bit_length(), size))


class QSGD(Codec):
    """Rounds each element at random to a multiple of ‖v‖ / s, without a bias: E[Q(v)] = v.

    For each bucket v of the vector, with levels s::

        Q(v)_j = ‖v‖ sign(v_j) l_j / s,    l_j = ⌊s |v_j| / ‖v‖ + u_j⌋,    u_j uniform in [0, 1)

    so that l_j is the upper of the two neighbouring levels with the probability that keeps the mean. The variance is at
    most min(d / s², √d / s) ‖v‖² for d elements in a bucket (lemma 3.1), so a large model needs buckets.

    A message holds a sign and a level of fixed width for each element, 1 + ⌈log2(s + 1)⌉ bits, packed, and the norm of
    each bucket. The paper's Elias code is not counted: it is shorter where most levels are 0, but its length depends on
    the data, and a receiver of fixed widths needs no decoder.

    Alistarh et al. 2017, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", section 3.1 (Q_s)
    and lemma 3.1; buckets: section 4.

    Args:
        levels: Number s ≥ 1 of levels above 0; 1, 3, 7, 15, ... fill 2, 3, 4, 5, ... bits.
        bucket_size: Number of successive elements that share a norm; d or more: all, as in section 3.1.

    Raises:
        ConfigurationError: A value is no whole number ≥ 1.
    """

    is_for_models = True

    def __init__(self, levels: Count = 127, bucket_size: Count = 512) -> None:
        self.levels, self.bucket_size = levels, bucket_size

    def decoded(self, vector: Tensor, draws: torch.Generator) -> Tensor:
        """Return the rounded vector; norms are rounded to the vector's precision, in which they are sent.

        Under ``trainer.precision: bf16-true`` that rounding moves the mean by up to 0.4 %.
        """
        size, wide = len(vector), wide_dtype(vector.device)
        width = min(self.bucket_size, size)
        uniform = torch.rand(size, generator=draws, dtype=wide).to(vector.device)
        fill = -size % width
        pad = torch.nn.functional.pad
        values, uniform = (pad(row, (0, fill)).view(-1, width) for row in (vector.to(wide), uniform))
        # Rounded to the precision in which they are sent: the receiver knows no other norm.
        norms = torch.linalg.vector_norm(values, dim=1, keepdim=True).to(vector.dtype).to(wide)
        places = torch.where(norms > 0, values.abs() / norms * self.levels, 0.0)
        levels = (places + uniform).floor().clamp(max=self.levels)
        return (norms * values.sign() * levels / self.levels).view(-1)[:size].to(vector.dtype)

    def num_bytes(self, size: int, number_bytes: int) -> int:
        """Return the bytes of the packed signs and levels, and of the norms.

        Example:
            >>> QSGD(7).num_bytes(4810, 4)  # 4810 x 4 bits, and 10 norms
            2445
        """
        num_buckets = -(-size // self.bucket_size)
        return _packed(size * (1 + self.levels.bit_length())) + num_buckets * number_bytes


class Sign(Codec):
    """Sends the signs and one scale: C(v) = (‖v‖₁ / d) sign(v).

    A message holds one bit for each element, packed, and the scale. A bit cannot say 0: an element that is 0 is read as
    +‖v‖₁ / d, which leaves the error ‖v − C(v)‖² = ‖v‖² − ‖v‖₁² / d as it is.

    Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", Algorithm 1
    (EF-SIGNSGD).

    Args:
        error_feedback: Whether each client adds what its message has lost to its next update; without that, the
            paper's section 3 has problems on which such steps do not converge.
    """

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback

    def decoded(self, vector: Tensor, draws: torch.Generator) -> Tensor:
        """Return the scaled signs."""
        scale = vector.abs().mean(dtype=wide_dtype(vector.device)).to(vector.dtype)
        # sign(0) = +1: a bit has no third value.
        return torch.where(vector < 0, -scale, scale)

    def num_bytes(self, size: int, number_bytes: int) -> int:
        """Return the bytes of the packed signs and of the scale.

        Example:
            >>> Sign().num_bytes(4810, 4)
            606
        """
        return _packed(size) + number_bytes


class BFloat16(Codec):
    """Rounds each element to bfloat16: 8 bits of precision, the range of float32, 2 bytes each."""

    is_for_models = True

    def decoded(self, vector: Tensor, draws: torch.Generator) -> Tensor:
        """Return the rounded vector."""
        return vector.to(torch.bfloat16).to(vector.dtype)

    def num_bytes(self, size: int, number_bytes: int) -> int:
        """Return 2 d."""
        return 2 * size


class Float8(Codec):
    """Rounds each element to float8 (e4m3fn: 4 bits of precision, up to 448), scaled so that the largest one is 448.

    With c = ‖v‖_∞ / 448, the element v_j is read as c · float8(v_j / c); below 2⁻⁶ c the spacing no longer shrinks. A
    message holds one byte for each element, and c.

    Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3 (E4M3).
    """

    is_for_models = True

    def decoded(self, vector: Tensor, draws: torch.Generator) -> Tensor:
        """Return the rounded vector."""
        # The largest element becomes 448; a vector of zeros would give 0/0.
        scale = (vector.abs().amax() / LARGEST_FLOAT8).clamp(min=torch.finfo(vector.dtype).tiny)
        return (vector / scale).to(torch.float8_e4m3fn).to(vector.dtype) * scale

    def num_bytes(self, size: int, number_bytes: int) -> int:
        """Return d bytes and those of c."""
        return size + number_bytes


def _packed(num_bits: int) -> int:
    """Return the number of bytes that hold so many bits."""
    return math.ceil(num_bits / 8)
