"""Under which name a run logs what callbacks and schedulers monitor, and whether it can come at all."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.twins import overrides
from fedbc_lightning.module.adapter import step_stage
from fedbc_lightning.module.collector import plain_name

if TYPE_CHECKING:
    from fedbc_lightning.trainer.trainer import FederatedTrainer

OF_VALIDATION = tuple(f"{stage}{separator}" for stage in ("val", "valid", "validation") for separator in "_/")
"""How names begin that modules log in ``validation_step``."""

OF_TEST = ("test_", "test/")
"""How names begin that modules log in ``test_step``."""

OF_EVALUATION = ("global/", "local/", "fairness/")
"""How the names begin that evaluation gives to the log of a run."""


def name_in_log(monitor: str, metrics: Collection[str]) -> str:
    """The name under which a run logs what a callback or scheduler monitors: that of the global model.

    Args:
        monitor: The name that a callback or scheduler was given.
        metrics: The names that are logged; one that is logged as it was given is meant as it was given.

    Example:
        >>> name_in_log("val_loss", ["global/val_loss"]), name_in_log("train_loss", ["train_loss"])
        ('global/val_loss', 'train_loss')
    """
    if monitor not in metrics:
        for split, prefixes in (("val", OF_VALIDATION), ("test", OF_TEST)):
            if monitor.startswith(prefixes):
                return f"global/{split}_{plain_name(monitor)}"
    return monitor


@contextmanager
def readable_as(monitor: str, name: str, metrics: dict[str, Tensor]) -> Iterator[None]:
    """Let a callback find under the name that it monitors what the run logs under ``name``."""
    if monitor == name:
        yield
        return
    metrics[monitor] = metrics[name]
    try:
        yield
    finally:
        metrics.pop(monitor, None)


def logged_only(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The metrics without what :func:`readable_as` added, which is the same tensor under a second name."""
    return {
        name: value
        for name, value in metrics.items()
        if name == name_in_log(name, ()) or metrics.get(name_in_log(name, ())) is not value
    }


def problem_of(trainer: FederatedTrainer, monitor: str) -> str | None:
    """Why no evaluation of a run will log a metric, and what to do; None: nothing is known against it."""
    name = name_in_log(monitor, ())
    split = next((split for split in ("val", "test") if f"/{split}_" in name), None)
    if split is not None and not trainer.has_split(split):
        return "there is no test data" if split == "test" else (
            f"there is no validation data; {how_to_validate(trainer.datamodule)}"
        )  # fmt: skip
    if not trainer.eval_every_n_rounds:
        return "trainer.eval_every_n_rounds is 0; set it to 1 or more"
    if split is not None and step_stage(trainer.user.module, split) is None:
        return "the module has neither validation_step nor test_step; add one"
    return None


def refuse_if_nothing_logs(trainer: FederatedTrainer, callback: Callback, monitor: str, *, is_evaluated: bool) -> None:
    """Raise if what a callback monitors was not logged when it should have been at the latest.

    A metric of an evaluation should be there after that of round 0, which comes before training, unless code of the
    user's may still log the bare name at the end of a round; any other name after the first evaluated round.

    Args:
        trainer: After a round that did not log it, nor any round before.
        callback: The callback, for the message.
        monitor: What it monitors.
        is_evaluated: Whether the round was evaluated.

    Raises:
        ConfigurationError: It was not logged, with the reason where one is known.
    """
    is_of_evaluation = name_in_log(monitor, ()).startswith(OF_EVALUATION)
    is_late = bool(trainer.current_round) and (is_evaluated or not trainer.eval_every_n_rounds)
    if is_of_evaluation and not is_late:
        is_due = is_evaluated or not trainer.eval_every_n_rounds
        is_late = is_due and (monitor.startswith(OF_EVALUATION) or not _may_be_logged_by_users_code(trainer))
    if is_late:
        problem = problem_of(trainer, monitor) if is_of_evaluation else None
        there = f"which nothing logs; there is: {', '.join(sorted(trainer.callback_metrics))}."
        why = there if problem is None else f"which evaluation logs, but {problem}."
        raise ConfigurationError(f"trainer.callbacks: {type(callback).__name__} monitors '{monitor}', {why}")


def _may_be_logged_by_users_code(trainer: FederatedTrainer) -> bool:
    """Whether hooks at the end of a round, or parts of the server, are not our own, and may log any name."""
    listeners = [callback for callback in trainer.hooks.callbacks if overrides(callback, "on_round_end", Callback)]
    writers = [*listeners, *trainer.federation.server_parts]
    return trainer.hooks.listens_itself("on_round_end") or any(
        type(writer).__module__.partition(".")[0] != "fedbc_lightning" for writer in writers
    )


def how_to_validate(datamodule: Any, *, is_of_run: bool = False) -> str:
    """What to do for validation data.

    Args:
        datamodule: The clients' data, which has none.
        is_of_run: Whether the models are those of a run, which was trained on all samples.
    """
    parameters = inspect.signature(type(datamodule)).parameters.values()
    is_argument = any(p.name == "val_fraction" or p.kind is p.VAR_KEYWORD for p in parameters)
    how = "data.val_fraction, e.g. 0.1"
    if not is_argument:
        how = f"val_fraction, e.g. 0.1, in {type(datamodule).__name__}.__init__: super().__init__(val_fraction=0.1)"
    if is_of_run:
        return f"the run was trained without any, and on every sample; use test, or train anew with {how}"
    return f"set {how}"
