"""One case of the battery of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Reference = Callable[..., dict[str, np.ndarray]]


@dataclass(frozen=True)
class Setting:
    """One algorithm with one choice of options, and the NumPy loop it must equal.

    Attributes:
        name: Name of the test case.
        build: Makes a fresh algorithm.
        reference: ``(clients, rounds, z, local) -> trajectories``.
        scalars: Client scalars to compare, by their state names.
        vectors: Client vectors to compare.
        server: Server vectors to compare.
        tolerance: Largest difference allowed; section 4.1 asks for 1e-6.
        options: Of the trainer, where the algorithm needs them; they go before what a test asks for.
    """

    name: str
    build: Callable[[], Any]
    reference: Reference
    scalars: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
