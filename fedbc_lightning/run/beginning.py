"""Finds out which run is asked for, and gives it the state from which it begins."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric import Fabric
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.seeding import global_seed
from fedbc_lightning.federation import checkpoint_content
from fedbc_lightning.module.adapter import check_loaders
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run import slurm
from fedbc_lightning.run.identity import Identity, identify, read
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run import Request, Run
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.state import file_rows
from fedbc_lightning.state.checkpoint import KEY, load

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


def prepare(
    request: Request, settings: RunSettings, fabric: Fabric, lock: RunLock, last: Run | None
) -> tuple[Identity, Beginning]:
    """Set the data up, find out what run this is, and find and read the checkpoint from which it is restored.

    The run folder is locked if the run goes on there.

    Args:
        request: What the user asks for.
        settings: What the user chose.
        fabric: Fabric that has been launched.
        lock: Locks the run folder.
        last: The trainer's last run; its state counts only if it was a run of the same module.

    Raises:
        ConfigurationError: There is no such checkpoint, it cannot be read, or another process writes to its run.
    """
    data, is_named = request.datamodule, request.ckpt_path not in (None, "last")
    path = Path(str(request.ckpt_path)) if is_named else None
    saved = _read(path, request, fabric, lock)
    set_data_up(request, fabric, saved)
    seed = global_seed() if settings.seed is None else settings.seed
    # Rank 0 decides: on a network file system ranks may see different folders for some seconds.
    is_first = fabric.is_global_zero
    asked = identify(request.model, data, request.algorithm, settings, seed) if is_first else None
    identity: Any = fabric.broadcast(asked)
    if not is_named:
        again = {job for job, is_again in slurm.starters(fabric).items() if is_again}
        path = fabric.broadcast(_find_own(request, identity, settings, again) if is_first else None)
        saved = _read(path, request, fabric, lock)
        if type(data.users_module).__qualname__ in (saved or {}):
            data.set_up(request.fn.value, saved)  # again, with the state that it had
    return identity, Beginning(path, saved, last if last and last.user.module is request.model else None)


def _read(path: Path | None, request: Request, fabric: Fabric, lock: RunLock) -> dict[str, Any] | None:
    if path is None:
        return None
    folder = run_folder.run_of(path)
    if folder is not None and request.fn == TrainerFn.FITTING and fabric.is_global_zero:
        lock.take(folder)  # first: another process could replace the checkpoint while this one reads it
    return load(path)


def set_data_up(request: Request, fabric: Fabric, saved: dict[str, Any] | None) -> None:
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


def begin(run: Run, beginning: Beginning, request: Request) -> None:
    """Give a run the state from which it begins; a training run without a checkpoint begins with the initial model.

    Args:
        run: Run that has been set up.
        beginning: The state from which it begins.
        request: What the user asks for; it says whether seed, settings, code and data may be other ones.
    """
    if beginning.saved is not None:
        _restore(run, beginning.saved, request)
    elif run.fn == TrainerFn.FITTING:
        return
    elif beginning.previous is not None:
        checkpoint_content.adopt(run.federation, beginning.previous.federation)
    else:
        rank_zero_info("No ckpt_path: the model is evaluated as it is, and stands for every client's too.")


def _restore(run: Run, saved: dict[str, Any], request: Request) -> None:
    # The order matters: frozen weights are put back before on_load_checkpoint, which may look at the whole state dict,
    # and callbacks come last, because their hooks may read the progress and the module.
    ours = saved[KEY]
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
    if run.fn == TrainerFn.FITTING and not request.takes_other_seed and seed != run.seed:
        raise ConfigurationError(
            f"seed: '{path}' was trained with {seed}, {run.seed} is given now, so that the run would not go on as if "
            f"never stopped; give seed {seed} (seed_everything), or say other_seed: true."
        )
    _compare(run, ours, is_strict=request.is_strict)
    states = saved["callbacks"]
    for callback in run.hooks.callbacks:
        run.hooks.call_callback(callback, "on_load_checkpoint", saved)
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])


def _compare(run: Run, ours: dict[str, Any], *, is_strict: bool) -> None:
    """Warn of what the run and its checkpoint differ in, or refuse it if the user is strict; the run keeps it."""
    saved = Identity(settings=ours["settings"], **ours.get("identity", {}))
    found = replace(run.identity, settings=run.compared).differences(saved)
    if run.fn != TrainerFn.FITTING:  # earlier changes are no news to who only evaluates
        found = [line for line in found if line not in saved.changes]
    if found and is_strict:
        raise ConfigurationError(f"ckpt_path: '{run.path}' is refused, as strict asks for it: {'; '.join(found)}.")
    goes_on = run.fn == TrainerFn.FITTING and not run.progress.is_over(run.settings.max_rounds)
    for line in found:
        warnings.warn(f"{line}{'; the run goes on as it is now' * goes_on}.", stacklevel=2)
    if goes_on:  # and keeps it: a later resume must not take this for a run of one code
        changes = [x if x in saved.changes else f"after round {run.progress.finished_round}: {x}" for x in found]
        run.identity = replace(run.identity, changes=changes)


def _find_own(request: Request, identity: Identity, settings: RunSettings, jobs: set[str]) -> Path | None:
    """Return the newest ``last.ckpt`` of this very run, if it is asked for; None if the run begins anew.

    One that was resumed with other settings, code or data is the last choice; one of other code or data counts where
    there is none of the same, and only if it has not finished: two lines of a script may differ in what no setting
    tells, and neither is to be taken for the other.
    A job that a cluster starts again goes on with those runs that it began, without being asked.

    Args:
        request: What the user asks for.
        identity: What makes this run the one that it is.
        settings: What the user chose.
        jobs: Names of those who start processes again, perhaps also these ones.

    Raises:
        ConfigurationError: There is no ``last.ckpt`` to evaluate.
    """
    experiment = settings.experiment
    is_fit, is_asked = request.fn == TrainerFn.FITTING, request.ckpt_path is not None
    if not (is_asked or is_fit):
        return None
    folders = [folder for folder in run_folder.run_folders(experiment) if (folder / run_folder.LAST).is_file()]
    known = {folder: read(folder) for folder in folders}
    was = {folder: found[0] for folder, found in known.items() if found is not None and identity.is_alike(found[0])}
    if not (is_asked or jobs):
        equal = [folder for folder, found in was.items() if identity.is_of(found) and not found.changes]
        if equal:
            rank_zero_info(f"'{equal[-1]}' is this very run, done anew here; ckpt_path: last goes on with it.")
        return None
    free = {"seed"} if request.takes_other_seed else set()
    same = [
        folder for folder, found in known.items()
        if (is_asked if found is None else identity.is_of(found[0], free)
            and (is_asked or (folder not in slurm.begun and not jobs.isdisjoint(found[1]))))
    ]  # fmt: skip
    alike = sorted((folder for folder in same if folder in was), key=lambda folder: not was[folder].changes)
    # Checkpoints are large, so only as many are read as it takes to find one to go on with.
    newest = (folder / run_folder.LAST for folder in reversed(alike or same))
    own = next((p for p in newest if alike or not is_fit or load(p)[KEY]["round"] < settings.max_rounds), None)
    if own is not None:
        if not is_asked:
            rank_zero_info(f"This job was started again; the checkpoint of its run is '{own}'.")
        return own
    if not is_asked:
        return None
    if not is_fit:
        if known:  # the settings of training need not be given to evaluate a model
            return [*known][-1] / run_folder.LAST
        raise ConfigurationError(f"ckpt_path: there is no last.ckpt under '{experiment}'.")
    # It is no error, because a job that a cluster starts again is started by one command, also for the first time; but
    # a misspelt name would otherwise train everything again unnoticed.
    beside = [path.name for path in experiment.parent.glob("*") if run_folder.last_checkpoint(path) is not None]
    said = f"WARNING: there is no last.ckpt to resume in '{experiment}': the run starts at round 0. "
    others = [(folder, found[0]) for folder, found in known.items() if found is not None]
    if others:
        folder, saved = others[-1]
        other = "attributes of model or callbacks" if saved.attributes != identity.attributes else "data or code"
        why = "; ".join(identity.differences(saved)[:3]) or f"its {other} differ"
        said = f"WARNING: '{folder}' is another run ({why}): this one starts at round 0; to go on there, name it. "
    rank_zero_only(log.warning)((said + ("" if known else did_you_mean(experiment.name, beside, ""))).rstrip())
    return None
