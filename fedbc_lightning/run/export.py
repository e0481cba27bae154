"""Writes one model of a run as a Lightning checkpoint, as safetensors, or as an adapter for peft."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError, nearest
from fedbc_lightning.core.files import replacing
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.evaluation.measurement import ClientModel
from fedbc_lightning.federation.checkpoint_content import module_state_of
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.run_checkpoint import lightning_checkpoint
from fedbc_lightning.state import checkpoint


@dataclass  # not frozen, because Lightning cannot pass frozen dataclasses to processes that it spawns
class Export:
    """Writes one model of a run to a file, as :meth:`FederatedTrainer.export` asks.

    Attributes:
        client: Number or name of the client whose own model is written; None: the global model.
        out: File to write; None: a file beside the checkpoint.
        force: Whether an existing file is overwritten.

    Raises:
        ConfigurationError: ``out`` cannot be written.
    """

    client: str | int | None
    out: Path | None
    force: bool

    def __post_init__(self) -> None:
        """Check the file before any work."""
        if self.out is not None:
            self._check(self.out)

    def write(self, run: Run) -> Path:
        """Write the model; the module holds z afterwards.

        Args:
            run: Run that has been set up, and restored from a checkpoint.

        Returns:
            The file that was written.

        Raises:
            ConfigurationError: The client or the model does not exist, or the file cannot be written.
        """
        assert run.path is not None, "export asks for a checkpoint"
        client, path = None if self.client is None else find_client(self.client, run.datamodule), run.path
        which = "global" if client is None else f"client_{client}"
        out = path.with_name(f"round_{run.progress.finished_round}_{which}.ckpt") if self.out is None else self.out
        if run.fabric.is_global_zero:
            self._check(out, path)
            state = module_state_of(run.federation, choose_model(run, client))
            try:
                out.parent.mkdir(parents=True, exist_ok=True)
                _write(run, state, _source(run, client, path), out)
            except OSError as error:
                raise ConfigurationError(f"out: cannot write '{out}' ({error.strerror}).") from error
        run.federation.load_global()
        return out

    def _check(self, out: Path, path: Path | None = None) -> None:
        if out.is_dir():
            raise ConfigurationError(f"out: '{out}' is a folder; give the name of a file.")
        if out.exists() and path is not None and out.samefile(path):
            raise ConfigurationError(f"out: '{out}' is the checkpoint itself; give another file.")
        if out.exists() and not self.force:
            raise ConfigurationError(f"out: '{out}' is there already; give another file, or --force to write over it.")


def _write(run: Run, state: dict[str, Tensor], source: dict[str, Any], out: Path) -> None:
    """Write a model in the form that the name of the file asks for; an adapter's folder has a name without a dot."""
    adapter = None if out.suffix else find_adapter(run.user.module)
    if out.suffix == ".safetensors":
        write_safetensors(state, source, out)
    elif adapter is not None:
        write_adapter(adapter, state, out)
    else:
        checkpoint.save_atomically(lightning_checkpoint(run, state, {checkpoint.SOURCE: source}), out)


def find_client(client: str | int, datamodule: FederatedDataModule) -> int:
    """Return the index of a client, which is given as a number or as a name.

    Raises:
        ConfigurationError: There is no such client.
    """
    last, names = datamodule.num_clients - 1, datamodule.client_names or []
    try:
        number = int(client)
    except ValueError:
        if client in names:
            return names.index(str(client))
        near = nearest(str(client), names)
        meant = f"did you mean '{near}'? Else give" if near else "give"
        raise ConfigurationError(f"client: none is named '{client}'; {meant} a number from 0 to {last}.") from None
    if not 0 <= number <= last:
        raise ConfigurationError(f"client: there is no client {client}; give a number from 0 to {last}.")
    return number


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
            f"client: {federation.algorithm} has no models of clients, and their last ones were not kept; leave client "
            "out, or train with trainer.keep_local_models: true."
        )
    return run.evaluator.local_model(models, client, run.progress.finished_round)


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


def write_safetensors(state: dict[str, Tensor], source: dict[str, Any], out: Path) -> None:
    """Write a module's state dict to a file, with its origin as metadata.

    Raises:
        ConfigurationError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigurationError(
            f"out: '{out}' needs safetensors: pip install 'fedbc-lightning[llm]', or give a name that ends in .ckpt."
        ) from error
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    with replacing(out) as partial:
        save_file(tensors, partial, {"format": "pt", checkpoint.SOURCE: json.dumps(source)})


def find_adapter(module: nn.Module) -> tuple[str, Any] | None:
    """Return the name and the object of the module's only ``PeftModel``; None if it has none or several."""
    peft = sys.modules.get("peft")  # a module that has adapters has imported it
    found = [(name, part) for name, part in module.named_modules() if peft and isinstance(part, peft.PeftModel)]
    return found[0] if len(found) == 1 else None


def write_adapter(adapter: tuple[str, Any], state: dict[str, Tensor], out: Path) -> None:
    """Write the folder that ``PeftModel.from_pretrained`` reads.

    Args:
        adapter: Name and object of the ``PeftModel`` in the user's module.
        state: State dict of the user's module.
        out: Folder to make.
    """
    name, model = adapter
    prefix = f"{name}." if name else ""
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    model.save_pretrained(str(out), state_dict=own)
