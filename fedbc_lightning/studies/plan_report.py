"""Prints the table of ``fedbc-cli plan`` for a study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbc_lightning.cli.plan_report import ROUGH
from fedbc_lightning.core.units import bytes_said, duration

if TYPE_CHECKING:
    from fedbc_lightning.studies.study_plan import StudyPlan


def print_study_plan(plan: StudyPlan) -> None:
    """Print the estimated cost of a study: a row per variant and algorithm, and the total."""
    table = Table(title=plan.name, title_justify="left", title_style="bold", box=None, header_style="dim",
                  pad_edge=False)  # fmt: skip
    for name in ("variant", "algorithm"):
        table.add_column(name)
    for name in ("runs", "tuning", "done", "one run", "all", "disk", "up", "down"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.rows:
        counts = (f"{count:,}" for count in (row.num_runs, row.num_trials, row.num_finished))
        sizes = map(bytes_said, (row.disk, row.bytes_up, row.bytes_down))
        times = duration(row.plan.seconds), duration(row.seconds)
        table.add_row(escape(row.variant), escape(row.method), *counts, *times, *sizes)
    console = Console(highlight=False)
    Console(width=max(console.width, 110), highlight=False).print(table)
    console.print(
        f"[bold]about {duration(plan.seconds)} on {plan.num_workers} worker{'s' * (plan.num_workers > 1)}[/bold], "
        f"{bytes_said(plan.disk)} on disk, {bytes_said(plan.bytes_up)} up, {bytes_said(plan.bytes_down)} down",
        soft_wrap=True,
    )
    if any(row.num_finished for row in plan.rows):
        console.print("Finished runs (done) cost nothing more.", style="dim", soft_wrap=True)
    console.print(ROUGH, style="dim", soft_wrap=True)
