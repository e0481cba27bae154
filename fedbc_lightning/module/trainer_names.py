"""The names of the trainer that hooks of module, callbacks and data module are given: what each means, and when.

One table: the trainer looks names up in it, ``docs/make_settings.py`` writes it down for readers, and
``tests/walkers/protocol.py`` holds each difference from ``lightning.Trainer`` against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import rank_zero_only

from fedbc_lightning.core.lightning_names import both

PHASES = ("setup", "fit start", "epoch start", "step", "epoch end", "validation", "fit end")
"""Times at which a name is read: ``setup``, ``on_fit_start`` with ``on_train_start``, the start of a local epoch, its
steps, its end, an evaluation, and ``on_train_end`` with ``on_fit_end``."""

STAGES = ("training", "validating", "testing", "predicting")


class Name(NamedTuple):
    """What a name means.

    Attributes:
        meaning: What it is, for readers.
        value: Its value until the trainer is told another one.
        compute: Function of the trainer that finds its value; what it reads counts as read by the user.
        differs: Phases in which ``lightning.Trainer`` has another value than the trainer of a run of one client, and
            why.
    """

    meaning: str
    value: Any = None
    compute: Callable[[Any], Any] | None = None
    differs: Mapping[str, str] = {}


def _in(phases: str, why: str) -> dict[str, str]:
    return dict.fromkeys(filter(None, phases.split(", ")), why)


def _number_of(name: str) -> Any:
    return lambda trainer: [len(each) for each in (getattr(trainer, name),) if each is not None]


def _of_run(trainer: Any, name: str) -> Any:
    return getattr(trainer.view, name, None)


_ALWAYS = ", ".join(PHASES)
_IN_TRAINING = "fit start, epoch start, step, epoch end, fit end"
_OWN_FOLDER = "each run has a folder of its own, with or without a logger"
_NEW_OPTIMIZER = "the optimizer of a client ends with the client"
_NO_FOLDER = "a run gets its folder after all of its settings are checked"
_BY_ROUNDS = "hooks outside of clients count rounds"
_KNOWN_EARLY = "known here before any loader is made"
_OF_ROUNDS = "an evaluation belongs to a round, not to an epoch"
_METRICS = "outside of clients: the metrics of rounds, by their names in metrics.csv"
_NO_SETTING = "Lightning's default; federated training has no such setting"

NAMES: dict[str, Name] = {
    "max_epochs": Name("local epochs of a client's round; of all rounds with `local_schedules: continue`"),
    "max_steps": Name("`local_steps` of a round (or of all rounds), else -1"),
    "current_epoch": Name(
        "number of the local epoch; outside of clients, of the round",
        None,
        lambda trainer: trainer.counted("current_epoch"),
        _in("fit end", _BY_ROUNDS),
    ),
    "global_step": Name(
        "local steps so far; outside of clients, the number of the round",
        None,
        lambda trainer: trainer.counted("global_step"),
        _in("validation, fit end", _BY_ROUNDS),
    ),
    "num_training_batches": Name(
        "batches of a client's epoch; outside of clients, those of the largest client",
        None,
        None,
        _in("setup, fit start", _KNOWN_EARLY),
    ),
    "estimated_stepping_batches": Name(
        "a client's steps in all of `max_epochs`; outside of clients, the largest client's",
        differs=_in("setup", "None in `setup` of the data module, whose clients are not known before"),
    ),
    "train_dataloader": Name(
        "loader of the client that trains; outside of clients, of the largest client",
        None,
        lambda trainer: trainer.loader_of_client(),
        _in("setup, fit start", _KNOWN_EARLY),
    ),
    "is_last_batch": Name(
        "whether the batch is the last of its local epoch",
        differs={
            **_in("validation, fit end", "False outside of clients"),
            "epoch start": "False, where Lightning still tells about the epoch before",
            "epoch end": "False if `on_train_batch_start` has ended the epoch",
        },
    ),
    "should_stop": Name(
        "set by the module in a client: that client stops at once; by a callback, or outside of clients: the run ends "
        "after the round",
        differs={
            **_in("step, epoch end", "a callback reads whether the run ends"),
            **_in("validation, fit end", "a client has ended, not the run"),
        },
    ),
    "callback_metrics": Name(
        f"in a client: what it has logged, by Lightning's names, without validation's; {_METRICS}",
        None,
        lambda trainer: trainer.metrics("callback"),
        _in("validation, fit end", _METRICS),
    ),
    "logged_metrics": Name(
        "as `callback_metrics`, without `logger=False`",
        None,
        lambda trainer: trainer.metrics("log"),
        _in("validation, fit end", _METRICS),
    ),
    "progress_bar_metrics": Name(
        "as `callback_metrics`, in a client only what has `prog_bar=True`, as numbers",
        None,
        lambda trainer: trainer.metrics("pbar"),
        _in("validation, fit end", _METRICS),
    ),
    "optimizers": Name("the client's optimizer in a list", [], differs=_in("validation, fit end", _NEW_OPTIMIZER)),
    "lr_scheduler_configs": Name(
        "its schedulers of interval `step` and `epoch`", [], differs=_in("validation, fit end", _NEW_OPTIMIZER)
    ),
    "lightning_module": Name("the module"),
    "precision_plugin": Name("that of the strategy", compute=lambda trainer: trainer.strategy.precision_plugin),
    "model": Name("the module", compute=lambda trainer: trainer.lightning_module),
    **{
        name: Name(meaning, None, partial(_of_run, name=name), _in("setup", _NO_FOLDER))
        for name, meaning in (("logger", "the first logger, or None"), ("loggers", "the run's loggers"))
    },
    "log_dir": Name(
        "the run folder", None, partial(_of_run, name="log_dir"), {**_in(_ALWAYS, _OWN_FOLDER), "setup": _NO_FOLDER}
    ),
    "datamodule": Name("the clients' data; its `train_dataloader()` is `trainer.train_dataloader` in a run"),
    "callbacks": Name("the callbacks of the run, without those that are left out"),
    "training": Name("whether the verb is `fit`, and no model is evaluated"),
    **dict.fromkeys(STAGES[1:], Name("whether this process does that now", False)),
    "evaluating": Name(
        "`validating or testing`", compute=lambda trainer: trainer.stage in ("validating", "testing")
    ),
    "sanity_checking": Name("False: there is no sanity check", False),
    "state": Name("the verb that runs, and the stage"),
    **{
        f"{stage}_dataloaders": Name(
            "loader of the evaluation, inside of it",
            differs=_in(_IN_TRAINING if stage == "val" else "", _OF_ROUNDS),
        )
        for stage in ("val", "test", "predict")
    },
    **{
        f"num_{stage}_batches": Name(
            "number of its batches, in a list",
            None,
            _number_of(f"{stage}_dataloaders"),
            _in(_IN_TRAINING if stage == "val" else "", _OF_ROUNDS),
        )
        for stage in ("val", "test", "predict")
    },
    "accumulate_grad_batches": Name("the setting"),
    "gradient_clip_val": Name("the setting"),
    "gradient_clip_algorithm": Name("the setting"),
    "precision": Name("the setting"),
    "default_root_dir": Name("the setting"),
    "strategy": Name("one device; `barrier` and `broadcast` join the processes in the hooks of rounds and of the run"),
    "world_size": Name("1: each process trains clients of its own", 1),
    **dict.fromkeys(("num_nodes", "num_devices"), Name("1, as `world_size`", 1)),
    **dict.fromkeys(("global_rank", "local_rank", "is_global_zero"), Name("those of the process")),
    "node_rank": Name("0", 0),
    "early_stopping_callbacks": Name(
        "the EarlyStopping callbacks",
        None,
        lambda trainer: [each for each in trainer.peek(["callbacks"])[0] if isinstance(each, both(EarlyStopping))],
    ),
    "early_stopping_callback": Name(
        "the first of them, or None", compute=lambda trainer: next(iter(trainer.early_stopping_callbacks), None)
    ),
    "print": Name("prints in process 0", rank_zero_only(print)),
    "profiler": Name("a profiler that measures nothing", PassThroughProfiler()),
    **dict.fromkeys(
        ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
        Name(_NO_SETTING, 1.0),
    ),
    "val_check_interval": Name(
        "None: evaluations come after rounds, by `eval_every_n_rounds`",
        differs=_in(_ALWAYS, "EarlyStopping reads from it that it is to check after evaluations"),
    ),
    "checkpoint_callbacks": Name(_NO_SETTING, []),
    "num_sanity_val_batches": Name(
        "an empty list", [], differs=_in("fit start, epoch start, step, epoch end, validation, fit end", _OF_ROUNDS)
    ),
    **dict.fromkeys(
        ("barebones", "fast_dev_run", "interrupted", "received_sigterm"), Name(_NO_SETTING, False)
    ),
    **dict.fromkeys(
        ("min_steps", "checkpoint_callback", "ckpt_path", "scaler",
         "distributed_sampler_kwargs", "progress_bar_callback"), Name(_NO_SETTING)
    ),
    "val_check_batch": Name("None", differs=_in(_ALWAYS, _OF_ROUNDS)),
    "enable_validation": Name("True", True),
    "enable_autolog_hparams": Name(_NO_SETTING, True),
    **dict.fromkeys(("min_epochs", "num_sanity_val_steps", "reload_dataloaders_every_n_epochs"), Name(_NO_SETTING, 0)),
    "overfit_batches": Name(_NO_SETTING, 0.0),
    "log_every_n_steps": Name(_NO_SETTING, 50),
    "check_val_every_n_epoch": Name(_NO_SETTING, 1),
}  # fmt: skip

MISSING = {
    "save_checkpoint": "callbacks.RoundCheckpoint writes the best round, and last.ckpt is always there",
    "accelerator": "strategy.root_device is the device",
    **dict.fromkeys(("device_ids", "init_module"), "self.device and precision say where and how"),
    **dict.fromkeys(("fit", "validate", "test", "predict"), "no verb runs inside of another one"),
    **dict.fromkeys(
        ("fit_loop", "validate_loop", "test_loop", "predict_loop"),
        "current_epoch, global_step, max_epochs and num_training_batches say where a client is",
    ),
}
"""Names of ``lightning.Trainer`` that have no meaning here, and what serves instead."""

HOOKS: dict[str, str] = dict.fromkeys(
    ("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_start", "on_validation_epoch_start",
     "on_validation_batch_start", "validation_step", "on_validation_batch_end", "on_validation_epoch_end",
     "on_validation_end", "on_validation_model_train"),
    "evaluations come before round 1 and after rounds, for each model and client that is evaluated",
)  # fmt: skip
"""Hooks that come at another time than under ``lightning.Trainer``, and why."""
