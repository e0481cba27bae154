"""Finding the folders that runs have made."""

from pathlib import Path

from fedbc_lightning.run.folder import run_folders


def only_run(experiment):
    """The run folder of an experiment that has been run once."""
    (found,) = run_folders(Path(experiment))
    return found
