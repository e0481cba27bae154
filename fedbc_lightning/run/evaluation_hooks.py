"""Calls the hooks around an evaluation once for all its models and clients, with z in the module."""

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
    """Evaluate the staged models and call the hooks around it; values that callbacks log are among the metrics.

    The caller publishes the metrics and then calls the hooks ``on_<name>_end`` and ``on_<name>_model_train``.

    Args:
        trainer: Trainer that has been set up.
        splits: Splits to evaluate that exist, of ``"test"`` and ``"val"``.
        round: Number of the current round.
        name: Kind of the hooks, ``"validation"`` or ``"test"``.
    """
    hooks, evaluating = trainer.hooks, partial(trainer.evaluator.evaluating, name, round)
    not_kept = partial(not_kept_from_evaluation_hooks, trainer.federation, trainer.evaluator)
    # A step that a hook makes with self.optimizers() changes z; it must not use the moments of the last client.
    trainer.federation.bench.optimizer.forget()
    start_hooks = (f"on_{name}_model_eval", f"on_{name}_start", f"on_{name}_epoch_start")
    with evaluating(), not_kept(*start_hooks):
        hooks.call_module(f"on_{name}_model_eval")
        hooks.call(f"on_{name}_start")
        hooks.call_callbacks(f"on_{name}_epoch_start")
    evaluation = trainer.evaluate(list(splits), round)
    with evaluating(), not_kept(f"on_{name}_epoch_end"):
        collector = trainer.user.start_collecting()
        hooks.call_callbacks(f"on_{name}_epoch_end")
        evaluation.metrics |= collector.logged()
    return evaluation


def say_which_hooks_are_never_called(hooks: Hooks) -> None:
    """Print in one line the overridden hooks that a federated run never calls."""
    found = [name for name in NEVER_CALLED if hooks.listens(name)]
    if found:
        rank_zero_info(f"{' and '.join(found)}: never called, for a federated run has no sanity check.")
