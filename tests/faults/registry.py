"""Kinds of faults, each in a module of its own that registers itself here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.runs import Bench


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: What is done, and where.
        try_it: Injects it in an empty folder; returns None where nothing was lost, else what was.
    """

    name: str
    try_it: Callable[[Path], str | None]


Kind = Callable[[Bench, int, random.Random], Iterator[Case]]
"""Makes at most so many cases; none where the machine does not allow the fault."""

KINDS: dict[str, tuple[Kind, int]] = {}
"""Name -> the kind and how many of its cases the full form tries."""


def kind(name: str, count: int) -> Callable[[Kind], Kind]:
    """Register a kind of fault.

    Args:
        name: As given to ``--kind``.
        count: Cases of the full form.
    """

    def register(cases: Kind) -> Kind:
        KINDS[name] = cases, count
        return cases

    return register
