"""The loop over rounds, each of which trains, aggregates, evaluates, commits and logs."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import Metrics
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.distributed.interrupts import Interrupts, check
from fedbc_lightning.evaluation.summary import Evaluation
from fedbc_lightning.federation.hook_writes import beginning_again, kept_from_round_hooks, kept_from_start_hooks
from fedbc_lightning.federation.isolation import SharedAttributes, check_isolation
from fedbc_lightning.module.adapter import plain_attributes, put_plain_attributes
from fedbc_lightning.module.monitors import name_in_log, readable_as
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.evaluation_hooks import evaluate_with_hooks, refuse_if_nothing_logs
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.run_warnings import say_that_nothing_is_measured, say_what_came_of_it, say_what_to_expect
from fedbc_lightning.run.run_writer import Recorder
from fedbc_lightning.state import file_rows
from fedbc_lightning.state.layout import WrittenParametersError


class RoundLoop:
    """Trains a run from its last finished round to its last round.

    Args:
        run: Run that has been set up for ``fit``, and restored if it resumes.
        recorder: Recorder of the run.
    """

    def __init__(self, run: Run, recorder: Recorder) -> None:
        self._run, self._recorder, self._progress = run, recorder, run.progress
        self._federation, self._hooks = run.federation, run.hooks
        self._is_resumed = run.path is not None
        self._frozen: dict[str, Tensor] = {}
        self._attributes: dict[tuple[str, str], Any] = {}
        self._interrupts = Interrupts(is_spokesman=run.fabric.is_global_zero)
        self._open_rows()
        self._progress.log_dir, self._progress.loggers = str(recorder.folder), recorder.loggers

    def run(self) -> None:
        """Run all rounds; however this ends, checkpoint and module hold the last finished round afterwards."""
        run, progress = self._run, self._progress
        failure = None
        if self._is_resumed and progress.is_over(run.settings.max_rounds):
            rank_zero_info(
                f"'{self._recorder.folder}' has finished: {progress.finished_round} rounds. Nothing is done; a larger "
                "trainer.max_rounds goes on with it."
            )
            self._federation.load_global()
            self._recorder.close(None)
            return
        with self._interrupts:
            try:
                self._call_start_hooks()
                if not self._is_resumed:
                    self._finish({})  # the initial model, as round 0
                while not progress.is_over(run.settings.max_rounds):
                    self._advance()
                    check()
            except BaseException as error:
                # A signal, a lost process and a mistake end in the same way: what is staged is dropped, so that the
                # checkpoint that close() writes is that of the last committed round.
                failure = cause = self._interrupts.end(error)
                self._federation.rollback()
                # Such as a teacher whose first client was at work: what is still frozen has not travelled yet.
                self._federation.layout.frozen.put_back(self._frozen)
                progress.current_round = progress.finished_round
                with suppress(ConfigurationError):  # replaced parameters cannot be loaded; ``error`` reports them
                    self._federation.load_global()
                if self._attributes:
                    put_plain_attributes(run.user.module, self._attributes, are_all=True)
                self._hooks.call_callbacks("on_exception", cause)
                run.datamodule.users_module.on_exception(cause)
                if cause is not error:
                    raise cause from None
                raise
            finally:
                self._recorder.close(failure)
            self._federation.load_global()
        self._hooks.call("on_train_end")
        self._hooks.call("on_fit_end")
        say_what_came_of_it(run, self._recorder.folder)

    def _open_rows(self) -> None:
        """Open the clients' rows if they lie in a file."""
        rows = self._federation.clients.file_rows
        if rows is not None:
            with self._recorder.disk_told():
                rows.open((self._recorder.folder / run_folder.LAST).with_name(file_rows.NAME), self._run.fabric)

    def _call_start_hooks(self) -> None:
        say_what_to_expect(self._run)
        server = self._federation.server
        with kept_from_start_hooks(self._federation, is_resumed=self._is_resumed):
            self._hooks.call("on_fit_start")
            self._hooks.call("on_train_start")
        # Taken once: whoever writes one of them in a later round finds there what it was made with.
        self._frozen = self._federation.layout.frozen.copies()
        if self._federation.server is not server:  # what the hooks wrote became the initial model
            self._open_rows()
        self._note_attributes()

    def _note_attributes(self) -> None:
        """Note what hooks may change in a round that is broken off, so that a module that is fitted again has it."""
        if self._federation.bench.has_hooks:
            self._attributes = plain_attributes(self._run.user.module)

    def _advance(self) -> None:
        """Run one round."""
        run, federation = self._run, self._federation
        started = time.perf_counter()
        round = self._progress.current_round = self._progress.finished_round + 1
        # Hooks may draw from the global generators; with a seed of its own for each round a resumed run draws the same.
        seed_globals(derive(run.seed, "round", round), run.user.device)
        if round > 1:
            # What a hook wrote between the rounds would be no client's.
            federation.layout.check_trainable(f"a hook before round {round}")
        with kept_from_round_hooks(federation, "on_round_start"):
            self._hooks.call("on_round_start")
        metrics = self._train(round)
        federation.load_global()
        metrics["time/round_seconds"] = time.perf_counter() - started
        self._finish(metrics)

    def _train(self, round: int) -> Metrics:
        """Train the clients, once more if what they write has to travel; the hook before them is called once."""
        federation = self._federation
        put_attributes_back = SharedAttributes(federation).noted() if self._frozen or round == 1 else None
        hooked = federation.layout.frozen.copies()
        try:
            if round == 1 and self._run.settings.check_isolation:
                check_isolation(federation)
            return federation.run_round(round)
        except WrittenParametersError as error:
            # Only training shows which frozen parameters are written, such as a teacher's moving average. They are
            # then buffers, the round is repeated with the longer row, and the one before is saved again with them.
            with beginning_again(federation, error, self._frozen, hooked):
                self._open_rows()
                self._recorder.write_again()
            if put_attributes_back is not None:
                put_attributes_back()
            return self._train(round)

    def _evaluate(self, round: int) -> Evaluation:
        started = time.perf_counter()
        if round:
            with self._run.around_evaluation.calling("on_validation_model_zero_grad"):
                self._hooks.call_module("on_validation_model_zero_grad")
        evaluation = evaluate_with_hooks(self._run, self._run.splits, round, "validation")
        with self._run.evaluator.evaluating("validation"), self._run.around_evaluation.calling("on_validation_end"):
            self._hooks.call_module("on_validation_end")
        with self._run.around_evaluation.calling("on_validation_model_train"):
            self._hooks.call_module("on_validation_model_train")
        if not (round or evaluation.metrics):
            say_that_nothing_is_measured(self._run)
        evaluation.metrics["time/eval_seconds"] = time.perf_counter() - started
        return evaluation

    def _finish(self, metrics: Metrics) -> None:
        """Evaluate and commit the round, call the hooks that see its numbers, and record it."""
        run, federation, progress = self._run, self._federation, self._progress
        round, every = progress.current_round, run.settings.eval_every_n_rounds
        is_evaluated = bool(every) and (round % every == 0 or round == run.settings.max_rounds)
        # A round whose last hooks were broken off is not finished: a resumed run repeats it with all of them.
        with federation.restored_on_error(progress), ExitStack() as noting:
            if federation.bench.has_hooks:
                noting.enter_context(run.user.noting_attributes())
            progress.evaluation = evaluation = self._evaluate(round) if is_evaluated else Evaluation()
            metrics |= evaluation.metrics
            progress.publish(metrics)
            federation.schedule.check(metrics)
            if round:
                federation.commit(round, metrics)
            run.user.best_metrics.commit()
            progress.finished_round = round
            collector = run.user.start_collecting()
            seed_globals(derive(run.seed, "round end", round), run.user.device)
            if round:
                with kept_from_round_hooks(federation, "on_round_end"):
                    self._hooks.call("on_round_end")
                federation.server.commit()
            metrics |= collector.logged()
            progress.publish(metrics)
            with self._run.around_evaluation.calling("on_validation_end"):
                self._call_validation_end(metrics, bool(evaluation.metrics))
            self._run.around_evaluation.end()
            noting.close()
            # Last, as under Lightning: what all other hooks have set belongs to a checkpoint.
            self._call_validation_end(metrics, bool(evaluation.metrics), are_checkpoints=True)
        self._note_attributes()
        self._recorder.record(round, metrics, federation.server.records if round else [], evaluation)

    def _call_validation_end(self, metrics: Metrics, is_evaluated: bool, *, are_checkpoints: bool = False) -> None:
        """Call ``on_validation_end`` after each evaluated round; if a callback monitors a name, when that was logged.

        Raises:
            ConfigurationError: A monitored name was not logged by the latest time at which it can be.
        """
        logged = self._progress.callback_metrics
        for callback in (one for one in self._hooks.callbacks if isinstance(one, Checkpoint) == are_checkpoints):
            monitor = getattr(callback, "monitor", None)
            if monitor is None:
                if is_evaluated or (are_checkpoints and not self._run.settings.eval_every_n_rounds):
                    self._hooks.call_callback(callback, "on_validation_end")
                continue
            name = name_in_log(str(monitor), logged)
            if name not in logged:
                refuse_if_nothing_logs(self._run, callback, str(monitor), is_evaluated=is_evaluated)
            elif name in metrics:
                with readable_as(monitor, name, logged):
                    self._hooks.call_callback(callback, "on_validation_end")
        fabric, progress = self._run.fabric, self._progress
        if fabric.world_size > 1:  # a callback may look at the clock of its own process, and all must stop together
            progress.should_stop = any(gather_objects(fabric, progress.should_stop))
