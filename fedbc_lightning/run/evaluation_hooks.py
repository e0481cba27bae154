"""Calls the hooks around an evaluation, and refuses to monitor what no evaluation will log."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.metric_names import Metrics, is_of_clients, measured
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.evaluation.summary import Evaluation
from fedbc_lightning.module.adapter import step_stage
from fedbc_lightning.module.monitors import is_of_evaluation, name_in_log
from fedbc_lightning.run.run import Run

# data.val_fraction is an argument of every shipped data module; a class by hand need not have it
HOW_TO_VALIDATE = "set data.val_fraction, e.g. 0.1, or pass val_fraction=0.1 to super().__init__ in a class of your own"


def evaluate_with_hooks(run: Run, splits: Sequence[str], round: int, name: Literal["validation", "test"]) -> Evaluation:
    """Evaluate the staged models and call the hooks around it; values that callbacks log are among the metrics.

    The caller publishes the metrics and then calls the hooks ``on_<name>_end`` and ``on_<name>_model_train``.

    Args:
        run: Run that has been set up.
        splits: Splits to evaluate that exist, of ``"test"`` and ``"val"``.
        round: Number of the current round.
        name: Kind of the hooks, ``"validation"`` or ``"test"``.
    """
    hooks, evaluating = run.hooks, partial(run.evaluator.evaluating, name)
    calling = run.around_evaluation.calling
    # A step that a hook makes with self.optimizers() changes z; it must not use the moments of the last client.
    run.federation.bench.optimizer.forget()
    start_hooks = (f"on_{name}_model_eval", f"on_{name}_start", f"on_{name}_epoch_start")
    with evaluating(), calling(*start_hooks):
        hooks.call_module(f"on_{name}_model_eval")
        hooks.call(f"on_{name}_start")
        hooks.call_callbacks(f"on_{name}_epoch_start")
    evaluation = run.evaluate(list(splits), round)
    with evaluating(), calling(f"on_{name}_epoch_end"):
        collector = run.user.start_collecting()
        hooks.call_callbacks(f"on_{name}_epoch_end")
        evaluation.metrics |= collector.logged()
    return evaluation


def evaluate_once(run: Run) -> Metrics:
    """Evaluate the models of a run that was set up for ``validate`` or ``test``, and return the metrics by name.

    Raises:
        ConfigurationError: There is no data to evaluate on.
    """
    is_test = run.fn == TrainerFn.TESTING
    split, name = ("test", "test") if is_test else ("val", "validation")
    if not run.has_split(split):
        missing = "test data to evaluate on" if is_test else f"validation data; {HOW_TO_VALIDATE} before training"
        raise ConfigurationError(f"data: there is no {missing}.")
    progress = run.progress
    progress.evaluation = evaluate_with_hooks(run, [split], progress.current_round, "test" if is_test else "validation")
    progress.callback_metrics = {}
    progress.publish(progress.evaluation.metrics)
    with run.around_evaluation.calling(f"on_{name}_end"):
        run.hooks.call(f"on_{name}_end")
    run.around_evaluation.end()
    run.hooks.call_module(f"on_{name}_model_train")
    return progress.evaluation.metrics


def check_what_schedulers_monitor(run: Run) -> None:
    """Raise, before training, if nothing will be logged of what a scheduler of the server monitors.

    Raises:
        ConfigurationError: No data to evaluate on, no evaluation, or no step that runs on them.
    """
    for name in run.federation.schedule.monitored:
        problem = problem_of(run, name)
        if problem:
            raise ConfigurationError(f"model: a scheduler monitors '{name}', which evaluation logs, but {problem}.")


def problem_of(run: Run, monitor: str) -> str | None:
    """Why no evaluation of a run will log a metric, and what to do; None: nothing is known against it."""
    # The order is that in which a user would ask: data, then how often, then which clients, then the module's step.
    name = name_in_log(monitor, ())
    found = measured(name)
    split = None if found is None else found.split
    if split is not None and split not in run.splits:
        no_test = "there is no test data, or trainer.eval_test is false, as while a study is tuned"
        return no_test if split == "test" else f"there is no validation data; {HOW_TO_VALIDATE}"
    if not run.settings.eval_every_n_rounds:
        return "trainer.eval_every_n_rounds is 0; set it to 1 or more"
    if not run.evaluator.client_ids and is_of_clients(name):
        return "trainer.eval_clients is 0, so that no client is evaluated; set it to 1 or more, all or null"
    if split is not None and step_stage(run.user.module, split) is None:
        return "the module has neither validation_step nor test_step; add one"
    return None


def refuse_if_nothing_logs(run: Run, callback: Callback, monitor: str, *, is_evaluated: bool) -> None:
    """Raise if what a callback monitors was not logged when it should have been at the latest.

    A metric of an evaluation should be there after that of round 0, which comes before training, unless code of the
    user's may still log the bare name at the end of a round; any other name after the first evaluated round.

    Args:
        run: After a round that did not log it, nor any round before.
        callback: The callback, for the message.
        monitor: What it monitors.
        is_evaluated: Whether the round was evaluated.

    Raises:
        ConfigurationError: It was not logged, with the reason where one is known.
    """
    if not is_evaluated and run.settings.eval_every_n_rounds:
        return
    is_evaluations = is_of_evaluation(monitor)
    if not run.progress.current_round and not (is_evaluations and name_in_log(monitor, ()) == monitor):
        # Hooks at the end of a round and parts of the server that are not our own may still log any name.
        listeners = [one for one in run.hooks.callbacks if overrides(one, "on_round_end", Callback)]
        is_own = overrides(run.user.module, "on_round_end", LightningModule)
        is_users = is_own or not all(map(is_ours, [*listeners, *run.federation.server_parts]))
        if is_users or not is_evaluations:
            return
    problem = problem_of(run, monitor) if is_evaluations else None
    there = f"which nothing logs; there is: {', '.join(sorted(run.progress.callback_metrics))}."
    why = there if problem is None else f"which evaluation logs, but {problem}."
    raise ConfigurationError(f"trainer.callbacks: {type(callback).__name__} monitors '{monitor}', {why}")
