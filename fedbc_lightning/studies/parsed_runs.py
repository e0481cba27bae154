"""What the command line of a run says: its complete config, the objects that it names, and their files."""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from fedbc_lightning.cli.classes import import_object
from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.errors import ConfigurationError, UsageError, one_line
from fedbc_lightning.core.files import IDENTITY
from fedbc_lightning.core.origin import source_hash
from fedbc_lightning.core.secret import check_source
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.run.identity import VERSIONS, Identity, read, samples_of
from fedbc_lightning.studies.study import Study, refuse
from fedbc_lightning.studies.study_run import Run, read_note

CPU = torch.device("cpu")


class Built(FederatedCLI):
    """Builds the objects that a command line names, and leaves it to the caller to run them."""

    def run_command(self, command: str) -> None:
        """Do nothing; see the base class."""


class _BuiltHere(Built):
    """Builds for the CPU: the machine on which a study is started may have no GPU."""

    def _needed_config(self) -> Namespace:
        config = super()._needed_config()
        here = {"accelerator": "cpu", "strategy": "auto", "devices": 1, "num_nodes": 1, "precision": "32-true"}
        config["plan"]["trainer"].update(Namespace(**here))
        return config


def checked_config(run: Run) -> Any:
    """Build what the command line of a run names, and return its complete config, as the parser's Namespace.

    Raises:
        ConfigurationError: The command line is wrong, or something that it names cannot be built.
    """
    with preserved_globals(CPU):
        config = build(run, "plan", _BuiltHere).config["plan"]
    del config["config"]  # the paths that it was read from
    return config


def build(run: Run, command: str, kind: type[Built] = Built) -> Built:
    """Build what the command line of a run names, for a command other than ``fit``.

    Raises:
        ConfigurationError: The command line is wrong, or something that it names cannot be built.
    """
    with contextlib.redirect_stdout(io.StringIO()), named(run):
        return kind(args=[command, *run.words()[1:]], parser_kwargs={"prog": PROG})


@contextlib.contextmanager
def named(run: Run) -> Iterator[None]:
    """Turn the parser's exit, and whatever is raised, into a line that names the run; other output is dropped.

    Raises:
        ConfigurationError: The parser has refused the command line and asked to end the process, or something was
            raised.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        message = said.getvalue().strip().removeprefix(f"{PROG}: error: ")
        raise ConfigurationError(f"{run.variant} / {run.method}: {message}") from None
    except Exception as error:
        kind = "" if isinstance(error, (ConfigurationError, UsageError)) else f"{type(error).__name__}: "
        raise ConfigurationError(f"{run.variant} / {run.method}: {kind}{one_line(error)}") from error


def check_runs(study: Study) -> None:
    """Build what the runs of a study name, in this process, and refuse settings that no study can have.

    Every algorithm is built in every variant with the first values of its grids, and with the others in trials of the
    first variant.

    Raises:
        ConfigurationError: A command line is wrong, something cannot be built, or a setting is refused; the message
            names the run. Or the study is strict, and runs in its folder were of other code, data or versions.
    """
    seed, first = study.seed_list[0], next(iter(study.variants))
    runs = [study.run(variant, method, seed, method.first()) for variant in study.variants for method in study.methods]
    for method in (method for method in study.methods if method.tuned):
        tries = [*method.each_value()][1:] or [method.first()]
        runs += [study.trial(first, method, study.tuning.seeds[0], tried) for tried in tries]
    _check_unchanged(study, [_checked(study, run) for run in runs])


def _checked(study: Study, run: Run) -> Any:
    parsed = checked_config(run)
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
    # One in a file is not asked for, as the tables of a finished study need none.
    check_source((trainer["privacy"] or {}).get("secret", ""))
    return parsed


def _check_unchanged(study: Study, configs: list[Any]) -> None:
    """Warn of runs in the study's folder that were of other code, data or versions, or refuse them if it is strict.

    Each run is compared with what is there today, and so with all others. Layers are those of the first run with the
    same settings of the model.

    Args:
        study: The study.
        configs: Complete configs, in which the classes of all runs are named.
    """
    code: dict[Any, set[str]] = {}
    for path in {path for config in configs for key, path in config.items() if key.endswith("class_path")}:
        with contextlib.suppress(ImportError, AttributeError):
            kind = import_object(path)
            code.setdefault(f"the class {kind.__qualname__}", set()).add(source_hash(kind))
    data, found = dict[str, dict[str, str]](), dict[str, list[Path]]()
    for folder, run, saved in _done_before(study):
        noted = read_note(folder).get("run", {})
        key, model = _settings_of("data", noted), _settings_of("model", noted)
        if key not in data:
            data[key] = saved.samples
            # A study whose data are gone still gives its tables; only strict insists on looking at them.
            with contextlib.suppress(*() if study.strict else (ConfigurationError, OSError)), preserved_globals(CPU):
                if key == _settings_of("data", run.identity()):  # else tuning has chosen one of them
                    data[key] = samples_of(data_of(run))
        known = {name: code.get(name) or code.setdefault((name, model), {there}) for name, there in saved.code.items()}
        here = {name: there if there in known[name] else "" for name, there in saved.code.items()}
        for line in replace(saved, code=here, samples=data[key], versions=VERSIONS).differences(saved):
            found.setdefault(line, []).append(folder)
    if found:
        first, *others = dict.fromkeys(itertools.chain(*found.values()))
        said = f"'{first}'{f' and {len(others)} more' if others else ''}: {'; '.join(found)}"
        said += ". To do that again, remove the folder, or give the study another name."
        if study.strict:
            raise ConfigurationError(said)
        warnings.warn(said, stacklevel=2)


def _settings_of(section: str, settings: Mapping[str, str]) -> str:
    """Return the settings of a section, and the seed, which runs must share to have the same data, say."""
    return str(sorted(item for item in settings.items() if item[0].startswith(section) or item[0] == "seed"))


def _done_before(study: Study) -> list[tuple[Path, Run, Identity]]:
    """Return the folders of trials and runs that are there, one that has the same data, and what was done there."""
    places: dict[Path, Run] = {}
    for variant, method, seed in itertools.product(study.variants, study.methods, study.tuning.seeds):
        trial = study.trial(variant, method, seed, method.first())
        places |= dict.fromkeys(trial.folder.parents[2].glob(f"*/rung_*/{trial.folder.name}"), trial)
    places |= {run.folder: run for run in study.runs()}
    files = [(folder, run, file) for folder, run in places.items() for file in folder.glob(f"*/{IDENTITY}")]
    return [(folder, run, known[0]) for folder, run, file in files if (known := read(file.parent)) is not None]


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
