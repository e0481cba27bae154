"""Fed+'s penalties: how far, and in which sense, a client's model is let away from z.

A penalty Ψ enters only through θ = prox_{Ψ/σ}(w − z) = argmin_θ Ψ(θ)/σ + ½ ‖w − z − θ‖²: the local step pulls w to
z + θ, and the server's z is the point of least Σ min_θ Ψ(θ)/σ + ½ ‖w_i − z − θ‖² (``server/smoothed_center.py``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError

if TYPE_CHECKING:
    from fedbc_lightning.state.layout import ParameterLayout


class Penalty:
    """Base class of the penalties Ψ. One of one's own overrides :meth:`prox`, and :meth:`pull` where v − θ cancels."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """With a prox of its own a class does not have the pull of the class that it derives from."""
        super().__init_subclass__(**kwargs)
        if "prox" in vars(cls) and "pull" not in vars(cls):
            cls.pull = Penalty.pull  # type: ignore[method-assign]

    def prox(self, v: Tensor) -> Tensor:
        """The θ of each client, (n, d), where ``v`` = w − z, (n, d)."""
        raise NotImplementedError

    def pull(self, v: Tensor) -> Tensor:
        """What θ leaves of the way, v − θ, (n, d): with it a client pulls z, and z pulls the client."""
        return v - self.prox(v)

    def bind(self, layout: ParameterLayout) -> Penalty:
        """The penalty for vectors of this layout; itself, unless it tells parameters apart by their names."""
        return self


class _Scaled(Penalty):
    """A penalty with one number, δ."""

    def __init__(self, delta: float) -> None:
        if not delta >= 0:
            raise ConfigurationError(f"algorithm.penalty: {type(self).__name__}.delta={delta}: give 0 or more.")
        self.delta = delta


class SquaredNorm(_Scaled):
    """Ψ = (σδ/2) ‖·‖², so θ = v / (1 + δ): a client keeps a share of its way from z (FedAvg+).

    Kundu et al., "Fed+".

    Args:
        delta: δ ≥ 0; 0 lets clients go, inf holds them at z.

    Raises:
        ConfigurationError: δ outside its range.

    Example:
        >>> SquaredNorm(1.0).prox(torch.tensor([[3.0, 4.0]]))
        tensor([[1.5000, 2.0000]])
    """

    def prox(self, v: Tensor) -> Tensor:
        """``v / (1 + delta)``."""
        return v / (1 + self.delta)

    def pull(self, v: Tensor) -> Tensor:
        """``v delta / (1 + delta)``."""
        return v * (1.0 if math.isinf(self.delta) else self.delta / (1 + self.delta))


class Norm(_Scaled):
    """Ψ = σδ ‖·‖₂, so θ = max(0, 1 − δ/‖v‖) v: a client keeps its way from z but for the last δ (FedGeoMed+).

    Kundu et al., "Fed+".

    Args:
        delta: δ ≥ 0; 0 lets clients go, inf holds them at z.

    Raises:
        ConfigurationError: δ outside its range.

    Example:
        >>> Norm(1.0).prox(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        tensor([[2.4000, 3.2000],
                [0.0000, 0.0000]])
    """

    def prox(self, v: Tensor) -> Tensor:
        """``max(0, 1 - delta / ||v||) v``, 0 at 0."""
        return v * (1 - self._share(v)).clamp(min=0)

    def pull(self, v: Tensor) -> Tensor:
        """``min(1, delta / ||v||) v``."""
        return v * self._share(v).clamp(max=1)

    def _share(self, v: Tensor) -> Tensor:
        """``delta / ||v||``, (n, 1)."""
        return self.delta / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)


class AbsoluteNorm(_Scaled):
    """Ψ = σδ ‖·‖₁, so θ = sign(v) max(|v| − δ, 0): each coordinate keeps its way from z but for δ (FedCoMed+).

    Kundu et al., "Fed+", whose printed max{0, ·} drops the negative side.

    Args:
        delta: δ ≥ 0; 0 lets clients go, inf holds them at z.

    Raises:
        ConfigurationError: δ outside its range.

    Example:
        >>> AbsoluteNorm(1.0).prox(torch.tensor([[3.0, -3.0, 0.5]]))
        tensor([[ 2., -2.,  0.]])
    """

    def prox(self, v: Tensor) -> Tensor:
        """``sign(v) max(|v| - delta, 0)``."""
        return v - self.pull(v)

    def pull(self, v: Tensor) -> Tensor:
        """``sign(v) min(|v|, delta)``."""
        return v.clamp(-self.delta, self.delta)


class Layerwise(Penalty):
    """A penalty of its own for each pattern of parameter names: "layer-wise" Fed+.

    The parameters that a pattern takes are one vector to its penalty: one norm over all of them.

    Kundu et al., "Fed+".

    Args:
        rules: Pattern -> penalty, such as ``head.*``: ``*`` any characters, ``?`` one, ``[ab]`` one of these. A
            parameter belongs to the first pattern that fits its name.
        default: Of all parameters that no pattern fits.

    Raises:
        ConfigurationError: A :class:`Layerwise` in another; later, a pattern that gets no parameter.
    """

    def __init__(self, rules: dict[str, Penalty], default: Penalty) -> None:
        if any(isinstance(penalty, Layerwise) for penalty in [*rules.values(), default]):
            raise ConfigurationError(
                "algorithm.penalty: a Layerwise stands in another Layerwise; give one, with the rules of both."
            )
        self.rules = rules
        self.default = default
        self._blocks: list[tuple[Penalty, list[slice]]] | None = None

    def bind(self, layout: ParameterLayout) -> Penalty:
        """Find which slices of the vector each pattern takes.

        Raises:
            ConfigurationError: A pattern gets no parameter.
        """
        taken: dict[str | None, list[slice]] = {pattern: [] for pattern in [*self.rules, None]}
        for entry in layout.entries:
            first = next((pattern for pattern in self.rules if fnmatchcase(entry.name, pattern)), None)
            taken[first].append(slice(entry.offset, entry.end))
        for pattern in self.rules:
            if not taken[pattern]:
                raise ConfigurationError(
                    f"algorithm.penalty: Layerwise.rules: '{pattern}' fits no parameter, or only those of patterns "
                    f"before it; change or drop it. The parameters: {', '.join(e.name for e in layout.entries)}."
                )
        bound = copy.copy(self)
        bound._blocks = [(self.default if name is None else self.rules[name], parts) for name, parts in taken.items()]
        return bound

    def prox(self, v: Tensor) -> Tensor:
        """Each block's own, (n, d); only after :meth:`bind`."""
        return self._of_blocks(v, lambda penalty, block: penalty.prox(block))

    def pull(self, v: Tensor) -> Tensor:
        """Likewise."""
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
