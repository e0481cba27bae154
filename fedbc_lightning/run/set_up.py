"""Sets a run up: the user's data and module, the federation, and the state from which it begins."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.seeding import global_seed
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.federation import checkpoint_content
from fedbc_lightning.federation.channel import Channel, ChannelPart
from fedbc_lightning.federation.coding import Codecs, CodedMessages
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.participation import Participation
from fedbc_lightning.federation.privacy import PrivateMessages
from fedbc_lightning.federation.simulation import Simulation
from fedbc_lightning.module.adapter import UserModule, check_loaders
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.module.trainer_proxy import ModuleTrainer
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run import slurm
from fedbc_lightning.run.evaluation_hooks import check_what_schedulers_monitor
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run import Progress, Request, Run
from fedbc_lightning.run.run_checkpoint import hyper_parameters, warn_of_other_settings
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.run.trainer_attributes import RunView
from fedbc_lightning.state import checkpoint, file_rows

log = logging.getLogger(__name__)


class Beginning(NamedTuple):
    """The state from which a run begins.

    Attributes:
        path: Checkpoint from which the run is restored; None if there is none.
        saved: Content of the checkpoint.
        previous: The trainer's last run with the same module, whose state is evaluated if there is no checkpoint.
    """

    path: Path | None
    saved: dict[str, Any] | None
    previous: Run | None


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
    shim = hooks.trainer
    _set_data_up(request, fabric, beginning.saved)
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
    run = Run(request.fn, settings, seed, fabric, federation, evaluator, progress, lock, beginning.path)
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


def make_shim(view: RunView, fabric: Fabric, request: Request) -> ModuleTrainer:
    """Make the trainer that hooks are given, and show it to module and data.

    Args:
        view: The FederatedTrainer.
        fabric: Fabric that has been launched.
        request: What the user asks for.
    """
    settings = view.settings
    shim = ModuleTrainer(
        view, datamodule=request.datamodule, is_global_zero=fabric.is_global_zero,
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


def _set_data_up(request: Request, fabric: Fabric, saved: dict[str, Any] | None) -> None:
    """Call the hooks that prepare the user's data, in Lightning's order."""
    model, datamodule = request.model, request.datamodule
    # A download is made once per machine, and no process may read before it is complete.
    if fabric.local_rank == 0:
        datamodule.prepare_data()
        model.prepare_data()
    fabric.barrier()
    datamodule.set_up(request.fn.value, saved)
    datamodule.validate_clients()
    check_loaders(model, datamodule)


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


def find_beginning(request: Request, experiment: Path, fabric: Fabric, lock: RunLock, last: Run | None) -> Beginning:
    """Find and read the checkpoint from which a run is restored, and lock its run folder if the run goes on there.

    Args:
        request: What the user asks for.
        experiment: Folder of all runs of this name.
        fabric: Fabric that has been launched.
        lock: Locks the run folder.
        last: The trainer's last run; its state counts only if it was a run of the same module.

    Raises:
        ConfigurationError: There is no such checkpoint, it cannot be read, or another process writes to its run.
    """
    fn = request.fn
    # Rank 0 decides: on a network file system ranks may see different folders for some seconds.
    path = fabric.broadcast(_find_checkpoint(request.ckpt_path, experiment, fn))
    folder = None if path is None else run_folder.run_of(path)
    if folder is not None and fn == TrainerFn.FITTING and fabric.is_global_zero:
        lock.take(folder)  # first: another process could replace the checkpoint while this one reads it
    is_same = last is not None and last.user.module is request.model
    return Beginning(path, None if path is None else checkpoint.load(path), last if is_same else None)


def begin(run: Run, beginning: Beginning, *, takes_other_seed: bool) -> None:
    """Give a run the state from which it begins; a training run without a checkpoint begins with the initial model.

    Args:
        run: Run that has been set up.
        beginning: The state from which it begins.
        takes_other_seed: Whether it may resume with another seed than that of its checkpoint.
    """
    if beginning.saved is not None:
        _restore(run, beginning.saved, takes_other_seed=takes_other_seed)
    elif run.fn == TrainerFn.FITTING:
        return
    elif beginning.previous is not None:
        checkpoint_content.adopt(run.federation, beginning.previous.federation)
    else:
        rank_zero_info("No ckpt_path: the model is evaluated as it is, and stands for every client's too.")


def _restore(run: Run, saved: dict[str, Any], *, takes_other_seed: bool) -> None:
    # The order matters: frozen weights are put back before on_load_checkpoint, which may look at the whole state dict,
    # and callbacks come last, because their hooks may read the progress and the module.
    ours = saved[checkpoint.KEY]
    state, module, path = ours["federation"], run.user.module, run.path
    checkpoint_content.prepare_for(run.federation, state, path or "")
    saved["state_dict"] = checkpoint_content.with_frozen_parameters(
        run.federation, saved["state_dict"], ours.get("frozen", {}), path or ""
    )
    module.on_load_checkpoint(saved)
    rows_path = None if path is None else path.with_name(file_rows.NAME)
    checkpoint_content.load_state(run.federation, state, saved["state_dict"], path, rows_path)
    run.progress.restore(ours, run.settings.max_rounds)
    seed = ours["settings"].get("seed", run.seed)
    if run.fn == TrainerFn.FITTING and not takes_other_seed and seed != run.seed:
        raise ConfigurationError(
            f"seed: '{path}' was trained with {seed}, {run.seed} is given now, so that the run would not go on as if "
            f"never stopped; give seed {seed} (seed_everything), or say other_seed: true."
        )
    warn_of_other_settings(ours["settings"], hyper_parameters(run))
    states = saved["callbacks"]
    for callback in run.hooks.callbacks:
        run.hooks.call_callback(callback, "on_load_checkpoint", saved)
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])


def _find_checkpoint(ckpt_path: str | os.PathLike | None, experiment: Path, fn: TrainerFn) -> Path | None:
    """Return the checkpoint that the user means; None if the run begins anew.

    Args:
        ckpt_path: Path of a checkpoint, or ``last``, or None.
        experiment: Folder of all runs of this name, in which ``last`` is looked for.
        fn: The verb; a training run may begin anew if there is no ``last``.

    Raises:
        ConfigurationError: There is no ``last.ckpt`` to evaluate.
    """
    # A requeued job runs the same command again, so its note counts more than the ckpt_path of that command.
    before = slurm.checkpoint_before(experiment) if fn == TrainerFn.FITTING else None
    if before is not None:
        rank_zero_info(f"SLURM: this job was requeued, and goes on from '{before}'.")
        return before
    if ckpt_path != "last":
        return None if ckpt_path is None else Path(ckpt_path)
    found = run_folder.last_checkpoint(experiment)
    if found is None and fn != TrainerFn.FITTING:
        raise ConfigurationError(f"ckpt_path: there is no last.ckpt under '{experiment}'.")
    if found is None:
        # It is no error, because a job that a cluster starts again is started by one command, also for the first time;
        # but a misspelt name would otherwise train everything again unnoticed.
        beside = [path.name for path in experiment.parent.glob("*") if run_folder.last_checkpoint(path) is not None]
        said = f"WARNING: there is no last.ckpt to resume in '{experiment}': the run starts at round 0. "
        rank_zero_only(log.warning)((said + did_you_mean(experiment.name, beside, "")).rstrip())
    return found
