"""Prints the table of ``fedbc-cli plan`` for one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbc_lightning.core.units import bytes_said, duration

if TYPE_CHECKING:
    from fedbc_lightning.planning import Plan

ROUGH = "Times are rough: from a few steps on this machine at its present load, with start-up, without checkpoints."


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
