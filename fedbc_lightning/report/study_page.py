"""Makes the page of a study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib.colors import to_hex

from fedbc_lightning.cli.overview import version
from fedbc_lightning.core.units import duration, megabytes
from fedbc_lightning.report import client_figures, figures
from fedbc_lightning.report.content import Block, Code, Gallery, Page, Section, Table, Text
from fedbc_lightning.report.study_tables import cost_rows, hash_rows, paper_blocks, result_blocks, settings_blocks
from fedbc_lightning.report.study_verdict import verdict_blocks, verdict_sentences
from fedbc_lightning.report.svg import drawing
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.figures import colors_of
from fedbc_lightning.studies.reported_round import criterion
from fedbc_lightning.studies.study_record import StudyRecord, read_record
from fedbc_lightning.studies.tables import REPORTED

MAX_VARIANTS = 5
"""Largest number of variants, and of partitions, whose clients are drawn."""
BAND = ", and the band is one standard deviation."
AGAINST = {"rounds": "the round", "bytes": "the megabytes sent and received", "simulated_seconds": "simulated seconds"}
"""What the curves are drawn against."""
EFFECTIVE = "dual/effective_number"
T = TypeVar("T")


def study_page(folder: Path) -> Page:
    """Return the page of the study whose ``study.json`` lies in a folder.

    Raises:
        ConfigurationError: A file of the study cannot be read.
    """
    files = read_record(folder)
    sections = [
        Section("overview", "Overview", verdict_blocks(files)),
        Section("paper", "Beside the paper's numbers", list(paper_blocks(files))),
        Section("results", "Results", list(result_blocks(files))),
        Section("curves", "Curves", list(_curves(files))),
        Section("duals", "λ and γ by client", list(_state(files))),
        Section("clients", "Every client", list(_clients(files))),
        Section("partition", "Who holds which data", list(_partitions(files))),
        Section("settings", "Settings, and where they come from", list(settings_blocks(files))),
        Section("cost", "Cost", [_cost(files)]),
        Section("repeat", "Repeat it", list(_repeat(files))),
    ]
    study = files.study
    every = {"algorithm": study.methods, "variant": study.variants, "seed": study.seed_list}
    counts = " × ".join(f"{len(some)} {name}{'s' * (len(some) > 1)}" for name, some in every.items())
    finished = len(files.runs)
    reported = REPORTED[study.report].format(metric=criterion(study.report, study.metrics[0]))
    return Page(
        title=f"{study.name}{f', {study.part}' if study.part else ''}",
        subtitle=f"{counts}; {finished} of {len(files.states)} runs have finished. Where nothing else is said, numbers "
        f"are those of the {reported}.",
        verdict=verdict_sentences(files),
        notices=list(_notices(files)),
        sections=[section for section in sections if section.blocks],
        footer=f"This page was made by {version()} from the files of the study; it needs no other file.",
    )


def _notices(files: StudyRecord) -> Iterator[str]:
    study = files.study
    if study.scale != 1:
        yield f"The study is scaled: it runs {study.scale:g} of the rounds and seeds that it is written with."
    if study.is_untuned:
        yield "Nothing is tuned: every range of values has been replaced by one fixed value."
    if study.report == "best_on_test" or study.papers:
        yield "A best round on test data is chosen on the test data themselves, which flatters every method."
    yield from (f"The runs cannot be compared: {problem}." for problem in files.outcome.problems)
    for state in files.states:
        if state.status == "failed":
            yield f"{state.run.title} has failed: {state.error}"
    waiting = [state for state in files.states if state.status in ("unfinished", "not begun")]
    if waiting:
        titles = [f"{state.run.title} ({_progress(state.round, state.max_rounds, state.status)})" for state in waiting]
        more = f", and {len(titles) - 5} more" if len(titles) > 5 else ""
        yield (
            f"{len(waiting)} of {len(files.states)} runs are unfinished, and are left out of tables and figures: "
            f"{'; '.join(titles[:5])}{more}."
        )
    missing = {name for run in files.runs.values() for name in run.missing}
    if missing:
        yield f"Some runs have no {', '.join(sorted(missing))} in their folder; what it holds is left out."


def _progress(round: int, max_rounds: int | None, status: str) -> str:
    return status if status == "not begun" else f"round {round}{f' of {max_rounds}' if max_rounds else ''}"


def colors(files: StudyRecord) -> dict[str, str]:
    """Map each algorithm that is shown to its colour."""
    with drawing():
        every = colors_of(files.study)
        return {method.name: to_hex(every[method.name]) for method in files.study.methods}


def _curves(files: StudyRecord) -> Iterator[Block]:
    study, found = files.study, files.curves
    if found.empty:
        return
    frames = {_title(files, variant): found[found["variant"] == variant] for variant in study.variants}
    frames = {title: rows for title, rows in frames.items() if not rows.empty}
    colored = colors(files)
    for place, metric in enumerate(study.metrics):
        for axis in ("rounds", "bytes", "simulated_seconds"):
            if axis not in found:
                continue
            pictures = figures.curves(f"c{place}{axis}", frames, axis, metric, colored)
            against = AGAINST[axis]
            text = (
                f"A line is the mean of {metric} over the seeds against {against}{BAND} The vertical axis is that of "
                "the rounds after the first tenth."
            )
            yield Gallery(text, pictures, colored, is_folded=axis == "bytes", title=f"{metric} against {against}")


def _title(files: StudyRecord, variant: str) -> str:
    """Return the title of a variant's figures: none if there is only one, without a name."""
    return "" if variant == "all" and len(files.study.variants) == 1 else variant


def _state(files: StudyRecord) -> Iterator[Block]:
    study, maps = files.study, client_figures.StateMaps()
    drawn = [(variant, method) for variant in spread(study.variants) for method in study.methods]
    for column in client_figures.STATE:
        for number, (variant, method) in enumerate(drawn):
            runs = {f"seed {seed}": run for (*of, seed), run in files.runs.items() if of == [variant, method.name]}
            title = ", ".join(filter(None, [method.name, _title(files, variant)]))
            client_figures.add_state_maps(maps, f"s{number}_", title, runs, column)
    text = f"{client_figures.HOW_TO_READ_MAPS}{_left_out(len(study.variants), 'variants')}"
    if maps.means:
        over = " A colour is the mean over the seeds, which share their clients." if maps.seeds else ""
        yield Gallery(f"{text}{over}", maps.means)
    if maps.seeds:
        most = client_figures.MAX_SEEDS
        which = f" The first {most} finished seeds are drawn." if len(study.seed_list) > most else ""
        same = f"The maps of one state in one variant have the same colours, seed by seed.{which}"
        yield Gallery(
            same if maps.means else f"{text} {same}",
            maps.seeds,
            is_folded=bool(maps.means),
            title="λ and γ by client, seed by seed",
        )
    if maps.sentences:
        yield Text(maps.sentences)
    yield from _effective(files)


def _effective(files: StudyRecord) -> Iterator[Block]:
    """Yield curves of the effective number of clients, of the algorithms that have weights λ."""
    rows = [
        run.metrics[["round", EFFECTIVE]].assign(variant=variant, algorithm=algorithm, seed=seed)
        for (variant, algorithm, seed), run in files.runs.items()
        if EFFECTIVE in run.metrics
    ]
    if not rows:
        return
    found = pd.concat(rows).rename(columns={"round": "rounds"}).dropna(subset=[EFFECTIVE])
    frames = {_title(files, variant): part for variant, part in found.groupby("variant", sort=False)}
    present = {name: color for name, color in colors(files).items() if name in set(found["algorithm"])}
    text = f"{client_figures.EFFECTIVE_NUMBER} A line is the mean over the seeds{BAND}"
    yield Gallery(text, figures.curves("n", frames, "rounds", EFFECTIVE, present), present)


def spread(items: Iterable[T]) -> list[T]:
    """Return the items that are drawn: all, or some from the first to the last at even distances."""
    every = list(items)
    if len(every) <= MAX_VARIANTS:
        return every
    return [every[round(place * (len(every) - 1) / (MAX_VARIANTS - 1))] for place in range(MAX_VARIANTS)]


def _left_out(count: int, what: str) -> str:
    """Return a sentence that says how many are drawn of more than can be."""
    return f" Of the {count} {what} {MAX_VARIANTS} are drawn, from the first to the last." * (count > MAX_VARIANTS)


def _clients(files: StudyRecord) -> Iterator[Block]:
    study = files.study
    for number, variant in enumerate(spread(study.variants)):
        runs = {method.name: files.runs_of(variant, method.name) for method in study.methods}
        runs = {name: found for name, found in runs.items() if found}
        every = [run for found in runs.values() for run in found]
        metric = next((name for name in study.metrics if any(name in run.evaluation for run in every)), None)
        if metric is None:
            continue
        is_shared = client_figures.share_clients(every)
        if not is_shared:
            runs = {name: found[:1] for name, found in runs.items()}
        frames = client_figures.accuracy_frames(runs, {metric: metric})
        if not frames:
            continue
        colored = {name: color for name, color in colors(files).items() if name in runs}
        over = "the mean over the seeds, which share their clients," if is_shared else "the first seed"
        text = (
            f"Each figure shows {figures.unit(metric)}, on the data of one client, by round, on the same axes; a line "
            f"is {over} of an algorithm. {client_figures.which_clients(every[0])}"
            f"{_left_out(len(study.variants), 'variants')}"
        )
        title = f"{metric} by client{f', {variant}' if _title(files, variant) else ''}"
        pictures = figures.small_multiples(f"m{number}_", frames, metric, colored)
        yield Gallery(text, pictures, colored, "small", is_folded=number > 0, title=title)


def _partitions(files: StudyRecord) -> Iterator[Block]:
    found: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for (variant, _, seed), run in files.runs.items():
        if run.partition.get("sizes"):
            who, _ = found.setdefault(run.partition.get("hash", ""), ([], run.partition))
            who.append(f"{variant}, seed {seed}")
    pictures = []
    for place, (key, (who, content)) in enumerate(spread(found.items())):
        users = list(dict.fromkeys(who))
        of_all = len(users) == len(files.study.variants) * len(files.study.seed_list)
        title = "all variants and seeds" if of_all else "; ".join(users[:4]) + ("; ..." if len(users) > 4 else "")
        pictures.append(figures.partition(f"p{place}", f"{title} (hash {key[:12]})", content))
    if pictures:
        text = "The left part shows the samples of each class at each client, and the right part those of all classes."
        yield Gallery(f"{text}{_left_out(len(found), 'partitions')}", pictures, size="large")


def _cost(files: StudyRecord) -> Table:
    results = files.outcome.results
    done = results[results["status"] == "finished"]
    seconds, sent = float(done["seconds"].sum()), float(done[["bytes_up", "bytes_down"]].sum().sum())
    text = (
        "The table shows the cost of a run: means over its finished seeds. Seconds are those of the clock, in which "
        f"other runs may have used the machine as well. All finished runs together took {duration(seconds)} and "
        f"{megabytes(sent)} MB."
    )
    return Table(text, cost_rows(files))


def _repeat(files: StudyRecord) -> Iterator[Block]:
    if files.command is not None:
        yield Code("This command runs the same again; on this folder it repeats no finished run.", files.command)
    text = (
        "The table lists the finished runs. Hashes are those of config.yaml, of the split of the data, and of the "
        "package's code; equal hashes mean equal content. Folders are relative to that of the study."
    )
    yield Table(text, hash_rows(files), is_folded=True, title=f"All {len(files.states)} runs, with their hashes")
    shown: dict[str, RunRecord] = {}
    for (_, algorithm, _), run in files.runs.items():
        shown.setdefault(algorithm, run)
    for algorithm, run in shown.items():
        if run.config_text:
            yield Code(f"config.yaml of the first run of {algorithm}", run.config_text, is_folded=True)
