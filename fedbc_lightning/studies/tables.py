"""Tables of a study's results, by rows of text, and their forms in Markdown and in LaTeX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from fedbc_lightning.core.metric_names import with_words
from fedbc_lightning.core.text import markdown_line, printable
from fedbc_lightning.studies.conclusions import Readings, by_holm, judge, verdict
from fedbc_lightning.studies.numbers import Cells, Rows, difference_and_interval, is_share, layout, mean_and_deviation
from fedbc_lightning.studies.paper import Paper
from fedbc_lightning.studies.results import AXES, StudyRecord
from fedbc_lightning.studies.statistics import ROUNDS, criterion, summarise
from fedbc_lightning.studies.study import Study

TEX = {mark: f"\\{mark}" for mark in "&%$#_{}"} | {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "−": "$-$",
    ">": "$>$", "≥": "$\\geq$", "γ": "$\\gamma$", "λ": "$\\lambda$",
}  # fmt: skip
# Caption and rows of each
Tables = Iterable[tuple[str, Rows]]
FLATTERS = "the best round is chosen on the test data, which flatters every method"


def tables(record: StudyRecord) -> Tables:
    """Yield caption and rows of all tables, those of papers first."""
    for name, paper in record.study.papers.items():
        yield from paper_tables(record.study, paper, record.readings[name])
    yield from metric_tables(record.study, record.summary, record.differences)
    yield from target_tables(record.study, record.curves)


# means, and differences to the reference


def metric_tables(study: Study, summary: pd.DataFrame, differences: pd.DataFrame) -> Tables:
    """Yield caption and rows of the tables of means and differences of each metric."""
    ending = "".join(f"; {words}" for words in [*study.fixed, reported_round(study)]) + cut_short(study)
    for metric in study.metrics:
        ours, differ = summary_rows(study, summary, metric), difference_rows(study, differences, metric)
        what, differs = measured(study, metric), f"difference to {study.reference_name} of the same seed, mean"
        if study.num_seeds > 1:
            differs += f" [{100 * study.confidence:g} % interval of the mean, Student's t]"
            differs += f", p {by_holm(study)}, bold: better" * (metric == study.metrics[0])
        if len(study.methods) == 1:
            yield f"{what}{ending}", ours
        elif study.has_one_variant:
            # A single variant that has no name: both are one table, of which the columns say what they hold.
            of_each = dict(differ[1:])
            header = ["", metric, f"difference to {study.reference_name}"]
            rows = [header, *([name, mean, of_each.get(name, "-")] for name, mean in ours[1:])]
            yield f"{what}; {differs}{ending}", rows
        else:
            yield f"{what}{ending}", ours
            yield f"{metric}{' in % points' if is_share(metric) else ''}: {differs}{ending}", differ


def summary_rows(study: Study, summary: pd.DataFrame, metric: str) -> Rows:
    """Return a header, then a row per algorithm with mean ± standard deviation in each variant.

    A cell says how many seeds have finished, if not all have.
    """
    found = summary[summary["metric"] == metric]
    cells: Cells = {name: {} for name in study.method_names}
    for row in found.to_dict("records"):
        cells[row["algorithm"]][row["variant"]] = mean_and_deviation(row, metric, study.num_seeds)
    return layout(study.blocks(), cells)


def difference_rows(study: Study, differences: pd.DataFrame, metric: str) -> Rows:
    """Return a header, then a row per algorithm but the reference with mean difference and interval per variant.

    What is better than the reference by its corrected p-value is in bold (``**``).
    """
    cells: Cells = {name: {} for name in study.method_names if name != study.reference_name}
    for row in differences[differences["metric"] == metric].to_dict("records"):
        text = difference_and_interval(row, metric, study.num_seeds)
        is_better = verdict(study, row, row["p_holm"]) == "holds"
        cells[row["algorithm"]][row["variant"]] = f"**{text}**" if is_better else text
    return layout(study.blocks(), cells)


def measured(study: Study, metric: str) -> str:
    """Return what the means of a table are: metric, unit, direction and number of seeds."""
    unit = " in %" if is_share(metric) else ""
    better = ", lower is better" if study.is_lower_better(metric) else ""
    return f"{with_words(metric)}{unit}{better}; {over_seeds(study.seed_list)}"


def over_seeds(seeds: Sequence[int]) -> str:
    """Return which seeds the numbers of a table are of, in words."""
    return f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"


def reported_round(study: Study) -> str:
    """Return the round whose values are reported, in words."""
    by = f" by {criterion(study.report, study.metrics[0])}" * study.report.startswith("best_on_")
    return ROUNDS[study.report] + by + ", which flatters every method" * (study.report == "best_on_test")


def cut_short(study: Study) -> str:
    """Return what was left out of the study as it is written."""
    scaled = f"; SCALED: {study.scale:g} of the study's rounds and seeds" if study.scale != 1 else ""
    return scaled + ("; NOT TUNED: fixed settings in place of ranges" if study.is_untuned else "")


# beside the numbers of papers


def paper_tables(study: Study, paper: Paper, readings: Readings) -> Tables:
    """Yield the table of our numbers and the paper's, and the table of its claims."""
    common = "".join(f"; {level}" for level in study.fixed) + cut_short(study)
    apart = "".join(
        f". {method.name} there is another method than here: {paper.other_methods[method.name].removesuffix('.')}"
        for method in study.methods
        if method.name in paper.other_methods
    )
    numbers = number_rows(paper, study, readings)
    if paper.values and numbers[1:]:  # some of its variants and algorithms are in this part of the study
        text = f"{measured(study, paper.metric)}; ours, read at different rounds, and {paper.title}{common}"
        yield f"{text}; {FLATTERS}{apart}", numbers
    claims = claim_rows(paper, study, readings)
    if claims[1:]:
        text = (
            f"What it concludes ({paper.title}), here, by {paper.metric}: it holds where the "
            f"{100 * study.confidence:g} % interval of the paired difference lies on the claimed side of 0, fails "
            f"where it lies on the other, and is open else{common}{apart}"
        )
        yield text, claims


def number_rows(paper: Paper, study: Study, readings: Readings) -> Rows:
    """Return a header, then for each algorithm a row of our numbers per reading, and the row of the paper's.

    A row of what the authors' public code gives comes last, where it was run.
    """
    cells: Cells = {}
    for name in (name for name in study.method_names if name in paper.algorithms):
        for report, results in readings.items():
            ours = summarise(results[results["algorithm"] == name], [paper.metric]).to_dict("records")
            cells[f"{name}, {ROUNDS[report]}"] = {
                row["variant"]: mean_and_deviation(row, paper.metric, study.num_seeds) for row in ours
            }
        printed = {"paper": paper.values, **({"public code": paper.public} if name in paper.public else {})}
        for what, values in printed.items():
            cells[f"{name}, {what}"] = {variant: paper.cell(name, levels, values) or "-"
                                        for variant, levels in study.levels.items()}  # fmt: skip
    return layout(study.blocks(paper.only), cells)


def claim_rows(paper: Paper, study: Study, readings: Readings) -> Rows:
    """Return a header, then a row per claimed pair and reading that says whether the claim holds."""
    cells: Cells = {}
    for one in judge(paper, study, readings):
        cells.setdefault(one.title, {})[one.variant] = f"{one.said}: {one.difference}"
    return layout(study.blocks(paper.only), cells)


# what results cost


def target_tables(study: Study, curves: pd.DataFrame) -> Tables:
    """Yield caption and rows of a table for each metric that has targets, with a column for each of these.

    A cell is the median cost over the seeds, with the least and the most, up to the first round after which the value
    was measured, and in how many seeds that is less, and more, than the reference's. A run that never reaches the value
    costs more than any number: left out, it would flatter who gets there in lucky seeds alone. No winner is called.

    Args:
        study: The study.
        curves: Its curves, from :attr:`~fedbc_lightning.studies.results.StudyRecord.curves`.
    """
    for metric, targets in study.targets.items() if not curves.empty else ():
        sign = "≤" if study.is_lower_better(metric) else "≥"
        goals = [f"{100 * value:g} %" if is_share(metric) else f"{value:g}" for value in targets]
        rows = [["", *(f"{sign} {goal}" for goal in goals)]]
        costs = [_costs(study, curves, metric, value) for value in targets]
        for variant in study.variants:
            for method in study.methods:
                name = method.name if study.has_one_variant else f"{variant}: {method.name}"
                rows.append([name, *(_cell(study, of_goal, variant, method.name) for of_goal in costs)])
        seeds = f"; median [least, most] over {study.num_seeds} seeds" if study.num_seeds > 1 else ""
        pairs = f"; pairs are with {study.reference_name} of the same seed" if len(study.methods) > 1 else ""
        yield f"{AXES[study.axis]} until {metric} first reaches a value{seeds}{pairs}; rounds are those evaluated", rows


def _costs(study: Study, curves: pd.DataFrame, metric: str, target: float) -> pd.DataFrame:
    """Return the cost until a metric reaches a value, by variant and seed and, in columns, algorithm."""
    is_there = curves[metric] <= target if study.is_lower_better(metric) else curves[metric] >= target
    costs = curves.assign(cost=curves[study.axis].where(is_there, math.inf))
    found = costs.pivot_table("cost", ["variant", "seed"], "algorithm", aggfunc="min")
    return found.reindex(columns=study.method_names)


def _cell(study: Study, costs: pd.DataFrame, variant: str, name: str) -> str:
    costs = costs[costs.index.get_level_values("variant") == variant].dropna(subset=[name])
    own, other, num_seeds = costs[name], costs[study.reference_name], study.num_seeds
    if own.empty:
        return "-"
    least, median, most = map(_cost, (own.min(), own.median(), own.max()))
    text = median if least == most else f"{median} [{least}, {most}]"
    text += f" ({len(own)} of {num_seeds} seeds)" * (len(own) < num_seeds)
    counts = f"; less in {(own < other).sum()}, more in {(own > other).sum()} of {other.count()} pairs"
    return text + counts * (name != study.reference_name)


def _cost(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# forms


def markdown(title: str, parts: Tables, notes: Sequence[str] = (), findings: Sequence[str] = ()) -> str:
    """Return a Markdown document with the findings, then the tables under their captions, then the notes."""
    lines = [f"# {title}", "", *(f"- {finding}" for finding in findings), *[""] * bool(findings)]
    for text, rows in parts:
        header, *body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        lines += [text, "", header, f"|{'---|' * len(rows[0])}", *body, ""]
    lines += [f"- {note}" for note in notes]
    return "\n".join(map(markdown_line, lines)).rstrip() + "\n"


def latex(parts: Tables) -> str:
    """Return LaTeX tables for the package booktabs."""
    lines = ["% needs \\usepackage{booktabs}"]
    for text, rows in parts:
        header, *body = [" & ".join(map(_tex, row)) + r" \\" for row in rows]
        columns = "l" + "r" * (len(rows[0]) - 1)
        lines += ["\\begin{table}", "\\centering", f"\\caption{{{_tex(text)}}}", f"\\begin{{tabular}}{{{columns}}}"]
        lines += ["\\toprule", header, "\\midrule", *body, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""]
    return "\n".join(lines)


def _tex(text: str) -> str:
    r"""Escape the characters of a text that have a meaning in TeX.

    Example:
        >>> print(_tex("**83.1 ± 0.2**"), _tex("a_b ≥ 5 %"), _tex("−1"))
        \textbf{83.1 $\pm$ 0.2} a\_b $\geq$ 5 \% $-$1
    """
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        return f"\\textbf{{{_tex(text[2:-2])}}}"
    return "".join(TEX.get(mark, mark) for mark in printable(text).replace("\n", " "))
