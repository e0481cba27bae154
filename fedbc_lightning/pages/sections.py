"""The sections that pages of studies and of runs share, each made from the records of finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.core.units import duration, megabytes
from fedbc_lightning.pages import page_figures
from fedbc_lightning.pages.page import Block, Code, Gallery, Table
from fedbc_lightning.pages.page_figures import spread
from fedbc_lightning.run.run_record import NOT_RECORDED, RunRecord
from fedbc_lightning.studies.results import totals

# Records of finished runs by variant, algorithm and seed; a single run has no variant.
Records = Mapping[tuple[str, str, int], RunRecord]
# Columns of ``clients.csv`` that are drawn over the rounds, with the papers' symbols.
STATE = {"dual": "λ", "tolerance": "γ"}
EFFECTIVE = "dual/effective_number"
# Largest number of clients of which each has a figure of its own.
MAX_CLIENTS = 30
# Largest number of variants, and of partitions, whose clients are drawn.
MAX_VARIANTS = 5
HOW_TO_READ_MAPS = (
    "Each row is a client, the one with most training data at the top; each column is a round. A client keeps its "
    "value while it does not take part, and is left empty before its first round."
)
EFFECTIVE_NUMBER = (
    "The effective number of clients, (Σλ)² / Σλ², says how evenly λ weighs the clients of a round: with equal weights "
    "it is their number, at 1 one client decides alone, and at 0 all λ are 0, so that z is the plain mean."
)
BAND = ", and the band is one standard deviation."


def left_out(count: int, what: str, most: int = MAX_VARIANTS) -> str:
    """Return a sentence that says how many are shown of more than can be."""
    return f" Of the {count:,} {what} {most} are shown, from the first to the last." * (count > most)


def of_all_runs(
    records: Records,
    colors: Mapping[str, str],
    command: str | None,
    values: Mapping[tuple[str, str, int], Mapping[str, str]],
    folder: Path,
) -> dict[str, list[Block]]:
    """Return the sections that a page about any finished runs has, by their headings.

    Args:
        records: The finished runs.
        colors: Map from algorithm to colour.
        command: Command line that does the same again; None if it is not known.
        values: Cells that stand beside the hashes of each run, by column.
        folder: Folder to which those of the runs are relative.
    """
    return {
        "λ and γ by client": [*state_blocks(records), *effective_blocks(records, colors)],
        "Who holds which data": list(partition_blocks(records)),
        "Cost": list(cost_blocks(records)),
        "Repeat it": list(repeat_blocks(records, command, values, folder)),
    }


def state_blocks(records: Records) -> Iterator[Block]:
    """Yield maps of λ and γ by client and round, of the first seed of each algorithm and variant.

    Client 3 of another seed may hold other data, so there is no mean over seeds.
    """
    variants = list(dict.fromkeys(variant for variant, _, _ in records))
    first: dict[str, RunRecord] = {}
    for (variant, algorithm, _), run in records.items():
        if variant in spread(variants, MAX_VARIANTS):
            first.setdefault(", ".join(filter(None, [algorithm, variant if len(variants) > 1 else ""])), run)
    pictures = []
    for column, symbol in STATE.items():
        for title, run in first.items():
            values = state_of(run, column)
            if values.size and values.min().min() == values.max().max():
                yield f"{title}: {symbol} is {values.max().max():g} at every client in every round."
            elif values.size:
                pictures.append(page_figures.client_map(f"{title}: {symbol}", values, f"{symbol} ({column})"))
    if pictures:
        seed = " A map is that of the first seed." * (len(records) > len(first))
        yield Gallery(f"{HOW_TO_READ_MAPS}{seed}{left_out(len(variants), 'variants')}", pictures)


def state_of(run: RunRecord, column: str) -> pd.DataFrame:
    """Return a state of the clients: a row per client, named, that with most data first, and a column per round.

    A client keeps its value while it does not take part; it has none before it takes part for the first time.

    Args:
        run: The run.
        column: Column of ``clients.csv``.
    """
    if column not in run.clients:
        return pd.DataFrame()
    rows = run.clients[run.clients["round"] > 0].dropna(subset=[column])
    found = rows.pivot_table(index="client", columns="round", values=column, aggfunc="last")
    if found.empty:
        return found
    every = range(1, max(run.num_rounds, int(found.columns[-1])) + 1)
    order = run.num_samples.index if len(run.num_samples) else found.index
    found = found.reindex(index=order, columns=every).ffill(axis=1)
    return found.rename(index=lambda client: run.client_name(client).removeprefix("client "))


def effective_blocks(records: Records, colors: Mapping[str, str]) -> Iterator[Block]:
    """Yield curves of the effective number of clients, of the algorithms that have weights λ."""
    rows = [
        run.metrics[["round", EFFECTIVE]].assign(variant=variant, algorithm=algorithm, seed=seed)
        for (variant, algorithm, seed), run in records.items()
        if EFFECTIVE in run.metrics
    ]
    if rows:
        found = pd.concat(rows).rename(columns={"round": "rounds"}).dropna(subset=[EFFECTIVE])
        over = f" A line is the mean over the seeds{BAND}" * (len(records) > 1)
        yield from lines(f"{EFFECTIVE_NUMBER}{over}", by_variant(found), "rounds", EFFECTIVE, colors)


def by_variant(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each variant by the title of its figure; a variant that has no name needs none."""
    return {"" if variant == "all" else str(variant): part for variant, part in rows.groupby("variant", sort=False)}


def lines(
    text: str,
    frames: Mapping[str, pd.DataFrame],
    axis: str,
    metric: str,
    colors: Mapping[str, str],
    size: str = "medium",
    **options: Any,
) -> Iterator[Gallery]:
    """Yield a figure for each frame with a line for each of its algorithms, or nothing if no frame has a row.

    Args:
        text: What the figures show.
        frames: Rows of :attr:`~fedbc_lightning.studies.results.StudyRecord.curves`, by title of the figure.
        axis: Column of the horizontal axis.
        metric: Column of the vertical axis.
        colors: Map from algorithm to colour.
        size: Size of the gallery.
        options: Other options of the gallery.
    """
    present = {name for rows in frames.values() for name in rows["algorithm"]}
    legend = {name: color for name, color in colors.items() if name in present}
    if legend:
        pictures = list(page_figures.curves(frames, axis, metric, legend, is_small=size == "small"))
        yield Gallery(text, pictures, legend, size, **options)


def client_blocks(
    runs: Mapping[str, RunRecord],
    columns: Mapping[str, str],
    metric: str,
    colors: Mapping[str, str],
    more: str = "",
    **options: Any,
) -> Iterator[Gallery]:
    """Yield a small figure for each client with a metric over the rounds.

    Args:
        runs: Runs that share a partition, by the name of a line.
        columns: Map from the name of a line to a column of ``evaluation.csv``.
        metric: Name of the metric.
        colors: Map from the name of a line to its colour.
        more: Last sentences of the caption.
        options: Options of the gallery.
    """
    tables = [
        run.evaluation[["client", "round", columns[name]]].set_axis(["client", "rounds", metric], axis="columns")
        .assign(algorithm=name)
        for name, run in runs.items() if columns[name] in run.evaluation
    ]  # fmt: skip
    if not tables:
        return
    first = next(iter(runs.values()))
    by_client = dict(iter(pd.concat(tables).groupby("client")))
    frames = {
        f"{first.client_name(client)}, n = {size:,.0f}": by_client[client]
        for client, size in spread(first.num_samples.items(), MAX_CLIENTS)
        if client in by_client
    }
    text = (
        f"Each figure shows {page_figures.unit(metric)}, on the data of one client, by round, on the same axes. "
        "Clients are ordered by their number n of training samples, the largest first."
    )
    text += left_out(len(first.num_samples), "clients", MAX_CLIENTS) + more
    yield from lines(text, frames, "rounds", metric, colors, size="small", **options)


def partition_blocks(records: Records) -> Iterator[Block]:
    """Yield a picture of each split of the data."""
    found: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for (variant, _, seed), run in records.items():
        if run.partition.get("sizes"):
            who, _ = found.setdefault(run.partition.get("hash", ""), ([], run.partition))
            who.append(f"{variant}, seed {seed}".removeprefix(", "))
    pictures = []
    for key, (who, content) in spread(found.items(), MAX_VARIANTS):
        users = list(dict.fromkeys(who))
        title = "; ".join(users[:4]) + "; ..." * (len(users) > 4) if len(found) > 1 else ""
        pictures.append(page_figures.partition(f"{title} (hash {key[:12]})".strip(), content))
    if pictures:
        text = "The left part shows the samples of each class at each client, and the right part those of all classes."
        yield Gallery(f"{text}{left_out(len(found), 'partitions')}", pictures, size="large")


def cost_blocks(records: Records) -> Iterator[Block]:
    """Yield the mean cost of a run of each algorithm in each variant."""
    costs = pd.DataFrame([
        {"variant": variant, "algorithm": algorithm, "rounds": run.num_rounds, **totals(run.metrics),
         "steps": run.num_steps}
        for (variant, algorithm, _), run in records.items()
    ])  # fmt: skip
    if costs.empty:
        return
    rows = [["algorithm", "variant", "runs", "rounds", "seconds", "MB sent by clients", "MB sent to clients",
             "local steps"]]  # fmt: skip
    for (variant, algorithm), runs in costs.groupby(["variant", "algorithm"], sort=False):
        mean = runs.mean(numeric_only=True)
        rows.append([algorithm, variant, str(len(runs)), f"{mean.rounds:,.0f}", f"{mean.seconds:,.1f}",
                     megabytes(mean.bytes_up), megabytes(mean.bytes_down), f"{mean.steps:,.0f}"])  # fmt: skip
    total = costs.sum(numeric_only=True)
    yield Table(
        "The table shows the cost of a run: means over its finished seeds. Seconds are those of the clock, in which "
        f"other runs may have used the machine as well. All finished runs together took {duration(total.seconds)} and "
        f"{megabytes(total.bytes_up + total.bytes_down)} MB.",
        rows,
    )


def repeat_blocks(
    records: Records, command: str | None, values: Mapping[tuple[str, str, int], Mapping[str, str]], folder: Path
) -> Iterator[Block]:
    """Yield what is needed to do the runs again, and to see that it is the same; see :func:`of_all_runs`."""
    if command is not None:
        yield f"This command runs the same again{'; on this folder it repeats no finished run' * bool(values)}."
        yield Code(command)
    found = [
        {"algorithm": algorithm, "variant": variant, "seed": str(seed), **values.get((variant, algorithm, seed), {}),
         **run.hashes, "made by": run.versions.get(PROG, NOT_RECORDED), **run.machine,
         "folder": run.folder.relative_to(folder).as_posix()}
        for (variant, algorithm, seed), run in records.items()
    ]  # fmt: skip
    text = (
        "The table lists the finished runs. Hashes are those of config.yaml, of the split of the data, and of the "
        "package's code; equal hashes mean equal content. Folders are relative to that of the study."
    )
    if found:
        rows = [list(found[0]), *(list(row.values()) for row in found)]
        yield Table(text, rows, fold="All finished runs, with their hashes" if len(rows) > 2 else "")
    shown: dict[str, RunRecord] = {}
    for (_, algorithm, _), run in records.items():
        shown.setdefault(algorithm, run)
    for algorithm, run in shown.items():
        if run.config_text:
            yield Code(run.config_text, fold=f"config.yaml of the first run of {algorithm}")
