"""The tables of a study's page, made by the functions that make those of ``fedbc-cli compare``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pandas as pd

from fedbc_lightning.core.units import megabytes
from fedbc_lightning.report.content import Block, Table
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.numbers import Rows, is_share, number
from fedbc_lightning.studies.origins import origin_rows
from fedbc_lightning.studies.paper_rows import claim_rows, fit_rows, number_rows, unlike
from fedbc_lightning.studies.study_record import StudyRecord
from fedbc_lightning.studies.study_run import as_word, flat
from fedbc_lightning.studies.tables import result_tables
from fedbc_lightning.studies.targets import target_tables

PUBLIC = " Where the authors' public code was run as it is published, what it gave has a row of its own."


def paper_blocks(files: StudyRecord) -> Iterator[Block]:
    """Yield for each paper our numbers beside the paper's, which reading fits, and the verdicts on its claims."""
    study, outcome = files.study, files.outcome
    for name, paper in study.papers.items() if files.runs else ():
        unit = " in %" if is_share(paper.metric) else ""
        claims = claim_rows(paper, study, outcome.readings[name])
        apart = "".join(f" {sentence}" for sentence in unlike(paper, study))
        if len(claims) > 1:
            yield Table(
                f"The table says which claims of {paper.title} hold here, by {paper.metric}. A claim holds where the "
                f"{100 * study.confidence:g} % interval of the paired difference (in brackets) lies on the claimed "
                "side of 0, it fails where the interval lies on the other side, and it is open otherwise. The "
                f"difference between the paper's own means stands in parentheses.{apart}",
                claims,
            )
        numbers = number_rows(paper, study, outcome.readings[name])
        if paper.values and len(numbers) > 1:
            yield Table(
                f"The table shows our {paper.metric}{unit}, as mean ± standard deviation over the seeds, beside the "
                f"numbers that {paper.title} prints. Papers rarely say which round they report, so ours are read at "
                f"several.{PUBLIC * bool(paper.public)}{apart}",
                numbers,
            )
            fits = fit_rows(paper, study, outcome.readings[name])
            if len(fits) > 1:
                yield Table(f"The table says which of our readings lies nearest to the numbers of {paper.title}.", fits)


def result_blocks(files: StudyRecord) -> Iterator[Block]:
    """Yield for each metric the means and the paired differences to the reference, in one table or in two."""
    study, outcome = files.study, files.outcome
    for metric in study.metrics if files.runs else ():
        unit = " in %" if is_share(metric) else ""
        better = "; lower is better" if study.is_lower_better(metric) else ""
        many = len(study.seed_list) > 1
        over = f"mean ± standard deviation over {len(study.seed_list)} seeds" if many else f"seed {study.seed_list[0]}"
        means = f"{metric}{unit} ({over}{better})"
        points = " in percentage points" if is_share(metric) else ""
        interval = f", as the mean over the seeds, with the {100 * study.confidence:g} % interval (Student's t) of it"
        difference = f"to {study.reference_name} of the same seed{interval if many else ''}"
        tables = result_tables(study, outcome.summary, outcome.differences, metric)
        if len(study.methods) > 1 and len(tables) == 1:
            text = f"The table shows {means}, and the difference{points} {difference}; the best mean is bold."
            yield Table(text, tables[0])
            continue
        yield Table(f"The table shows {means}; the best mean of a variant is bold.", tables[0])
        if len(tables) > 1:
            yield Table(f"The table shows the difference in {metric}{points} {difference}.", tables[1])
    if study.targets and files.runs:
        for caption, rows in target_tables(study, files.curves):
            yield Table(f"The table shows the {caption}.", rows)


def settings_blocks(files: StudyRecord) -> Iterator[Block]:
    """Yield the settings with their origin, and the settings as the study gives them."""
    study = files.study
    if study.origins:
        text = "The table lists the settings of this experiment, and says who chose each of them."
        yield Table(text, origin_rows(study, partial(_settings_of, files)), is_text=True)
    text = (
        "The table lists what the study sets. All other settings are those of the base config or defaults; the "
        "complete configs stand under “Repeat it”."
    )
    title = "All settings that the study gives"
    yield Table(text, _given_rows(files), is_folded=bool(study.origins), title=title, is_text=True)


def _settings_of(files: StudyRecord, method: Method) -> dict[str, dict[str, str]]:
    """Return the settings of an algorithm in each variant of which a run has finished."""
    runs = {variant: run for (variant, name, _), run in files.runs.items() if name == method.name}
    return {variant: dict(flat(run.config)) for variant, run in runs.items()}


def _given_rows(files: StudyRecord) -> Rows:
    study = files.study
    rows: Rows = [["runs", "setting", "value"], ["all", "base config", ", ".join(study.configs)]]
    rows.append(["all", "seeds", ", ".join(map(str, study.seed_list))])
    rows += [["all", key, as_word(value)] for key, value in study.overrides.items()]
    for variant, overrides in study.variants.items():
        rows += [[variant, key, as_word(value)] for key, value in (overrides or {}).items()]
    for method in study.methods:
        rows.append([method.name, "algorithm", method.algorithm])
        rows += [[method.name, key, as_word(value)] for key, value in method.settings.items()]
        rows += [[method.name, key, f"tuned over {as_word(list(values.grid or (values.low, values.high)))}"]
                 for key, values in method.tuned.items()]  # fmt: skip
    return rows


def cost_rows(files: StudyRecord) -> Rows:
    """Return a header, then the mean cost of a run of each algorithm in each variant."""
    rows: Rows = [["algorithm", "variant", "runs", "rounds", "seconds", "MB sent by clients", "MB sent to clients",
                   "local steps"]]  # fmt: skip
    results = files.outcome.results
    done = results[results["status"] == "finished"]
    for (variant, algorithm), runs in done.groupby(["variant", "algorithm"], sort=False):
        steps = pd.Series([run.num_steps for run in files.runs_of(str(variant), str(algorithm))]).mean()
        means = runs[["rounds", "seconds", "bytes_up", "bytes_down"]].mean()
        sent = [megabytes(means[name]) for name in ("bytes_up", "bytes_down")]
        rounds, seconds = f"{means['rounds']:,.0f}", f"{means['seconds']:,.1f}"
        rows.append([str(algorithm), str(variant), str(len(runs)), rounds, seconds, *sent, f"{steps:,.0f}"])
    return rows


def hash_rows(files: StudyRecord) -> Rows:
    """Return a header, then every finished run with its values and hashes."""
    study = files.study
    rows: Rows = [["algorithm", "variant", "seed", "round", *study.metrics, "config", "partition", "code", "folder"]]
    results = files.outcome.results
    for row in results[results["status"] == "finished"].to_dict("records"):
        run = files.runs[row["variant"], row["algorithm"], row["seed"]]
        values = [number(row[name], name) for name in study.metrics]
        folder = run.folder.relative_to(study.folder).as_posix()
        first = [row["algorithm"], row["variant"], str(row["seed"]), f"{row['round']:.0f}"]
        rows.append([*first, *values, *run.hashes.values(), folder])
    return rows
