"""The tables that commands print: any rows of text, metrics, the split of the data, and the plan of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fedbc_lightning.core.files import is_there, url_of
from fedbc_lightning.core.printing import Console
from fedbc_lightning.core.units import bytes_said, decimals, duration
from fedbc_lightning.data.datamodule import SPLITS
from fedbc_lightning.data.datasets import labels_of_classes
from fedbc_lightning.data.partition_report import in_words, save_partition_report
from fedbc_lightning.planning import Plan
from fedbc_lightning.trainer.arguments import as_datamodule

MAX_CLIENT_ROWS = 40
MAX_CLASS_COLUMNS = 12
ROUGH = "Times are rough: from a few steps on this machine at its present load, with start-up, without checkpoints."


def show(console: Console, text: str, rows: Sequence[Sequence[str]]) -> None:
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


def print_metrics(metrics: Mapping[str, Any], title: str) -> None:
    """Print names and values as a table.

    Args:
        metrics: Map from names to numbers or tensors of one element.
        title: Title of the table.
    """
    rows = [[name, f"{float(value):.0f}" if "/num_" in name else decimals(float(value))]
            for name, value in metrics.items()]  # fmt: skip
    show(Console(), title, [["metric", "value"], *rows])


def show_partition(datamodule: Any, folder: Path) -> None:
    """Draw the split of the data and print a row per client; of many clients only the largest and the smallest.

    Args:
        datamodule: FederatedDataModule that has not been set up.
        folder: Folder to which ``partition.png``, ``partition.json`` and ``partition.npz`` are written.

    Raises:
        ConfigurationError: The data are not split over clients.
    """
    datamodule = as_datamodule(datamodule)
    datamodule.prepare_data()
    datamodule.setup("fit")
    report = save_partition_report(datamodule, folder)
    console = Console()
    for line in [*in_words(report), f"hash {report['hash'][:16]}"]:
        console.print(line, highlight=False, soft_wrap=True)
    show(console, "", _client_rows(datamodule))
    for name in ("partition.png", "partition.json", "partition.npz"):
        if is_there(file := folder / name):
            console.print(escape(url_of(file) or str(file)), highlight=False, soft_wrap=True)


def _client_rows(datamodule: Any) -> list[list[str]]:
    """Return a header, then a row per client, in order; of many only the largest, a row of dots, and the smallest."""
    sizes = {split: counts for split in SPLITS if (counts := datamodule.num_samples(split)).any()}
    histogram, names = datamodule.label_histogram(), datamodule.client_names
    labels = range(0 if histogram is None or histogram.shape[1] > MAX_CLASS_COLUMNS else histogram.shape[1])
    rows = [["client", *sizes, *labels_of_classes(len(labels), datamodule.class_names, "c")]]
    totals = np.sum(list(sizes.values()), axis=0)
    shown: list[int | None] = list(range(len(totals)))
    if len(shown) > MAX_CLIENT_ROWS:
        by_size, half = np.argsort(-totals, kind="stable").tolist(), MAX_CLIENT_ROWS // 2
        shown = [*by_size[:half], None, *by_size[-half:]]
    for client in shown:
        if client is None:
            rows.append(["..."])
            continue
        counts = [f"{counts[client]:,}" for counts in sizes.values()]
        held = [f"{histogram[client, label]:,}" if histogram[client, label] else "." for label in labels]
        rows.append([names[client] if names else str(client), *counts, *held])
    return rows


def print_plan(plan: Plan) -> None:
    """Print the estimated cost of a run in readable units."""
    about = "" if plan.is_counted else "about "
    processes = f", {plan.num_processes} processes, measured in one" if plan.num_processes > 1 else ""
    asked = f" ({plan.clients_asked:,} are asked for)" if plan.clients_per_round < plan.clients_asked else ""
    clients = f"{plan.clients_per_round:,.6g} of {plan.num_clients:,} per round{asked}"
    rows = [
        ("method", escape(f"{plan.algorithm}, {plan.model} with d = {plan.num_parameters:,}")),
        ("clients", f"{clients}, {plan.max_rounds:,} rounds"),
        ("steps", f"{plan.steps_per_client:,.4g} per client, {plan.steps_per_round:,.6g} per round, "
         f"{about}{plan.num_steps:,} in all"),
        ("engine", plan.engine),
        ("round", f"about {duration(plan.round_seconds)}"),
        ("start-up", f"about {duration(plan.start_seconds)}"),
        ("time", f"[bold]about {duration(plan.seconds)}[/bold] on {plan.device}{processes}"),
    ]  # fmt: skip
    if plan.num_evaluations:
        rows.insert(5, ("evaluation", f"about {duration(plan.evaluation_seconds)}, {plan.num_evaluations:,} times"))
    if plan.simulated_seconds is not None:
        rows += [("simulated", f"{about}{duration(plan.simulated_seconds)} on the clients' clock (trainer.system)")]
    for title, parts in (("memory", plan.memory), ("disk", plan.disk)):
        rows += [("" if k else title, f"{bytes_said(size)}  {what}") for k, (what, size) in enumerate(parts.items())]
    for title, total in (("sent up", plan.bytes_up), ("sent down", plan.bytes_down)):
        rows += [(title, f"{bytes_said(total / plan.max_rounds)} per round, {about}{bytes_said(total)} in all")]
    table = Table(title="plan", title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(ROUGH, style="dim", soft_wrap=True)
