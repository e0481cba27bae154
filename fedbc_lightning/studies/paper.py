"""Holds a table of a paper: its numbers, and its claims that one algorithm is better than others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbc_lightning.studies.numbers import is_share


@dataclass
class Claim:
    """The claim of a paper that one algorithm is better than others.

    Args:
        better: Name in the study of the algorithm that is claimed to be better.
        than: Names of the other algorithms.
        variants: Variants or levels for which the claim is made; None: all.
    """

    better: str
    than: list[str]
    variants: list[str] | None = None


@dataclass
class Paper:
    """A table of a paper, shown beside our numbers.

    Args:
        title: Name of the paper and number of the table.
        metric: The study's metric that the table shows.
        only: Levels of the study's factors that this table is about, e.g. ``[E = 5]``; the cells do not name them.
        values: The paper's cells: algorithm -> variant -> cell, e.g. ``83.61 ± 0.43``, in the unit in which tables show
            the metric (accuracies in percent). With factors: algorithm -> level -> level -> cell.
        claims: Conclusions of the paper, which are checked on our runs.
        public: Cells that the authors' public code gives, where it was run, in the form of ``values``.
        other_methods: Algorithms whose name stands for another method in the paper's experiments -> how that differs
            from ours. Their cells are shown, and the captions say so.
    """

    title: str
    metric: str
    only: list[str] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    public: dict[str, dict[str, Any]] = field(default_factory=dict)
    other_methods: dict[str, str] = field(default_factory=dict)

    @property
    def algorithms(self) -> list[str]:
        """Names in the study of the algorithms that the table or its claims mention."""
        return list(dict.fromkeys([*self.values, *(n for claim in self.claims for n in (claim.better, *claim.than))]))

    @property
    def names(self) -> list[str]:
        """Names of algorithms, variants and levels of the study that the table or its claims mention."""
        claimed = [variant for claim in self.claims for variant in claim.variants or ()]
        cells = [*_keys(self.values), *_keys(self.public)]
        return [*self.algorithms, *self.other_methods, *self.only, *cells, *claimed]

    def cell(self, algorithm: str, levels: Iterable[str], values: Mapping[str, Any] | None = None) -> str:
        """Return the text that a table prints; empty where it prints nothing.

        Args:
            algorithm: Name of the row.
            levels: Levels of the variant, in the order of the factors.
            values: Cells to look in, such as ``public``; None: those of the paper.

        Example:
            >>> values = {"FedBC": {"C = 1": {"e = 1.1": "50.35 ± 0.91"}}}
            >>> Paper("", "", ["E = 5"], values).cell("FedBC", ("E = 5", "C = 1", "e = 1.1"))
            '50.35 ± 0.91'
        """
        found = (self.values if values is None else values).get(algorithm, {})
        for level in levels:
            if level not in self.only:
                found = found.get(level, {}) if isinstance(found, dict) else {}
        if isinstance(found, dict):
            return ""
        # YAML reads 75.50 as the number 75.5, and a table should print both digits again.
        return f"{found:.2f}" if isinstance(found, float) and is_share(self.metric) else str(found)

    def mean(self, algorithm: str, levels: Iterable[str]) -> float:
        """Return the paper's mean as a plain number, an accuracy in [0, 1]; NaN where the table has none.

        Example:
            >>> values = {"FedBC": {"E = 1": "87.83 ± 0.35"}}
            >>> Paper("", "accuracy/global", values=values).mean("FedBC", ["E = 1"])
            0.8783
        """
        found = re.match(r"\s*-?\d+(\.\d+)?", self.cell(algorithm, levels))
        if found is None:
            return math.nan
        return round(float(found[0]) / 100, 12) if is_share(self.metric) else float(found[0])


def _keys(cells: dict[str, Any]) -> Iterator[str]:
    """Yield all keys of nested mappings."""
    for key, value in cells.items():
        yield key
        if isinstance(value, dict):
            yield from _keys(value)
