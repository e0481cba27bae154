"""Makes the page of a single run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.overview import version
from fedbc_lightning.core.metric_names import TRAIN_LOSS, Measured, is_lower_better, is_of_validation, measured
from fedbc_lightning.core.units import duration, megabytes
from fedbc_lightning.report import client_figures, figures
from fedbc_lightning.report.content import Block, Code, Gallery, Page, Picture, Section, Table, Text
from fedbc_lightning.report.svg import COLORS
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.run.run_warnings import divergence
from fedbc_lightning.studies.numbers import Rows, is_share, number
from fedbc_lightning.studies.reported_round import OF_PAPERS, ROUNDS, can_choose, evaluated, reported_rows
from fedbc_lightning.studies.results import totals
from fedbc_lightning.studies.study_run import flat

OF_CLIENTS = {"global": "global model z", "local": "clients' own models"}
PLACES = {
    **OF_CLIENTS,
    "heldout": "z on held-out clients",
    "heldout_finetuned": "z on held-out clients, fine-tuned",
}
EVEN = {
    "worst10": "worst tenth of the clients",
    "least_data": "tenth with least data",
    "most_data": "tenth with most data",
}


def run_page(folder: Path) -> Page:
    """Return the page of the run in a folder.

    Raises:
        ConfigurationError: A file of the run cannot be read.
    """
    run = RunRecord(folder)
    sections = [
        Section("numbers", "Numbers", list(_numbers(run))),
        Section("curves", "Curves", list(_curves(run))),
        Section("duals", "λ and γ by client", list(_state(run))),
        Section("clients", "Every client", list(_clients(run))),
        Section("partition", "Who holds which data", list(_partition(run))),
        Section("settings", "Settings", [_settings(run)]),
        Section("cost", "Cost", [_cost(run)]),
        Section("repeat", "Repeat it", list(_repeat(run))),
    ]
    algorithm, data = (_class(run, part) for part in ("algorithm", "data"))
    return Page(
        title=f"{folder.resolve().parent.name}: {algorithm} on {data}",
        subtitle=f"A run of {run.last_round} rounds on {len(run.num_samples)} clients, in {folder}.",
        verdict=_verdict(run, algorithm),
        notices=list(_notices(run)),
        sections=[section for section in sections if section.blocks],
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


def _kinds(names: Iterable[str]) -> list[Measured]:
    """Return the metrics of names of the evaluation, each with its split, as names of z."""
    return list(dict.fromkeys(what._replace(place="global") for what in map(measured, names) if what))


def _said(kind: Measured) -> str:
    """Return a metric in words, with its split."""
    return f"{kind.split} {kind.metric}".replace("_", " ")


def _columns(kind: Measured, table: pd.DataFrame, places: dict[str, str] = PLACES) -> dict[str, str]:
    """Map the columns of a table that hold a metric to the models that they measure."""
    columns = {kind._replace(place=place).name: text for place, text in places.items()}
    return {name: text for name, text in columns.items() if name in table}


def _verdict(run: RunRecord, algorithm: str) -> list[str]:
    """Return what the run reached, in sentences."""
    rows = evaluated(run.metrics) if not run.metrics.empty else run.metrics
    names = _measured(run)
    if rows.empty or not names:
        return ["No round has been evaluated yet."]
    last, kind = rows.iloc[-1], _kinds(names)[0]
    unit = " %" if is_share(kind.metric) else ""
    said = [f"{text} {number(last[name], name)}{unit}" for name, text in _columns(kind, rows).items()]
    first = f"After round {int(last['round'])}, {algorithm} reaches this {_said(kind)}: {', '.join(said)}."
    worst = Measured(kind.metric, "worst10").name
    if worst not in rows or pd.isna(last[worst]):
        return [first]
    return [first, f"On the tenth of the clients that it serves worst, z reaches {number(last[worst], worst)}{unit}."]


def _notices(run: RunRecord) -> Iterator[str]:
    if run.max_rounds is not None and run.last_round < run.max_rounds:
        yield (
            f"The run is unfinished: it has {run.last_round} of {run.max_rounds} rounds. It was stopped, or it is "
            "still running."
        )
    diverged = divergence(run.metrics_as_written)
    if diverged is not None:
        yield diverged
    if run.missing:
        yield f"There is no {', '.join(run.missing)} in the folder, so that what these files hold is left out."


def _numbers(run: RunRecord) -> Iterator[Block]:
    rows: Rows = [["metric", "unit", *(ROUNDS[report] for report in OF_PAPERS), "round of the best"]]
    done = not run.metrics.empty and not evaluated(run.metrics).empty
    for name in _measured(run) if done else ():
        cells, best = [], "-"
        for report in OF_PAPERS:
            if report == "best_on_test" and not can_choose(report, name):
                cells.append("-")
                continue
            found = reported_rows(run.metrics, report, name, is_lower_better=is_lower_better(name))
            cells.append(number(found[name].mean(skipna=False), name))
            best = f"{int(found['round'].iloc[-1])}" if report == "best_on_test" else best
        rows.append([name, "%" if is_share(name) else "", *cells, best])
    if rows[1:]:
        yield Table(
            "The table shows how good the models are at the last evaluated round, as the mean over the evaluated "
            "rounds of the last tenth, and at the best round, which is chosen on the test data and so flatters every "
            "method. The other metrics of the rounds are in metrics.csv.",
            rows,
        )


def _curves(run: RunRecord) -> Iterator[Block]:
    metrics = run.metrics
    pictures: list[Picture] = []
    there = {what.place for what in map(measured, metrics) if what}
    legend = {text: COLORS[k] for k, (place, text) in enumerate(PLACES.items()) if place in there}
    for kind in _kinds(_measured(run)):
        columns = _columns(kind, metrics)
        pictures.append(_lines(f"c{len(pictures)}", _said(kind), metrics, columns, kind.metric, legend))
    if pictures:
        yield Gallery("The curves show the models on the clients' data after each evaluated round.", pictures, legend)
    legend = {place: COLORS[k] for k, place in enumerate(EVEN.values())}
    columns = {Measured("accuracy", place).name: text for place, text in EVEN.items()}
    columns = {name: text for name, text in columns.items() if name in metrics and metrics[name].notna().any()}
    if columns:
        picture = _lines("even", "accuracy of z", metrics, columns, "accuracy", legend)
        yield Gallery("The curves show how evenly z serves the clients.", [picture], legend)
    others = {
        TRAIN_LOSS: ("training loss", "The training loss is the mean over the clients of a round."),
        "dual/effective_number": ("effective number of clients", client_figures.EFFECTIVE_NUMBER),
    }
    others = {column: said for column, said in others.items() if column in metrics and metrics[column].notna().any()}
    pictures = [
        figures.lines(f"o{place}", title, metrics, title, {column: COLORS[0]})
        for place, (column, (title, _)) in enumerate(others.items())
    ]
    if pictures:
        yield Gallery(" ".join(text for _, text in others.values()), pictures)


def _lines(
    name: str, title: str, metrics: pd.DataFrame, columns: dict[str, str], kind: str, legend: dict[str, str]
) -> Picture:
    """Draw columns of ``metrics.csv`` under the names and in the colours of the legend."""
    scale = 100.0 if is_share(kind) else 1.0
    found = metrics[list(columns)].rename(columns=columns) * scale
    found.insert(0, "round", metrics["round"])
    return figures.lines(name, title, found, figures.unit(kind), {text: legend[text] for text in columns.values()})


def _state(run: RunRecord) -> Iterator[Block]:
    maps = client_figures.StateMaps()
    for column in client_figures.STATE:
        client_figures.add_state_maps(maps, "s", "", {"": run}, column)
    if maps.means:
        yield Gallery(client_figures.HOW_TO_READ_MAPS, maps.means)
    if maps.sentences:
        yield Text(maps.sentences)


def _clients(run: RunRecord) -> Iterator[Block]:
    kinds = _kinds(name for name in _measured(run) if name in run.evaluation)
    if not kinds:
        return
    kind, columns = (
        kinds[0].metric,
        {text: name for name, text in _columns(kinds[0], run.evaluation, OF_CLIENTS).items()},
    )
    frames = client_figures.accuracy_frames({"run": [run]}, columns)
    if len(columns) == 1:
        frames = {title: found.set_axis(list(columns), axis=1) for title, found in frames.items()}
    if not frames:
        return
    legend = {place: COLORS[k] for k, place in enumerate(OF_CLIENTS.values()) if place in columns}
    pictures = figures.small_multiples("m", frames, kind, legend)
    text = f"Each figure shows {figures.unit(kind)}, on the data of one client, by round, on the same axes."
    yield Gallery(f"{text} {client_figures.which_clients(run)}", pictures, legend, size="small")


def _partition(run: RunRecord) -> Iterator[Block]:
    content = run.partition
    if content.get("sizes"):
        picture = figures.partition("p", "", content)
        text = "The left part shows the samples of each class at each client, and the right part those of all classes."
        yield Gallery(text, [picture], size="large")


def _settings(run: RunRecord) -> Table:
    rows = [["setting", "value"], *([key, value] for key, value in flat(run.config))]
    text = "The table lists all settings of the run, by the keys that the command line takes."
    return Table(text, rows, is_folded=True, title="All settings", is_text=True)


def _cost(run: RunRecord) -> Table:
    found = totals(run.metrics)
    seconds = found["seconds"]
    rows = [
        ["what", "amount", "unit"],
        ["rounds", f"{run.last_round:,}", ""],
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
