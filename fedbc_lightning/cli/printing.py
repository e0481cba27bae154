"""Prints the results of the commands on one run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import SUPPRESS, ArgumentParser
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbc_lightning.cli.choices import choices
from fedbc_lightning.cli.docstrings import Block, import_path, plain, read_docstring
from fedbc_lightning.cli.names import fold
from fedbc_lightning.cli.parser import BriefHelpFormatter
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.core.units import decimals
from fedbc_lightning.data.datamodule import SPLITS
from fedbc_lightning.data.partition_report import save_partition_report
from fedbc_lightning.trainer.arguments import check_datamodule

MAX_CLIENT_ROWS = 40
MAX_CLASS_COLUMNS = 12
MAX_NAMED = 10
MIN_TABLE_WIDTH = 150


def print_classes(section: str, base: type) -> None:
    """Print the classes that a section takes by name, those of this package first, each with its first line.

    Args:
        section: For example ``algorithm``.
        base: Base class of the classes.
    """
    lines = [
        _name_and_line(cls)
        for cls in choices(base)
        if is_ours(cls) or cls.__module__.split(".")[0] == "torch" or section.startswith("trainer.")
    ]
    width = max((len(name) for name, _ in lines), default=0) + 2
    console = Console(highlight=False, markup=False, emoji=False)
    print(f"--{section}")
    for name, summary in lines:
        line = f"{name:{width}}{summary}"
        print(_wrap(line, console.width, width) if console.is_terminal else line)  # a file or grep gets whole lines
    print(f"\nor the path of your own, package.module.Class. The options of one: --{section}.help Class")


def _name_and_line(cls: type) -> tuple[str, str]:
    """Return the name by which a class can be given, the usual one if there is one, and its docstring's first line."""
    doc = read_docstring(cls)
    summary = plain(doc.summary)
    if fold(doc.name) == fold(cls.__name__):
        return doc.name, summary
    return cls.__name__, f"{doc.name}: {summary}"


def print_class(key: str, cls: type) -> None:
    """Print the docstring of an algorithm, or of a part of one, then its options.

    Args:
        key: Key under which the class is given, e.g. ``algorithm``.
        cls: Class to explain.
    """
    doc = read_docstring(cls)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_wrap(f"{doc.name}: {plain(doc.summary)}", console.width, 0), style="bold", soft_wrap=True)
    console.print(f"class {import_path(cls)}", style="dim", soft_wrap=True)
    for title, blocks in doc.sections.items():
        if title != "Args":  # the options below have the same texts
            console.print(f"\n{title}" if title else "", style="bold")
            for block in blocks:
                _print_block(console, block)
    parser = ArgumentParser(add_help=False, usage=SUPPRESS, formatter_class=BriefHelpFormatter)
    parser.add_class_arguments(cls, key, fail_untyped=False, as_group=False)
    for action in private_cli.actions(parser):
        action.help = action.help and plain(action.help)
    console.print(f"\n{parser.format_help().strip() or 'no options'}", soft_wrap=True)


def _print_block(console: Console, block: Block) -> None:
    for line in block.lines:
        if block.kind == "literal":
            console.print(f"    {line}" if line else "", soft_wrap=True)
        else:
            mark, width = ("- ", 6) if block.kind == "items" and len(block.lines) > 1 else ("", 4)
            console.print(_wrap(f"{' ' * 4}{mark}{plain(line)}", console.width, width), soft_wrap=True)


def _wrap(text: str, width: int, indent: int) -> str:
    """Wrap a text at spaces only, so that a formula with a hyphen is not broken."""
    return textwrap.fill(
        text, max(width, 40), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


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
