"""Records a run: its folder, tables, TensorBoard events and ``last.ckpt``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.fabric.loggers import Logger, TensorBoardLogger

from fedbc_lightning.core.devices import device_name
from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.files import told
from fedbc_lightning.core.lightning_names import both
from fedbc_lightning.core.private_lightning import purge_from
from fedbc_lightning.evaluation.summary import Evaluation
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run import slurm
from fedbc_lightning.run.identity import read
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.run_checkpoint import run_checkpoint, states_of_users
from fedbc_lightning.run.run_record import FitResult
from fedbc_lightning.run.tables import RunLog
from fedbc_lightning.state import checkpoint

log = logging.getLogger(__name__)

# Largest fraction of the time that writing checkpoints may take if ``checkpoint_every_n_rounds`` is None
MAX_SHARE_OF_TIME = 0.05

# Group of the histograms: TensorBoard sorts groups by name, and shows this one behind those of the curves
BY_CLIENT = "values_by_client"


class Recorder:
    """Records rounds; a resumed run goes on from the records up to the round of ``last.ckpt``.

    Args:
        run: Run that has been set up for ``fit``, and restored if it resumes.

    Attributes:
        folder: Run folder; the old one if the run resumes from its ``last.ckpt``.
        loggers: Lightning loggers of the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_writer = run.fabric.is_global_zero
        resumed = run_folder.run_of(run.path) if run.path is not None else None
        folder = resumed or Path()
        if resumed is None and self._is_writer:
            label = f"{type(run.federation.algorithm).__name__}-{run.seed}"
            folder = run_folder.claim(run.settings.experiment, label, run.lock)
        self.folder: Path = run.fabric.broadcast(folder)
        self._tables = RunLog(self.folder)
        if resumed is not None and self._is_writer:
            with self.disk_told():
                self._tables.recover(run.progress.current_round, run.progress.num_rows)
        purge_step = run.progress.current_round + 1 if resumed is not None else None
        self.loggers = _make_loggers(run.settings.logger, self.folder, purge_step)
        self._recorded_round = self._written_round = run.progress.current_round if resumed is not None else -1
        self._write_seconds, self._last_written = 0.0, time.perf_counter()
        self._states = states_of_users(self._run)
        jobs = slurm.starters(run.fabric)
        if self._is_writer:
            slurm.begun.add(self.folder)
            with self.disk_told():
                known, before = read(self.folder) or (run.identity, [])
                (run.identity if run.identity.changes else known).write(
                    self.folder, {*before, *jobs}, device_name(run.fabric.device)
                )
        if resumed is None and self._is_writer:
            with self.disk_told():
                self._describe_run()

    @contextmanager
    def disk_told(self) -> Iterator[None]:
        """Write into the run folder only as long as it is this run's; errors of its disk become one line."""
        with told(self.folder, run_folder.how_to_resume(self.folder / run_folder.LAST)):
            self._run.lock.check()
            yield

    def record(
        self, round: int, metrics: dict[str, float], records: list[dict[str, Any]], evaluation: Evaluation
    ) -> None:
        """Write one committed round, and the checkpoint if it is due."""
        # Callbacks may count in the next round already when an interrupt has this one saved.
        self._states = states_of_users(self._run)
        if self._is_writer:
            with self.disk_told():
                self._tables.write(round, metrics, records, evaluation.rows())
                for logger in self.loggers:
                    logger.log_metrics(metrics, step=round)
                    if isinstance(logger, both(TensorBoardLogger)):
                        self._show(logger, round, evaluation)
        self._recorded_round = round
        fabric = self._run.fabric
        if fabric.broadcast(self._is_due(round)):
            self.save()
            fabric.barrier()  # no rank may overwrite the old checkpoint's rows before the new one is written

    def save(self) -> None:
        """Write ``last.ckpt`` of the last committed round, unless it is written already; every rank calls this.

        A round is saved only if all its tables and events have been written. Otherwise the older checkpoint stays, from
        which a resumed run repeats the round.
        """
        round, rows = self._run.progress.finished_round, self._run.federation.clients.file_rows
        is_recorded = round == self._recorded_round
        if not self._run.settings.enable_checkpointing or not is_recorded or round <= self._written_round:
            return
        if self._is_writer:
            with self.disk_told():
                self._write()
        if rows is not None:
            with self.disk_told():
                rows.mark_saved()
        self._written_round = round

    def write_again(self) -> None:
        """Write ``last.ckpt`` of the last committed round again, because state that belongs to it has changed."""
        self._written_round = -1
        self.save()
        self._run.fabric.barrier()

    def _write(self) -> None:
        """Write rows, tables and events to the disk first, then the checkpoint that relies on them."""
        started = time.perf_counter()
        # The commit point is the replacement of last.ckpt. All that it speaks of (numbers of rows in tables, slots of
        # clients.bin) is on the disk before, or a power failure could leave a checkpoint without its rows.
        rows = self._run.federation.clients.file_rows
        if rows is not None:
            rows.sync()
        self._tables.sync()
        for logger in self.loggers:
            if isinstance(logger, both(TensorBoardLogger)):
                logger.experiment.flush()
        path = self.folder / run_folder.LAST
        checkpoint.save_atomically(self.checkpoint(self._states, is_last=True), path, self._run.lock.check)
        self._last_written = time.perf_counter()
        self._write_seconds = self._last_written - started

    def close(self, failure: BaseException | None) -> None:
        """Save what is not saved yet, and close the loggers.

        Args:
            failure: Exception that ended the run, or None. If closing fails, too, that is logged but not raised.
        """
        status = "success" if failure is None else "failed"
        acts: list[Callable[[], None]] = [self.save, *(partial(logger.finalize, status) for logger in self.loggers)]
        for act in acts:
            try:
                with self.disk_told():
                    act()
            except Exception as error:
                if failure is None:
                    raise
                if str(error) != str(failure):
                    log.warning("while the run was ended: %s", first_line(error))

    def checkpoint(self, states: dict[str, Any] | None = None, *, is_last: bool = False) -> dict[str, Any]:
        """Return the committed state as a Lightning checkpoint with one more key, :data:`checkpoint.KEY`.

        Args:
            states: States of callbacks and data, as from :func:`states_of_users`; None: their current states.
            is_last: Whether it becomes ``last.ckpt``. If the clients' rows lie in ``clients.bin``, later rounds
                overwrite them there, so that other checkpoints lack them: these can evaluate z but not resume a run.
        """
        states = states_of_users(self._run) if states is None else states
        return run_checkpoint(self._run, states, self._tables.num_rows, is_last=is_last)

    def result(self) -> FitResult:
        """Return what has been recorded so far."""
        run = self._run
        criterion = next((one for one in run.hooks.callbacks if getattr(one, "monitor", None) is not None), None)
        return FitResult(
            folder=self.folder.absolute(),
            last_round=run.progress.finished_round,
            method=str(run.federation.algorithm),
            monitor=getattr(criterion, "monitor", None),
            mode=getattr(criterion, "mode", None),
        )

    def _is_due(self, round: int) -> bool:
        if not self._run.settings.enable_checkpointing:
            return False
        every = self._run.settings.checkpoint_every_n_rounds
        minutes = self._run.settings.checkpoint_every_minutes
        # Rank 0 decides by its clock and tells the others, so that all write their part of the same round. When a
        # checkpoint is written changes no number: it holds the committed state alone.
        passed = time.perf_counter() - self._last_written
        if round == 0 or (minutes is not None and passed >= 60 * minutes):
            return True
        if every is not None:
            return round % every == 0
        return self._write_seconds <= MAX_SHARE_OF_TIME * passed

    def _describe_run(self) -> None:
        """Write the partition and its picture, and give other loggers the hyper-parameters."""
        from PIL import Image

        from fedbc_lightning.data.partition_report import save_partition_report

        save_partition_report(self._run.datamodule, self.folder)
        for logger in self.loggers:
            if isinstance(logger, both(TensorBoardLogger)):
                with Image.open(self.folder / "partition.png") as picture:
                    logger.experiment.add_image("partition", np.asarray(picture.convert("RGB")), 0, dataformats="HWC")
            else:
                with suppress(NotImplementedError):
                    logger.log_hyperparams(self._run.settings_used)

    def _show(self, logger: TensorBoardLogger, round: int, evaluation: Evaluation) -> None:
        """Write what TensorBoard shows of a round beside the curves."""
        if round == 0:  # and not when the folder was made: config.yaml is written in between
            self._show_settings(logger)
        if not evaluation.metrics or not self._run.settings.has_histograms(round):
            return
        clients, trained = self._run.federation.clients, self._run.datamodule.training_clients
        shown: dict[str, Any] = {name: clients.scalar(name).numpy()[trained] for name in clients.scalar_names}
        shown |= {name: list(of_clients.values()) for name, of_clients in evaluation.clients.items()}
        for name, numbers in shown.items():
            values = np.array(numbers)[np.abs(numbers) < 1e20]  # TensorBoard has no bin for others, such as NaN
            if len(values):
                logger.experiment.add_histogram(f"{BY_CLIENT}/{name}", values, round)

    def _show_settings(self, logger: TensorBoardLogger) -> None:
        """Show settings and ``config.yaml``, where the command line has written one, in the tabs HPARAMS and TEXT."""
        from torch.utils.tensorboard.summary import hparams

        settings, config = self._run.settings_used, self.folder / "config.yaml"
        text = config.read_text(encoding="utf-8") if config.is_file() else yaml.safe_dump(settings, sort_keys=False)
        logger.experiment.add_text("config", f"```yaml\n{text}\n```", 0)
        given = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in settings.items()}
        # Without the first summary, of a whole experiment: TensorBoard reads only one of these for all runs that it
        # shows, and would leave out the settings of other methods.
        for summary in hparams(given, {})[1:]:
            logger.experiment.file_writer.add_summary(summary)


def _make_loggers(
    logger: Logger | Iterable[Logger] | bool | None, folder: Path, purge_step: int | None
) -> list[Logger]:
    if logger is False:
        return []
    if logger is None or logger is True:
        return [TensorBoardLogger(folder, name="", version="", purge_step=purge_step)]
    loggers = [logger] if isinstance(logger, both(Logger)) else list(logger)  # type: ignore[arg-type]
    for each in loggers:
        if isinstance(each, both(TensorBoardLogger)) and purge_step is not None:
            purge_from(each, purge_step)
    return loggers
