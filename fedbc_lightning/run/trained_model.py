"""Writes one model of a run to a file, or predicts with it: the global model, or a client's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

from fedbc_lightning.core.clients import find_clients
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import is_there, make_folder, refuse_link, replacing, told
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.storable import find_unreadable, plain_copy
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.datamodule import POOLED
from fedbc_lightning.evaluation.measurement import ClientModel
from fedbc_lightning.federation.checkpoint_content import module_state_of
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.run_checkpoint import lightning_checkpoint
from fedbc_lightning.state import checkpoint


def export(run: Run, *, client: str | int | None, out: Path | None, force: bool) -> Path:
    """Write a model as :meth:`FederatedTrainer.export` says; the module holds z afterwards.

    Args:
        run: Run that has been set up, and restored from a checkpoint.
        client: Number or name of the client whose own model is written; None: the global model.
        out: File to write; None: a file beside the checkpoint.
        force: Whether an existing file is overwritten.

    Returns:
        The file that was written.

    Raises:
        ConfigurationError: The client or the model does not exist, or the file cannot be written.
    """
    assert run.path is not None, "export asks for a checkpoint"
    index, path = _index_of(client, run.datamodule), run.path
    out = path.with_name(f"{_name(run, index)}.ckpt") if out is None else out
    if run.fabric.is_global_zero:
        check_out(out, force=force)
        if out == path or (out.exists() and out.samefile(path)):
            raise ConfigurationError(f"out: '{out}' is the checkpoint itself; give another file.")
        state = module_state_of(run.federation, choose_model(run, index))
        with told(out.parent, setting="out"):
            make_folder(out.parent)
            _write(run, state, _source(run, index, path), out)
    run.federation.load_global()
    return out


def _name(run: Run, client: int | None) -> str:
    return f"round_{run.progress.finished_round}_{'global' if client is None else f'client_{client}'}"


def check_out(out: Path, *, force: bool) -> None:
    """Raise if the file is there already, also before any work is done.

    Raises:
        ConfigurationError: It is, and ``force`` is False.
    """
    if is_there(out) and not force:
        raise ConfigurationError(f"out: '{out}' is there already; give another file, or --force to write over it.")


def _write(run: Run, state: dict[str, Tensor], source: dict[str, Any], out: Path) -> None:
    """Write a model in the form that the name of the file asks for; an adapter's folder has a name without a dot."""
    peft = sys.modules.get("peft")  # a module that has adapters has imported it
    named = run.user.module.named_modules()
    adapters = [(name, part) for name, part in named if peft and isinstance(part, peft.PeftModel)]
    if out.suffix == ".safetensors":
        if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
            raise ConfigurationError(f"out: '{others[0]}' is no tensor, as safetensors holds; give a .ckpt file.")
        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        with replacing(out) as partial:
            save_file(tensors, partial, {"format": "pt", checkpoint.SOURCE: json.dumps(source)})
    elif not out.suffix and len(adapters) == 1:
        ((name, adapter),) = adapters
        prefix = f"{name}." if name else ""
        own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        for place in (out, *out.glob("*")):  # peft opens the files itself
            refuse_link(place)
        adapter.save_pretrained(str(out), state_dict=own)  # the folder that ``PeftModel.from_pretrained`` reads
    else:
        checkpoint.save_atomically(lightning_checkpoint(run, state, {checkpoint.SOURCE: source}), out)


def _source(run: Run, client: int | None, path: Path) -> dict[str, Any]:
    """Describe the origin of the model: run, checkpoint, round, algorithm and client."""
    algorithm, names = run.federation.algorithm, run.datamodule.client_names
    fine_tuning = None if client is None else algorithm.fine_tuning
    return {
        "run": "/".join(path.resolve().parent.parent.parts[-2:]),
        "checkpoint": path.name,
        "round": run.progress.finished_round,
        "algorithm": str(algorithm),
        "client": client,
        "client_name": None if client is None or names is None else names[client],
        "fine_tuned_on": fine_tuning and fine_tuning.split,
    }


def predict(run: Run, *, client: str | int | None, dataloaders: Iterable[Any] | None) -> list[Any]:
    """Return the value of ``predict_step`` for each batch, on the CPU; the module holds z afterwards.

    Args:
        run: Run that has been set up, and restored if there is a checkpoint.
        client: Number or name of the client whose own model predicts; None: the global model.
        dataloaders: Batches; None: ``predict_dataloader`` of the user's data module or model where one is overridden,
            else the test data of that client, or of all.

    Raises:
        ConfigurationError: The client or the model does not exist, or there is nothing to predict on.
    """
    index = _index_of(client, run.datamodule)
    loader = _of_the_user(run) if dataloaders is None else dataloaders
    return _predict(run, index, _test_loader(run, index) if loader is None else loader)


def write_predictions(
    run: Run, *, client: str | int | None, dataloaders: Iterable[Any] | None, out: Path, force: bool
) -> list[Path]:
    """Write predictions as :meth:`FederatedTrainer.predict` says, on test data a file for each client that has some.

    Args:
        run: Run that has been set up, and restored if there is a checkpoint.
        client: Number or name of the only client, whose own model predicts; None: all of them.
        dataloaders: Batches, as in :func:`predict`.
        out: Folder of the files.
        force: Whether existing files are overwritten.

    Returns:
        The files.

    Raises:
        ConfigurationError: There is nothing to predict on, or a file cannot be written.
    """
    data, algorithm, index = run.datamodule, run.federation.algorithm, _index_of(client, run.datamodule)
    has_own = algorithm.has_local_model or algorithm.fine_tuning or run.federation.layout.kept_entries
    given = _of_the_user(run) if dataloaders is None else dataloaders
    tested: list[Any] = np.flatnonzero(data.num_samples("test")).tolist() if index is None and given is None else []
    files = {out / f"{_name(run, owner)}.pt": owner for owner in tested or [index]}
    if run.fabric.is_global_zero:
        for file in files:
            check_out(file, force=force)
    for file, owner in files.items():
        loader = _test_loader(run, owner) if given is None else given
        own = owner if index is not None or (has_own and owner not in data.heldout) else None
        predictions = _predict(run, own, loader, check=_check_storable)
        name = owner if owner is None or data.client_names is None else data.client_names[owner]
        if run.fabric.is_global_zero:
            with told(out, setting="out"):
                checkpoint.save_atomically({"client": name, "predictions": predictions}, file)
    return list(files)


def _check_storable(output: Any) -> None:
    refused = find_unreadable(plain_copy(output), "the value")
    if refused is not None:
        raise ConfigurationError(
            f"predict_step: {refused}, which a file cannot hold; return tensors, numbers and texts, or lists and dicts "
            "of these."
        )


def _test_loader(run: Run, client: int | None) -> Any:
    loader = run.evaluator.loader("test", POOLED if client is None else client)
    if loader is None:
        raise ConfigurationError("dataloaders: there is no test data to predict on; give a DataLoader.")
    return loader


def _predict(
    run: Run, client: int | None, loader: Any, check: Callable[[Any], None] = lambda output: None
) -> list[Any]:
    """Predict with the model of a client, or with the global one; ``check`` sees the value of each batch."""
    if isinstance(loader, (list, tuple)) and any(isinstance(part, DataLoader) for part in loader):
        if len(loader) > 1:
            raise ConfigurationError("dataloaders: several were given; give one DataLoader, and call predict for each.")
        loader = loader[0]
    evaluator, federation, chosen = run.evaluator, run.federation, choose_model(run, client)
    run.hooks.call_module("on_predict_model_eval")
    run.hooks.call("on_predict_start")
    with evaluator.evaluating("predict"):
        federation.bench.load(chosen.model, chosen.counters, kept=chosen.kept)
        run.shim.set(predicting=True, predict_dataloaders=loader)
        evaluator.seed_client(POOLED if client is None else client, run.progress.finished_round)
        predictions = list(_predictions(run, loader, check))
        run.shim.set(predicting=False)
    run.hooks.call("on_predict_end")
    federation.load_global()
    return predictions


def _predictions(run: Run, loader: Iterable[Any], check: Callable[[Any], None]) -> Iterator[Any]:
    user, hooks, step, cpu = run.user, run.hooks, run.user.module.predict_step, torch.device("cpu")
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    user.start_collecting()
    hooks.call("on_predict_epoch_start")
    for batch_idx, raw in enumerate(loader):
        batch = user.to_device(raw)
        hooks.call("on_predict_batch_start", batch, batch_idx)
        with user.autocast():
            output = step(*((batch, batch_idx) if takes_index else (batch,)))
        hooks.call("on_predict_batch_end", output, batch, batch_idx)
        output = move_data_to_device(output, cpu)
        check(output)
        yield output
    hooks.call("on_predict_epoch_end")


def _of_the_user(run: Run) -> Iterable[Any] | None:
    """What ``predict_dataloader`` gives, as under lightning.Trainer: the data module's, else the model's; or None."""
    data, model = run.datamodule.users_module, run.user.module
    if overrides(data, "predict_dataloader", DataHooks):
        if data is not run.datamodule:
            data.setup("predict")  # a wrapped module has been set up for training
        return data.predict_dataloader()
    return model.predict_dataloader() if overrides(model, "predict_dataloader", DataHooks) else None


def _index_of(client: str | int | None, datamodule: FederatedDataModule) -> int | None:
    """Return the index of a client, which is given as a number or as a name; None for none."""
    if client is None:
        return None
    (index,) = find_clients([client], datamodule.num_clients, datamodule.client_names, "client")
    return index


def choose_model(run: Run, client: int | None) -> ClientModel:
    """Return the global model or a client's own.

    Where clients keep parameters of their own, the global model has those of the initial module, as a new client would.

    Raises:
        ConfigurationError: The clients' models were not kept, or the algorithm trains on pooled data.
    """
    federation = run.federation
    if client is None:
        server = federation.server
        return ClientModel(federation.algorithm.global_model(server), server["counters"], server.kept)
    if federation.algorithm.trains_pooled:
        raise ConfigurationError(f"client: {federation.algorithm} trains one model on all data; leave client out.")
    if client in run.datamodule.heldout:
        raise ConfigurationError(
            f"client: client {client} is held out (data.heldout_clients) and has no model of its own; leave client out."
        )
    models = federation.models()
    if models.local is None:
        raise ConfigurationError(
            f"client: {federation.algorithm} has no models of clients, and their last ones were not kept, or stayed "
            "with the clients (trainer.backend); leave client out, or train with trainer.keep_local_models: true."
        )
    return run.evaluator.local_model(models, client, run.progress.finished_round)
