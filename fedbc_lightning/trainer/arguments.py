"""Checks the arguments of the trainer before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
from lightning.pytorch.core.hooks import DataHooks

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import AnyCallback, AnyDataModule, both, overrides
from fedbc_lightning.core.private_lightning import stops_after_epochs
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.federation.coding import Codecs
from fedbc_lightning.federation.privacy import Privacy
from fedbc_lightning.federation.system import System

_AT_LEAST = {
    "max_rounds": 0, "local_epochs": 1, "local_steps": 1, "num_nodes": 1, "eval_every_n_rounds": 0,
    "heldout_finetune_steps": 0, "histogram_every_n_rounds": 0,
    "accumulate_grad_batches": 1, "checkpoint_every_n_rounds": 1, "gradient_clip_val": 0,
}  # fmt: skip


_REFUSED_CALLBACKS: dict[type[Callback], str] = {
    ModelCheckpoint: (
        "saves lightning.Trainer's state, not the server's and clients'; use "
        "fedbc_lightning.callbacks.RoundCheckpoint (last.ckpt is written without any callback)."
    ),
    LearningRateMonitor: "reads lightning.Trainer's optimizers; log the rate in training_step with self.log.",
    ProgressBar: "counts lightning.Trainer's batches; RoundProgressBar is there already.",
    GradientAccumulationScheduler: "changes lightning.Trainer; use trainer.accumulate_grad_batches.",
    StochasticWeightAveraging: "averages over epochs of one model; the server averages here.",
    WeightAveraging: "keeps a copy of one model; the server averages here.",
    OnExceptionCheckpoint: "is not needed: last.ckpt is written on every exception.",
    LearningRateFinder: "tries rates on one model; compare them by a study, fedbc-cli compare.",
    BatchSizeFinder: "tries sizes on one model; give the size to the data, as batch_size.",
    DeviceStatsMonitor: "reads lightning.Trainer's devices; fedbc-cli plan tells the memory of a run.",
    ThroughputMonitor: "counts lightning.Trainer's batches; time/round_seconds is logged by itself.",
    ModelPruning: "puts other parameters in the module's place; prune in the module's __init__.",
    BaseFinetuning: "freezes and thaws during training; vectors are fixed by then. Freeze in the module's __init__.",
}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Check the constructor arguments of FederatedTrainer, all at once.

    Args:
        arguments: Map from the names of the arguments to their values.

    Raises:
        ConfigurationError: Some values are impossible; the message names all of them.
    """
    integers = [name for name in _AT_LEAST if name != "gradient_clip_val" and type(arguments[name]) is not int]
    needed = ("max_rounds", "num_nodes", "eval_every_n_rounds", "heldout_finetune_steps", "histogram_every_n_rounds",
              "accumulate_grad_batches")  # fmt: skip
    wrong = [
        f"trainer.{name}: got {arguments[name]}; it must be a whole number"
        for name in integers
        if arguments[name] is not None or name in needed
    ]
    if wrong:
        raise ConfigurationError("; ".join(wrong) + ".")
    wrong = [
        f"trainer.{name}: got {arguments[name]}; it must be at least {bound}"
        for name, bound in _AT_LEAST.items()
        if arguments[name] is not None and not arguments[name] >= bound
    ]
    if arguments["local_epochs"] is not None and arguments["local_steps"] is not None:
        wrong.append("trainer.local_epochs and trainer.local_steps: give one of them and set the other to null")
    if not str(arguments["name"]) or Path(arguments["name"]).is_absolute() or ".." in Path(arguments["name"]).parts:
        wrong.append(f"trainer.name: got '{arguments['name']}'; give the name of a folder below default_root_dir")
    for name, least in (("clients_per_round", 1), ("eval_clients", 0)):
        value = arguments[name]
        bad_fraction = isinstance(value, bool) or (isinstance(value, float) and not 0 < value <= 1)
        if bad_fraction or (isinstance(value, int) and value < least) or (isinstance(value, str) and value != "all"):
            wrong.append(f"trainer.{name}: got {value}; give a number of clients from {least}, or a fraction in (0, 1]")
    privacy, codec, system = arguments["privacy"], arguments["codec"], arguments["system"]
    for name, kind, how in (
        ("privacy", Privacy, "Privacy(clip, noise_multiplier, delta)"),
        ("codec", Codecs, "Codecs(up=..., down=...)"),
        ("system", System, "System(compute=...)"),
    ):
        if not (arguments[name] is None or isinstance(arguments[name], kind)):
            wrong.append(f"trainer.{name}: got {arguments[name]!r}; give fedbc_lightning.{how}")
    if privacy is not None and arguments["stragglers"] is not None:
        wrong.append(
            "trainer.stragglers: they are drawn among all sampled clients together, so one client changes who else "
            "sends its update, and ε of trainer.privacy does not hold; leave one of the two out"
        )
    if privacy is not None and codec is not None:
        wrong.append(
            "trainer.codec: a coded update, with what earlier messages have lost, is not within the bound of "
            "trainer.privacy any more, on which ε counts; leave one of the two out"
        )
    if privacy is not None and isinstance(system, System) and system.availability is not None:
        wrong.append(
            "trainer.system.availability: the clients who are there are not sampled with the probability on which ε of "
            "trainer.privacy depends; leave one of the two out"
        )
    if arguments["gradient_clip_algorithm"] not in (None, "norm", "value"):
        wrong.append(f"trainer.gradient_clip_algorithm: got {arguments['gradient_clip_algorithm']}; use norm or value")
    deterministic = arguments["deterministic"]
    if not (deterministic is None or isinstance(deterministic, bool) or deterministic == "warn"):
        wrong.append(f"trainer.deterministic: got {deterministic}; use true, false, warn or null")
    if arguments["buffers"] not in ("average", "local", "global"):
        wrong.append(f"trainer.buffers: got {arguments['buffers']}; use average, local or global")
    patterns = arguments["local_parameters"]
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns or ()):
        wrong.append(f"trainer.local_parameters: got {patterns!r}; give a list of names or patterns, e.g. ['head.*']")
    if arguments["engine"] not in ("sequential", "vectorized", "auto"):
        wrong.append(f"trainer.engine: got {arguments['engine']}; use sequential, vectorized or auto")
    if arguments["local_schedules"] not in ("fresh", "continue"):
        wrong.append(f"trainer.local_schedules: got {arguments['local_schedules']}; use fresh or continue")
    if arguments["record_steps"] not in (True, False, "auto"):
        wrong.append(f"trainer.record_steps: got {arguments['record_steps']}; use auto, true or false")
    if arguments["client_dtype"] not in (None, "float32", "bfloat16"):
        wrong.append(f"trainer.client_dtype: got {arguments['client_dtype']}; use float32 or bfloat16, or leave it out")
    if wrong:
        raise ConfigurationError("; ".join(wrong) + ".")


def check_callbacks(callbacks: list[Callback]) -> None:
    """Refuse callbacks that cannot work with federated rounds.

    Raises:
        ConfigurationError: A callback is refused, is none, or is an EarlyStopping that checks after local epochs.
    """
    for callback in callbacks:
        if not isinstance(callback, AnyCallback):
            raise ConfigurationError(f"trainer.callbacks: {callback!r} is not a Lightning Callback.")
        refused = next((kind for kind in _REFUSED_CALLBACKS if isinstance(callback, both(kind))), None)
        if refused is not None:
            raise ConfigurationError(f"trainer.callbacks: {type(callback).__name__} {_REFUSED_CALLBACKS[refused]}")
        if isinstance(callback, both(EarlyStopping)) and stops_after_epochs(callback):
            raise ConfigurationError(
                "trainer.callbacks: EarlyStopping(check_on_train_epoch_end=True) would check after each client's "
                "epoch; leave it out: it then checks after each evaluated round."
            )


def callbacks_of(model: LightningModule) -> list[Callback]:
    """Return the callbacks that the module brings along.

    Raises:
        ConfigurationError: One of them is refused, see :func:`check_callbacks`.
    """
    own = model.configure_callbacks()
    callbacks = [own] if isinstance(own, AnyCallback) else list(own)
    check_callbacks(callbacks)
    return callbacks


def check_datamodule(datamodule: Any, model: Any = None) -> None:
    """Refuse data without clients.

    Args:
        datamodule: Object that was given as data.
        model: Module that was given; if it has a ``train_dataloader`` of its own, the message says what to do.

    Raises:
        ConfigurationError: The data are None, an ordinary LightningDataModule, anything else without clients, or a
            data module that lacks a method.
    """
    if isinstance(datamodule, FederatedDataModule):
        _check_methods(datamodule)
        return
    if isinstance(datamodule, FederatedAlgorithm):
        raise ConfigurationError(
            f"data: got {type(datamodule).__name__}, an algorithm; the order is (model, datamodule, algorithm)."
        )
    if isinstance(datamodule, type):
        raise ConfigurationError(
            f"data: got the class {datamodule.__name__}; give an object: {datamodule.__name__}(...)."
        )
    if datamodule is None and overrides(model, "train_dataloader", DataHooks):
        raise ConfigurationError(
            f"data: none given, and {type(model).__name__}.train_dataloader says nothing of clients; wrap the data set "
            "behind it: fedbc_lightning.PartitionedDataModule(dataset, partitioner)."
        )
    if datamodule is None:
        raise ConfigurationError("data: none given; pass a FederatedDataModule.")
    if isinstance(datamodule, AnyDataModule):
        raise ConfigurationError(
            f"data: {type(datamodule).__name__} has no clients; federate it unchanged with "
            "fedbc_lightning.PartitionedDataModule(data, partitioner)."
        )
    raise ConfigurationError(f"data: got {type(datamodule).__name__}; give a FederatedDataModule.")


def _check_methods(datamodule: FederatedDataModule) -> None:
    """Refuse a data module that lacks what every subclass must define.

    Raises:
        ConfigurationError: It does not call its base class, or lacks a method or the number of clients.
    """
    name = type(datamodule).__name__
    if not hasattr(datamodule, "loader_options"):
        raise ConfigurationError(f"data: {name}.__init__ does not call super().__init__(); call it first.")
    methods = ("client_train_dataset", "client_test_dataset")
    missing = [method for method in methods if not overrides(datamodule, method, FederatedDataModule)]
    if missing:
        more = "; it may return None" if missing == ["client_test_dataset"] else ""
        raise ConfigurationError(
            f"data: {name} has no {' and no '.join(missing)}; define "
            f"{' and '.join(f'{method}(self, client)' for method in missing)}{more}."
        )


def check_algorithm(algorithm: Any) -> None:
    """Refuse what is no federated algorithm.

    Raises:
        ConfigurationError: It is None or anything else.
    """
    if isinstance(algorithm, type) and issubclass(algorithm, FederatedAlgorithm):
        raise ConfigurationError(
            f"algorithm: got the class {algorithm.__name__}; give an object: {algorithm.__name__}(...)."
        )
    if not isinstance(algorithm, FederatedAlgorithm):
        raise ConfigurationError(
            f"algorithm: got {algorithm!r}; give a FederatedAlgorithm, e.g. FedBC(dual_lr=1e-3). The order is "
            "(model, datamodule, algorithm)."
        )
    name = type(algorithm).__name__
    for method, arguments in (("client_update", "engine, cohort, server"), ("server_callbacks", "engine")):
        if not overrides(algorithm, method, FederatedAlgorithm):
            raise ConfigurationError(f"algorithm: {name} has no {method}; define {method}(self, {arguments}).")


def default_callbacks(callbacks: list[Callback], enable_progress_bar: bool) -> list[Callback]:
    """Return the user's callbacks, with a progress bar added if it is enabled and there is none."""
    from fedbc_lightning.callbacks import NotebookProgressBar, RoundProgressBar
    from fedbc_lightning.core.notebook import is_notebook

    if not enable_progress_bar or any(isinstance(c, (NotebookProgressBar, RoundProgressBar)) for c in callbacks):
        return callbacks
    return [*callbacks, NotebookProgressBar() if is_notebook() else RoundProgressBar()]
