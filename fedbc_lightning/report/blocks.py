"""The parts that pages of studies and of runs share: λ and γ by client, every client's accuracy, and partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd

from fedbc_lightning.report import page_figures
from fedbc_lightning.report.page import Block, Gallery, Picture, Text
from fedbc_lightning.run.run_record import RunRecord

# Records of finished runs by variant, algorithm and seed; a single run has neither a variant nor an algorithm.
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
T = TypeVar("T")


def spread(items: Iterable[T], most: int = MAX_VARIANTS) -> list[T]:
    """Return the items that are drawn: all, or ``most`` from the first to the last at even distances."""
    every = list(items)
    if len(every) <= most:
        return every
    return [every[round(place * (len(every) - 1) / (most - 1))] for place in range(most)]


def left_out(count: int, what: str) -> str:
    """Return a sentence that says how many are drawn of more than can be."""
    return f" Of the {count} {what} {MAX_VARIANTS} are drawn, from the first to the last." * (count > MAX_VARIANTS)


def share_clients(runs: Sequence[RunRecord]) -> bool:
    """Whether the clients of all runs are known to hold the same data; client 3 of another seed may hold others."""
    hashes = {run.partition.get("hash") for run in runs}
    return len(runs) == 1 or (len(hashes) == 1 and None not in hashes)


def state_blocks(records: Records) -> Iterator[Block]:
    """Yield maps of λ and γ by client and round: the mean over seeds that share their clients, else the first seed."""
    variants = list(dict.fromkeys(variant for variant, _, _ in records))
    groups: dict[str, list[RunRecord]] = {}
    for (variant, algorithm, _), run in records.items():
        if variant in spread(variants):
            name = ", ".join(filter(None, [algorithm, variant if len(variants) > 1 else ""]))
            groups.setdefault(name, []).append(run)
    pictures: list[Picture] = []
    sentences: list[str] = []
    for column, symbol in STATE.items():
        for title, runs in groups.items():
            # Client 3 of another seed may hold other data, so a mean over seeds needs the same partition.
            tables = [state_of(run, column) for run in (runs if share_clients(runs) else runs[:1])]
            mean = pd.concat(tables).groupby(level=0, sort=False).mean()
            head = f"{title}: {symbol}" if title else symbol
            if mean.size and mean.min().min() == mean.max().max():
                sentences.append(f"{head} is {mean.max().max():g} at every client in every round.")
            elif mean.size:
                pictures.append(page_figures.client_map(head, mean, f"{symbol} ({column})"))
    if pictures:
        over = " A colour is the mean over the seeds if they share their clients, else the value of the first."
        text = f"{HOW_TO_READ_MAPS}{over * (len(records) > len(groups))}{left_out(len(variants), 'variants')}"
        yield Gallery(text, pictures)
    if sentences:
        yield Text(sentences)


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


def client_pictures(
    runs: Mapping[str, Sequence[RunRecord]], columns: Mapping[str, str], metric: str, colors: Mapping[str, str]
) -> list[Picture]:
    """Draw a metric of each client over the rounds, as the mean over runs that share their clients.

    Args:
        runs: Runs that share a partition, by the name of a line.
        columns: Map from the name of a line to a column of ``evaluation.csv``.
        metric: Name of the metric.
        colors: Map from the name of a line to its colour.
    """
    lines = {
        name: pd.concat(tables).groupby(["client", "round"])[columns[name]].mean()
        for name, some in runs.items()
        if (tables := [run.evaluation for run in some if columns[name] in run.evaluation])
    }
    if not lines:
        return []
    joined, first = pd.DataFrame(lines), next(iter(runs.values()))[0]
    present = set(joined.index.get_level_values("client"))
    frames = {
        f"{first.client_name(client)}, n = {size:,.0f}": joined.xs(client, level="client").sort_index()
        for client, size in spread(first.num_samples.items(), MAX_CLIENTS)
        if client in present
    }
    return page_figures.small_multiples(frames, metric, colors) if frames else []


def which_clients(run: RunRecord) -> str:
    """Return a sentence that says which clients are drawn."""
    count = len(run.num_samples)
    text = "Clients are ordered by their number n of training samples, the largest first."
    if count <= MAX_CLIENTS:
        return text
    return f"{text} Of the {count:,} clients {MAX_CLIENTS} are drawn, at equal distances in this order."


def partition_blocks(records: Records) -> Iterator[Block]:
    """Yield a picture of each split of the data."""
    found: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for (variant, _, seed), run in records.items():
        if run.partition.get("sizes"):
            who, _ = found.setdefault(run.partition.get("hash", ""), ([], run.partition))
            who.append(f"{variant}, seed {seed}".removeprefix(", "))
    pictures = []
    for key, (who, content) in spread(found.items()):
        users = list(dict.fromkeys(who))
        title = "; ".join(users[:4]) + "; ..." * (len(users) > 4) if len(found) > 1 else ""
        pictures.append(page_figures.partition(f"{title} (hash {key[:12]})".strip(), content))
    if pictures:
        text = "The left part shows the samples of each class at each client, and the right part those of all classes."
        yield Gallery(f"{text}{left_out(len(found), 'partitions')}", pictures, size="large")
