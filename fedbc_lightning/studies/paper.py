"""What a paper says, beside what comes out here: its numbers, and whether its claims hold."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import pandas as pd

from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.studies.numbers import (
    Rows,
    difference_and_interval,
    grid,
    is_lower_better,
    is_share,
    mean_and_deviation,
    signed,
)
from fedbc_lightning.studies.statistics import paired_differences


@dataclass
class Claim:
    """That one algorithm is better than others.

    Args:
        better: The algorithm, by its name in the study.
        than: The others.
        variants: Where; None: in all.
    """

    better: str
    than: list[str]
    variants: list[str] | None = None


@dataclass
class Paper:
    """A table of a paper.

    Args:
        title: Which paper and table.
        metric: Which of the study's metrics it shows.
        values: Algorithm -> variant -> the paper's cell, e.g. ``83.61 ± 0.43``, in the unit in which tables show the
            metric (accuracies in percent).
        claims: What the paper concludes.
    """

    title: str
    metric: str
    values: dict[str, dict[str, str]]
    claims: list[Claim] = field(default_factory=list)

    def check(self, algorithms: list[str], variants: list[str], metrics: list[str]) -> None:
        """Raise unless all names are those of the study.

        Raises:
            ConfigurationError: One is not.
        """
        if self.metric not in metrics:
            raise ConfigurationError(f"paper.metric: '{self.metric}' is not among the metrics {', '.join(metrics)}.")
        named = {*self.values, *(name for claim in self.claims for name in (claim.better, *claim.than))}
        places = {variant for cells in self.values.values() for variant in cells}
        places |= {variant for claim in self.claims for variant in claim.variants or ()}
        for kind, found, known in (("algorithms", named, algorithms), ("variants", places, variants)):
            unknown = sorted(found - set(known))
            if unknown:
                raise ConfigurationError(f"paper: '{unknown[0]}' is not among the {kind} {', '.join(known)}.")

    def mean(self, algorithm: str, variant: str) -> float:
        """The paper's mean as a plain number, of an accuracy between 0 and 1; NaN where it says none.

        Example:
            >>> Paper("", "global/test_accuracy", {"FedBC": {"E = 1": "87.83 ± 0.35"}}).mean("FedBC", "E = 1")
            0.8783
        """
        found = re.match(r"\s*-?\d+(\.\d+)?", self.values.get(algorithm, {}).get(variant, ""))
        if found is None:
            return math.nan
        return round(float(found[0]) / 100, 12) if is_share(self.metric) else float(found[0])

    def number_rows(self, algorithms: list[str], variants: list[str], summary: pd.DataFrame) -> Rows:
        """A header, then a row per algorithm: ours, and the paper's in parentheses."""
        header, *rows = grid(algorithms, variants, summary, self.metric, mean_and_deviation)
        for name, row in zip(algorithms, rows, strict=True):
            theirs = self.values.get(name, {})
            row[1:] = [f"{ours} ({theirs.get(variant, '-')})" for variant, ours in zip(variants, row[1:], strict=True)]
        return [header, *rows]

    def claim_rows(self, variants: list[str], results: pd.DataFrame, confidence: float) -> Rows:
        """A header, then a row per claim: whether it holds, by the interval of the paired difference.

        It holds where the interval lies above 0 (below 0 for a metric that should be small), it fails where the
        interval lies on the other side, and is open where the interval holds 0 or there is none.
        """
        sign = -1 if is_lower_better(self.metric) else 1
        rows = [["", *variants]]
        for claim in self.claims:
            for other in claim.than:
                found = paired_differences(results, [self.metric], other, confidence)
                found = found[found["algorithm"] == claim.better].set_index("variant")
                row = [f"{claim.better} > {other}"]
                for variant in variants:
                    is_claimed = claim.variants is None or variant in claim.variants
                    if not is_claimed or variant not in found.index:
                        row.append("-")
                        continue
                    cell = found.loc[variant]
                    said = verdict(sign * cell["low"], sign * cell["high"])
                    row.append(f"{said}: {difference_and_interval(cell, self.metric)}")
                    theirs = self.mean(claim.better, variant) - self.mean(other, variant)
                    row[-1] += "" if math.isnan(theirs) else f" (paper {signed(theirs, self.metric)})"
                rows.append(row)
        return rows


def verdict(one_end: float, other_end: float) -> str:
    """Whether a claim holds, by the ends of an interval of what should be positive.

    Example:
        >>> verdict(0.1, 0.3), verdict(-0.2, 0.1), verdict(-0.1, -0.3), verdict(math.nan, math.nan)
        ('holds', 'open', 'fails', 'open')
    """
    if min(one_end, other_end) > 0:
        return "holds"
    return "fails" if max(one_end, other_end) < 0 else "open"
