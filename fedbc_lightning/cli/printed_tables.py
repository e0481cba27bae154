"""The tables that the commands on one run print: metrics, the split of the data, and the plan of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbc_lightning.core.units import bytes_said, decimals, duration
from fedbc_lightning.data.datamodule import SPLITS
from fedbc_lightning.data.partition_report import save_partition_report
from fedbc_lightning.trainer.arguments import check_datamodule

if TYPE_CHECKING:
    from fedbc_lightning.planning import Plan

MAX_CLIENT_ROWS = 40
MAX_CLASS_COLUMNS = 12
MAX_NAMED = 10
MIN_TABLE_WIDTH = 150
ROUGH = "Times are rough: from a few steps on this machine at its present load, with start-up, without checkpoints."


def print_metrics(metrics: Mapping[str, Any], title: str) -> None:
    """Print names and values as a table.

    Args:
        metrics: Map from names to numbers or tensors of one element.
        title: Title of the table.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{float(value):.0f}" if "/num_" in name else decimals(float(value)))
    Console().print(table)


def show_partition(datamodule: Any, folder: Path) -> None:
    """Draw the split of the data and print a row per client; of many clients only the largest and the smallest.

    Args:
        datamodule: FederatedDataModule that has not been set up.
        folder: Folder to which ``partition.png``, ``partition.json`` and ``partition.npz`` are written.

    Raises:
        ConfigurationError: The data are not split over clients.
    """
    check_datamodule(datamodule)
    datamodule.prepare_data()
    datamodule.setup("fit")
    report = save_partition_report(datamodule, folder)
    console = Console()
    sizes = {split: datamodule.num_samples(split) for split in SPLITS}
    table = _client_table(sizes, datamodule.label_histogram(), datamodule.client_names)
    console.print(_summary(report), highlight=False, soft_wrap=True)
    console.print()
    Console(width=max(console.width, MIN_TABLE_WIDTH)).print(table)  # digits are never cut
    console.print()
    for name in ("partition.png", "partition.json", "partition.npz"):
        if (folder / name).is_file():
            console.print(folder / name, highlight=False, soft_wrap=True)


def _summary(report: Mapping[str, Any]) -> str:
    sizes = report["num_samples"]
    parts = [f"{report[f'num_{split}']:,} {split}" for split in SPLITS if report[f"num_{split}"]]
    text = (
        f"[bold]{report['num_clients']:,} clients, {sizes['total']:,} samples[/bold] ({', '.join(parts)}); "
        f"{sizes['min']:,} to {sizes['max']:,} per client, mean {sizes['mean']:,.1f}"
    )
    if "label_emd" in report:
        classes = report["classes_per_client"]
        text += (
            f"\n{report['num_classes']} classes, {classes['min']} to {classes['max']} per client, "
            f"mean {classes['mean']:.1f}; "
            f"distance from the pooled class shares {report['label_emd']:.2f} (0: the same, 2: nothing in common)"
        )
    if "heldout_clients" in report:
        names, heldout = report["client_names"], report["heldout_clients"]
        shown = [escape(str(names[client] if names else client)) for client in heldout[:MAX_NAMED]]
        more = f" and {len(heldout) - MAX_NAMED:,} more" * (len(heldout) > MAX_NAMED)
        text += f"\n{len(heldout):,} of the clients are held out and never train: {', '.join(shown)}{more}"
    return f"{text}\n[dim]hash {report['hash'][:16]}[/dim]"


def _client_table(sizes: Mapping[str, np.ndarray], histogram: np.ndarray | None, names: Sequence[str] | None) -> Table:
    sizes = {split: counts for split, counts in sizes.items() if counts.any()}
    totals = np.sum(list(sizes.values()), axis=0)
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("client", justify="left" if names else "right")
    for split in sizes:
        table.add_column(split, justify="right")
    if histogram is not None and histogram.shape[1] > MAX_CLASS_COLUMNS:
        histogram = None
    for label in range(0 if histogram is None else histogram.shape[1]):
        table.add_column(f"c{label}", justify="right")
    for client in _shown_clients(totals):
        if client is None:
            table.add_row("...")
            continue
        counts = [f"{counts[client]:,}" for counts in sizes.values()]
        held = () if histogram is None else histogram[client]
        labels = [f"{count:,}" if count else "[dim].[/dim]" for count in held]
        table.add_row(escape(names[client]) if names else str(client), *counts, *labels)
    return table


def _shown_clients(totals: np.ndarray) -> list[int | None]:
    """Return all clients in order, or of many the largest ones, a None, and the smallest ones."""
    if len(totals) <= MAX_CLIENT_ROWS:
        return list(range(len(totals)))
    by_size = np.argsort(-totals, kind="stable").tolist()
    half = MAX_CLIENT_ROWS // 2
    return [*by_size[:half], None, *by_size[-half:]]


def print_plan(plan: Plan) -> None:
    """Print the estimated cost of a run in readable units."""
    about = "" if plan.is_counted else "about "
    table = Table(title="plan", title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("method", escape(f"{plan.algorithm}, {plan.model} with d = {plan.num_parameters:,}"))
    table.add_row(
        "clients", f"{plan.clients_per_round:,.6g} of {plan.num_clients:,} per round, {plan.max_rounds:,} rounds"
    )
    table.add_row(
        "steps",
        f"{plan.steps_per_client:,.4g} per client, {plan.steps_per_round:,.6g} per round, "
        f"{about}{plan.num_steps:,} in all",
    )
    table.add_row("engine", escape(_engines(plan)))
    table.add_row("round", f"about {duration(plan.round_seconds[plan.engine])}")
    if plan.num_evaluations:
        table.add_row("evaluation", f"about {duration(plan.evaluation_seconds)}, {plan.num_evaluations:,} times")
    table.add_row("start-up", f"about {duration(plan.start_seconds)}")
    processes = f", {plan.num_processes} processes, measured in one" if plan.num_processes > 1 else ""
    table.add_row("time", f"[bold]about {duration(plan.seconds)}[/bold] on {plan.device}{processes}")
    if plan.simulated_seconds is not None:
        table.add_row("simulated", f"{about}{duration(plan.simulated_seconds)} on the clients' clock (trainer.system)")
    for title, parts in (("memory", plan.memory), ("disk", plan.disk)):
        for k, (what, size) in enumerate(parts.items()):
            table.add_row("" if k else title, f"{bytes_said(size)}  {what}")
    for title, total in (("sent up", plan.bytes_up), ("sent down", plan.bytes_down)):
        table.add_row(title, f"{bytes_said(total / plan.max_rounds)} per round, {about}{bytes_said(total)} in all")
    console = Console(highlight=False)
    console.print(table)
    console.print(ROUGH, style="dim", soft_wrap=True)


def _engines(plan: Plan) -> str:
    others = [kind for kind in plan.round_seconds if kind != plan.engine]
    if others:
        return f"{plan.engine}; {others[0]} would take about {duration(plan.round_seconds[others[0]])} per round"
    other = "sequential" if plan.engine == "vectorized" else "vectorized"
    return f"{plan.engine}; {other} {plan.not_timed}" if plan.not_timed.startswith("cannot") else (
        f"{plan.engine}; {other} was not timed: {plan.not_timed}"
    )  # fmt: skip
