"""What each argument of ``lightning.Trainer`` is here: one table for ``adopt``, for mistakes and for the docs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fedbc_lightning.core.errors import did_you_mean


class Place(NamedTuple):
    """What a user does here with an argument of ``lightning.Trainer``.

    Attributes:
        use: What takes its place here; None: the argument is kept; empty: nothing takes its place.
        note: Why, or what is different here; empty: nothing is.
    """

    use: str | None
    note: str


LIGHTNING_ARGUMENTS = {
    "accelerator": Place(None, ""),
    "strategy": Place(
        None,
        "It says only how processes are started (`auto`, `ddp`, `ddp_spawn`, `ddp_fork`, `ddp_notebook`); each of them "
        "trains whole clients, so strategies that split or synchronise a model are refused.",
    ),
    "devices": Place(None, "Each process trains whole clients, so the numbers do not depend on how many there are."),
    "num_nodes": Place(None, "Each process trains whole clients, so the numbers do not depend on how many there are."),
    "precision": Place(None, "Short forms are written out (`16-mixed` for 16); Transformer Engine is refused."),
    "logger": Place(None, "A step of a logger is a round; TensorBoard is the default, and tables are always written."),
    "callbacks": Place(None, "Callbacks that need parts of `lightning.Trainer` have another place, see below."),
    "fast_dev_run": Place("max_rounds: 1 and local_steps: 1", "They try one step of every client."),
    "max_epochs": Place(
        "max_rounds and local_epochs", "Their product is the number of epochs that a client of every round makes."
    ),
    "min_epochs": Place("patience of EarlyStopping", "It counts evaluated rounds, and nothing else ends a run early."),
    "max_steps": Place("max_rounds and local_steps", "Their product is the number of a client's optimizer steps."),
    "min_steps": Place("patience of EarlyStopping", "It counts evaluated rounds, and nothing else ends a run early."),
    "max_time": Place("callbacks: Timer", "It ends the run after a round."),
    "limit_train_batches": Place("local_steps", "A client then takes that many steps in a round, whatever it holds."),
    "limit_val_batches": Place("eval_clients", "It bounds the clients that are evaluated; their data are read whole."),
    "limit_test_batches": Place("eval_clients", "It bounds the clients that are evaluated; their data are read whole."),
    "limit_predict_batches": Place("dataloaders of trainer.predict", "They may hold as little as you like."),
    "overfit_batches": Place("max_rounds and a small data set", "Validation data are never replaced by training data."),
    "val_check_interval": Place("eval_every_n_rounds", "There is nothing to evaluate within a round."),
    "check_val_every_n_epoch": Place("eval_every_n_rounds", "The global model exists after a round only."),
    "num_sanity_val_steps": Place("", "The initial model is evaluated whole, as round 0, before training."),
    "log_every_n_steps": Place("", "What `self.log` gets is joined over the steps of a round; each round is logged."),
    "enable_checkpointing": Place(None, "A run resumes from `last.ckpt`; RoundCheckpoint keeps the best round."),
    "enable_progress_bar": Place(None, ""),
    "enable_model_summary": Place("callbacks: ModelSummary", "No summary is printed without it."),
    "accumulate_grad_batches": Place(None, ""),
    "gradient_clip_val": Place(None, "The gradient that is clipped has the terms of the method in it."),
    "gradient_clip_algorithm": Place(None, ""),
    "deterministic": Place(None, "cuDNN takes its deterministic algorithms by default; False leaves torch's settings."),
    "benchmark": Place(
        "deterministic: false", "Then set `torch.backends.cudnn.benchmark = True` where your module is defined."
    ),
    "inference_mode": Place("", "Evaluation runs under `torch.no_grad`."),
    "use_distributed_sampler": Place("", "Each process trains whole clients, and a client's samples stay together."),
    "profiler": Place("fedbc-cli plan", "It tells where the time goes; a profiler of your own can surround `fit`."),
    "detect_anomaly": Place("torch.autograd.set_detect_anomaly(True)", "Call it where your module is defined."),
    "barebones": Place("logger, enable_checkpointing and enable_progress_bar: false", "They switch off one by one."),
    "plugins": Place("precision, accelerator and strategy", "Environments of clusters are found by themselves."),
    "sync_batchnorm": Place("buffers", "A client trains in one process; the server joins them as it says."),
    "reload_dataloaders_every_n_epochs": Place("", "Clients have data of their own, which are dealt once."),
    "default_root_dir": Place(None, "The default is `runs`; below it stand `<name>/<method>-<seed>`."),
    "enable_autolog_hparams": Place("", "Hyper-parameters are always logged, so that runs can be told apart."),
    "model_registry": Place("", "Models are not uploaded; `fedbc-cli export` writes them to files."),
}  # fmt: skip
"""Every argument of ``lightning.Trainer`` of Lightning 2.6."""


def advice(name: str, known: Iterable[str] = ()) -> str:
    """Say what to do here with an argument of ``lightning.Trainer``, or with one that is no better known.

    Args:
        name: The argument.
        known: Those that there are here, of which one may have been meant.

    Example:
        >>> advice("val_check_interval")
        'use eval_every_n_rounds. There is nothing to evaluate within a round.'
        >>> advice("accelerator")
        'keep it.'
    """
    if name not in LIGHTNING_ARGUMENTS:
        return did_you_mean(name, known, "leave it out.")
    use, note = LIGHTNING_ARGUMENTS[name]
    action = "keep it" if use is None else f"use {use}" if use else "leave it out"
    return f"{action}. {note}".strip()
