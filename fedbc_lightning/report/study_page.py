"""Makes the page of a study."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.colors import to_hex

from fedbc_lightning.cli.overview import version
from fedbc_lightning.core.units import duration, megabytes
from fedbc_lightning.report import blocks, page_figures
from fedbc_lightning.report.page import Block, Code, Gallery, Page, Table
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.conclusions import claim_sentences, finding_sentences
from fedbc_lightning.studies.drawing import colors_of
from fedbc_lightning.studies.numbers import Rows, number
from fedbc_lightning.studies.origins import origin_rows
from fedbc_lightning.studies.paper_rows import judge
from fedbc_lightning.studies.result_tables import REPORTED, tables
from fedbc_lightning.studies.statistics import criterion
from fedbc_lightning.studies.study_record import StudyRecord, read_record
from fedbc_lightning.studies.study_run import as_word

BAND = ", and the band is one standard deviation."
# What the curves are drawn against.
AGAINST = {"rounds": "the round", "bytes": "the megabytes sent and received", "simulated_seconds": "simulated seconds"}


def study_page(folder: Path) -> Page:
    """Return the page of the study whose ``study.json`` lies in a folder.

    Raises:
        ConfigurationError: A file of the study cannot be read.
    """
    record = read_record(folder)
    study = record.study
    every = {"algorithm": study.methods, "variant": study.variants, "seed": study.seed_list}
    counts = " × ".join(f"{len(some)} {name}{'s' * (len(some) > 1)}" for name, some in every.items())
    found = tables(study, record.outcome, record.curves) if record.runs else ()
    reported = REPORTED[study.report].format(metric=criterion(study.report, study.metrics[0]))
    return Page(
        title=f"{study.name}{f', {study.part}' if study.part else ''}",
        subtitle=f"{counts}; {len(record.runs)} of {len(record.states)} runs have finished. Where nothing else is "
        f"said, numbers are those of the {reported}.",
        verdict=_verdict(record),
        notices=list(_notices(record)),
        sections={
            "Results": [Table(f"{text}.", rows) for text, rows in found],
            "Curves": list(_curves(record)),
            "λ and γ by client": [*blocks.state_blocks(record.runs), *_effective(record)],
            "Every client": list(_clients(record)),
            "Who holds which data": list(blocks.partition_blocks(record.runs)),
            "Settings, and where they come from": list(_settings(record)),
            "Cost": [_cost(record)],
            "Repeat it": list(_repeat(record)),
        },
        footer=f"This page was made by {version()} from the files of the study; it needs no other file.",
    )


def _verdict(record: StudyRecord) -> list[str]:
    """Return what came out, the most important first."""
    if not record.runs:
        return ["No run has finished yet, so there is nothing to say about the algorithms."]
    study, outcome = record.study, record.outcome
    claims = [
        sentence
        for name, paper in study.papers.items()
        for sentence in claim_sentences(paper.title, judge(paper, study, outcome.readings[name]))
    ]
    return [*claims, *finding_sentences(study, outcome.differences)]


def _notices(record: StudyRecord) -> Iterator[str]:
    study = record.study
    if study.scale != 1:
        yield f"The study is scaled: it runs {study.scale:g} of the rounds and seeds that it is written with."
    if study.is_untuned:
        yield "Nothing is tuned: every range of values has been replaced by one fixed value."
    if study.report == "best_on_test" or study.papers:
        yield "A best round on test data is chosen on the test data themselves, which flatters every method."
    yield from (f"The runs cannot be compared: {problem}." for problem in record.outcome.problems)
    for state in record.states:
        if state.status == "failed":
            yield f"{state.run.title} has failed: {state.error}"
    waiting = [state for state in record.states if state.is_open]
    if waiting:
        titles = [f"{state.run.title} (round {state.round} of {state.max_rounds})" if state.max_rounds
                  else f"{state.run.title} (not begun)" for state in waiting]  # fmt: skip
        more = f", and {len(titles) - 5} more" if len(titles) > 5 else ""
        yield (
            f"{len(waiting)} of {len(record.states)} runs are unfinished, and are left out of tables and figures: "
            f"{'; '.join(titles[:5])}{more}."
        )
    missing = {name for run in record.runs.values() for name in run.missing}
    if missing:
        yield f"Some runs have no {', '.join(sorted(missing))} in their folder; what it holds is left out."


def _colors(record: StudyRecord) -> dict[str, str]:
    """Map each algorithm that is shown to its colour."""
    with mpl.rc_context(page_figures.STYLE):
        every = colors_of(record.study)
        return {method.name: to_hex(every[method.name]) for method in record.study.methods}


def _frames(record: StudyRecord, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return rows by variant; a single variant needs no name."""
    is_single = len(record.study.variants) == 1
    return {"" if is_single else str(variant): part for variant, part in rows.groupby("variant", sort=False)}


def _curves(record: StudyRecord) -> Iterator[Block]:
    if record.curves.empty:
        return
    frames, colors = _frames(record, record.curves), _colors(record)
    for metric in record.study.metrics:
        for axis, against in AGAINST.items():
            if axis in record.curves:
                text = (
                    f"A line is the mean of {metric} over the seeds against {against}{BAND} The vertical axis is that "
                    "of the rounds after the first tenth."
                )
                pictures = page_figures.curves(frames, axis, metric, colors)
                yield Gallery(text, pictures, colors, is_folded=axis == "bytes", title=f"{metric} against {against}")


def _effective(record: StudyRecord) -> Iterator[Block]:
    """Yield curves of the effective number of clients, of the algorithms that have weights λ."""
    rows = [
        run.metrics[["round", blocks.EFFECTIVE]].assign(variant=variant, algorithm=algorithm, seed=seed)
        for (variant, algorithm, seed), run in record.runs.items()
        if blocks.EFFECTIVE in run.metrics
    ]
    if rows:
        found = pd.concat(rows).rename(columns={"round": "rounds"}).dropna(subset=[blocks.EFFECTIVE])
        colors = {name: color for name, color in _colors(record).items() if name in set(found["algorithm"])}
        pictures = page_figures.curves(_frames(record, found), "rounds", blocks.EFFECTIVE, colors)
        yield Gallery(f"{blocks.EFFECTIVE_NUMBER} A line is the mean over the seeds{BAND}", pictures, colors)


def _clients(record: StudyRecord) -> Iterator[Block]:
    study = record.study
    for number_, variant in enumerate(blocks.spread(study.variants)):
        runs = {method.name: found for method in study.methods if (found := record.runs_of(variant, method.name))}
        every = [run for found in runs.values() for run in found]
        metric = next((name for name in study.metrics if any(name in run.evaluation for run in every)), None)
        if metric is None:
            continue
        is_shared = blocks.share_clients(every)
        runs = runs if is_shared else {name: found[:1] for name, found in runs.items()}
        colors = {name: color for name, color in _colors(record).items() if name in runs}
        pictures = blocks.client_pictures(runs, dict.fromkeys(runs, metric), metric, colors)
        over = "the mean over the seeds, which share their clients," if is_shared else "the first seed"
        text = (
            f"Each figure shows {page_figures.unit(metric)}, on the data of one client, by round, on the same axes; a "
            f"line is {over} of an algorithm. {blocks.which_clients(every[0])}"
            f"{blocks.left_out(len(study.variants), 'variants')}"
        )
        title = f"{metric} by client{f', {variant}' if len(study.variants) > 1 else ''}"
        if pictures:
            yield Gallery(text, pictures, colors, "small", is_folded=number_ > 0, title=title)


def _settings(record: StudyRecord) -> Iterator[Block]:
    """Yield the settings with their origin, and the settings as the study gives them."""
    study = record.study
    if study.origins:
        text = "The table lists the settings of this experiment, and says who chose each of them."
        yield Table(text, origin_rows(study, record.runs), is_text=True)
    text = (
        "The table lists what the study sets. All other settings are those of the base config or defaults; the "
        "complete configs stand under “Repeat it”."
    )
    title = "All settings that the study gives"
    yield Table(text, _given_rows(record), is_folded=bool(study.origins), title=title, is_text=True)


def _given_rows(record: StudyRecord) -> Rows:
    study = record.study
    given = {"all": {"base config": ", ".join(study.configs), "seeds": study.seed_list, **study.overrides}}
    given |= {variant: overrides or {} for variant, overrides in study.variants.items() if overrides}
    for method in study.methods:
        tuned = {key: values.text for key, values in method.tuned.items()}
        given[method.name] = {"algorithm": method.algorithm, **method.settings, **tuned}
    rows = [[who, key, as_word(value)] for who, settings in given.items() for key, value in settings.items()]
    return [["runs", "setting", "value"], *rows]


def _cost(record: StudyRecord) -> Table:
    """Return the mean cost of a run of each algorithm in each variant."""
    rows: Rows = [["algorithm", "variant", "runs", "rounds", "seconds", "MB sent by clients", "MB sent to clients",
                   "local steps"]]  # fmt: skip
    results = record.outcome.results
    done = results[results["status"] == "finished"]
    for (variant, algorithm), runs in done.groupby(["variant", "algorithm"], sort=False):
        steps = pd.Series([run.num_steps for run in record.runs_of(str(variant), str(algorithm))]).mean()
        means = runs[["rounds", "seconds", "bytes_up", "bytes_down"]].mean()
        sent = [megabytes(means[name]) for name in ("bytes_up", "bytes_down")]
        counts = f"{means['rounds']:,.0f}", f"{means['seconds']:,.1f}"
        rows.append([str(algorithm), str(variant), str(len(runs)), *counts, *sent, f"{steps:,.0f}"])
    seconds, total = float(done["seconds"].sum()), float(done[["bytes_up", "bytes_down"]].sum().sum())
    text = (
        "The table shows the cost of a run: means over its finished seeds. Seconds are those of the clock, in which "
        f"other runs may have used the machine as well. All finished runs together took {duration(seconds)} and "
        f"{megabytes(total)} MB."
    )
    return Table(text, rows)


def _repeat(record: StudyRecord) -> Iterator[Block]:
    if record.command is not None:
        yield Code("This command runs the same again; on this folder it repeats no finished run.", record.command)
    study = record.study
    rows: Rows = [["algorithm", "variant", "seed", "round", *study.metrics, "config", "partition", "code", "folder"]]
    results = record.outcome.results
    for row in results[results["status"] == "finished"].to_dict("records"):
        run = record.runs[row["variant"], row["algorithm"], row["seed"]]
        values = [number(row[name], name) for name in study.metrics]
        first = [row["algorithm"], row["variant"], str(row["seed"]), f"{row['round']:.0f}"]
        rows.append([*first, *values, *run.hashes.values(), run.folder.relative_to(study.folder).as_posix()])
    text = (
        "The table lists the finished runs. Hashes are those of config.yaml, of the split of the data, and of the "
        "package's code; equal hashes mean equal content. Folders are relative to that of the study."
    )
    yield Table(text, rows, is_folded=True, title=f"All {len(record.states)} runs, with their hashes")
    shown: dict[str, RunRecord] = {}
    for (_, algorithm, _), run in record.runs.items():
        shown.setdefault(algorithm, run)
    for algorithm, run in shown.items():
        if run.config_text:
            yield Code(f"config.yaml of the first run of {algorithm}", run.config_text, is_folded=True)
