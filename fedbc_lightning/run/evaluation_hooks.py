"""The hooks around an evaluation, once for all models and clients that it evaluates, with z in the module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.evaluation.evaluator import Evaluation
from fedbc_lightning.federation.hook_writes import not_kept_from_evaluation_hooks

if TYPE_CHECKING:
    from fedbc_lightning.module.hooks import Hooks
    from fedbc_lightning.trainer.trainer import FederatedTrainer

NEVER_CALLED = ("on_sanity_check_start", "on_sanity_check_end")


def evaluate_with_hooks(
    trainer: FederatedTrainer, splits: Sequence[str], round: int, name: Literal["validation", "test"]
) -> Evaluation:
    """Evaluate the staged models; what callbacks log at its end is among the metrics.

    The end hooks ``on_<name>_end`` and ``on_<name>_model_train`` are the caller's, who publishes the metrics before.

    Args:
        trainer: Set up.
        splits: ``"test"``, ``"val"``: those that exist.
        round: The current one.
        name: Whose hooks.
    """
    hooks, evaluating = trainer.hooks, partial(trainer.evaluator.evaluating, name, round)
    # What a hook does with self.optimizers() is done to z: not by the moments of the client that came last.
    trainer.federation.engine.optimizer.forget()
    start_hooks = (f"on_{name}_model_eval", f"on_{name}_start", f"on_{name}_epoch_start")
    with evaluating(), not_kept_from_evaluation_hooks(trainer, *start_hooks):
        hooks.call_module(f"on_{name}_model_eval")
        hooks.call(f"on_{name}_start")
        hooks.call_callbacks(f"on_{name}_epoch_start")
    evaluation = trainer.evaluate(list(splits), round)
    with evaluating(), not_kept_from_evaluation_hooks(trainer, f"on_{name}_epoch_end"):
        collector = trainer.user.start_collecting()
        hooks.call_callbacks(f"on_{name}_epoch_end")
        evaluation.metrics |= collector.logged()
    return evaluation


def say_which_hooks_are_never_called(hooks: Hooks) -> None:
    """Name the overridden hooks that have no place in federated training, in one line."""
    found = [name for name in NEVER_CALLED if hooks.listens(name)]
    if found:
        rank_zero_info(f"{' and '.join(found)}: never called, for a federated run has no sanity check.")
