"""Draws what happened at each client of a run: λ, γ, accuracy, and the data it holds."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from fedbc_lightning.report import figures
from fedbc_lightning.report.content import Picture
from fedbc_lightning.report.files import RunFiles

STATE = {"dual": "λ", "tolerance": "γ"}
"""Columns of ``clients.csv`` that are drawn over the rounds, with the papers' symbols."""
MAX_CLIENTS = 30
"""Largest number of clients of which each has a figure of its own."""


def state_maps(name: str, title: str, run: RunFiles) -> tuple[list[Picture], list[str]]:
    """Draw λ and γ of each client over the rounds.

    Args:
        name: Prefix of the figures' ids.
        title: What the run is, for the titles of the figures.
        run: The run.

    Returns:
        The figures, and sentences about values that do not change and so have no figure.
    """
    pictures, sentences = [], []
    for column, symbol in STATE.items():
        values = state_of(run, column)
        if values.empty:
            continue
        found = values.stack().unique()
        if len(found) == 1:
            sentences.append(f"{f'{title}: ' if title else ''}{symbol} is {found[0]:g} at every client in every round.")
        else:
            head = f"{title}: {symbol}" if title else symbol
            pictures.append(figures.client_map(f"{name}{column}", head, values, f"{symbol} ({column})"))
    return pictures, sentences


def state_of(run: RunFiles, column: str) -> pd.DataFrame:
    """Return a state of the clients: a row per client, that with most data first, and a column per round.

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
    return found.reindex(index=order, columns=every).ffill(axis=1)


def accuracy_frames(runs: Mapping[str, list[RunFiles]], columns: Mapping[str, str]) -> dict[str, pd.DataFrame]:
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


def shown_clients(run: RunFiles) -> list[int]:
    """Return the clients that have a figure of their own, those with most data first.

    Of more than 30 clients, 30 at equal distances in the order of their sizes are taken.
    """
    order = [int(client) for client in run.num_samples.index]
    return list(dict.fromkeys(order[place] for place in _places(len(order))))


def _places(count: int) -> list[int]:
    if count <= MAX_CLIENTS:
        return list(range(count))
    return [round(k * (count - 1) / (MAX_CLIENTS - 1)) for k in range(MAX_CLIENTS)]


def which_clients(run: RunFiles) -> str:
    """Return a sentence that says which clients are drawn."""
    count = len(run.num_samples)
    if count <= MAX_CLIENTS:
        return "The clients are ordered by their number n of training samples, the largest first."
    return (
        f"Of the {count:,} clients {MAX_CLIENTS} are drawn, at equal distances in the order of their number n of "
        "training samples, the largest first."
    )
