"""Records a run: its folder, tables, TensorBoard events and ``last.ckpt``."""

from __future__ import annotations

import io
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
from lightning.fabric.loggers import Logger, TensorBoardLogger
from torch import Tensor

from fedbc_lightning.core import storage
from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.storable import plain_copy
from fedbc_lightning.core.twins import both
from fedbc_lightning.evaluation.evaluator import Evaluation
from fedbc_lightning.federation.checkpoint_content import module_state_of, state_of
from fedbc_lightning.module.monitors import logged_only
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.tables import RunLog, read_rows
from fedbc_lightning.state import checkpoint

if TYPE_CHECKING:
    from fedbc_lightning.trainer.trainer import FederatedTrainer

log = logging.getLogger(__name__)

MAX_SHARE_OF_TIME = 0.05
"""Largest fraction of the time that writing checkpoints may take if ``checkpoint_every_n_rounds`` is None."""


class Recorder:
    """Records rounds; a resumed run goes on from the records up to the round of ``last.ckpt``.

    Args:
        trainer: Trainer that has been set up, and restored if it resumes.
        path: Checkpoint from which the trainer was restored, or None.
        logger: Argument ``logger`` of the trainer.

    Attributes:
        folder: Run folder; the old one if the run resumes from its ``last.ckpt``.
        loggers: Lightning loggers of the run.
    """

    def __init__(
        self, trainer: FederatedTrainer, path: Path | None, logger: Logger | Iterable[Logger] | bool | None
    ) -> None:
        self._trainer, self._settings = trainer, settings(trainer)
        self._is_writer = trainer.is_global_zero
        resumed = run_folder.run_of(path) if path is not None else None
        folder = resumed or Path()
        if resumed is None and self._is_writer:
            folder = run_folder.claim(trainer.default_root_dir / trainer.name, trainer.run_lock)
        self.folder: Path = trainer._fabric.broadcast(folder)
        self._tables = RunLog(self.folder)
        if resumed is not None and self._is_writer:
            with self.disk_told():
                self._tables.recover(trainer.current_round, trainer.saved_rows)
        purge_step = trainer.current_round + 1 if resumed is not None else None
        self.loggers = _make_loggers(logger, self.folder, purge_step)
        if resumed is not None and self._is_writer:
            with self.disk_told():
                self._complete_events()
        self._recorded_round = self._written_round = trainer.current_round if resumed is not None else -1
        self._write_seconds, self._last_written = 0.0, time.perf_counter()
        self._states = states_of_users(self._trainer)
        if resumed is None and self._is_writer:
            with self.disk_told():
                self._describe_run()

    def disk_told(self) -> AbstractContextManager[None]:
        """Turn errors of the file system in the run folder into an error of one line."""
        return storage.told(self.folder, self._trainer.how_to_resume(self.folder))

    def record(
        self, round: int, metrics: dict[str, float], records: list[dict[str, Any]], evaluation: Evaluation
    ) -> None:
        """Write one committed round, and the checkpoint if it is due."""
        self._states = states_of_users(self._trainer)
        if self._is_writer:
            with self.disk_told():
                self._tables.write(round, metrics, records, evaluation.rows())
                for logger in self.loggers:
                    logger.log_metrics(metrics, step=round)
                    if isinstance(logger, both(TensorBoardLogger)) and evaluation.metrics:
                        self._log_histograms(logger, round, evaluation)
        self._recorded_round = round
        fabric = self._trainer._fabric
        if fabric.broadcast(self._is_due(round)):
            self.save()
            fabric.barrier()  # no rank may overwrite the old checkpoint's rows before the new one is written

    def save(self) -> None:
        """Write ``last.ckpt`` of the last committed round, unless it is written already; every rank calls this.

        A round is saved only if all its tables and events have been written. Otherwise the older checkpoint stays, from
        which a resumed run repeats the round.
        """
        round, rows = self._trainer.finished_round, self._trainer.clients.file_rows
        is_recorded = round == self._recorded_round
        if not self._trainer.enable_checkpointing or not is_recorded or round <= self._written_round:
            return
        if self._is_writer:
            with self.disk_told():
                self._write()
        if rows is not None:
            with self.disk_told():
                rows.mark_saved(is_writer=self._is_writer)
        self._written_round = round

    def write_again(self) -> None:
        """Write ``last.ckpt`` of the last committed round again, because state that belongs to it has changed."""
        self._written_round = -1
        self.save()
        self._trainer._fabric.barrier()

    def _write(self) -> None:
        """Write rows, tables and events to the disk first, then the checkpoint that relies on them."""
        started = time.perf_counter()
        rows = self._trainer.clients.file_rows
        if rows is not None:
            rows.sync()
        self._tables.sync()
        for logger in self.loggers:
            if isinstance(logger, both(TensorBoardLogger)):
                logger.experiment.flush()
        path = self.folder / run_folder.LAST
        checkpoint.save_atomically(self.checkpoint(self._states, is_last=True), path)
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
            except Exception as error:  # noqa: PERF203
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
        states = states_of_users(self._trainer) if states is None else states
        return run_checkpoint(self._trainer, self._settings, states, self._tables.num_rows, is_last=is_last)

    def _is_due(self, round: int) -> bool:
        every = self._trainer.checkpoint_every_n_rounds
        if round == 0:
            return True
        if every is not None:
            return round % every == 0
        return self._write_seconds <= MAX_SHARE_OF_TIME * (time.perf_counter() - self._last_written)

    def _describe_run(self) -> None:
        from PIL import Image

        from fedbc_lightning.data.partition_report import partition_png, save_partition_report

        save_partition_report(self._trainer.datamodule, self.folder)
        for logger in self.loggers:
            if isinstance(logger, both(TensorBoardLogger)):
                with Image.open(io.BytesIO(partition_png(self._trainer.datamodule))) as picture:
                    logger.experiment.add_image("partition", np.asarray(picture.convert("RGB")), 0, dataformats="HWC")
            else:
                with suppress(NotImplementedError):
                    logger.log_hyperparams(self._settings)

    def _complete_events(self) -> None:
        """Write TensorBoard's curves again from ``metrics.csv`` if their files are gone."""
        for logger in self.loggers:
            if not isinstance(logger, TensorBoardLogger) or any(Path(logger.log_dir).glob("events.out.tfevents.*")):
                continue
            path = self._tables.metrics.path
            rows = read_rows(path) if path.is_file() else []
            for row in rows:
                numbers = {name: float(cell) for name, cell in row.items() if cell and name != "round"}
                logger.log_metrics(numbers, step=int(row["round"]))
            log.warning(
                "'%s' holds no TensorBoard events of the rounds before: the curves of %d rounds are drawn again from "
                "metrics.csv, histograms are not.",
                *(logger.log_dir, len(rows)),
            )

    def _log_histograms(self, logger: TensorBoardLogger, round: int, evaluation: Evaluation) -> None:
        values = {f"clients/{name}": self._trainer.clients.scalar(name) for name in self._trainer.clients.scalar_names}
        values |= {f"clients/{name}": torch.tensor([*of.values()]) for name, of in evaluation.clients.items()}
        for name, tensor in values.items():
            with suppress(ValueError):  # NumPy cannot bin e.g. NaN, which must not end the run
                logger.experiment.add_histogram(name, tensor, round)


def run_checkpoint(
    trainer: FederatedTrainer,
    settings: dict[str, Any],
    states: dict[str, Any],
    num_rows: dict[str, int],
    *,
    is_last: bool,
) -> dict[str, Any]:
    """Return the content of a checkpoint that resumes a run, see :meth:`Recorder.checkpoint`."""
    ours: dict[str, Any] = {
        **states,
        checkpoint.KEY: {
            "format": checkpoint.FORMAT,
            "round": trainer.finished_round,
            "max_rounds": trainer.max_rounds,
            "should_stop": trainer.should_stop,
            "callback_metrics": {
                name: float(v)
                for name, v in logged_only(trainer.callback_metrics).items()
                if not name.startswith("time/")
            },
            "settings": settings,
            "rows": num_rows,
            "federation": state_of(trainer.federation, is_last=is_last),
        },
    }
    content = lightning_checkpoint(trainer, module_state_of(trainer.federation), ours)
    trainer.hooks.call_callbacks("on_save_checkpoint", content)
    return content


def states_of_users(trainer: FederatedTrainer) -> dict[str, Any]:
    """What callbacks and the user's data module want to keep, under Lightning's keys.

    Callbacks stand by ``state_key`` under ``callbacks``, the data module under the name of its class; only those that
    have any state.
    """
    callbacks = {callback.state_key: callback.state_dict() for callback in trainer.hooks.callbacks}
    data = trainer.datamodule.users_module
    states = {"callbacks": {key: state for key, state in callbacks.items() if state}}
    states |= {type(data).__qualname__: state for state in (data.state_dict(),) if state}
    return {key: plain_copy(state, is_snapshot=True) for key, state in states.items()}


def lightning_checkpoint(trainer: FederatedTrainer, state: dict[str, Tensor], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint that ``MyModule.load_from_checkpoint`` reads.

    Args:
        trainer: Trainer whose round and module are written.
        state: State dict of the module.
        ours: Additional entries, which Lightning ignores.
    """
    module = trainer.user.module
    content: dict[str, Any] = {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": trainer.finished_round,
        "global_step": trainer.finished_round,
        "state_dict": state,
        **ours,
    }
    if module.hparams:
        content[module.CHECKPOINT_HYPER_PARAMS_NAME] = module._hparams_name
        content[module.CHECKPOINT_HYPER_PARAMS_KEY] = plain_values(dict(module.hparams))
    module.on_save_checkpoint(content)
    return plain_copy(content)  # the entries of module and callbacks may hold NumPy's numbers


def settings(trainer: FederatedTrainer) -> dict[str, Any]:
    """Return the hyper-parameters of a run under dotted names, to compare them on resume."""
    local = dict(vars(trainer.local))
    rounds = local.pop("schedule_rounds")
    described: dict[str, Any] = {
        "trainer.clients_per_round": trainer.clients_per_round,
        "trainer.engine": trainer.federation.engine_kind,
        "trainer.precision": trainer.precision,
        "trainer.deterministic": trainer.deterministic,
        "trainer.buffers": trainer.buffers,
        "trainer.sampler": type(trainer.sampler).__name__,
        **_flat("trainer.stragglers", vars(trainer.stragglers) if trainer.stragglers else {}),
        "trainer.eval_every_n_rounds": trainer.eval_every_n_rounds,
        "trainer.eval_clients": trainer.eval_clients,
        "trainer.keep_local_models": trainer.keep_local_models,
        "trainer.client_dtype": trainer.client_dtype,
        "trainer.local_schedules": rounds and f"continue (for max_rounds: {rounds})",
        "seed": trainer.seed,
        "data.batch_size": trainer.datamodule.batch_size,
        **_flat("trainer", local),
        **_flat("algorithm", vars(trainer.federation.algorithm)),
        **_flat("model", dict(trainer.user.module.hparams)),
    }
    return plain_values(described, tensors=False)


def refuse_other_seed(saved: dict[str, Any], seed: int, path: Path | None) -> None:
    """Raise if a run would resume with another seed than that with which it began.

    Raises:
        ConfigurationError: The seeds differ.
    """
    if saved.get("seed", seed) != seed:
        raise ConfigurationError(
            f"seed: '{path}' was trained with {saved['seed']}, {seed} is given now, so that the run would not go on as "
            f"if never stopped; give seed {saved['seed']} (seed_everything), or say other_seed: true."
        )


def warn_of_other_settings(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Warn of every hyper-parameter that differs between a checkpoint and the run that resumes from it."""
    for name in sorted({*saved, *current}):
        if saved.get(name) != current.get(name):
            warnings.warn(
                f"{name} was {saved.get(name)} when the checkpoint was written and is {current.get(name)} now; "
                "the run goes on with the new value.",
                stacklevel=2,
            )


def plain_values(values: dict[str, Any], *, tensors: bool = True) -> dict[str, Any]:
    """Keep the entries that a checkpoint may hold: numbers, strings, tensors (if wanted), and containers of these."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(is_plain, value.values()))
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or type(value) in (bool, int, float, str) or (tensors and type(value) is Tensor)

    return {name: value for name, value in values.items() if is_plain(value)}


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested objects, lists and dicts into dotted names; an object also gives the name of its class."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if name.startswith("_"):
            continue
        if isinstance(value, (list, tuple)) and any(map(_has_parts, value)):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict) and any(map(_has_parts, value.values())):
            flat |= _flat(key, value)
        elif _has_parts(value):
            flat |= {key: type(value).__name__, **_flat(key, vars(value))}
        else:
            flat[key] = value
    return flat


def _has_parts(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)


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
            each._kwargs["purge_step"] = purge_step
    return loggers
