"""What the command line of a run says: its complete config, the objects that it names, and their files."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run

LEAF = "https://github.com/TalwalkarLab/leaf writes it, by the script preprocess.sh in its folder data"
# Where the files come from that no data module downloads, by its class.
SOURCES = {
    "ShakespeareDataModule": f"{LEAF}/shakespeare",
    "FEMNISTDataModule": f"{LEAF}/femnist",
    "Sent140DataModule": "it comes from http://help.sentiment140.com/for-students",
    "LibSVMDataModule": "it comes from https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets",
}
BRING = "bring the files, or run it where they can be downloaded"


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
        key = json.dumps([data["class_path"], texts], sort_keys=True)
        if key not in seen:
            seen.add(key)
            try:
                data_module = build(run, "partition").datamodule
                data_module.prepare_data()
                data_module.setup("fit")  # where nothing is downloaded, files are first looked for when they are read
            except ConfigurationError as error:
                source = SOURCES.get(data["class_path"].rpartition(".")[2], BRING)
                missing[f"{str(error).rstrip('.')}; {source}"] = None
    if missing:
        raise ConfigurationError(" | ".join(missing) + ". No run was begun.")
