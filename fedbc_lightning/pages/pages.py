"""The pages of studies and of single runs: what stands on them, and the files that they are written to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd
import yaml

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import AnyPath, told, write
from fedbc_lightning.core.metric_names import PLACES, TRAIN_LOSS, Measured, is_lower_better, is_of_validation, measured
from fedbc_lightning.core.text import shorten
from fedbc_lightning.pages import page_figures, sections
from fedbc_lightning.pages.page import Block, Code, Page, Table, render
from fedbc_lightning.run.folder import method_of
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.run.run_warnings import remarks
from fedbc_lightning.run.tables import read_rows
from fedbc_lightning.studies.conclusions import claim_sentences, finding_sentences, judge
from fedbc_lightning.studies.drawing import COLORS, colors_of
from fedbc_lightning.studies.numbers import Cells, is_share, layout, mean_and_deviation, number
from fedbc_lightning.studies.origins import origin_rows
from fedbc_lightning.studies.results import AXES, RECORD, StudyRecord, finished, read_record, rows_of_run
from fedbc_lightning.studies.statistics import OF_PAPERS, evaluated, reported_rows
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run
from fedbc_lightning.studies.tables import over_seeds, reported_round, tables

# Name of the page in the folder that it is about, where nothing else is said.
NAME = "report.html"
# What the curves of a study are drawn against; seconds of training tell of the machine as well.
AGAINST = {axis: AXES[axis] for axis in ("rounds", "bytes", "simulated_seconds")}
# Words for what is measured, by the last part of a metric's name
SHOWN = {name: place.words for name, place in PLACES.items() if place.words}
OF_CLIENTS = {name: SHOWN[name] for name in ("global", "local")}
SAMPLED = "sampled clients"
# Colours of the lines of a run; a line has the same colour in every figure.
LEGEND = dict(zip([*SHOWN.values(), SAMPLED], COLORS, strict=False))


def report(folder: AnyPath, output: AnyPath | None = None) -> list[Path]:
    """Write the page about a study or a run, and return the files.

    A study of which several tables of a paper were computed has a page for each of them.

    Args:
        folder: Folder of a study, of a table of a paper in it, of a run, or of all runs of one name (the newest).
        output: File to write; None: ``report.html`` in the folder.

    Raises:
        ConfigurationError: The folder holds neither, one of its files cannot be read, or the page cannot be written.
    """
    places = find(Path(folder))
    if output is not None and len(places) > 1:
        raise ConfigurationError(f"--output: '{folder}' has several pages; give one of {', '.join(map(str, places))}.")
    files = []
    for place in places:
        page = study_page(place) if (place / RECORD).is_file() else run_page(place)
        file = Path(output or place / NAME)
        with told(file, setting="--output"):
            write(file, render(page))
        files.append(file)
    return files


def find(folder: Path) -> list[Path]:
    """Return the folders that have a page of their own: those with ``study.json``, or one run.

    Raises:
        ConfigurationError: There is no such folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"'{folder}' is no folder; give that of a study or of a run.")
    if (folder / RECORD).is_file() or (folder / "metrics.csv").is_file():
        return [folder]
    newest = RunRecord.newest(folder)
    found = sorted(path.parent for path in folder.glob(f"*/{RECORD}")) or ([newest.folder] if newest else [])
    if not found:
        raise ConfigurationError(
            f"'{folder}' is neither a study nor a run: there is no {RECORD}, no metrics.csv, and no folder of a run in "
            "it. The command that runs a study writes the first anew, and repeats no finished run."
        )
    return found


# a study


def study_page(folder: Path) -> Page:
    """Return the page of the study whose ``study.json`` lies in a folder.

    Raises:
        ConfigurationError: A file of the study cannot be read.
    """
    record = read_record(folder)
    study, runs = record.study, record.runs
    every = {"algorithm": study.methods, "variant": study.variants, "seed": study.seed_list}
    counts = " × ".join(f"{len(some)} {name}{'s' * (len(some) > 1)}" for name, some in every.items())
    colors = colors_of(study)
    values = {
        (row["variant"], row["algorithm"], row["seed"]):
            {"round": f"{row['round']:.0f}", **{name: number(row[name], name) for name in study.metrics}}
        for row in record.results.to_dict("records")
    }  # fmt: skip
    return Page(
        title=f"{study.name}{f', {study.part}' if study.part else ''}",
        subtitle=f"{counts}; {len(runs)} of {len(record.states)} runs have finished. Where nothing else is "
        f"said, numbers are those of the {reported_round(study)}.",
        verdict=_study_verdict(record),
        notices=list(_study_notices(record)),
        sections={
            "Results": [Table(f"{text}.", rows) for text, rows in tables(record)] if runs else [],
            "Curves": list(_study_curves(record, colors)),
            "Every client": list(_study_clients(record, colors)),
            "Settings, and where they come from": list(_study_settings(study, runs)),
            **sections.of_all_runs(runs, colors, record.command, values, study.folder),
        },
    )


def _study_verdict(record: StudyRecord) -> list[str]:
    """Return what came out, the most important first."""
    if not record.runs:
        return ["No run has finished yet, so there is nothing to say about the algorithms."]
    study = record.study
    claims = [
        sentence
        for name, paper in study.papers.items()
        for sentence in claim_sentences(paper.title, list(judge(paper, study, record.readings[name])))
    ]
    return [*claims, *finding_sentences(study, record.differences)]


def _study_notices(record: StudyRecord) -> Iterator[str]:
    study = record.study
    if study.scale != 1:
        yield f"The study is scaled: it runs {study.scale:g} of the rounds and seeds that it is written with."
    if study.is_untuned:
        yield "Nothing is tuned: every range of values has been replaced by one fixed value."
    if study.report == "best_on_test" or study.papers:
        yield "A best round on test data is chosen on the test data themselves, which flatters every method."
    yield from (f"The runs cannot be compared: {problem}." for problem in record.problems)
    yield from (f"{state.run.title} has failed: {state.error}" for state in record.states if state.status == "failed")
    waiting = [state for state in record.states if state.is_open]
    if waiting:
        titles = [f"{state.run.title} (round {state.round} of {state.max_rounds})" if state.max_rounds
                  else f"{state.run.title} (not begun)" for state in waiting]  # fmt: skip
        yield (
            f"{len(waiting)} of {len(record.states)} runs are unfinished, and are left out of tables and figures: "
            f"{shorten(titles, 5)}."
        )
    yield from _missing("Some runs have", record.runs.values())


def _missing(who: str, runs: Iterable[RunRecord]) -> Iterator[str]:
    missing = {name for run in runs for name in run.missing}
    if missing:
        yield f"{who} no {', '.join(sorted(missing))} in the run folder; what that holds is left out."


def _study_curves(record: StudyRecord, colors: dict[str, str]) -> Iterator[Block]:
    frames = {} if record.curves.empty else sections.by_variant(record.curves)
    for metric in record.study.metrics:
        for axis, against in AGAINST.items():
            if axis in record.curves:
                text = (
                    f"A line is the mean of {metric} over the seeds against {against}{sections.BAND} The vertical axis "
                    "is that of the rounds after the first tenth."
                )
                fold = f"{metric} against {against}" if axis == "bytes" else ""
                yield from sections.lines(text, frames, axis, metric, colors, fold=fold)


def _study_clients(record: StudyRecord, colors: dict[str, str]) -> Iterator[Block]:
    study, finished_runs = record.study, finished(record.states)
    for place, variant in enumerate(page_figures.spread(study.variants, sections.MAX_VARIANTS)):
        runs = {method.name: found[0] for method in study.methods if (found := record.runs_of(variant, method.name))}
        metric = next((name for name in study.metrics if any(name in run.evaluation for run in runs.values())), None)
        if metric is not None:
            text = f" A line is the first seed of an algorithm.{sections.left_out(len(study.variants), 'variants')}"
            fold = f"{metric} by client, {variant}" * (place > 0)
            yield from sections.client_blocks(runs, dict.fromkeys(runs, metric), metric, colors, text, fold=fold)
            yield _client_table(study, variant, [run for run in finished_runs if run.variant == variant], metric, fold)


def _client_table(study: Study, variant: str, runs: Sequence[Run], metric: str, fold: str) -> Table:
    """Return a row per client with its numbers, in a column per algorithm and model."""
    what, first = measured(metric) or Measured(metric), runs[0].record
    # Client 3 of another seed may hold other data; clients with names are the same in all seeds.
    is_named, names = bool(first.partition.get("client_names")), study.method_names
    seeds = list(dict.fromkeys(run.seed for run in runs))[: None if is_named else 1]
    models: dict[str, list[pd.Series]] = {}
    for run in sorted(runs, key=lambda run: names.index(run.method)):
        if run.seed not in seeds or run.record.evaluation.empty:
            continue
        rows = run.record.evaluation.merge(rows_of_run(study, run)[["round"]])
        for place, words in OF_CLIENTS.items():
            if (name := what._replace(place=place).name) in rows:
                models.setdefault(f"{run.method}, {words}", []).append(rows.groupby("client")[name].mean())
    cells: Cells = {}
    for model, of_seeds in models.items():
        of_clients = pd.concat(of_seeds, axis=1).T.agg(["mean", "std", "count"])
        for client in sections.spread(first.num_samples.index, sections.MAX_CLIENTS):
            if client in of_clients:
                mean, std, count = of_clients[client]
                text = mean_and_deviation({"mean": mean, "std": std, "num_seeds": int(count)}, metric, len(seeds))
                cells.setdefault(first.client_name(client), {})[model] = text
    unit = f"{' in %' * is_share(metric)} on each client's {'validation ' * (what.split == 'val')}data"
    where = f", {variant}" * (len(study.variants) > 1)
    left_out = sections.left_out(len(first.num_samples), "clients", sections.MAX_CLIENTS)
    caption = f"The table shows {what.metric}{unit}{where}, {reported_round(study)}; {over_seeds(seeds)}.{left_out}"
    return Table(caption, layout({"": {model: model for model in models}}, cells), fold=fold)


def _study_settings(study: Study, runs: sections.Records) -> Iterator[Block]:
    """Yield the settings with their origin, and what the study sets as its config gives it."""
    if study.origins:
        text = "The table lists the settings of this experiment, and says who chose each of them."
        yield Table(text, origin_rows(study, runs), is_text=True)
    yield (
        "The study sets the following. All other settings are those of the base config or defaults; the complete "
        "configs stand under “Repeat it”."
    )
    algorithms = {method.name: study.algorithms[method.name] for method in study.methods}
    given = {"base": study.base, "algorithms": algorithms, "overrides": study.overrides,
             "variants": study.variants, "seeds": study.seed_list}  # fmt: skip
    yield Code(yaml.safe_dump(given, sort_keys=False, allow_unicode=True))


# a run


def run_page(folder: Path) -> Page:
    """Return the page of the run in a folder.

    Raises:
        ConfigurationError: A file of the run cannot be read.
    """
    run = RunRecord(folder)
    algorithm = method_of(folder.resolve()) or "the run"
    runs = {("", algorithm, int(run.config.get("seed_everything") or 0)): run}
    colors = {algorithm: COLORS[0]}
    command = f"{PROG} fit --config {folder / 'config.yaml'}" if run.config else None
    return Page(
        title=f"{folder.resolve().parent.name}: {algorithm}",
        subtitle=f"A run of {run.num_rounds} rounds on {len(run.num_samples)} clients, in {folder}.",
        verdict=_run_verdict(run, algorithm),
        notices=list(_run_notices(run)),
        sections={
            "Results": list(_run_numbers(run)),
            "Curves": list(_run_curves(run)),
            "Every client": list(_run_clients(run)),
            **sections.of_all_runs(runs, colors, command, {}, folder),
        },
    )


def _columns(table: pd.DataFrame, places: Mapping[str, str] = SHOWN) -> dict[str, dict[str, str]]:
    """Group the columns of a table by what they measure, accuracies and test data first; columns are by their model."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(table, key=lambda name: (not is_share(name), is_of_validation(name))):
        what = measured(name)
        if what and what.place in places and table[name].notna().any():
            found.setdefault(f"{what.split} {what.metric}".replace("_", " "), {})[places[what.place]] = name
    return found


def _run_verdict(run: RunRecord, algorithm: str) -> list[str]:
    """Return what the run reached, in sentences."""
    rows = evaluated(run.metrics)
    for what, columns in _columns(rows).items():
        last, unit = rows.iloc[-1], " %" if is_share(what) else ""
        reached = [f"{text} {number(last[name], name)}{unit}" for text, name in columns.items()]
        return [f"After round {int(last['round'])}, {algorithm} reaches this {what}: {', '.join(reached)}."]
    return ["No round has been evaluated yet."]


def _run_notices(run: RunRecord) -> Iterator[str]:
    if run.max_rounds is not None and run.num_rounds < run.max_rounds:
        yield (
            f"The run is unfinished: it has {run.num_rounds} of {run.max_rounds} rounds. It was stopped, or it is "
            "still running."
        )
    # As written: for pandas an empty cell (not evaluated) and nan (diverged) are the same.
    yield from remarks(read_rows(run.folder / "metrics.csv"))
    yield from _missing("The run has", [run])


def _run_numbers(run: RunRecord) -> Iterator[Block]:
    table = [["metric", "unit", "last round", "mean of last tenth", "best round", "round of the best"]]
    for name in [name for columns in _columns(evaluated(run.metrics)).values() for name in columns.values()]:
        is_low = is_lower_better(name)
        found = [reported_rows(run.metrics, report, name, is_lower_better=is_low) for report in OF_PAPERS]
        values = [number(rows[name].mean(skipna=False), name) for rows in found]
        table.append([name, "%" if is_share(name) else "", *values, f"{found[-1]['round'].iloc[-1]:.0f}"])
    if table[1:]:
        yield Table(
            "The table shows how good the models are at the last evaluated round, as the mean over the evaluated "
            "rounds of the last tenth, and at the round that is best by the same metric. A best round by test data "
            "flatters every method. The other metrics of the rounds are in metrics.csv.",
            table,
        )


def _run_curves(run: RunRecord) -> Iterator[Block]:
    figures = {what: ("The curves show the models on the clients' data after each evaluated round.", columns)
               for what, columns in _columns(run.metrics).items()}  # fmt: skip
    if TRAIN_LOSS in run.metrics:
        text = "The training loss is the mean over the clients of a round."
        figures["training loss"] = text, {SAMPLED: TRAIN_LOSS}
    for what, (text, columns) in figures.items():
        rows = run.metrics[["round", *columns.values()]].set_axis(["rounds", *columns], axis="columns")
        rows = rows.melt("rounds", var_name="algorithm", value_name=what)
        yield from sections.lines(text, {"": rows}, "rounds", what, LEGEND)


def _run_clients(run: RunRecord) -> Iterator[Block]:
    for what, columns in list(_columns(run.evaluation, OF_CLIENTS).items())[:1]:
        yield from sections.client_blocks(dict.fromkeys(columns, run), columns, what, LEGEND)
