"""Looks for the data files of a study before any worker starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.studies.compare import parse, parser_errors
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


class _Preparing(FederatedCLI):
    """Runs a command line of ``partition`` only so far that the data module has found its files."""

    def run_command(self, command: str) -> None:
        """Let the data module download what it may, and check its files."""
        self.datamodule.prepare_data()


def check_data_files(study: Study) -> None:
    """Let every data set of a study find, or download, its files, as each run would do later in its worker.

    Raises:
        ConfigurationError: Files are missing; the message says which, where they are expected, and how to get them.
    """
    # Here, and not in each worker: 150 runs would each say that the same file is not there.
    missing = list(dict.fromkeys(filter(None, (_what_is_missing(run, data) for run, data in _data_of(study)))))
    if missing:
        raise ConfigurationError(" | ".join(missing) + ". No run was begun.")


def _what_is_missing(run: Run, data: dict[str, Any]) -> str | None:
    """Return what is to be said of the data set of a run whose files are missing; None if they are there."""
    try:
        with parser_errors(run):
            _Preparing(args=["partition", *run.words()[1:]], parser_kwargs={"prog": PROG})
    except ConfigurationError as error:
        name = data["class_path"].rpartition(".")[2]
        return f"{str(error).rstrip('.')}; {SOURCES.get(name, BRING)}"
    return None


def _data_of(study: Study) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yield a run for each data set that differs in its class or in its texts, such as paths."""
    seen = set()
    for variant in study.variants:
        method = study.methods[0]
        run = study.run(variant, method, study.seed_list[0], method.first())
        data = parse(run)["fit"]["data"].as_dict()
        texts = {name: value for name, value in (data.get("init_args") or {}).items() if isinstance(value, str)}
        key = json.dumps([data["class_path"], texts], sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield run, data
