"""Calls the hooks around an evaluation once for all its models and clients, with z in the module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.evaluation.summary import Evaluation
from fedbc_lightning.federation.hook_writes import not_kept_from_evaluation_hooks
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.module.monitors import how_to_validate
from fedbc_lightning.run.run import Run

NEVER_CALLED = ("on_sanity_check_start", "on_sanity_check_end")


def evaluate_with_hooks(run: Run, splits: Sequence[str], round: int, name: Literal["validation", "test"]) -> Evaluation:
    """Evaluate the staged models and call the hooks around it; values that callbacks log are among the metrics.

    The caller publishes the metrics and then calls the hooks ``on_<name>_end`` and ``on_<name>_model_train``.

    Args:
        run: Run that has been set up.
        splits: Splits to evaluate that exist, of ``"test"`` and ``"val"``.
        round: Number of the current round.
        name: Kind of the hooks, ``"validation"`` or ``"test"``.
    """
    hooks, evaluating = run.hooks, partial(run.evaluator.evaluating, name, round)
    not_kept = partial(not_kept_from_evaluation_hooks, run.federation, run.evaluator)
    # A step that a hook makes with self.optimizers() changes z; it must not use the moments of the last client.
    run.federation.bench.optimizer.forget()
    start_hooks = (f"on_{name}_model_eval", f"on_{name}_start", f"on_{name}_epoch_start")
    with evaluating(), not_kept(*start_hooks):
        hooks.call_module(f"on_{name}_model_eval")
        hooks.call(f"on_{name}_start")
        hooks.call_callbacks(f"on_{name}_epoch_start")
    evaluation = run.evaluate(list(splits), round)
    with evaluating(), not_kept(f"on_{name}_epoch_end"):
        collector = run.user.start_collecting()
        hooks.call_callbacks(f"on_{name}_epoch_end")
        evaluation.metrics |= collector.logged()
    return evaluation


def say_which_hooks_are_never_called(hooks: Hooks) -> None:
    """Print in one line the overridden hooks that a federated run never calls."""
    found = [name for name in NEVER_CALLED if hooks.listens(name)]
    if found:
        rank_zero_info(f"{' and '.join(found)}: never called, for a federated run has no sanity check.")


def evaluate_once(run: Run) -> dict[str, float]:
    """Evaluate the models of a run that was set up for ``validate`` or ``test``, and return the metrics by name.

    Raises:
        ConfigurationError: There is no data to evaluate on.
    """
    is_test = run.fn == TrainerFn.TESTING
    split, name = ("test", "test") if is_test else ("val", "validation")
    if not run.has_split(split):
        raise ConfigurationError(
            "data: there is no test data to evaluate on."
            if is_test else
            f"data: there is no validation data; {how_to_validate(run.datamodule, is_of_run=run.is_trained)}."
        )  # fmt: skip
    progress = run.progress
    run.shim.set(current_round=progress.current_round)
    run.hooks.call_callbacks("setup", run.fn.value)
    progress.evaluation = evaluate_with_hooks(run, [split], progress.current_round, "test" if is_test else "validation")
    progress.callback_metrics = {}
    progress.publish(progress.evaluation.metrics)
    run.hooks.call(f"on_{name}_end")
    run.hooks.call_module(f"on_{name}_model_train")
    return progress.evaluation.metrics
