"""Penalties of Fed+, which say how far, and in which norm, a client's model may be from z.

A penalty Ψ is used only through θ = prox_{Ψ/σ}(w − z) = argmin_θ Ψ(θ)/σ + ½ ‖w − z − θ‖². The local step pulls w to
z + θ, and the server's z minimises Σ min_θ Ψ(θ)/σ + ½ ‖w_i − z − θ‖² (``server/smoothed_center.py``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.checks import Checked, NotNegative
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.state.layout import ParameterLayout


class Penalty(Checked):
    """Base class of the penalties Ψ.

    Your own penalty overrides :meth:`prox`. It overrides :meth:`pull`, too, if the difference v − θ loses digits by
    cancellation.
    """

    section = "algorithm.penalty"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a class that overrides ``prox`` only the default ``pull``, since an inherited one would not fit."""
        super().__init_subclass__(**kwargs)
        if "prox" in vars(cls) and "pull" not in vars(cls):
            cls.pull = Penalty.pull  # type: ignore[method-assign]

    def prox(self, v: Tensor) -> Tensor:
        """Return the θ of each client, (n, d), for ``v`` = w − z, (n, d)."""
        raise NotImplementedError

    def pull(self, v: Tensor) -> Tensor:
        """Return v − θ, (n, d), the part of ``v`` = w − z by which a client pulls z, and z pulls the client."""
        return v - self.prox(v)

    def bind(self, layout: ParameterLayout) -> Penalty:
        """Return the penalty for vectors of this layout; only one that tells parameters apart returns a copy."""
        return self


class _Scaled(Penalty):
    """Base class of penalties with one number, δ."""

    def __init__(self, delta: NotNegative) -> None:
        self.delta = delta


class SquaredNorm(_Scaled):
    """Lets a client keep a fraction of its difference v = w − z from z, as in FedAvg+: θ = v / (1 + δ).

    The penalty is Ψ = (σδ/2) ‖·‖². Source: Kundu et al., "Fed+".

    Args:
        delta: Strength δ ≥ 0; 0 leaves clients free, inf holds them at z.

    Raises:
        ConfigurationError: δ is out of range.

    Example:
        >>> SquaredNorm(1.0).prox(torch.tensor([[3.0, 4.0]]))
        tensor([[1.5000, 2.0000]])
    """

    def prox(self, v: Tensor) -> Tensor:
        """Return ``v / (1 + delta)``."""
        return v / (1 + self.delta)

    def pull(self, v: Tensor) -> Tensor:
        """Return ``v delta / (1 + delta)``."""
        # v − θ would cancel for small δ, and inf / inf is NaN.
        return v * (1.0 if math.isinf(self.delta) else self.delta / (1 + self.delta))


class Norm(_Scaled):
    """Shortens a client's difference v = w − z from z by δ, as in FedGeoMed+: θ = max(0, 1 − δ/‖v‖) v.

    The penalty is Ψ = σδ ‖·‖₂. Source: Kundu et al., "Fed+".

    Args:
        delta: Length δ ≥ 0; 0 leaves clients free, inf holds them at z.

    Raises:
        ConfigurationError: δ is out of range.

    Example:
        >>> Norm(1.0).prox(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        tensor([[2.4000, 3.2000],
                [0.0000, 0.0000]])
    """

    def prox(self, v: Tensor) -> Tensor:
        """Return ``max(0, 1 - delta / ||v||) v``, which is 0 for v = 0."""
        return v * (1 - self._share(v)).clamp(min=0)

    def pull(self, v: Tensor) -> Tensor:
        """Return ``min(1, delta / ||v||) v``."""
        return v * self._share(v).clamp(max=1)

    def _share(self, v: Tensor) -> Tensor:
        """Return ``delta / ||v||``, (n, 1)."""
        # The smallest normal number keeps 0 / 0 away: a client that stands on z has v = 0 in the first round.
        return self.delta / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)


class AbsoluteNorm(_Scaled):
    """Shortens each coordinate of v = w − z by δ, as in FedCoMed+: θ = sign(v) max(abs(v) − δ, 0).

    The penalty is Ψ = σδ ‖·‖₁. Source: Kundu et al., "Fed+"; the max{0, ·} printed there drops negative coordinates.

    Args:
        delta: Length δ ≥ 0; 0 leaves clients free, inf holds them at z.

    Raises:
        ConfigurationError: δ is out of range.

    Example:
        >>> AbsoluteNorm(1.0).prox(torch.tensor([[3.0, -3.0, 0.5]]))
        tensor([[ 2., -2.,  0.]])
    """

    def prox(self, v: Tensor) -> Tensor:
        """Return ``sign(v) max(|v| - delta, 0)``."""
        return v - self.pull(v)

    def pull(self, v: Tensor) -> Tensor:
        """Return ``sign(v) min(|v|, delta)``."""
        return v.clamp(-self.delta, self.delta)


class Layerwise(Penalty):
    """Gives parameters their own penalty by patterns of their names, which is "layer-wise" Fed+.

    All parameters that match a pattern form one vector, so the penalty takes one norm over all of them. Source: Kundu
    et al., "Fed+".

    Args:
        rules: Pattern -> penalty. In a pattern such as ``head.*``, ``*`` stands for any characters, ``?`` for one, and
            ``[ab]`` for one of those listed. A parameter belongs to the first pattern that matches its name.
        default: Penalty of all parameters that match no pattern.
    """

    def __init__(self, rules: dict[str, Penalty], default: Penalty) -> None:
        self.rules = rules
        self.default = default
        self._blocks: list[tuple[Penalty, list[slice]]] | None = None

    def bind(self, layout: ParameterLayout) -> Penalty:
        """Return a copy that knows which slices of the vector belong to each pattern.

        Raises:
            ConfigurationError: No parameter belongs to some pattern.
        """
        taken: dict[str | None, list[slice]] = {pattern: [] for pattern in [*self.rules, None]}
        for entry in layout.shared_entries:
            first = next((pattern for pattern in self.rules if fnmatchcase(entry.name, pattern)), None)
            taken[first].append(slice(entry.offset, entry.end))
        for pattern in self.rules:
            if not taken[pattern]:
                raise ConfigurationError(
                    f"algorithm.penalty: Layerwise.rules: '{pattern}' fits no parameter, or only those of patterns "
                    f"before it; change or drop it. The parameters: {', '.join(e.name for e in layout.shared_entries)}."
                )
        # A copy, because a user's penalty may serve several runs, with models of different layouts.
        bound = copy.copy(self)
        bound._blocks = [(self.default if name is None else self.rules[name], parts) for name, parts in taken.items()]
        return bound

    def prox(self, v: Tensor) -> Tensor:
        """Return the θ of each block by its own penalty, (n, d); call it on the result of :meth:`bind` only."""
        return self._of_blocks(v, lambda penalty, block: penalty.prox(block))

    def pull(self, v: Tensor) -> Tensor:
        """Return v − θ of each block by its own penalty, (n, d); call it on the result of :meth:`bind` only."""
        return self._of_blocks(v, lambda penalty, block: penalty.pull(block))

    def _of_blocks(self, v: Tensor, function: Callable[[Penalty, Tensor], Tensor]) -> Tensor:
        assert self._blocks is not None, "bind(layout) gives the penalty that knows the slices"
        found = torch.empty_like(v)
        for penalty, parts in self._blocks:
            if parts:
                block = function(penalty, torch.cat([v[:, part] for part in parts], dim=1))
                for part, piece in zip(parts, block.split([p.stop - p.start for p in parts], dim=1), strict=True):
                    found[:, part] = piece
        return found
