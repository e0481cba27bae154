"""Results in words and numbers: Markdown and LaTeX tables, and the same in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from fedbc_lightning.studies.results import is_lower_better
from fedbc_lightning.studies.study import Study

Rows = list[list[str]]

REPORTED = {
    "last": "last evaluated round",
    "best_on_validation": "round with the best validation value",
    "best_on_test": "best round on the test data itself, which flatters every method",
}


def is_share(metric: str) -> bool:
    """Whether a metric is shown in percent.

    Example:
        >>> is_share("global/test_accuracy"), is_share("global/test_loss")
        (True, False)
    """
    return "acc" in metric


def number(value: float, metric: str) -> str:
    """A value as it is shown.

    Example:
        >>> number(0.8312, "global/test_accuracy"), number(1.5, "global/test_loss"), number(math.nan, "x")
        ('83.12', '1.5000', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4f}"


def signed(value: float, metric: str) -> str:
    """A difference as it is shown.

    Example:
        >>> signed(0.0123, "global/test_accuracy"), signed(0.0, "global/test_loss")
        ('+1.23', '0.0000')
    """
    text = number(abs(value), metric)
    if not text.strip("0.-"):
        return text
    return ("+" if value > 0 else "−") + text


def summary_rows(study: Study, summary: pd.DataFrame, metric: str) -> Rows:
    """A header, then a row per algorithm: mean ± standard deviation in each variant; the best mean in bold (**)."""
    of_metric = summary[summary["metric"] == metric].set_index(["variant", "algorithm"])
    best = {}
    for variant in study.variants:
        means = of_metric["mean"].get(variant)
        if means is not None and len(means):
            best[variant] = means.min() if is_lower_better(metric) else means.max()
    rows = [["", *study.variants]]
    for method in study.methods:
        row = [method.name]
        for variant in study.variants:
            if (variant, method.name) not in of_metric.index:
                row.append("-")
                continue
            found = of_metric.loc[(variant, method.name)]
            text = number(found["mean"], metric)
            text += f" ± {number(found['std'], metric)}" if found["num_seeds"] > 1 else ""
            row.append(f"**{text}**" if found["mean"] == best[variant] and len(study.methods) > 1 else text)
        rows.append(row)
    return rows


def difference_rows(study: Study, differences: pd.DataFrame, metric: str) -> Rows:
    """A header, then a row per algorithm but the reference: mean difference and its interval in each variant."""
    of_metric = differences[differences["metric"] == metric].set_index(["variant", "algorithm"])
    rows = [["", *study.variants]]
    for method in study.methods:
        if method.name == study.reference_name:
            continue
        row = [method.name]
        for variant in study.variants:
            if (variant, method.name) not in of_metric.index:
                row.append("-")
                continue
            found = of_metric.loc[(variant, method.name)]
            text = signed(found["difference"], metric)
            if not math.isnan(found["low"]):
                text += f" [{signed(found['low'], metric)}, {signed(found['high'], metric)}]"
            row.append(text)
        rows.append(row)
    return rows


def caption(study: Study, metric: str) -> str:
    """What the numbers of a table are."""
    seeds = study.seed_list
    unit = " in %" if is_share(metric) else ""
    over = f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{metric}{unit}, {REPORTED[study.report]}; {over}"


def difference_caption(study: Study, metric: str) -> str:
    """What the numbers of a table of differences are."""
    unit = " in % points" if is_share(metric) else ""
    text = f"{metric}{unit}: difference to {study.reference_name} of the same seed, mean"
    if len(study.seed_list) > 1:
        text += f" [{100 * study.confidence:g} % interval of the mean, Student's t]"
    return text


def tables(study: Study, summary: pd.DataFrame, differences: pd.DataFrame) -> Iterable[tuple[str, Rows]]:
    """Caption and rows of all tables, the most important first."""
    for metric in study.metrics:
        yield caption(study, metric), summary_rows(study, summary, metric)
        if len(study.methods) > 1:
            yield difference_caption(study, metric), difference_rows(study, differences, metric)


def markdown(title: str, parts: Iterable[tuple[str, Rows]], notes: Sequence[str] = ()) -> str:
    """Tables under their captions, then notes."""
    lines = [f"# {title}", ""]
    for text, rows in parts:
        header, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines += [text, "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        lines += [f"| {' | '.join(row)} |" for row in body]
        lines.append("")
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def latex(parts: Iterable[tuple[str, Rows]]) -> str:
    """Tables for the package booktabs."""
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
    r"""Text with what TeX would read otherwise escaped.

    Example:
        >>> print(_tex("**83.1 ± 0.2**"), _tex("a_b 5 %"), _tex("−1"))
        \textbf{83.1 $\pm$ 0.2} a\_b 5 \% $-$1
    """
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        return f"\\textbf{{{_tex(text[2:-2])}}}"
    for mark in "\\&%$#_{}":
        text = text.replace(mark, "\\textbackslash{}" if mark == "\\" else f"\\{mark}")
    for mark, tex in (
        ("±", "$\\pm$"),
        ("−", "$-$"),
        ("~", "\\textasciitilde{}"),
        ("^", "\\textasciicircum{}"),
    ):
        text = text.replace(mark, tex)
    return text
