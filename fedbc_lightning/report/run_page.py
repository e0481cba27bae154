"""Makes the page of a single run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.overview import version
from fedbc_lightning.core.metric_names import TRAIN_LOSS, Measured, is_lower_better, is_of_validation, measured
from fedbc_lightning.core.units import duration, megabytes
from fedbc_lightning.report import blocks, page_figures
from fedbc_lightning.report.page import Block, Code, Gallery, Page, Picture, Table
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.run.run_warnings import divergence
from fedbc_lightning.studies.numbers import Rows, is_share, number
from fedbc_lightning.studies.results import totals
from fedbc_lightning.studies.statistics import OF_PAPERS, ROUNDS, can_choose, evaluated, reported_rows
from fedbc_lightning.studies.study_run import flat

OF_CLIENTS = {"global": "global model z", "local": "clients' own models"}
PLACES = {
    **OF_CLIENTS,
    "heldout": "z on held-out clients",
    "heldout_finetuned": "z on held-out clients, fine-tuned",
}
EVEN = {"worst10": "worst tenth of the clients", "least_data": "tenth with least data",
        "most_data": "tenth with most data"}  # fmt: skip


def run_page(folder: Path) -> Page:
    """Return the page of the run in a folder.

    Raises:
        ConfigurationError: A file of the run cannot be read.
    """
    run = RunRecord(folder)
    algorithm, data = (_class(run, part) for part in ("algorithm", "data"))
    records = {("", "", 0): run}
    return Page(
        title=f"{folder.resolve().parent.name}: {algorithm} on {data}",
        subtitle=f"A run of {run.num_rounds} rounds on {len(run.num_samples)} clients, in {folder}.",
        verdict=_verdict(run, algorithm),
        notices=list(_notices(run)),
        sections={
            "Numbers": list(_numbers(run)),
            "Curves": list(_curves(run)),
            "λ and γ by client": list(blocks.state_blocks(records)),
            "Every client": list(_clients(run)),
            "Who holds which data": list(blocks.partition_blocks(records)),
            "Settings": [_settings(run)],
            "Cost": [_cost(run)],
            "Repeat it": list(_repeat(run)),
        },
        footer=f"This page was made by {version()} from the files in {folder}; it needs no other file.",
    )


def _class(run: RunRecord, part: str) -> str:
    """Return the name of the class of a part of the config."""
    given = run.config.get(part) or {}
    name = given.get("class_path", "?") if isinstance(given, dict) else given
    return str(name).rpartition(".")[2]


def _measured(run: RunRecord) -> list[str]:
    """Return the metrics of test and validation data, accuracies first."""
    found = [name for name in run.metrics if (what := measured(name)) and what.place in PLACES]
    return sorted(found, key=lambda name: (not is_share(name), is_of_validation(name)))


def _kinds(run: RunRecord) -> list[Measured]:
    """Return the metrics that were evaluated, each with its split, as metrics of z."""
    return list(dict.fromkeys(what._replace(place="global") for what in map(measured, _measured(run)) if what))


def _columns(kind: Measured, table: pd.DataFrame, places: dict[str, str] = PLACES) -> dict[str, str]:
    """Map the models of which a table has a metric to its columns."""
    columns = {text: kind._replace(place=place).name for place, text in places.items()}
    return {text: name for text, name in columns.items() if name in table and table[name].notna().any()}


def _verdict(run: RunRecord, algorithm: str) -> list[str]:
    """Return what the run reached, in sentences."""
    rows = evaluated(run.metrics) if not run.metrics.empty else run.metrics
    if rows.empty or not _kinds(run):
        return ["No round has been evaluated yet."]
    last, kind = rows.iloc[-1], _kinds(run)[0]
    places = {**PLACES, "worst10": "z on the tenth of the clients that it serves worst"}
    unit = " %" if is_share(kind.metric) else ""
    reached = [f"{text} {number(last[name], name)}{unit}" for text, name in _columns(kind, rows, places).items()]
    metric = f"{kind.split} {kind.metric}".replace("_", " ")
    return [f"After round {int(last['round'])}, {algorithm} reaches this {metric}: {', '.join(reached)}."]


def _notices(run: RunRecord) -> Iterator[str]:
    if run.max_rounds is not None and run.num_rounds < run.max_rounds:
        yield (
            f"The run is unfinished: it has {run.num_rounds} of {run.max_rounds} rounds. It was stopped, or it is "
            "still running."
        )
    # As written: for pandas an empty cell (not evaluated) and nan (diverged) are the same.
    diverged = divergence(run.metrics_as_written)
    if diverged is not None:
        yield diverged
    if run.missing:
        yield f"There is no {', '.join(run.missing)} in the folder, so that what these files hold is left out."


def _numbers(run: RunRecord) -> Iterator[Block]:
    table: Rows = [["metric", "unit", *(ROUNDS[report] for report in OF_PAPERS), "round of the best"]]
    done = not run.metrics.empty and not evaluated(run.metrics).empty
    for name in _measured(run) if done else ():
        found = {report: reported_rows(run.metrics, report, name, is_lower_better=is_lower_better(name))
                 for report in OF_PAPERS if report != "best_on_test" or can_choose(report, name)}  # fmt: skip
        values = {report: number(rows[name].mean(skipna=False), name) for report, rows in found.items()}
        cells = [values.get(report, "-") for report in OF_PAPERS]
        best = f"{int(found['best_on_test']['round'].iloc[-1])}" if "best_on_test" in found else "-"
        table.append([name, "%" if is_share(name) else "", *cells, best])
    if table[1:]:
        yield Table(
            "The table shows how good the models are at the last evaluated round, as the mean over the evaluated "
            "rounds of the last tenth, and at the best round, which is chosen on the test data and so flatters every "
            "method. The other metrics of the rounds are in metrics.csv.",
            table,
        )


def _curves(run: RunRecord) -> Iterator[Block]:
    pictures, shown = [], set[str]()
    for kind in _kinds(run):
        columns = _columns(kind, run.metrics)
        if columns:  # else the run has no row of an evaluated round yet
            shown |= set(columns)
            pictures += _lines(run, f"{kind.split} {kind.metric}".replace("_", " "), columns, kind.metric, PLACES)
    if pictures:
        text = "The curves show the models on the clients' data after each evaluated round."
        yield Gallery(text, pictures, {name: color for name, color in _legend(PLACES).items() if name in shown})
    columns = _columns(Measured("accuracy"), run.metrics, EVEN)
    if columns:
        text = "The curves show how evenly z serves the clients."
        yield Gallery(text, _lines(run, "accuracy of z", columns, "accuracy", EVEN), _legend(EVEN))
    others = {
        TRAIN_LOSS: ("training loss", "The training loss is the mean over the clients of a round."),
        blocks.EFFECTIVE: ("effective number of clients", blocks.EFFECTIVE_NUMBER),
    }
    for column, (title, text) in others.items():
        if column in run.metrics and run.metrics[column].notna().any():
            yield Gallery(text, _lines(run, title, {title: column}, title, {column: title}))


def _legend(places: dict[str, str]) -> dict[str, str]:
    return {text: page_figures.COLORS[place] for place, text in enumerate(places.values())}


def _lines(run: RunRecord, title: str, columns: dict[str, str], metric: str, places: dict[str, str]) -> list[Picture]:
    """Draw columns of ``metrics.csv`` as lines of one figure."""
    parts = [
        pd.DataFrame({"rounds": run.metrics["round"], "algorithm": text, metric: run.metrics[name]})
        for text, name in columns.items()
    ]
    colors = {text: color for text, color in _legend(places).items() if text in columns}
    return page_figures.curves({title: pd.concat(parts)}, "rounds", metric, colors)


def _clients(run: RunRecord) -> Iterator[Block]:
    for kind in _kinds(run):
        columns, colors = _columns(kind, run.evaluation, OF_CLIENTS), _legend(OF_CLIENTS)
        pictures = blocks.client_pictures({text: [run] for text in columns}, columns, kind.metric, colors)
        if pictures:
            unit = page_figures.unit(kind.metric)
            text = f"Each figure shows {unit}, on the data of one client, by round, on the same axes."
            legend = {text: colors[text] for text in columns}
            yield Gallery(f"{text} {blocks.which_clients(run)}", pictures, legend, size="small")
            return


def _settings(run: RunRecord) -> Table:
    rows = [["setting", "value"], *([key, value] for key, value in flat(run.config))]
    text = "The table lists all settings of the run, by the keys that the command line takes."
    return Table(text, rows, is_folded=True, title="All settings", is_text=True)


def _cost(run: RunRecord) -> Table:
    found = totals(run.metrics)
    seconds = found["seconds"]
    rows = [
        ["what", "amount", "unit"],
        ["rounds", f"{run.num_rounds:,}", ""],
        ["training and evaluation", f"{seconds:,.1f}", f"seconds{f' ({duration(seconds)})' if seconds >= 60 else ''}"],
        ["sent by the clients", megabytes(found["bytes_up"]), "MB"],
        ["sent to the clients", megabytes(found["bytes_down"]), "MB"],
        ["local steps of all clients", f"{run.num_steps:,}", "steps"],
    ]
    return Table("The table shows what the run has cost up to its last round.", rows)


def _repeat(run: RunRecord) -> Iterator[Block]:
    if run.config:
        yield Code("This command runs the same again.", f"{PROG} fit --config {run.folder / 'config.yaml'}")
    rows = [["what", "hash"], *([what, value] for what, value in run.hashes.items())]
    yield Table(
        "The hashes are those of config.yaml, of the split of the data, and of the package's code; equal hashes mean "
        f"equal content. The run was made by {PROG} {run.versions.get(PROG, 'of a version that it has not recorded')}.",
        rows,
        is_text=True,
    )
    if run.config_text:
        yield Code("config.yaml", run.config_text, is_folded=True)
