"""Sets a run up: the user's data and module, the federation, the evaluator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.core.seeding import global_seed
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.federation.channel import Channel, ChannelPart
from fedbc_lightning.federation.coding import Codecs, CodedMessages
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.participation import Participation
from fedbc_lightning.federation.privacy import PrivateMessages
from fedbc_lightning.federation.simulation import Simulation
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.module.trainer_proxy import ModuleTrainer
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.monitored import check_what_schedulers_monitor
from fedbc_lightning.run.restore import Beginning
from fedbc_lightning.run.run import Request, Run
from fedbc_lightning.run.run_progress import Progress
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.state import checkpoint

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def set_up(
    request: Request,
    settings: RunSettings,
    fabric: Fabric,
    hooks: Hooks,
    progress: Progress,
    lock: RunLock,
    beginning: Beginning,
) -> Run:
    """Set a run up in this process, before the state of a checkpoint is restored.

    Args:
        request: What the user asks for.
        settings: What the user chose.
        fabric: Fabric that has been launched.
        hooks: The hooks of callbacks and module.
        progress: Progress of the run, at its beginning.
        lock: Locks the run folder.
        beginning: The state from which the run begins.

    Raises:
        ConfigurationError: A setting cannot be honoured.
    """
    datamodule, algorithm = request.datamodule, request.algorithm
    seed = global_seed() if settings.seed is None else settings.seed
    shim = _make_shim(settings, fabric, datamodule, hooks)
    shim.show_module(request.model, progress, fabric)
    _set_users_parts_up(request, fabric, shim, hooks, beginning.saved)
    user = UserModule(request.model, fabric, hooks, shim, datamodule)
    user.attach()
    participation = Participation(
        datamodule, algorithm, settings.local, settings.chosen_sampler, settings.clients_per_round,
        settings.stragglers, seed,
    )  # fmt: skip
    client_dtype = None if settings.client_dtype is None else getattr(torch, settings.client_dtype)
    federation = Federation(
        fabric, user, datamodule, algorithm, Simulation(participation, datamodule, algorithm, settings.system),
        settings.buffers, settings.keep_local_models, client_dtype, _engine(request, settings, beginning.saved),
        settings.local_parameters or [], _channel(settings, participation),
    )  # fmt: skip
    evaluator = Evaluator(fabric, federation, datamodule, settings.eval_clients, settings.heldout_finetune_steps, seed)
    is_trained = beginning.saved is not None or beginning.previous is not None
    run = Run(
        request.fn, settings, seed, fabric, federation, evaluator, progress, lock, beginning.path, is_trained
    )  # fmt: skip
    if request.fn == TrainerFn.FITTING:
        check_what_schedulers_monitor(run)
    return run


def _channel(settings: RunSettings, participation: Participation) -> Channel:
    """Return the channel of the run; privacy comes last, since ε counts on what the server reads."""
    parts = list[ChannelPart]()
    if settings.codec is not None and settings.codec != Codecs():
        parts.append(CodedMessages(settings.codec))
    parts += settings.channel or []
    if settings.privacy is not None:
        parts.append(PrivateMessages(settings.privacy, participation.num_sampled, len(participation.clients)))
    return Channel(parts)


def _engine(request: Request, settings: RunSettings, saved: dict[str, Any] | None) -> Any:
    """Return the engine that is asked for; where it is ``auto``, a run keeps the engine that it chose."""
    if settings.engine != "auto" or (saved is None and request.fn == TrainerFn.FITTING):
        return settings.engine
    return "sequential" if saved is None else saved[checkpoint.KEY]["settings"]["trainer.engine"]


def _make_shim(settings: RunSettings, fabric: Fabric, datamodule: FederatedDataModule, hooks: Hooks) -> ModuleTrainer:
    return ModuleTrainer(
        max_rounds=settings.max_rounds, current_round=0, datamodule=datamodule, logger=None, loggers=[],
        callback_metrics={}, callbacks=hooks.callbacks, is_global_zero=fabric.is_global_zero,
        # One process trains a client, so world_size is 1; the rank lets a module print or write on rank 0 only.
        global_rank=fabric.global_rank, local_rank=fabric.local_rank, world_size=1, num_nodes=1, num_devices=1,
        progress_bar_callback=None, precision=settings.precision,
        default_root_dir=str(settings.default_root_dir), log_dir=None,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        gradient_clip_val=settings.gradient_clip_val,
        gradient_clip_algorithm=settings.local.gradient_clip_algorithm,
    )  # fmt: skip


def _set_users_parts_up(
    request: Request, fabric: Fabric, shim: ModuleTrainer, hooks: Hooks, saved: dict[str, Any] | None
) -> None:
    """Call the hooks that prepare the user's data and module, in Lightning's order."""
    model, datamodule, stage = request.model, request.datamodule, request.fn.value
    datamodule.trainer = shim  # type: ignore[assignment]
    if fabric.local_rank == 0:
        datamodule.prepare_data()
        model.prepare_data()
    fabric.barrier()
    datamodule.set_up(stage, saved)
    datamodule.validate_clients()
    model.trainer = shim  # type: ignore[assignment]
    model.setup(stage)
    hooks.call_module("configure_sharded_model")  # its older name, which Lightning calls, too
    model.configure_model()
