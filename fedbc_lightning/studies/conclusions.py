"""Says in sentences, with numbers, how the algorithms of a study compare with its reference."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fedbc_lightning.studies.numbers import is_share, signed
from fedbc_lightning.studies.paper_rows import Judgement, verdict
from fedbc_lightning.studies.statistics import ROUNDS
from fedbc_lightning.studies.study import Study

# What is said of an algorithm and the reference for each verdict on the claim that the algorithm is better.
COMPARED = {"holds": "better than", "fails": "worse than", "open": "not told apart from"}
CLAIMED = {"holds": "hold", "open": "stay open", "fails": "fail"}


def finding_sentences(study: Study, differences: pd.DataFrame) -> list[str]:
    """Return a sentence per algorithm about its difference to the reference, by the study's first metric.

    Args:
        study: The study.
        differences: Paired differences to the reference.
    """
    found = differences[(differences["metric"] == study.metrics[0]) & differences["difference"].notna()]
    sentences = []
    for method in study.methods:
        mine = found[found["algorithm"] == method.name]
        if len(mine) == 1:
            sentences.append(_of_one_variant(study, mine.iloc[0]))
        elif len(mine):
            sentences.append(_of_variants(study, mine))
    return sentences


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


def judged(study: Study, row: pd.Series) -> str:
    """Return the verdict on the claim that an algorithm is better than the reference, from its paired difference."""
    sign = -1 if study.is_lower_better(row["metric"]) else 1
    return verdict(sign * row["low"], sign * row["high"])


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence with commas and "and"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def of_variants(count: int, num_variants: int) -> str:
    """Say how many of several variants are meant.

    Example:
        >>> of_variants(2, 2), of_variants(3, 3), of_variants(1, 3)
        ('both variants', 'all 3 variants', '1 of 3 variants')
    """
    if count < num_variants:
        return f"{count} of {num_variants} variants"
    return "both variants" if num_variants == 2 else f"all {num_variants} variants"


def _of_one_variant(study: Study, row: pd.Series) -> str:
    name, metric, reference = row["algorithm"], row["metric"], study.reference_name
    where = "" if len(study.variants) == 1 else f" at {row['variant']}"
    text = f"{name} against {reference}{where}: {_sized(study, [row['difference']])} in {metric}{_better(study)}"
    if row["num_pairs"] < 2:
        return f"{text} with one seed; several seeds would say whether that is more than chance."
    low, high = (signed(row[end], metric) for end in ("low", "high"))
    said = judged(study, row)
    ending = {
        "holds": f"{name} is better.",
        "fails": f"{name} is worse.",
        "open": f"these {row['num_pairs']} seeds do not tell them apart.",
    }
    return f"{text}, {100 * study.confidence:g} % interval [{low}, {high}]; {ending[said]}"


def _of_variants(study: Study, rows: pd.DataFrame) -> str:
    name, reference = rows["algorithm"].iloc[0], study.reference_name
    said = rows.apply(lambda row: judged(study, row), axis=1)
    parts: list[str] = []
    for word, compared in COMPARED.items():
        mine = rows.loc[said == word, "difference"]
        if mine.empty:
            continue
        count = str(len(mine)) if parts else of_variants(len(mine), len(rows))
        parts.append(f"{compared} {reference} in {count} ({_sized(study, [*mine], is_short=bool(parts))})")
    return f"By {study.metrics[0]}{_better(study)}, {name} is {listed(parts)}."


def _sized(study: Study, differences: Sequence[float], is_short: bool = False) -> str:
    """Return a difference, or the smallest and the largest of several, with the unit unless it was said before."""
    metric = study.metrics[0]
    ends = dict.fromkeys(signed(value, metric) for value in (min(differences), max(differences)))
    return " to ".join(ends) + (" percentage points" if is_share(metric) and not is_short else "")


def _better(study: Study) -> str:
    return " (lower is better)" if study.is_lower_better(study.metrics[0]) else ""
