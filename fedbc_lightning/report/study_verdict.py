"""Says in sentences what a study found: which claims of a paper hold, and which algorithm is better than which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedbc_lightning.report.content import Block, Table
from fedbc_lightning.studies.findings import finding_sentences, judged, listed, of_variants
from fedbc_lightning.studies.numbers import Rows, mean_and_deviation
from fedbc_lightning.studies.paper_rows import Judgement, judge
from fedbc_lightning.studies.reported_round import ROUNDS
from fedbc_lightning.studies.study_record import StudyRecord

VERBS = {"holds": ("holds", "hold"), "open": ("is open", "are open"), "fails": ("fails", "fail")}
"""What is said of one claim, and of several."""
SAID = {"holds": "better", "fails": "worse", "open": "not told apart"}


def verdict_sentences(files: StudyRecord) -> list[str]:
    """Return what came out, the most important first."""
    if not files.runs:
        return ["No run has finished yet, so there is nothing to say about the algorithms."]
    sentences: list[str] = []
    for name, paper in files.study.papers.items():
        found = judge(paper, files.study, files.outcome.readings[name])
        if found:
            sentences += claim_sentences(paper.title, found)
    return [*sentences, *finding_sentences(files.study, files.outcome.differences)]


def claim_sentences(title: str, found: Sequence[Judgement]) -> list[str]:
    """Return how many of the claims of the paper ``title`` hold at each reading, and which do not at the first."""
    readings = list(dict.fromkeys(judgement.report for judgement in found))
    num_claims = sum(one.report == readings[0] for one in found)
    readings_of = dict[str, list[str]]()
    for report in readings:
        words = [one.said for one in found if one.report == report]
        said = [f"{words.count(word)} {verbs[words.count(word) > 1]}" for word, verbs in VERBS.items() if word in words]
        if num_claims == 1:
            said = [VERBS[words[0]][0]]
        readings_of.setdefault(listed(said), []).append(ROUNDS[report])
    counts = [f"{said} ({listed(rounds)})" for said, rounds in readings_of.items()]
    claims = f"Of {num_claims} claims of {title}," if num_claims > 1 else f"The only claim of {title}"
    return [f"{claims} {'; '.join(counts)}.", *_of_pairs([one for one in found if one.report == readings[0]])]


def _of_pairs(found: Sequence[Judgement]) -> Iterator[str]:
    """Yield which claims do not hold, pair by pair: one alone with its difference, several by their number."""
    pairs: dict[tuple[str, str], list[Judgement]] = {}
    for one in found:
        pairs.setdefault((one.better, one.other), []).append(one)
    for word in ("fails", "open"):
        for (better, other), of_pair in pairs.items():
            claim = f"The claim that {better} is better than {other} {VERBS[word][0]}"
            mine = [one for one in of_pair if one.said == word]
            if len(mine) == 1:
                yield f"{claim} at {mine[0].variant} ({ROUNDS[mine[0].report]}): {mine[0].difference}."
            elif mine:
                yield f"{claim} in {of_variants(len(mine), len(of_pair))} ({ROUNDS[mine[0].report]})."


def verdict_blocks(files: StudyRecord) -> list[Block]:
    """Return the table that names for each variant the best mean, and who is better than the reference.

    With a single variant the sentences and the tables of results say the same, so there is none.
    """
    study, summary, differences = files.study, files.outcome.summary, files.outcome.differences
    metric = study.metrics[0]
    if len(study.variants) == 1:
        return []
    rows_of_metric = (row for _, row in differences[differences["metric"] == metric].iterrows())
    said = {(row["variant"], row["algorithm"]): judged(study, row) for row in rows_of_metric}
    reference = study.reference_name
    rows: Rows = [["variant", "best mean", *(f"{words} than {reference}" if words != "not told apart" else words
                                            for words in SAID.values())]]  # fmt: skip
    found = summary[summary["metric"] == metric]
    for variant in study.variants:
        mine = found[found["variant"] == variant]
        if mine.empty:
            continue
        best = mine.loc[mine["mean"].idxmin() if study.is_lower_better(metric) else mine["mean"].idxmax()]
        value = mean_and_deviation(best, metric, len(study.seed_list))
        lists = [", ".join(name for (place, name), word in said.items() if (place, word) == (variant, key)) or "-"
                 for key in SAID]  # fmt: skip
        rows.append([variant, f"{best['algorithm']}: {value}", *lists])
    if len(rows) == 1:
        return []
    text = (
        f"The table compares by {metric}. An algorithm is better or worse than {reference} where the "
        f"{100 * study.confidence:g} % interval of the paired difference does not contain 0; the others cannot be told "
        "apart with these seeds. Many intervals in one table are not corrected for their number."
    )
    return [Table(text, rows, is_text=True)]
