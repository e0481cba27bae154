"""How a cohort of clients is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedbc_lightning.engines.sequential import SequentialEngine


def make_engine(kind: Literal["sequential", "vectorized"], *args: Any) -> SequentialEngine:
    """The engine of a run; the arguments are those of :class:`~fedbc_lightning.engines.sequential.SequentialEngine`."""
    if kind == "vectorized":
        from fedbc_lightning.engines.vectorized import VectorizedEngine  # torch.func takes its time to import

        return VectorizedEngine(*args)
    from fedbc_lightning.engines.sequential import SequentialEngine

    return SequentialEngine(*args)
