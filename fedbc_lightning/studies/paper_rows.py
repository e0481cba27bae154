"""Lays out a paper's numbers beside ours, and decides whether its claims hold here."""

from __future__ import annotations

import math

import pandas as pd

from fedbc_lightning.studies.numbers import Rows, difference_and_interval, laid_out, mean_and_deviation, signed
from fedbc_lightning.studies.paper import Paper
from fedbc_lightning.studies.statistics import paired_differences
from fedbc_lightning.studies.study import Study


def number_rows(paper: Paper, study: Study, summary: pd.DataFrame) -> Rows:
    """Return a header, then a row per algorithm with our numbers and the paper's in parentheses."""
    ours = summary[summary["metric"] == paper.metric].set_index(["variant", "algorithm"])

    def text(variant: str, name: str) -> str:
        mine = "-"
        if (variant, name) in ours.index:
            mine = mean_and_deviation(ours.loc[(variant, name)], paper.metric, len(study.seed_list))
        return f"{mine} ({paper.cell(name, study.levels[variant]) or '-'})"

    names = [method.name for method in study.methods if method.name in paper.algorithms]
    return laid_out(names, study.blocks(paper.only), text)


def claim_rows(paper: Paper, study: Study, results: pd.DataFrame) -> Rows:
    """Return a header, then a row per claimed pair that says whether the claim holds.

    A claim holds where the interval of the paired difference lies above 0 (below 0 for a metric that should be
    small), it fails where the interval lies on the other side, and is open where the interval contains 0 or there
    is none.
    """
    sign = -1 if study.is_lower_better(paper.metric) else 1
    present = {method.name for method in study.methods}
    cells: dict[tuple[str, str], str] = {}
    for claim in paper.claims:
        for other in claim.than if claim.better in present else ():
            if other not in present:
                continue
            title = f"{claim.better} better than {other}"
            found = paired_differences(results, [paper.metric], other, study.confidence)
            found = found[found["algorithm"] == claim.better].set_index("variant")
            for variant, levels in study.levels.items():
                cells.setdefault((variant, title), "-")
                is_claimed = claim.variants is None or {variant, *levels} & set(claim.variants)
                if not is_claimed or variant not in found.index:
                    continue
                cell = found.loc[variant]
                said = verdict(sign * cell["low"], sign * cell["high"])
                theirs = paper.mean(claim.better, levels) - paper.mean(other, levels)
                from_paper = "" if math.isnan(theirs) else f" (paper {signed(theirs, paper.metric)})"
                cells[variant, title] = (
                    f"{said}: {difference_and_interval(cell, paper.metric, len(study.seed_list))}{from_paper}"
                )
    titles = list(dict.fromkeys(title for _, title in cells))
    return laid_out(titles, study.blocks(paper.only), lambda variant, title: cells[variant, title])


def verdict(one_end: float, other_end: float) -> str:
    """Decide whether a claim holds from the two ends of the interval of a difference that should be positive.

    Example:
        >>> verdict(0.1, 0.3), verdict(-0.2, 0.1), verdict(-0.1, -0.3), verdict(math.nan, math.nan)
        ('holds', 'open', 'fails', 'open')
    """
    if min(one_end, other_end) > 0:
        return "holds"
    return "fails" if max(one_end, other_end) < 0 else "open"
