"""Checks what is given to the trainer beside its settings: callbacks, model, data and algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import IterableDataset

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.callbacks import RoundProgressBar
from fedbc_lightning.core.checks import shown
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import AnyCallback, both, listed, overrides
from fedbc_lightning.core.private_lightning import stops_after_epochs
from fedbc_lightning.data import FederatedDataModule, SitesDataModule
from fedbc_lightning.data.inner_modules import plain_dataset
from fedbc_lightning.data.sites import is_data
from fedbc_lightning.run.settings import RunSettings

AVERAGING = "a callback that averages the global model over rounds, see `docs/howto/hooks.md`"

# Callbacks that watch parts of lightning.Trainer that a federated run does not have, each with what takes its place.
# Where a module's own configure_callbacks returns one, it is left out with a line.
WATCHING_CALLBACKS: dict[type[Callback], str] = {
    lightnings.ModelCheckpoint: "`fedbc_lightning.callbacks.RoundCheckpoint`, which keeps the best round",
    lightnings.OnExceptionCheckpoint: "nothing: `last.ckpt` is written on every exception",
    lightnings.LearningRateMonitor: "`self.log` of the rate in `training_step`",
    lightnings.ThroughputMonitor: "nothing: `time/round_seconds` is logged by itself",
    lightnings.DeviceStatsMonitor: "`fedbc-cli plan`, which tells the memory of a run",
    lightnings.ProgressBar: "`RoundProgressBar`, which is there already",
}

# Those and the ones that change such parts: its optimizers, batches, devices. Lightning would call them, and they would
# end in a traceback or do nothing.
REFUSED_CALLBACKS = WATCHING_CALLBACKS | {
    lightnings.GradientAccumulationScheduler: "`trainer.accumulate_grad_batches`",
    lightnings.StochasticWeightAveraging: AVERAGING,
    WeightAveraging: AVERAGING,
    lightnings.LearningRateFinder: "a study: `fedbc-cli compare`",
    lightnings.BatchSizeFinder: "`data.batch_size`",
    lightnings.BaseFinetuning: "freezing in the module's `__init__`, or in `on_train_epoch_start` of the first epochs",
    lightnings.ModelPruning: "pruning in the module's `__init__`",
}


def refused_kind(cls: type) -> type[Callback] | None:
    """Return which of the refused callbacks a class is or is derived from, or None."""
    return next((kind for kind in REFUSED_CALLBACKS if issubclass(cls, both(kind))), None)


def callbacks_of_settings(settings: RunSettings) -> list[Callback]:
    """Return the user's callbacks, with a progress bar added if it is enabled and there is none."""
    callbacks = check_callbacks(settings.callbacks)
    if settings.enable_progress_bar and not any(isinstance(callback, RoundProgressBar) for callback in callbacks):
        callbacks.append(RoundProgressBar())
    return callbacks


def with_callbacks_of(model: LightningModule, callbacks: list[Callback]) -> list[Callback]:
    """Return the trainer's callbacks and those of the module's ``configure_callbacks``.

    As in Lightning, the module's replace the trainer's of the same class or of a class above it. Those that only watch
    parts of lightning.Trainer are left out with a line, because the module need not be changed for them.
    """
    given = listed(model.configure_callbacks())
    skipped = sorted({type(each).__name__ for each in given if refused_kind(type(each)) in WATCHING_CALLBACKS})
    if skipped:
        rank_zero_info(
            f"model: {', '.join(skipped)} of configure_callbacks {'is' if len(skipped) == 1 else 'are'} left out, "
            "because a federated run lacks the parts of lightning.Trainer that are watched; docs/reference/settings.md "
            "says what takes their place."
        )
    of_module = check_callbacks([each for each in given if refused_kind(type(each)) not in WATCHING_CALLBACKS])
    classes = {type(each) for each in callbacks} - {Callback}  # a plain Callback() would be above all of them
    replaced = [each for each in classes if any(isinstance(own, each) for own in of_module)]
    kept = [each for each in callbacks if type(each) not in replaced]
    return [*kept, *of_module]


def check_callbacks(given: Any) -> list[Callback]:
    """Return the callbacks that the settings or the module gave, a list of them, one or None, as a list.

    Raises:
        ConfigurationError: A callback cannot work with federated rounds, is none, or is an EarlyStopping that checks
            after local epochs.
    """
    callbacks = listed(given)
    for callback in callbacks:
        if not isinstance(callback, AnyCallback):
            raise ConfigurationError(f"trainer.callbacks: {callback!r} is not a Lightning Callback.")
        if (kind := refused_kind(type(callback))) is not None:
            raise ConfigurationError(
                f"trainer.callbacks: {type(callback).__name__} needs parts of lightning.Trainer that a federated run "
                f"does not have; leave it out. In its place: {REFUSED_CALLBACKS[kind]}."
            )
        if isinstance(callback, both(lightnings.EarlyStopping)) and stops_after_epochs(callback):
            raise ConfigurationError(
                "trainer.callbacks: EarlyStopping(check_on_train_epoch_end=True) would check after each client's "
                "epoch; leave it out: it then checks after each evaluated round."
            )
    return callbacks


def as_datamodule(datamodule: Any, model: Any = None) -> FederatedDataModule:
    """Return the data as a FederatedDataModule with all its methods.

    Args:
        datamodule: Object that was given as data: a FederatedDataModule, or a mapping from clients' names to data.
        model: Module that was given; if it has a ``train_dataloader`` of its own, the message says what to do.

    Raises:
        ConfigurationError: The data are of another kind, or a data module that lacks a method.
    """
    if isinstance(datamodule, Mapping):
        found = {name: plain_dataset(site) or site for name, site in datamodule.items()}
        uncut = [name for name, site in found.items() if not is_data(site) or isinstance(site, IterableDataset)]
        if 0 < len(uncut) < len(found):
            rank_zero_info(
                f"data: test data are cut from no client, because {uncut[0]!r} is no Dataset; give "
                "SitesDataModule(data, test={...}) for test data of each"
            )
        return SitesDataModule(datamodule, test_fraction=0.0 if uncut else 0.2)
    if not isinstance(datamodule, FederatedDataModule):
        own = "" if not overrides(model, "train_dataloader", DataHooks) else f" of {type(model).__name__}"
        raise ConfigurationError(
            f"data: {_found(datamodule)}; give a FederatedDataModule. Any other data module, or the data set behind a "
            f"train_dataloader{own}, gets clients by fedbc_lightning.PartitionedDataModule(data, partitioner), and "
            f"one data set per client is a dict from their names, {{name: data, ...}}. {_ORDER}"
        )
    if not hasattr(datamodule, "loader_options"):
        name = type(datamodule).__name__
        raise ConfigurationError(f"data: {name}.__init__ does not call super().__init__(); call it first.")
    _check_methods("data", datamodule, FederatedDataModule, {
        "client_train_dataset": "client", "client_test_dataset": "client",
    })  # fmt: skip
    return datamodule


def check_algorithm(algorithm: Any) -> None:
    """Raise unless ``algorithm`` is a FederatedAlgorithm with the server's half; a client trains from z by default.

    Raises:
        ConfigurationError: It is of another kind or lacks a method.
    """
    if not isinstance(algorithm, FederatedAlgorithm):
        raise ConfigurationError(
            f"algorithm: {_found(algorithm)}; give a FederatedAlgorithm, e.g. FedBC(dual_lr=1e-3). {_ORDER}"
        )
    _check_methods("algorithm", algorithm, FederatedAlgorithm, {"server_callbacks": "engine"})


_ORDER = "The order is (model, datamodule, algorithm)."


def _found(value: Any) -> str:
    return "none given" if value is None else f"got {shown(value)}"


def _check_methods(section: str, value: object, base: type, methods: dict[str, str]) -> None:
    """Raise unless a class defines what every subclass must.

    They are no abstract methods, because Python would refuse to make the object with a message about its class alone.
    """
    for method, arguments in methods.items():
        if not overrides(value, method, base):
            name = type(value).__name__
            raise ConfigurationError(f"{section}: {name} has no {method}; define {method}(self, {arguments}).")
