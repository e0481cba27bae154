"""The loop over rounds, each of which trains, aggregates, evaluates, commits and logs."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.distributed.interrupts import Interrupts, check
from fedbc_lightning.evaluation.evaluator import Evaluation
from fedbc_lightning.federation.hook_writes import (
    begin_again,
    kept_from_round_hooks,
    kept_from_start_hooks,
    not_kept_from_evaluation_hooks,
)
from fedbc_lightning.module.monitors import name_in_log, readable_as
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.evaluation_hooks import evaluate_with_hooks, say_which_hooks_are_never_called
from fedbc_lightning.run.monitored import refuse_if_nothing_logs
from fedbc_lightning.run.recorder import Recorder
from fedbc_lightning.state import row_file
from fedbc_lightning.state.layout import WrittenParametersError

if TYPE_CHECKING:
    from fedbc_lightning.trainer.trainer import FederatedTrainer


class RoundLoop:
    """Runs the rounds of a trainer, from its last finished round to its last round.

    Args:
        trainer: Trainer that has been set up, and restored if it resumes.
        path: Checkpoint from which the trainer was restored, or None.
    """

    def __init__(self, trainer: FederatedTrainer, path: Path | None) -> None:
        self.trainer = trainer
        self.federation, self.hooks = trainer.federation, trainer.hooks
        self._is_resumed = path is not None
        self.recorder = trainer.recorder = Recorder(trainer, path, trainer.logger_setting)
        self._not_kept_from = partial(not_kept_from_evaluation_hooks, trainer.federation, trainer.evaluator)
        self._take_state()
        trainer.log_dir, trainer.loggers = str(self.recorder.folder), self.recorder.loggers
        trainer.shim.set(loggers=trainer.loggers, logger=trainer.logger, log_dir=trainer.log_dir)

    def run(self) -> None:
        """Run all rounds; however this ends, checkpoint and module hold the last finished round afterwards."""
        trainer = self.trainer
        failure: BaseException | None = None
        with Interrupts(is_spokesman=trainer.is_global_zero) as self.interrupts:
            try:
                self._call_start_hooks()
                if not self._is_resumed:
                    self._start()
                while trainer.finished_round < trainer.max_rounds and not trainer.should_stop:
                    self._advance()
                    check()
            except BaseException as error:
                failure = cause = self.interrupts.end(error)
                self.federation.rollback()
                trainer.current_round = trainer.finished_round
                with suppress(ConfigurationError):  # replaced parameters cannot be loaded; ``error`` reports them
                    self.federation.load_global()
                self.hooks.call_callbacks("on_exception", cause)
                trainer.datamodule.users_module.on_exception(cause)
                if cause is not error:
                    raise cause from None
                raise
            finally:
                self.recorder.close(failure)
            self.federation.load_global()
        self.hooks.call("on_train_end")
        self.hooks.call("on_fit_end")

    def _take_state(self) -> None:
        """Show the federation's state to callbacks, and open the clients' rows if they lie in a file."""
        trainer = self.trainer
        trainer.show_federation()
        if trainer.clients.file_rows is not None:
            rows_path = (self.recorder.folder / run_folder.LAST).with_name(row_file.NAME)
            with self.recorder.disk_told():
                trainer.clients.file_rows.open(rows_path, trainer._fabric)

    def _call_start_hooks(self) -> None:
        say_which_hooks_are_never_called(self.hooks)
        with kept_from_start_hooks(self.federation, is_resumed=self._is_resumed):
            self.hooks.call_callbacks("setup", "fit")
            self.hooks.call("on_fit_start")
            self.hooks.call("on_train_start")
        if self.trainer.server is not self.federation.server:
            self._take_state()

    def _start(self) -> None:
        """Evaluate the initial model and record it as round 0."""
        evaluation = self._evaluate(0) if self.trainer.eval_every_n_rounds else Evaluation()
        self.federation.schedule.check(evaluation.metrics)
        self._finish({}, evaluation)

    def _advance(self) -> None:
        """Run one round."""
        trainer, federation = self.trainer, self.federation
        started = time.perf_counter() - federation.engine.seconds_waited
        trainer.current_round = round = trainer.finished_round + 1
        trainer.shim.set(current_round=round, current_epoch=round, global_step=round)
        seed_globals(derive(trainer.seed, "round", round), trainer.user.device)
        frozen = federation.layout.frozen.copies() if round == 1 else {}
        with kept_from_round_hooks(federation, "on_round_start"):
            self.hooks.call("on_round_start")
        try:
            metrics = federation.run_round(round)
        except WrittenParametersError as error:
            begin_again(federation, error, frozen)
            self._take_state()
            self.recorder.write_again()
            self._advance()
            return
        federation.load_global()
        trainer.shim.set(callback_metrics=trainer.callback_metrics)  # until here it held the last client's metrics
        metrics["time/round_seconds"] = time.perf_counter() - federation.engine.seconds_waited - started
        self._finish(metrics, self._evaluate(round) if self._is_evaluated(round) else Evaluation())

    def _is_evaluated(self, round: int) -> bool:
        every = self.trainer.eval_every_n_rounds
        return bool(every) and (round % every == 0 or round == self.trainer.max_rounds)

    def _evaluate(self, round: int) -> Evaluation:
        started = time.perf_counter()
        splits = [split for split in ("test", "val") if self.trainer.has_split(split)]
        if round:
            with self._not_kept_from("on_validation_model_zero_grad"):
                self.hooks.call_module("on_validation_model_zero_grad")
        evaluation = evaluate_with_hooks(self.trainer, splits, round, "validation")
        told = self._not_kept_from("on_validation_end")
        with self.trainer.evaluator.evaluating("validation", round), told:
            self.hooks.call_module("on_validation_end")
        self.hooks.call_module("on_validation_model_train")
        evaluation.metrics["time/eval_seconds"] = time.perf_counter() - started
        return evaluation

    def _finish(self, metrics: dict[str, float], evaluation: Evaluation) -> None:
        """Commit the round and call the hooks that see its numbers; signals are deferred meanwhile."""
        trainer = self.trainer
        round = trainer.current_round
        trainer.evaluation = evaluation
        metrics |= evaluation.metrics
        self._publish(metrics)
        with self.interrupts.deferred():
            if round:
                self.federation.commit(round, metrics)
            trainer.user.best_metrics.commit()
            trainer.finished_round = round
            collector = trainer.user.start_collecting()
            trainer.shim.set(current_epoch=round, global_step=round)
            seed_globals(derive(trainer.seed, "round end", round), trainer.user.device)
            try:
                if round:
                    with kept_from_round_hooks(self.federation, "on_round_end"):
                        self.hooks.call("on_round_end")
                    self.federation.server.commit()
                metrics |= collector.logged()
                self._publish(metrics)
                with self._not_kept_from("on_validation_end"):
                    self._call_validation_end(metrics, bool(evaluation.metrics))
            finally:
                records = self.federation.server.records if round else []
                self.recorder.record(round, metrics, records, evaluation)

    def _call_validation_end(self, metrics: dict[str, float], is_evaluated: bool) -> None:
        """Call ``on_validation_end`` after each evaluated round; if a callback monitors a name, when that was logged.

        Raises:
            ConfigurationError: A monitored name was not logged by the latest time at which it can be.
        """
        trainer = self.trainer
        for callback in self.hooks.callbacks:
            monitor = getattr(callback, "monitor", None)
            if monitor is None:
                if is_evaluated:
                    callback.on_validation_end(trainer, trainer.user.module)  # type: ignore[arg-type]
                continue
            name = name_in_log(str(monitor), trainer.callback_metrics)
            if name not in trainer.callback_metrics:
                refuse_if_nothing_logs(trainer, callback, str(monitor), is_evaluated=is_evaluated)
            elif name in metrics:
                with readable_as(monitor, name, trainer.callback_metrics):
                    callback.on_validation_end(trainer, trainer.user.module)  # type: ignore[arg-type]
        if trainer.world_size > 1:
            trainer.should_stop = any(gather_objects(trainer._fabric, trainer.should_stop))

    def _publish(self, metrics: dict[str, float]) -> None:
        trainer = self.trainer
        trainer.callback_metrics |= {name: torch.tensor(value) for name, value in metrics.items()}
        trainer.shim.set(callback_metrics=trainer.callback_metrics)
