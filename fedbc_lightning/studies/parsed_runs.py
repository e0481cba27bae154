"""What the command line of a run says: its complete config, the objects that it names, and their files."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.errors import ConfigurationError
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


def parse(run: Run) -> dict[str, Any]:
    """Return the complete config of a run as plain values, without the paths that it was read from.

    Raises:
        ConfigurationError: The command line is wrong; the message is the parser's.
    """
    with parser_errors(run):
        config = _Parsed(args=run.words(), parser_kwargs={"prog": PROG}).config["fit"].as_dict()
    return {key: value for key, value in config.items() if key != "config"}


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
        ConfigurationError: A command line is wrong or a setting is refused; the message names the run.
    """
    seed, (first, *others) = study.seed_list[0], study.variants
    for method in study.methods:
        for tried in method.each_value():
            _check_run(study, study.run(first, method, seed, tried))
        if method.tuned:
            parse(study.trial(first, method, study.tuning.seeds[0], method.first()))
    for variant in others:
        is_of_algorithm = any(key.partition(".")[0] == "algorithm" for key in study.variants[variant] or {})
        for method in study.methods if is_of_algorithm else study.methods[:1]:
            _check_run(study, study.run(variant, method, seed, method.first()))


def _check_run(study: Study, run: Run) -> None:
    parsed = parse(run)
    trainer, data = parsed["trainer"], parsed["data"] or {}
    asked = {
        "report: best_on_validation: there are no validation data; set data.val_fraction":
            study.report == "best_on_validation" and not (data.get("init_args") or {}).get("val_fraction", 1),
        "trainer.engine: auto: might choose differently for runs that are compared; say sequential or vectorized":
            trainer["engine"] == "auto",
        "trainer.devices, trainer.num_nodes: a study gives each run one device, and does several at a time; leave them "
        "out": trainer["devices"] not in ("auto", 1, "1", [0]) or trainer["num_nodes"] > 1,
        "trainer.system: null: there is no simulated clock for axis: simulated_seconds; give e.g. {compute: 1.0}":
            study.axis == "simulated_seconds" and not trainer["system"],
        "trainer.eval_every_n_rounds: 0: leaves nothing to compare; give 1 or more":
            trainer["eval_every_n_rounds"] == 0,
    }  # fmt: skip
    refuse({f"{run.title}: {what}.": is_so for what, is_so in asked.items()})


def check_data_files(study: Study) -> None:
    """Let every data set of a study find, or download, its files, as each run would do later in its worker.

    Raises:
        ConfigurationError: Files are missing; the message says which, where they are expected, and how to get them.
    """
    # Here, and not in each worker: 150 runs would each say that the same file is not there.
    seen, missing = set(), dict[str, None]()
    for variant in study.variants:
        run = study.run(variant, study.methods[0], study.seed_list[0], study.methods[0].first())
        data = parse(run)["data"]
        # Data sets differ in their class or in their texts, such as paths; numbers say how they are dealt to clients.
        texts = {name: value for name, value in (data.get("init_args") or {}).items() if isinstance(value, str)}
        key = f"{data['class_path']} {texts}"
        if key in seen:
            continue
        seen.add(key)
        try:
            data_module = build(run, "partition").datamodule
            data_module.prepare_data()
            data_module.setup("fit")  # where nothing is downloaded, files are first looked for when they are read
        except ConfigurationError as error:
            missing[str(error).rstrip(".")] = None
    if missing:
        raise ConfigurationError(" | ".join(missing) + "; docs/data.md says where to get it. No run was begun.")
