"""Sets a run up: the user's data and module, the federation, and the state from which it begins."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.data import FederatedDataModule, SitesDataModule
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.federation.channel import Channel, ChannelPart
from fedbc_lightning.federation.coding import Codecs, CodedMessages
from fedbc_lightning.federation.elsewhere import Elsewhere
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.kept_rows import RowsAtClients
from fedbc_lightning.federation.participation import Participation
from fedbc_lightning.federation.privacy import PrivateMessages
from fedbc_lightning.federation.simulation import Simulation
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.module.trainer_proxy import ModuleTrainer
from fedbc_lightning.run.beginning import Beginning
from fedbc_lightning.run.evaluation_hooks import check_what_schedulers_monitor
from fedbc_lightning.run.identity import Identity, agreed_with_clients
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run import Progress, Request, Run
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.run.trainer_attributes import RunView
from fedbc_lightning.state import checkpoint

BATCH_HOOKS = [f"on_{stage}_batch_{when}" for stage in ("validation", "test") for when in ("start", "end")]


def set_up(
    request: Request,
    settings: RunSettings,
    fabric: Fabric,
    hooks: Hooks,
    progress: Progress,
    lock: RunLock,
    identity: Identity,
    beginning: Beginning,
) -> Run:
    """Set a run up in this process over data that are set up, before the state of a checkpoint is restored.

    Args:
        request: What the user asks for.
        settings: What the user chose.
        fabric: Fabric that has been launched.
        hooks: The hooks of callbacks and module.
        progress: Progress of the run, at its beginning.
        lock: Locks the run folder.
        identity: What makes the run this one.
        beginning: The state from which the run begins.

    Raises:
        ConfigurationError: A setting cannot be honoured.
    """
    datamodule, algorithm, seed = request.datamodule, request.algorithm, identity.settings["seed"]
    shim = hooks.trainer
    participation = Participation(
        datamodule, algorithm, settings.local, settings.chosen_sampler, settings.clients_per_round,
        settings.stragglers, seed,
    )  # fmt: skip
    _show_largest_client(shim, participation, datamodule)
    hooks.call("setup", request.fn.value)
    hooks.call_module("configure_sharded_model")  # its older name, which Lightning calls, too
    request.model.configure_model()
    user = UserModule(request.model, fabric, hooks, shim, datamodule)
    user.attach()
    client_dtype = None if settings.client_dtype is None else getattr(torch, settings.client_dtype)
    federation = Federation(
        fabric, user, datamodule, algorithm, Simulation(participation, datamodule, algorithm, settings.system),
        settings.buffers, settings.keep_local_models, client_dtype, _engine(request, settings, beginning.saved),
        settings.local_parameters or [], _channel(settings, participation),
    )  # fmt: skip
    evaluator = Evaluator(
        fabric, lambda: federation.engine, datamodule, settings.eval_clients, settings.heldout_finetune_steps, seed
    )
    federation.is_shared_by_seconds = settings.share_by == "seconds"
    if federation.is_shared_by_seconds and federation.engine_kind == "vectorized":
        raise ConfigurationError(
            "trainer.share_by: seconds: numbers of the vectorized engine depend on who is trained together, so on the "
            "clock; take engine: sequential, or share_by: steps."
        )
    federation.agreed = agreed_with_clients(identity.settings, datamodule)
    if settings.chosen_backend is not None and request.fn == TrainerFn.FITTING:
        elsewhere = Elsewhere(federation, settings.chosen_backend, lambda: progress.log_dir)
        federation.train_elsewhere = elsewhere.train
        # A callback that collects from batches what it logs at the end needs them all in this process.
        collecting = [one for one in hooks.callbacks for name in BATCH_HOOKS if overrides(one, name, Callback)]
        if not collecting or (isinstance(datamodule, SitesDataModule) and datamodule.elsewhere):
            evaluator.elsewhere = elsewhere.evaluate
    run = Run(request.fn, settings, seed, fabric, federation, evaluator, progress, lock, beginning.path, identity)
    if request.fn == TrainerFn.FITTING:
        check_what_schedulers_monitor(run)
    return run


def _channel(settings: RunSettings, participation: Participation) -> Channel:
    """Return the channel of the run; privacy comes last, since ε counts on what the server reads."""
    parts = list[ChannelPart]()
    if settings.codec is not None and settings.codec != Codecs():
        parts.append(CodedMessages(settings.codec))
    parts += settings.channel or []
    parts += [RowsAtClients()] * settings.keeps_rows
    if settings.privacy is not None:
        parts.append(PrivateMessages(settings.privacy, participation.num_sampled, len(participation.clients)))
    return Channel(parts)


def _engine(request: Request, settings: RunSettings, saved: dict[str, Any] | None) -> Any:
    """Return the engine that is asked for; where it is ``auto``, a run keeps the engine that it chose."""
    if settings.engine != "auto" or (saved is None and request.fn == TrainerFn.FITTING):
        return settings.engine
    return "sequential" if saved is None else saved[checkpoint.KEY]["settings"]["trainer.engine"]


def make_shim(view: RunView, fabric: Fabric, request: Request) -> ModuleTrainer:
    """Make the trainer that hooks are given, and show it to module and data.

    Args:
        view: The FederatedTrainer.
        fabric: Fabric that has been launched.
        request: What the user asks for.
    """
    settings = view.settings
    shim = ModuleTrainer(
        view, datamodule=request.datamodule, is_global_zero=view.is_global_zero,
        # One process trains a client, so world_size is 1; the rank lets a module print or write on rank 0 only.
        global_rank=fabric.global_rank, local_rank=fabric.local_rank, precision=settings.precision,
        default_root_dir=str(settings.default_root_dir), accumulate_grad_batches=settings.accumulate_grad_batches,
        gradient_clip_val=settings.gradient_clip_val,
        gradient_clip_algorithm=None if settings.gradient_clip_val is None else settings.local.gradient_clip_algorithm,
        max_steps=settings.local.limits(1)["max_steps"],
        max_epochs=None if settings.local.epochs is None else settings.local.limits(1)["max_epochs"],
    )  # fmt: skip
    shim.show_module(request.model, fabric)
    request.datamodule.trainer = request.model.trainer = shim  # type: ignore[assignment]
    return shim


def _show_largest_client(shim: ModuleTrainer, participation: Participation, data: FederatedDataModule) -> None:
    """Show the counts and the loader of the largest client, which ``self.trainer`` has outside of clients.

    ``configure_optimizers`` sees them, too, when it is called to learn its form.
    """
    local, num_batches = participation.local, participation.most_batches
    limits = local.limits(num_batches)
    if local.schedule_rounds is None:
        limits["max_epochs"] = local.epochs or 1
    largest = partial(data.client_train_dataloader, participation.largest)
    shim.show_largest_client({**limits, "num_training_batches": num_batches}, largest)
