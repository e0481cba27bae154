"""Print the numbers of docs/results.md that stand beside a paper's, and their counts, from the folder of a table.

fedbc-cli reproduce table7 --only '[C = 1]' --tuning.skip true --seeds 3
python docs/make_results.py studies/fedbc_mnist_untuned/table7
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from fedbc_lightning.report.study_files import read_study_files
from fedbc_lightning.studies.numbers import Rows, laid_out, number
from fedbc_lightning.studies.paper import Paper
from fedbc_lightning.studies.paper_rows import Readings, claim_rows, distances, judge, means
from fedbc_lightning.studies.reported_round import ROUNDS
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.tables import markdown

WITHIN = 0.015
"""Distance to the paper's accuracy up to which a cell is counted as near."""


def show(folder: Path) -> None:
    """Print the numbers of each of a study's papers, how far they are from the paper's, and how many claims hold."""
    files = read_study_files(folder)
    if not files.study.papers:
        raise SystemExit(f"{folder}: this study has no numbers of a paper; its tables are in table.md")
    for name, paper in files.study.papers.items():
        readings = files.outcome.readings[name]
        ours = means(paper, readings)
        shown = ", ".join(ROUNDS[report] for report in ours)
        parts = [
            (f"{shown} (paper)", cells(files.study, paper, ours)),
            ("Claims", claim_rows(paper, files.study, readings)),
        ]
        print(markdown(paper.title, parts))
        print(f"Distance to the paper in points, and cells within {100 * WITHIN:g}\n")
        print(near(paper, distances(paper, files.study, ours)))
        print("\nClaims by algorithm that is compared with, reading and verdict\n")
        print(counts(files.study, paper, readings))


def cells(study: Study, paper: Paper, ours: pd.DataFrame) -> Rows:
    """Return a row per algorithm, whose cells are our readings and the paper's mean in parentheses."""

    def text(variant: str, name: str) -> str:
        if (variant, name) not in ours.index:
            return "-"
        said = ", ".join(number(mean, paper.metric) for mean in ours.loc[(variant, name)])
        return f"{said} ({number(paper.mean(name, study.levels[variant]), paper.metric)})"

    return laid_out(paper.values, study.blocks(paper.only), text)


def near(paper: Paper, found: pd.DataFrame) -> pd.DataFrame:
    """Return for each algorithm and reading the mean distance to the paper, and how many cells are near it.

    The last rows are those of all algorithms, and of those that are the same method in the paper.
    """
    names = found.index.get_level_values("algorithm")
    groups = {name: found[names == name] for name in names.unique()}
    groups |= {"all": found, "the same methods": found[~names.isin(list(paper.other_methods))]}
    return pd.DataFrame(
        {
            name: {
                **{f"mean, {ROUNDS[report]}": f"{100 * group[report].mean():.2f}" for report in group},
                **{f"near, {ROUNDS[report]}": f"{(group[report] <= WITHIN).sum()} of {len(group)}" for report in group},
            }
            for name, group in groups.items()
        }
    ).T


def counts(study: Study, paper: Paper, readings: Readings) -> pd.DataFrame:
    """Return how many claims hold, are open and fail; the last row is the sum."""
    found = pd.DataFrame(
        [
            {"than": one.other, "reading": ROUNDS[one.report], "verdict": one.said}
            for one in judge(paper, study, readings)
        ]
    )
    return pd.crosstab(found["than"], [found["reading"], found["verdict"]], margins=True) if len(found) else found


if __name__ == "__main__":
    pd.set_option("display.width", 250, "display.max_columns", None)
    show(Path(sys.argv[1]))
