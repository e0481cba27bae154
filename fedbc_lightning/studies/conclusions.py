"""What the numbers of a study say: claims of papers that hold or fail here, and how the algorithms compare."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedbc_lightning.core.metric_names import with_words
from fedbc_lightning.studies.numbers import difference_and_interval, is_share, signed
from fedbc_lightning.studies.paper import Paper
from fedbc_lightning.studies.statistics import OF_PAPERS, ROUNDS, Report, can_choose, paired_differences
from fedbc_lightning.studies.study import Study

# Tidy tables of the same runs, one row per run, read at different rounds.
Readings = Mapping[Report, pd.DataFrame]
# What is said of an algorithm and the reference for each verdict on the claim that the algorithm is better.
COMPARED = {"holds": "better than", "fails": "worse than", "open": "not told apart from"}
CLAIMED = {"holds": "hold", "open": "stay open", "fails": "fail"}


def reports(paper: Paper, study: Study) -> list[Report]:
    """Return the readings of our runs that stand beside the paper's numbers; the study's own one comes first.

    Papers rarely say whether their numbers are those of the last round, of a mean of rounds, or of the best round on
    the test data, so all three are shown.
    """
    wanted = dict.fromkeys([study.report, *OF_PAPERS])
    return [report for report in wanted if not report.startswith("best_on_") or can_choose(report, paper.metric)]


# claims of papers


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


def judge(paper: Paper, study: Study, readings: Readings) -> Iterator[Judgement]:
    """Decide for each claim of a paper, each reading and each variant whether the claim holds here.

    A claim holds where the interval of the paired difference lies above 0 (below 0 for a metric that should be small),
    it fails where the interval lies on the other side, and is open where the interval contains 0 or there is none. Each
    is judged by itself: the intervals are not corrected for their number.
    """
    for claim in paper.claims:
        for other, (report, results) in itertools.product(claim.than, readings.items()):
            differences = paired_differences(results, [paper.metric], other, study.confidence).drop(columns="p_holm")
            for row in differences[differences["algorithm"] == claim.better].to_dict("records"):
                variant, levels = row["variant"], study.levels[row["variant"]]
                names = {variant, *levels}
                if names.issuperset(paper.only) and (claim.variants is None or names & set(claim.variants)):
                    theirs = paper.mean(claim.better, levels) - paper.mean(other, levels)
                    from_paper = "" if math.isnan(theirs) else f" (paper {signed(theirs, paper.metric)})"
                    ours = difference_and_interval(row, paper.metric, study.num_seeds)
                    said = verdict(study, row, row["p"])
                    yield Judgement(claim.better, other, report, variant, said, ours + from_paper)


def verdict(study: Study, row: Mapping[Any, Any], p: float) -> str:
    """Decide from its paired difference whether the claim holds that an algorithm is better than another.

    Returns:
        ``holds`` or ``fails``, by the sign of the difference, where ``p`` is small enough for the study's confidence;
        else ``open``, also where ``p`` is NaN.
    """
    if not p <= 1 - study.confidence:
        return "open"
    return "holds" if (row["difference"] < 0) == study.is_lower_better(row["metric"]) else "fails"


def claim_sentences(title: str, found: Sequence[Judgement]) -> list[str]:
    """Return a sentence that says how many of the claims of the paper ``title`` hold at each reading, if it has any."""
    readings_of = dict[str, list[str]]()
    for report in dict.fromkeys(one.report for one in found):
        words = [one.said for one in found if one.report == report]
        said = listed([f"{words.count(word)} {verb}" for word, verb in CLAIMED.items() if word in words])
        readings_of.setdefault(said, []).append(ROUNDS[report])
    counts = [f"{said} ({listed(rounds)})" for said, rounds in readings_of.items()]
    num_claims = sum(one.report == found[0].report for one in found)
    return [f"Of {num_claims} claim{'s' * (num_claims > 1)} of {title}, {'; '.join(counts)}."] if found else []


# differences to the reference


def finding_sentences(study: Study, differences: pd.DataFrame) -> list[str]:
    """Return a sentence per algorithm about its difference to the reference; the first says by which metric.

    Args:
        study: The study.
        differences: Paired differences to the reference, with p-values that are corrected for their number.
    """
    metric, sentences = study.metrics[0], list[str]()
    found = differences[(differences["metric"] == metric) & differences["difference"].notna()]
    unit = " in % points" if is_share(metric) else ""
    better = ", lower is better" if study.is_lower_better(metric) else ""
    head = f"By {with_words(metric)}{unit}{better} [{100 * study.confidence:g} % interval], p {by_holm(study)}: "
    for name, of_method in found.groupby("algorithm", sort=False):
        rows, parts = of_method.to_dict("records"), []
        for word, compared in COMPARED.items():
            if mine := [row for row in rows if verdict(study, row, row["p_holm"]) == word]:
                where = f" in {len(mine)} of {len(study.variants)} variants" if len(study.variants) > 1 else ""
                ends = dict.fromkeys(signed(end(row["difference"] for row in mine), metric) for end in (min, max))
                one = difference_and_interval(mine[0], metric, study.num_seeds)
                size = one if len(mine) == 1 else " to ".join(ends)
                parts.append(f"{compared} {study.reference_name}{where} ({size})")
        sentences.append(head * (not sentences) + f"{name} is {listed(parts)}.")
    return sentences


def by_holm(study: Study) -> str:
    """Return how p-values of the first metric are corrected, in words."""
    return f"by Holm's correction for {study.num_comparisons} comparison{'s' * (study.num_comparisons > 1)}"


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence with commas and "and"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
