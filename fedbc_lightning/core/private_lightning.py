"""The private parts of Lightning that the package uses; no other file names one, but for its command line.

Each text says in which versions the part was read and what happens without it. ``pyproject.toml`` allows no version
that is newer than these, and ``tests/core/test_private.py`` fails if a part is gone or means something else.
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, Strategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.core.optimizer import (
    LightningOptimizer,
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.utilities import _verify_dataloader_idx_requirement
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _extract_batch_size
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.distributed import Store, init_process_group, is_initialized
from torchmetrics import Metric
from torchmetrics.utilities.prints import rank_zero_only

# Processes


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which starts the running command again, without its observer.

    During the whole run the observer kills this process without a word if another one fails; the heartbeats name it.

    Read in Lightning 2.6. Without it, start ``sys.argv`` with LOCAL_RANK, WORLD_SIZE and MASTER_PORT set.

    Attributes:
        started: The processes that this one has started.
    """

    started: Sequence[subprocess.Popen] = ()

    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()
        self.started, self.procs = self.procs, []  # the observer ends if it has nobody to watch


class LaunchedStrategy(DDPStrategy):
    """DDP's strategy with a launcher of its own for processes that are started as commands, and a store of its own.

    Lightning's own way of joining leaves an exit handler that with NCCL waits for ever if another process was lost.

    Read in Lightning 2.6. Without these names, give ``strategy.launcher`` and ``timeout`` when the strategy is made,
    and join the process group before ``setup_environment``.
    """

    def meet(self) -> Store:
        """Return the store over which the processes find each other."""
        raise NotImplementedError

    def _setup_distributed(self) -> None:
        self._set_world_ranks()  # before, the environment does not know its rank
        if not is_initialized():  # by an earlier run of this process
            backend = self._process_group_backend = self._get_process_group_backend()
            device = None if self.root_device.type == "cpu" else self.root_device
            place: Any = {"rank": self.global_rank, "world_size": self.world_size, "device_id": device}
            init_process_group(backend, store=self.meet(), timeout=self._timeout, **place)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            assert self.cluster_environment is not None
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


class UnpatchedFabric(Fabric):
    """Fabric that does not patch torch's DataLoader.

    Fabric replaces methods of DataLoader while a launched function runs, so that ``setup_dataloaders`` can create
    loaders again. Nothing here calls that, but creating a loader would take ten times as long, and after an exception
    the methods would stay replaced, with one more layer for each exception.

    Read in Lightning 2.6. If this method is no longer called, loaders are slow again, and
    ``tests/core/test_private.py`` says so.
    """

    def _wrap_with_setup(self, to_run: Callable, *args: Any, **kwargs: Any) -> Any:
        self.strategy.setup_environment()
        return to_run(*args, **kwargs)


def start_method(strategy: Strategy) -> str:
    """Return how a strategy starts processes: popen, spawn or fork; popen for those that start none.

    Read in Lightning 2.6. Without it, keep the start method from the strategy's name.
    """
    return getattr(strategy, "_start_method", "popen")


# The user's module


def sizes_in(batch: Any) -> Iterator[int | None]:
    """Yield the first dimension of each tensor in a batch, at every depth, and None for what is no tensor.

    Read in Lightning 2.6. Without it, write the walk over lists, mappings and data classes anew: its public sister
    raises and warns by itself.
    """
    return _extract_batch_size(batch)


class BatchFetcher(_PrefetchDataFetcher):
    """Yields the batches of a CombinedLoader; where their number is unknown, it reads one ahead to tell the last one.

    Read in Lightning 2.6. Without it, iterate over the CombinedLoader, one batch ahead if it has no ``len``.
    """


def combination_mode(combined: CombinedLoader) -> str:
    """Return the mode of a CombinedLoader, such as ``"max_size_cycle"``.

    Read in Lightning 2.6. Without it, ask the user for the mode.
    """
    return combined._mode


def check_dataloader_idx(
    module: LightningModule, methods: tuple[str, ...], stage: RunningStage, has_several: bool
) -> None:
    """Raise Lightning's RuntimeError if a method of an evaluation misses ``dataloader_idx``, or asks in vain for it.

    Read in Lightning 2.6. Without it, look for the argument in their signatures.

    Args:
        module: The module.
        methods: Names of the step and of its hooks.
        stage: Stage that the message names.
        has_several: Whether the data come from several loaders.
    """
    _verify_dataloader_idx_requirement(methods, has_several, stage, module)


def read_optimizers(returned: Any) -> tuple[list[Any], list[Any], str | None]:
    """Return the optimizers, schedulers and monitor that ``configure_optimizers`` has returned in any form.

    Read in Lightning 2.6. Without it, read its six forms here; Lightning's documentation lists them.

    Raises:
        MisconfigurationException: The form is none of Lightning's.
    """
    return _configure_optimizers(returned)


def read_schedulers(schedulers: list[Any], monitor: str | None, *, by_hand: bool = False) -> list[LRSchedulerConfig]:
    """Return schedulers in one form, with interval, frequency and monitor; those that are stepped by hand have none.

    Read in Lightning 2.6. Without it, fill in the fields of LRSchedulerConfig here.

    Raises:
        MisconfigurationException: A scheduler has no ``step``, or needs a monitor and has none.
    """
    if by_hand:
        return _configure_schedulers_manual_opt(schedulers)
    return _configure_schedulers_automatic_opt(schedulers, monitor)


def show_optimizers(strategy: Any, optimizers: list[Any], *, wrapped: bool = False) -> None:
    """Let a module find optimizers at its trainer's strategy, where ``self.optimizers()`` looks for them.

    Wrapped ones call the strategy's ``optimizer_step``, as manual optimization needs it.

    Read in Lightning 2.6. Without it, ``self.optimizers()`` fails inside clients unless its new source is shown.
    """
    if wrapped:
        optimizers = [LightningOptimizer._to_lightning_optimizer(each, strategy) for each in optimizers]
    strategy._lightning_optimizers = optimizers


def is_from_compiled(module: LightningModule) -> bool:
    """Return whether Lightning has taken the steps of a compiled module over into this one.

    Read in Lightning 2.6. Without it, remember it here: taken over twice, a step is compiled around its compiled form.
    """
    return module._compiler_ctx is not None


def hparams_name(module: LightningModule) -> str:
    """Return the argument's name under which a module saved its hyper-parameters, for its checkpoint.

    Read in Lightning 2.6. Without it, write "kwargs", which all modules that saved them one by one have.
    """
    return str(module._hparams_name)


HPARAMS = "_hparams"
"""Attribute behind ``hparams`` of modules and data modules.

Read in Lightning 2.6. Without it, a federated data module has no ``hparams`` until it asks the wrapped one for them.
"""


def forward_value(metric: Metric) -> Any:
    """Return the value of a Metric for the batch that it was called with last; None if it was only updated.

    Read in torchmetrics 1.8. Without it, ``trainer.callback_metrics`` lacks the values of steps of Metrics.
    """
    return metric._forward_cache


@contextmanager
def warnings_of_metrics() -> Iterator[list[str]]:
    """Collect what torchmetrics warns of as it computes a metric, on every rank, in place of showing it.

    Read in torchmetrics 1.4 to 1.9. Without it, a metric that is undefined for a client counts by what stands in for it
    (0 for the AUROC of one class), and processes other than the first do not know.
    """
    said, shown, gate = list[str](), warnings.warn, cast(Any, rank_zero_only)
    rank = gate.rank
    warnings.warn, gate.rank = lambda message, *_, **__: said.append(str(message)), 0
    try:
        yield said
    finally:
        warnings.warn, gate.rank = shown, rank


# Callbacks and loggers


def stops_after_epochs(callback: EarlyStopping) -> bool | None:
    """Return the argument ``check_on_train_epoch_end`` of an EarlyStopping; None if it was not given.

    Read in Lightning 2.6. Without it, EarlyStopping with this argument never stops: say so in the documentation.
    """
    return callback._check_on_train_epoch_end


def purge_from(logger: TensorBoardLogger, step: int) -> None:
    """Let a logger drop what an interrupted run wrote from a step on; it opens its file later.

    Read in Lightning 2.6. Without it, a resumed run shows the rounds twice that come after its checkpoint.
    """
    logger._kwargs["purge_step"] = step
