"""Writes ``config.yaml`` into the run folder, which repeats the run exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import SaveConfigCallback

from fedbc_lightning.cli.overview import version
from fedbc_lightning.core.files import replacing
from fedbc_lightning.core.origin import code_hash


class SaveRunConfig(SaveConfigCallback):
    """Writes the parsed config into a new run folder at the start of ``fit``, on rank 0; a resumed run keeps its file.

    ``ckpt_path`` and ``other_seed`` are reset, so that ``fedbc-cli fit --config <run>/config.yaml`` runs the same
    from the start.
    """

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Write the file atomically, unless there is one."""
        if stage != "fit" or not trainer.is_global_zero or trainer.log_dir is None:
            return
        path = Path(trainer.log_dir) / self.config_filename
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        config = self.config.clone()
        config["ckpt_path"], config["other_seed"] = None, False
        self.parser.dump_header = [version(), f"code {code_hash()}"]
        with trainer.recorder.disk_told(), replacing(path) as partial:
            self.parser.save(config, str(partial), skip_none=False, overwrite=True, multifile=False)
