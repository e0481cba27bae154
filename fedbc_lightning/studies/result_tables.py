"""Tables of a study's results in Markdown, in LaTeX and on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fedbc_lightning.studies.numbers import (
    Rows,
    difference_and_interval,
    grid,
    is_share,
    mean_and_deviation,
)
from fedbc_lightning.studies.paper import Paper
from fedbc_lightning.studies.paper_rows import Readings, claim_rows, fit_rows, number_rows, unlike
from fedbc_lightning.studies.results import Outcome
from fedbc_lightning.studies.statistics import criterion
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.targets import target_tables

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


def summary_rows(study: Study, summary: pd.DataFrame, metric: str) -> Rows:
    """Return a header, then a row per algorithm with mean ± standard deviation in each variant.

    The best mean is in bold (``**``). Only algorithms of which all seeds have finished compete for it; the cells of the
    others say how many seeds have.
    """
    num_seeds = len(study.seed_list)
    whole = summary[(summary["metric"] == metric) & (summary["num_seeds"] == num_seeds)]
    means = whole.groupby("variant")["mean"]
    best = means.min() if study.is_lower_better(metric) else means.max()

    def cell(found: pd.Series, metric: str) -> str:
        text = mean_and_deviation(found, metric, num_seeds)
        is_best = found["num_seeds"] == num_seeds and found["mean"] == best[found.name[0]] and len(study.methods) > 1
        return f"**{text}**" if is_best else text

    return grid([method.name for method in study.methods], study.blocks(), summary, metric, cell)


def difference_rows(study: Study, differences: pd.DataFrame, metric: str) -> Rows:
    """Return a header, then a row per algorithm but the reference with mean difference and interval per variant."""
    others = [method.name for method in study.methods if method.name != study.reference_name]

    def cell(found: pd.Series, metric: str) -> str:
        return difference_and_interval(found, metric, len(study.seed_list))

    return grid(others, study.blocks(), differences, metric, cell)


def result_tables(study: Study, summary: pd.DataFrame, differences: pd.DataFrame, metric: str) -> list[Rows]:
    """Return the tables of a metric: the means, and the differences to the reference if there are several algorithms.

    With a single variant that has no name both are one table, of which the columns say what they hold.
    """
    means = summary_rows(study, summary, metric)
    if len(study.methods) == 1:
        return [means]
    differ = difference_rows(study, differences, metric)
    if list(study.variants) != ["all"]:
        return [means, differ]
    of_each = dict(differ[1:])
    header = ["", metric, f"difference to {study.reference_name}"]
    return [[header, *([name, mean, of_each.get(name, "-")] for name, mean in means[1:])]]


def caption(study: Study, metric: str) -> str:
    """Return the caption of a table of means."""
    return f"{measured(study, metric)}{circumstances(study)}"


def measured(study: Study, metric: str) -> str:
    """Return what the means of a table are: metric, unit, direction and number of seeds."""
    seeds = study.seed_list
    unit = " in %" if is_share(metric) else ""
    better = ", lower is better" if study.is_lower_better(metric) else ""
    over = f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{metric}{unit}{better}; {over}"


def difference_caption(study: Study, metric: str) -> str:
    """Return the caption of a table of differences."""
    unit = " in % points" if is_share(metric) else ""
    return f"{metric}{unit}: {differs(study)}{circumstances(study)}"


def differs(study: Study) -> str:
    """Return what the differences of a table are: to which algorithm, and with which interval."""
    text = f"difference to {study.reference_name} of the same seed, mean"
    if len(study.seed_list) > 1:
        text += f" [{100 * study.confidence:g} % interval of the mean, Student's t]"
    return text


def circumstances(study: Study) -> str:
    """Return what the caption of a table must say: common levels, the reported round, and what was cut short."""
    reported = REPORTED[study.report].format(metric=criterion(study.report, study.metrics[0]))
    return "".join(f"; {words}" for words in [*study.fixed, reported]) + cut_short(study)


def cut_short(study: Study) -> str:
    """Return what was left out of the study as it is written."""
    scaled = f"; SCALED: {study.scale:g} of the study's rounds and seeds" if study.scale != 1 else ""
    return scaled + ("; NOT TUNED: fixed settings in place of ranges" if study.is_untuned else "")


def tables(study: Study, outcome: Outcome, curves: pd.DataFrame) -> Iterable[tuple[str, Rows]]:
    """Yield caption and rows of all tables, those of papers first.

    Args:
        study: The study.
        outcome: What its runs gave.
        curves: What they measured in each round, for the tables of ``targets``.
    """
    for name, paper in study.papers.items():
        yield from paper_tables(study, paper, outcome.readings[name])
    yield from metric_tables(study, outcome.summary, outcome.differences)
    yield from target_tables(study, curves)


def metric_tables(study: Study, summary: pd.DataFrame, differences: pd.DataFrame) -> Iterable[tuple[str, Rows]]:
    """Yield caption and rows of the tables of means and differences of each metric."""
    for metric in study.metrics:
        found = result_tables(study, summary, differences, metric)
        captions = [caption(study, metric), difference_caption(study, metric)]
        if len(found) == 1 and len(study.methods) > 1:
            captions = [f"{measured(study, metric)}; {differs(study)}{circumstances(study)}"]
        yield from zip(captions, found, strict=False)


def paper_tables(study: Study, paper: Paper, readings: Readings) -> Iterable[tuple[str, Rows]]:
    """Yield the table of our numbers and the paper's, which reading fits the paper, and the table of its claims."""
    common = "".join(f"; {level}" for level in study.fixed) + cut_short(study)
    apart = "".join(f". {sentence.removesuffix('.')}" for sentence in unlike(paper, study))
    header, *numbers = number_rows(paper, study, readings)
    if paper.values and numbers:  # some of its variants and algorithms are in this part of the study
        text = f"{measured(study, paper.metric)}; ours, read at different rounds, and {paper.title}{common}"
        yield f"{text}; {FLATTERS}{apart}", [header, *numbers]
        header, *distances = fit_rows(paper, study, readings)
        if distances:
            yield f"Which of our readings is nearest to {paper.title}, by {paper.metric}{common}", [header, *distances]
    header, *claims = claim_rows(paper, study, readings)
    if claims:
        text = (
            f"What it concludes ({paper.title}), here, by {paper.metric}: it holds where the "
            f"{100 * study.confidence:g} % interval of the paired difference lies on the claimed side of 0, fails "
            f"where it lies on the other, and is open else{common}{apart}"
        )
        yield text, [header, *claims]


def show(console: Console, text: str, rows: Rows) -> None:
    """Print a table on the terminal, under its caption; it is never cut to the terminal's width."""
    console.print(text, style="italic", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for k, name in enumerate(rows[0]):
        table.add_column(escape(name), justify="right" if k else "left", no_wrap=True)
    for row in rows[1:]:
        cells = [escape(cell) for cell in row]
        table.add_row(*(f"[bold]{cell[2:-2]}[/bold]" if cell.startswith("**") else cell for cell in cells))
    width = console.width
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(width, needed)
    console.print(table, highlight=False)
    console.width = width
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
        header, *body = [[_tex(cell) for cell in row] for row in rows]
        lines += ["\\begin{table}", "\\centering", f"\\caption{{{_tex(text)}}}"]
        lines += [
            f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            "\\toprule",
            " & ".join(header) + r" \\",
            "\\midrule",
        ]
        lines += [" & ".join(row) + r" \\" for row in body]
        lines += ["\\bottomrule", "\\end{tabular}", "\\end{table}", ""]
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
