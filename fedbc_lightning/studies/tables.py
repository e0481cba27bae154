"""Tables of a study's results, by rows of text, and their forms in Markdown, in LaTeX and on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fedbc_lightning.studies.conclusions import Readings, distances, judge, means
from fedbc_lightning.studies.numbers import (
    UNITS,
    Rows,
    difference_and_interval,
    is_share,
    laid_out,
    mean_and_deviation,
    number,
)
from fedbc_lightning.studies.paper import Paper
from fedbc_lightning.studies.results import StudyRecord
from fedbc_lightning.studies.statistics import ROUNDS, criterion, summarise
from fedbc_lightning.studies.study import Study

TEX = {mark: f"\\{mark}" for mark in "&%$#_{}"} | {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "−": "$-$",
    ">": "$>$", "γ": "$\\gamma$", "λ": "$\\lambda$",
}  # fmt: skip
REPORTED = {
    "last": "last evaluated round",
    "mean_of_last_tenth": "mean of the evaluated rounds of the last tenth",
    "best_on_validation": "round with the best {metric} on validation data",
    "best_on_test": "round with the best {metric} on the test data itself, which flatters every method",
}
FLATTERS = "the best round is chosen on the test data, which flatters every method"


def tables(record: StudyRecord) -> Iterable[tuple[str, Rows]]:
    """Yield caption and rows of all tables, those of papers first."""
    for name, paper in record.study.papers.items():
        yield from paper_tables(record.study, paper, record.readings[name])
    yield from metric_tables(record.study, record.summary, record.differences)
    yield from target_tables(record.study, record.curves)


# means, and differences to the reference


def metric_tables(study: Study, summary: pd.DataFrame, differences: pd.DataFrame) -> Iterable[tuple[str, Rows]]:
    """Yield caption and rows of the tables of means and differences of each metric."""
    differs = f"difference to {study.reference_name} of the same seed, mean"
    if len(study.seed_list) > 1:
        differs += f" [{100 * study.confidence:g} % interval of the mean, Student's t]"
    reported = REPORTED[study.report].format(metric=criterion(study.report, study.metrics[0]))
    ending = "".join(f"; {words}" for words in [*study.fixed, reported]) + cut_short(study)
    for metric in study.metrics:
        ours, differ = summary_rows(study, summary, metric), difference_rows(study, differences, metric)
        what = measured(study, metric)
        if len(study.methods) == 1:
            yield f"{what}{ending}", ours
        elif list(study.variants) == ["all"]:
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

    The best mean is in bold (``**``). Only algorithms of which all seeds have finished compete for it; the cells of the
    others say how many seeds have.
    """
    num_seeds = len(study.seed_list)
    found = summary[summary["metric"] == metric]
    whole = found[found["num_seeds"] == num_seeds].groupby("variant")["mean"]
    best = whole.min() if study.is_lower_better(metric) else whole.max()
    cells = {}
    for row in found.to_dict("records"):
        text = mean_and_deviation(row, metric, num_seeds)
        is_whole = row["num_seeds"] == num_seeds and len(study.methods) > 1
        is_best = is_whole and row["mean"] == best[row["variant"]]
        cells[row["variant"], row["algorithm"]] = f"**{text}**" if is_best else text
    return laid_out([method.name for method in study.methods], study.blocks(), cells)


def difference_rows(study: Study, differences: pd.DataFrame, metric: str) -> Rows:
    """Return a header, then a row per algorithm but the reference with mean difference and interval per variant."""
    found = differences[differences["metric"] == metric].to_dict("records")
    cells = {(row["variant"], row["algorithm"]): difference_and_interval(row, metric, len(study.seed_list))
             for row in found}  # fmt: skip
    others = [method.name for method in study.methods if method.name != study.reference_name]
    return laid_out(others, study.blocks(), cells)


def measured(study: Study, metric: str) -> str:
    """Return what the means of a table are: metric, unit, direction and number of seeds."""
    seeds = study.seed_list
    unit = " in %" if is_share(metric) else ""
    better = ", lower is better" if study.is_lower_better(metric) else ""
    over = f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{metric}{unit}{better}; {over}"


def cut_short(study: Study) -> str:
    """Return what was left out of the study as it is written."""
    scaled = f"; SCALED: {study.scale:g} of the study's rounds and seeds" if study.scale != 1 else ""
    return scaled + ("; NOT TUNED: fixed settings in place of ranges" if study.is_untuned else "")


# beside the numbers of papers


def paper_tables(study: Study, paper: Paper, readings: Readings) -> Iterable[tuple[str, Rows]]:
    """Yield the table of our numbers and the paper's, which reading fits the paper, and the table of its claims."""
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
        fits = fit_rows(paper, study, readings)
        if fits[1:]:
            yield f"Which of our readings is nearest to {paper.title}, by {paper.metric}{common}", fits
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
    cells, names = dict[tuple[str, str], str](), list[str]()
    for report, results in readings.items():
        for row in summarise(results, [paper.metric]).to_dict("records"):
            text = mean_and_deviation(row, paper.metric, len(study.seed_list))
            cells[row["variant"], f"{row['algorithm']}, {ROUNDS[report]}"] = text
    for method in study.methods:
        if method.name not in paper.algorithms:
            continue
        printed = {"paper": paper.values, **({"public code": paper.public} if method.name in paper.public else {})}
        names += [f"{method.name}, {what}" for what in [*(ROUNDS[report] for report in readings), *printed]]
        for what, values in printed.items():
            for variant, levels in study.levels.items():
                cells[variant, f"{method.name}, {what}"] = paper.cell(method.name, levels, values) or "-"
    return laid_out(names, study.blocks(paper.only), cells)


def fit_rows(paper: Paper, study: Study, readings: Readings) -> Rows:
    """Return a header, then a row per reading: how far our means lie from the paper's.

    Only cells count for which the paper has a number and all readings have one, and whose algorithm is the same method
    in the paper; there is no row without such a cell.
    """
    found = distances(paper, study, means(paper, readings))
    found = found[~found.index.isin(list(paper.other_methods), level="algorithm")]
    # Papers round to two digits, so two readings may be equally near: a tie counts for each.
    nearest = found.eq(found.min(axis=1), axis=0).sum()
    rows = [["", "nearest to the paper in", "mean distance"]]
    for report in found if len(found) else ():
        cells = f"{nearest[report]} of {len(found)} cells"
        rows.append([ROUNDS[report], cells, number(found[report].mean(), paper.metric)])
    return rows


def claim_rows(paper: Paper, study: Study, readings: Readings) -> Rows:
    """Return a header, then a row per claimed pair and reading that says whether the claim holds."""
    found = judge(paper, study, readings)
    cells = {(one.variant, one.title): f"{one.said}: {one.difference}" for one in found}
    return laid_out(dict.fromkeys(one.title for one in found), study.blocks(paper.only), cells)


# what results cost


def target_tables(study: Study, curves: pd.DataFrame) -> Iterable[tuple[str, Rows]]:
    """Yield caption and rows of a table for each metric that has targets, with a column for each of these.

    A cell is the mean ± standard deviation over the seeds that reached the value, of the cost up to the first round
    after which it was measured, and says how many seeds these are if not all did.

    Args:
        study: The study.
        curves: Its curves, from :func:`~fedbc_lightning.studies.results.read_curves`.
    """
    for metric, targets in study.targets.items() if not curves.empty else ():
        sign = "≤" if study.is_lower_better(metric) else "≥"
        rows: Rows = [["", *(f"{sign} {_target(value, metric)}" for value in targets)]]
        for variant in study.variants:
            for method in study.methods:
                mine = curves[(curves["variant"] == variant) & (curves["algorithm"] == method.name)]
                name = method.name if list(study.variants) == ["all"] else f"{variant}: {method.name}"
                rows.append([name, *(_cell(study, mine, metric, value) for value in targets)])
        seeds = f"; mean ± standard deviation over {len(study.seed_list)} seeds" if len(study.seed_list) > 1 else ""
        yield f"{UNITS[study.axis]} until {metric} first reaches a value{seeds}; rounds are those evaluated", rows


def _target(value: float, metric: str) -> str:
    return f"{100 * value:g} %" if is_share(metric) else f"{value:g}"


def _cost(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _cell(study: Study, curves: pd.DataFrame, metric: str, target: float) -> str:
    is_there = curves[metric] <= target if study.is_lower_better(metric) else curves[metric] >= target
    costs = curves[is_there].groupby("seed")[study.axis].min()
    if costs.empty:
        return "never"
    text = _cost(costs.mean())
    text = f"{text} ± {_cost(costs.std())}" if len(costs) > 1 else text
    num_seeds = len(study.seed_list)
    return text if len(costs) == num_seeds else f"{text} ({len(costs)} of {num_seeds} seeds)"


# forms


def show(console: Console, text: str, rows: Rows) -> None:
    """Print a table on the terminal, under its caption; it is never cut to the terminal's width."""
    console.print(text, style="italic", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for k, name in enumerate(rows[0]):
        table.add_column(escape(name), justify="right" if k else "left", no_wrap=True)
    for row in rows[1:]:
        cells = [escape(cell) for cell in row]
        table.add_row(*(f"[bold]{cell[2:-2]}[/bold]" if cell.startswith("**") else cell for cell in cells))
    # As wide as its cells: rich would otherwise cut cells to fit the terminal.
    table.width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.print(table, highlight=False, crop=False)
    console.print()


def markdown(
    title: str, parts: Iterable[tuple[str, Rows]], notes: Sequence[str] = (), findings: Sequence[str] = ()
) -> str:
    """Return a Markdown document with the findings, then the tables under their captions, then the notes."""
    lines = [f"# {title}", "", *(f"- {finding}" for finding in findings), *[""] * bool(findings)]
    for text, rows in parts:
        header, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines += [text, "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        lines += [f"| {' | '.join(row)} |" for row in body]
        lines.append("")
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def latex(parts: Iterable[tuple[str, Rows]]) -> str:
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
        >>> print(_tex("**83.1 ± 0.2**"), _tex("a_b 5 %"), _tex("−1"))
        \textbf{83.1 $\pm$ 0.2} a\_b 5 \% $-$1
    """
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        return f"\\textbf{{{_tex(text[2:-2])}}}"
    return "".join(TEX.get(mark, mark) for mark in text)
