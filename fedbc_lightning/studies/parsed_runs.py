"""What the command line of a run says: its complete config, the objects that it names, and their files."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedbc_lightning.cli.classes import import_object
from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import IDENTITY
from fedbc_lightning.core.origin import source_hash
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.run.identity import VERSIONS, read, samples_of
from fedbc_lightning.studies.study import Study, refuse
from fedbc_lightning.studies.study_run import Run


class Built(FederatedCLI):
    """Builds the objects that a command line names, and leaves it to the caller to run them."""

    def run_command(self, command: str) -> None:
        """Do nothing; see the base class."""


class _Parsed(Built):
    """Parses a command line, and builds nothing."""

    def set_seed(self) -> None:
        """Do nothing; see the base class."""

    def instantiate_classes(self) -> None:
        """Do nothing; see the base class."""


def parse(run: Run) -> Any:
    """Return the complete config of a run, as the parser's Namespace.

    Raises:
        ConfigurationError: The command line is wrong; the message is the parser's.
    """
    with parser_errors(run):
        config = _Parsed(args=run.words(), parser_kwargs={"prog": PROG}).config["fit"]
    del config["config"]  # the paths that it was read from
    return config


def build(run: Run, command: str) -> Built:
    """Build what the command line of a run names, for a command other than ``fit``.

    Raises:
        ConfigurationError: The command line is wrong; the message is the parser's.
    """
    with contextlib.redirect_stdout(io.StringIO()), parser_errors(run):
        return Built(args=[command, *run.words()[1:]], parser_kwargs={"prog": PROG})


@contextlib.contextmanager
def parser_errors(run: Run) -> Iterator[None]:
    """Turn the parser's exit into an error that names the run; other output to stderr is dropped.

    Raises:
        ConfigurationError: The parser has refused the command line and asked to end the process.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        message = said.getvalue().strip().removeprefix(f"{PROG}: error: ")
        raise ConfigurationError(f"{run.variant} / {run.method}: {message}") from None


def check_runs(study: Study) -> None:
    """Parse the command lines of representative runs in this process, and refuse settings that no study can have.

    These runs are: every algorithm with every value of its grids in the first variant, the first algorithm in every
    other variant, and all algorithms in a variant that overrides a setting of the algorithm.

    Raises:
        ConfigurationError: A command line is wrong or a setting is refused; the message names the run. Or the study is
            strict, and runs in its folder were of other code, data or versions.
    """
    seed, (first, *others), configs = study.seed_list[0], study.variants, list[Any]()
    for method in study.methods:
        configs += [_checked(study, study.run(first, method, seed, tried)) for tried in method.each_value()]
        if method.tuned:
            parse(study.trial(first, method, study.tuning.seeds[0], method.first()))
    for variant in others:
        is_of_algorithm = any(key.partition(".")[0] == "algorithm" for key in study.variants[variant] or {})
        methods = study.methods if is_of_algorithm else study.methods[:1]
        configs += [_checked(study, study.run(variant, method, seed, method.first())) for method in methods]
    _check_unchanged(study, configs)


def _checked(study: Study, run: Run) -> Any:
    parsed = parse(run)
    trainer, data = parsed["trainer"], parsed["data"] or {}
    asked = {
        "report: best_on_validation: there are no validation data; set data.val_fraction":
            study.report == "best_on_validation" and not (data.get("init_args") or {}).get("val_fraction", 1),
        "trainer.engine: auto: might choose differently for runs that are compared; say sequential or vectorized":
            trainer["engine"] == "auto",
        "trainer.devices, trainer.num_nodes: a study gives each run one device, and does several at a time; leave them "
        "out": trainer["devices"] not in ("auto", 1, "1", [0]) or trainer["num_nodes"] not in ("auto", 1),
        "trainer.system: null: there is no simulated clock for axis: simulated_seconds; give e.g. {compute: 1.0}":
            study.axis == "simulated_seconds" and not trainer["system"],
        "trainer.eval_every_n_rounds: 0: leaves nothing to compare; give 1 or more":
            trainer["eval_every_n_rounds"] == 0,
    }  # fmt: skip
    refuse({f"{run.title}: {what}.": is_so for what, is_so in asked.items()})
    return parsed


def _check_unchanged(study: Study, configs: list[Any]) -> None:
    """Warn of runs in the study's folder that were of other code, data or versions, or refuse them if it is strict.

    Samples are read of the oldest run first: if it has those of today, so have the later ones of the same data.

    Args:
        study: The study.
        configs: Complete configs, in which the classes of all runs are named.
    """
    code: dict[str, set[str]] = {}
    for path in {path for config in configs for key, path in config.items() if key.endswith("class_path")}:
        with contextlib.suppress(ImportError, AttributeError):
            kind = import_object(path)
            code.setdefault(f"the class {kind.__qualname__}", set()).add(source_hash(kind))
    runs = {run.folder: run for run in study.runs()}
    places = [*runs, *study.folder.glob("tuning/*/*/*/rung_*/seed_*")]
    files = sorted((file.stat().st_mtime_ns, file) for place in places for file in place.glob(f"*/{IDENTITY}"))
    seen, changed, what = set[str](), list[Path](), dict[str, None]()
    for folder, saved in [(file.parent.parent, known[0]) for _, file in files if (known := read(file.parent))]:
        run, samples = runs.get(folder), saved.samples
        if run is not None and run.named_data not in seen:
            # A study whose data are gone still gives its tables; only strict insists on looking at them.
            with contextlib.suppress(*() if study.strict else (Exception,)), preserved_globals(torch.device("cpu")):
                samples = samples_of(data_of(run))
            seen |= {run.named_data} if samples == saved.samples else set()
        here = {name: there if there in code.get(name, {there}) else "" for name, there in saved.code.items()}
        found = replace(saved, code=here, samples=samples, versions=VERSIONS).differences(saved)
        changed += [folder] if found else []
        what |= dict.fromkeys(found)
    if changed:
        said = f"'{changed[0]}'{f' and {len(changed) - 1} more' if changed[1:] else ''}: {'; '.join(what)}"
        said += ". To do that again, remove the folder, or give the study another name."
        if study.strict:
            raise ConfigurationError(said)
        warnings.warn(said, stacklevel=2)


def data_of(run: Run) -> Any:
    """Return the data of a run, set up as for ``fit``.

    Raises:
        ConfigurationError: Files are missing, or the command line is wrong.
    """
    found = build(run, "partition").datamodule
    found.prepare_data()
    found.setup("fit")  # where nothing is downloaded, files are first looked for when they are read
    return found


def check_data_files(study: Study) -> None:
    """Let every data set of a study find, or download, its files, as each run would do later in its worker.

    Raises:
        ConfigurationError: Files are missing; the message says which, where they are expected, and how to get them.
    """
    # Here, and not in each worker: 150 runs would each say that the same file is not there.
    missing = dict[str, None]()
    for run in {run.named_data: run for run in study.runs()}.values():
        try:
            data_of(run)
        except ConfigurationError as error:
            missing[str(error).rstrip(".")] = None
    if missing:
        raise ConfigurationError(" | ".join(missing) + "; docs/data.md says where to get it. No run was begun.")
