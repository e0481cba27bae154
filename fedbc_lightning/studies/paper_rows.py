"""Lays out a paper's numbers beside ours, and decides whether its claims hold here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from fedbc_lightning.studies.numbers import (
    Rows,
    difference_and_interval,
    laid_out,
    mean_and_deviation,
    number,
    signed,
)
from fedbc_lightning.studies.paper import Claim, Paper
from fedbc_lightning.studies.statistics import OF_PAPERS, ROUNDS, Report, can_choose, paired_differences, summarise
from fedbc_lightning.studies.study import Study

# Tidy tables of the same runs, one row per run, read at different rounds.
Readings = Mapping[Report, pd.DataFrame]


def reports(paper: Paper, study: Study) -> list[Report]:
    """Return the readings of our runs that stand beside the paper's numbers; the study's own one comes first.

    Papers rarely say whether their numbers are those of the last round, of a mean of rounds, or of the best round on
    the test data, so all three are shown.
    """
    wanted = dict.fromkeys([study.report, *OF_PAPERS])
    return [report for report in wanted if not report.startswith("best_on_") or can_choose(report, paper.metric)]


def number_rows(paper: Paper, study: Study, readings: Readings) -> Rows:
    """Return a header, then for each algorithm a row of our numbers per reading, and the row of the paper's.

    A row of what the authors' public code gives comes last, where it was run.
    """
    summaries = {report: _summary(paper, results) for report, results in readings.items()}
    rows: dict[str, tuple[str, Report | None]] = {}
    public = {f"{name}, public code": name for name in paper.public}
    for method in study.methods:
        if method.name in paper.algorithms:
            rows |= {f"{method.name}, {ROUNDS[report]}": (method.name, report) for report in summaries}
            rows[f"{method.name}, paper"] = method.name, None
            rows |= {label: (name, None) for label, name in public.items() if name == method.name}

    def text(variant: str, label: str) -> str:
        name, report = rows[label]
        if report is None:
            cell = paper.public_cell if label in public else paper.cell
            return cell(name, study.levels[variant]) or "-"
        ours = summaries[report]
        if (variant, name) not in ours.index:
            return "-"
        return mean_and_deviation(ours.loc[(variant, name)], paper.metric, len(study.seed_list))

    return laid_out(rows, study.blocks(paper.only), text)


def fit_rows(paper: Paper, study: Study, readings: Readings) -> Rows:
    """Return a header, then a row per reading: how far our means lie from the paper's.

    Only cells count for which the paper has a number and all readings have one, and whose algorithm is the same method
    in the paper; there is no row without such a cell.
    """
    found = distances(paper, study, means(paper, readings))
    found = found[~found.index.isin(list(paper.other_methods), level="algorithm")]
    rows = [["", "nearest to the paper in", "mean distance"]]
    if found.empty:
        return rows
    # Papers round to two digits, so two readings may be equally near.
    nearest = found.eq(found.min(axis=1), axis=0).sum()  # a tie counts for each
    for report in found:
        cells = f"{nearest[report]} of {len(found)} cells"
        rows.append([ROUNDS[report], cells, number(found[report].mean(), paper.metric)])
    return rows


def means(paper: Paper, readings: Readings) -> pd.DataFrame:
    """Return our means of the paper's metric: a row per variant and algorithm, a column per reading."""
    return pd.DataFrame({report: _summary(paper, results)["mean"] for report, results in readings.items()})


def distances(paper: Paper, study: Study, ours: pd.DataFrame) -> pd.DataFrame:
    """Return how far our means lie from the paper's, for the cells that both have at all readings."""
    theirs = [paper.mean(name, study.levels[variant]) for variant, name in ours.index]
    return ours.sub(pd.Series(theirs, index=ours.index, dtype=float), axis=0).abs().dropna()


def unlike(paper: Paper, study: Study) -> list[str]:
    """Return a sentence for each algorithm of the study whose name stands for another method in the paper."""
    return [
        f"{method.name} there is another method than here: {paper.other_methods[method.name]}."
        for method in study.methods
        if method.name in paper.other_methods
    ]


def _summary(paper: Paper, results: pd.DataFrame) -> pd.DataFrame:
    """Return mean and deviation of the paper's metric, by variant and algorithm."""
    return summarise(results, [paper.metric]).set_index(["variant", "algorithm"])


@dataclass(frozen=True)
class Judgement:
    """What our runs say of one claim of a paper, in one variant and at one reading.

    Attributes:
        better: Algorithm that is claimed to be better.
        other: Algorithm that it is compared with.
        report: Round at which our runs are read.
        variant: Variant of the study.
        said: ``holds``, ``fails`` or ``open``, from :func:`verdict`.
        difference: Paired difference with its interval, and the paper's difference where it has one.
    """

    better: str
    other: str
    report: Report
    variant: str
    said: str
    difference: str

    @property
    def title(self) -> str:
        """The claim and the reading, e.g. ``FedBC better than FedAvg, last round``."""
        return f"{self.better} better than {self.other}, {ROUNDS[self.report]}"


def claim_rows(paper: Paper, study: Study, readings: Readings) -> Rows:
    """Return a header, then a row per claimed pair and reading that says whether the claim holds."""
    cells: dict[str, dict[str, str]] = {}
    for found in judge(paper, study, readings):
        cells.setdefault(found.title, {})[found.variant] = f"{found.said}: {found.difference}"
    return laid_out(cells, study.blocks(paper.only), lambda variant, title: cells[title].get(variant, "-"))


def judge(paper: Paper, study: Study, readings: Readings) -> list[Judgement]:
    """Decide for each claim of a paper, each reading and each variant whether the claim holds here.

    A claim holds where the interval of the paired difference lies above 0 (below 0 for a metric that should be small),
    it fails where the interval lies on the other side, and is open where the interval contains 0 or there is none.
    """
    present = {method.name for method in study.methods}
    return [
        found
        for claim in paper.claims
        for other in (claim.than if claim.better in present else ())
        for report, results in (readings.items() if other in present else ())
        for found in _judge(paper, study, report, results, claim, other)
    ]


def _judge(
    paper: Paper, study: Study, report: Report, results: pd.DataFrame, claim: Claim, other: str
) -> Iterator[Judgement]:
    """Yield for each variant with a claim on ``other`` what our runs say of it."""
    sign = -1 if study.is_lower_better(paper.metric) else 1
    found = paired_differences(results, [paper.metric], other, study.confidence)
    found = found[found["algorithm"] == claim.better].set_index("variant")
    for variant, levels in study.levels.items():
        names = {variant, *levels}
        is_claimed = names.issuperset(paper.only) and (claim.variants is None or names & set(claim.variants))
        if not is_claimed or variant not in found.index:
            continue
        cell = found.loc[variant]
        said = verdict(sign * cell["low"], sign * cell["high"])
        theirs = paper.mean(claim.better, levels) - paper.mean(other, levels)
        from_paper = "" if math.isnan(theirs) else f" (paper {signed(theirs, paper.metric)})"
        difference = difference_and_interval(cell, paper.metric, len(study.seed_list))
        yield Judgement(claim.better, other, report, variant, said, difference + from_paper)


def verdict(one_end: float, other_end: float) -> str:
    """Decide whether a claim holds from the two ends of the interval of a difference that should be positive.

    Example:
        >>> verdict(0.1, 0.3), verdict(-0.2, 0.1), verdict(-0.1, -0.3), verdict(math.nan, math.nan)
        ('holds', 'open', 'fails', 'open')
    """
    if min(one_end, other_end) > 0:
        return "holds"
    return "fails" if max(one_end, other_end) < 0 else "open"
