"""Print the numbers of docs/results.md that stand beside a paper's, and their counts, from the folder of a table.

fedbc-cli reproduce table7 --only '[C = 1]' --tuning.skip true --seeds 3
python docs/make_results.py studies/fedbc_mnist_untuned/table7

Nothing is printed of a study whose runs are not all finished, since its means would be of unequal seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.conclusions import Readings, judge
from fedbc_lightning.studies.numbers import Rows, is_share, layout, number
from fedbc_lightning.studies.paper import Paper
from fedbc_lightning.studies.results import RECORD, read_record
from fedbc_lightning.studies.statistics import ROUNDS, summarise
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.tables import claim_rows, cut_short, markdown

WITHIN = 0.015
"""Distance to the paper's accuracy up to which a cell is counted as near."""


def show(folder: Path) -> None:
    """Print the numbers of each of a study's papers, how far they are from the paper's, and how many claims hold.

    Raises:
        ConfigurationError: There is no study in the folder, it has no paper's numbers, or runs of it are not finished.
    """
    if not (folder / RECORD).is_file():
        raise ConfigurationError(f"{folder}: there is no {RECORD}; give the folder of a table, or of a study.")
    files = read_record(folder)
    if not files.study.papers:
        raise ConfigurationError(f"{folder}: this study has no numbers of a paper; its tables are in table.md.")
    if len(files.runs) < len(files.states):
        raise ConfigurationError(f"{folder}: {len(files.runs)} of {len(files.states)} runs have finished.")
    for name, paper in files.study.papers.items():
        readings = files.readings[name]
        ours = means(paper, readings)
        shown = ", ".join(ROUNDS[report] for report in ours)
        parts = [(f"{shown} (paper)", cells(files.study, paper, ours))]
        fits = fit_rows(paper, files.study, readings)
        if fits[1:]:
            parts.append(("Which reading is nearest to the paper", fits))
        claims = claim_rows(paper, files.study, readings)
        if claims[1:]:
            parts.append(("Claims", claims))
        print(markdown(paper.title + cut_short(files.study), parts))
        far = distances(paper, files.study, ours)
        if len(far):
            print(f"Mean distance to the paper, in its unit; accuracies within {100 * WITHIN:g} points are near it\n")
            print(near(paper, far))
        if claims[1:]:
            print("\nClaims by pair of algorithms, reading and verdict\n")
            print(counts(files.study, paper, readings))


def means(paper: Paper, readings: Readings) -> pd.DataFrame:
    """Return our means of the paper's metric: a row per variant and algorithm, a column per reading."""
    found = {report: summarise(results, [paper.metric]) for report, results in readings.items()}
    return pd.DataFrame({report: one.set_index(["variant", "algorithm"])["mean"] for report, one in found.items()})


def distances(paper: Paper, study: Study, ours: pd.DataFrame) -> pd.DataFrame:
    """Return how far our means lie from the paper's, for the cells that both have at all readings."""
    theirs = [paper.mean(name, study.levels[variant]) for variant, name in ours.index]
    return ours.sub(pd.Series(theirs, index=ours.index, dtype=float), axis=0).abs().dropna()


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


def cells(study: Study, paper: Paper, ours: pd.DataFrame) -> Rows:
    """Return a row per algorithm, whose cells are our readings and the paper's mean in parentheses."""
    found: dict[str, dict[str, str]] = {name: {} for name in paper.values}
    for variant, name in ours.index:
        said = ", ".join(number(mean, paper.metric) for mean in ours.loc[(variant, name)])
        theirs = number(paper.mean(name, study.levels[variant]), paper.metric)
        found.setdefault(name, {})[variant] = f"{said} ({theirs})"
    return layout(study.blocks(paper.only), {name: found[name] for name in paper.values})


def near(paper: Paper, found: pd.DataFrame) -> pd.DataFrame:
    """Return for each algorithm and reading the mean distance to the paper, and how many cells are near it.

    The last rows are those of all algorithms, and of those that are the same method in the paper.
    """
    names = found.index.get_level_values("algorithm")
    groups = {name: found[names == name] for name in names.unique()}
    groups |= {"all": found, "the same methods": found[~names.isin(list(paper.other_methods))]}
    rows: dict[str, dict[str, str]] = {name: {} for name in groups}
    for name, group in groups.items():
        for report in group:
            rows[name][f"mean, {ROUNDS[report]}"] = number(group[report].mean(), paper.metric)
            if is_share(paper.metric):
                rows[name][f"near, {ROUNDS[report]}"] = f"{(group[report] <= WITHIN).sum()} of {len(group)}"
    return pd.DataFrame(rows).T


def counts(study: Study, paper: Paper, readings: Readings) -> pd.DataFrame:
    """Return how many claims hold, are open and fail; the last row is the sum."""
    found = pd.DataFrame(
        [
            {"better": one.better, "than": one.other, "reading": ROUNDS[one.report], "verdict": one.said}
            for one in judge(paper, study, readings)
        ]
    )
    return pd.crosstab([found["better"], found["than"]], [found["reading"], found["verdict"]], margins=True)


if __name__ == "__main__":
    pd.set_option("display.width", 250, "display.max_columns", None)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of a table, or of a study")
    try:
        show(parser.parse_args().folder)
    except ConfigurationError as error:
        parser.error(str(error))
