"""Draws what happened at each client of a run: λ, γ, accuracy, and the data it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from fedbc_lightning.report import figures
from fedbc_lightning.report.content import Picture
from fedbc_lightning.run.run_record import RunRecord

STATE = {"dual": "λ", "tolerance": "γ"}
"""Columns of ``clients.csv`` that are drawn over the rounds, with the papers' symbols."""
MAX_CLIENTS = 30
"""Largest number of clients of which each has a figure of its own."""
HOW_TO_READ_MAPS = (
    "Each row is a client, the one with most training data at the top; each column is a round. A client keeps its "
    "value while it does not take part, and is left empty before its first round."
)
EFFECTIVE_NUMBER = (
    "The effective number of clients, (Σλ)² / Σλ², says how evenly λ weighs the clients of a round: with equal weights "
    "it is their number, at 1 one client decides alone, and at 0 all λ are 0, so that z is the plain mean."
)
MAX_SEEDS = 5
"""Largest number of seeds of which each has maps of its own."""


@dataclass
class StateMaps:
    """Maps of λ and γ by client and round.

    Attributes:
        means: A map per state: the mean over seeds that share their clients.
        seeds: A map per state and seed, where there are several seeds.
        sentences: What is said about values that do not change and so have no map.
    """

    means: list[Picture] = field(default_factory=list)
    seeds: list[Picture] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


def add_state_maps(maps: StateMaps, name: str, title: str, runs: Mapping[str, RunRecord], column: str) -> None:
    """Draw a state of each client over the rounds, if it changes.

    Args:
        maps: What the drawings and sentences are added to.
        name: Prefix of the figures' ids.
        title: What the runs are, for the titles of the figures; empty if there is nothing to say.
        runs: Runs that differ in their seed alone, by what tells them apart in a title.
        column: The state, one of ``STATE``.
    """
    tables = {seed: state_of(run, column) for seed, run in runs.items()}
    tables = {seed: table for seed, table in tables.items() if not table.empty}
    if not tables:
        return
    every = pd.concat(tables)
    low, high = every.min().min(), every.max().max()
    symbol = STATE[column]
    head, what = f"{title}: {symbol}" if title else symbol, f"{symbol} ({column})"
    if low == high:
        maps.sentences.append(f"{head} is {low:g} at every client in every round.")
        return
    if share_clients([runs[seed] for seed in tables]):
        mean = every.groupby(level=1, sort=False).mean()
        maps.means.append(figures.client_map(f"{name}{column}", head, mean, what))
    if len(tables) > 1:
        for place, (seed, table) in enumerate(list(tables.items())[:MAX_SEEDS]):
            one = f"{name}{column}{place}"
            maps.seeds.append(figures.client_map(one, f"{head}, {seed}", table, what, (low, high)))


def share_clients(runs: Sequence[RunRecord]) -> bool:
    """Whether the clients of all runs are known to hold the same data; client 3 of another seed may hold others."""
    hashes = {run.partition.get("hash") for run in runs}
    return len(runs) == 1 or (len(hashes) == 1 and None not in hashes)


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
    every = range(1, max(run.last_round, int(found.columns[-1])) + 1)
    order = run.num_samples.index if len(run.num_samples) else found.index
    found = found.reindex(index=order, columns=every).ffill(axis=1)
    return found.rename(index=lambda client: run.client_name(client).removeprefix("client "))


def accuracy_frames(runs: Mapping[str, list[RunRecord]], columns: Mapping[str, str]) -> dict[str, pd.DataFrame]:
    """Return by title of a client a table with rounds as index and a column per line, the mean over these runs.

    Args:
        runs: Runs that share a partition, by algorithm.
        columns: Map from the name of a line to a column of ``evaluation.csv``; with one column, a line is an algorithm.
    """
    found: dict[str, pd.Series] = {}
    for algorithm, files in runs.items():
        tables = [run.evaluation for run in files]
        for line, column in columns.items():
            rows = [table[["round", "client", column]] for table in tables if column in table]
            if rows:
                means = pd.concat(rows).groupby(["client", "round"])[column].mean()
                found[algorithm if len(columns) == 1 else line] = means
    if not found:
        return {}
    joined = pd.DataFrame(found)
    first = next(iter(runs.values()))[0]
    clients = shown_clients(first)
    present = set(joined.index.get_level_values("client"))
    sizes = first.num_samples
    return {
        f"{first.client_name(client)}, n = {sizes[client]:,.0f}": joined.xs(client, level="client").sort_index()
        for client in clients
        if client in present
    }


def shown_clients(run: RunRecord) -> list[int]:
    """Return the clients that have a figure of their own, those with most data first.

    Of more than 30 clients, 30 at equal distances in the order of their sizes are taken.
    """
    order = [int(client) for client in run.num_samples.index]
    return list(dict.fromkeys(order[place] for place in _places(len(order))))


def _places(count: int) -> list[int]:
    if count <= MAX_CLIENTS:
        return list(range(count))
    return [round(k * (count - 1) / (MAX_CLIENTS - 1)) for k in range(MAX_CLIENTS)]


def which_clients(run: RunRecord) -> str:
    """Return a sentence that says which clients are drawn."""
    count = len(run.num_samples)
    if count <= MAX_CLIENTS:
        return "The clients are ordered by their number n of training samples, the largest first."
    return (
        f"Of the {count:,} clients {MAX_CLIENTS} are drawn, at equal distances in the order of their number n of "
        "training samples, the largest first."
    )
