"""Compares a paper's numbers with ours, and checks whether its claims hold here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.numbers import (
    Rows,
    difference_and_interval,
    is_share,
    laid_out,
    mean_and_deviation,
    signed,
)
from fedbc_lightning.studies.statistics import paired_differences

if TYPE_CHECKING:
    from fedbc_lightning.studies.study import Study


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
    """

    title: str
    metric: str
    only: list[str] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    @property
    def algorithms(self) -> list[str]:
        """Names in the study of the algorithms that the table or its claims mention."""
        return list(dict.fromkeys([*self.values, *(n for claim in self.claims for n in (claim.better, *claim.than))]))

    def check(self, place: str, algorithms: list[str], levels: list[tuple[str, ...]], metrics: list[str]) -> None:
        """Raise unless the study knows all names that are used here.

        Args:
            place: Key of this table in the config, for messages.
            algorithms: Names of the study's algorithms.
            levels: Levels of each variant of the study.
            metrics: Metrics of the study.

        Raises:
            ConfigurationError: The study does not know a name.
        """
        if self.metric not in metrics:
            raise ConfigurationError(f"{place}.metric: '{self.metric}' is not among the metrics {', '.join(metrics)}.")
        known = list(dict.fromkeys(level for names in levels for level in names))
        variants = [", ".join(names) for names in levels]
        named = {*self.only, *(level for cells in self.values.values() for level in _keys(cells))}
        claimed = {name for claim in self.claims for name in claim.variants or ()} - set(variants)
        for kind, found, among in (
            ("algorithms", set(self.algorithms), algorithms), ("variants and levels", named | claimed, known),
        ):  # fmt: skip
            unknown = sorted(found - set(among))
            if unknown:
                raise ConfigurationError(f"{place}: '{unknown[0]}' is not among the {kind} {', '.join(among)}.")

    def cell(self, algorithm: str, levels: Iterable[str]) -> str:
        """Return the text that the paper's table prints; empty where it prints nothing.

        Args:
            algorithm: Name of the row.
            levels: Levels of the variant, in the order of the factors.

        Example:
            >>> values = {"FedBC": {"C = 1": {"e = 1.1": "50.35 ± 0.91"}}}
            >>> Paper("", "", ["E = 5"], values).cell("FedBC", ("E = 5", "C = 1", "e = 1.1"))
            '50.35 ± 0.91'
        """
        found: Any = self.values.get(algorithm, {})
        for level in levels:
            if level not in self.only:
                found = found.get(level, {}) if isinstance(found, dict) else {}
        if isinstance(found, float) and is_share(self.metric):  # 75.50 in YAML is a number
            return f"{found:.2f}"
        return "" if isinstance(found, dict) else str(found)

    def mean(self, algorithm: str, levels: Iterable[str]) -> float:
        """Return the paper's mean as a plain number, an accuracy in [0, 1]; NaN where the table has none.

        Example:
            >>> values = {"FedBC": {"E = 1": "87.83 ± 0.35"}}
            >>> Paper("", "global/test_accuracy", values=values).mean("FedBC", ["E = 1"])
            0.8783
        """
        found = re.match(r"\s*-?\d+(\.\d+)?", self.cell(algorithm, levels))
        if found is None:
            return math.nan
        return round(float(found[0]) / 100, 12) if is_share(self.metric) else float(found[0])

    def number_rows(self, study: Study, summary: pd.DataFrame) -> Rows:
        """Return a header, then a row per algorithm with our numbers and the paper's in parentheses."""
        ours = summary[summary["metric"] == self.metric].set_index(["variant", "algorithm"])

        def text(variant: str, name: str) -> str:
            mine = "-"
            if (variant, name) in ours.index:
                mine = mean_and_deviation(ours.loc[(variant, name)], self.metric, len(study.seed_list))
            return f"{mine} ({self.cell(name, study.levels[variant]) or '-'})"

        names = [method.name for method in study.methods if method.name in self.algorithms]
        return laid_out(names, study.blocks(self.only), text)

    def claim_rows(self, study: Study, results: pd.DataFrame) -> Rows:
        """Return a header, then a row per claimed pair that says whether the claim holds.

        A claim holds where the interval of the paired difference lies above 0 (below 0 for a metric that should be
        small), it fails where the interval lies on the other side, and is open where the interval contains 0 or there
        is none.
        """
        sign = -1 if study.is_lower_better(self.metric) else 1
        present = {method.name for method in study.methods}
        cells: dict[tuple[str, str], str] = {}
        for claim in self.claims:
            for other in claim.than if claim.better in present else ():
                if other not in present:
                    continue
                title = f"{claim.better} better than {other}"
                found = paired_differences(results, [self.metric], other, study.confidence)
                found = found[found["algorithm"] == claim.better].set_index("variant")
                for variant, levels in study.levels.items():
                    cells.setdefault((variant, title), "-")
                    is_claimed = claim.variants is None or {variant, *levels} & set(claim.variants)
                    if not is_claimed or variant not in found.index:
                        continue
                    cell = found.loc[variant]
                    said = verdict(sign * cell["low"], sign * cell["high"])
                    theirs = self.mean(claim.better, levels) - self.mean(other, levels)
                    beside = "" if math.isnan(theirs) else f" (paper {signed(theirs, self.metric)})"
                    cells[variant, title] = (
                        f"{said}: {difference_and_interval(cell, self.metric, len(study.seed_list))}{beside}"
                    )
        titles = list(dict.fromkeys(title for _, title in cells))
        return laid_out(titles, study.blocks(self.only), lambda variant, title: cells[variant, title])


def _keys(cells: dict[str, Any]) -> Iterator[str]:
    """Yield all keys of nested mappings."""
    for key, value in cells.items():
        yield key
        if isinstance(value, dict):
            yield from _keys(value)


def verdict(one_end: float, other_end: float) -> str:
    """Decide whether a claim holds from the two ends of the interval of a difference that should be positive.

    Example:
        >>> verdict(0.1, 0.3), verdict(-0.2, 0.1), verdict(-0.1, -0.3), verdict(math.nan, math.nan)
        ('holds', 'open', 'fails', 'open')
    """
    if min(one_end, other_end) > 0:
        return "holds"
    return "fails" if max(one_end, other_end) < 0 else "open"
