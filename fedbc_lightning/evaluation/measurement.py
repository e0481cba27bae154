"""What is measured, that is which models on which data by which step, and the evaluation of one model after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fedbc_lightning.core.devices import read, upload
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.core.text import called
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.loading import ClientLoaders
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.local import FineTuning
from fedbc_lightning.module.mistakes import locate_step, place_in_run
from fedbc_lightning.state.layout import is_same

MODELS = ("global", "local", "finetuned")
# One of these models and the client on whose data it is evaluated; -1 is the pooled data
Task = tuple[str, int]
# Values of tasks by name
Results = dict[Task, dict[str, float]]


class ClientModel(NamedTuple):
    """A client's own model.

    Attributes:
        model: Shared parameters and floating-point buffers, ``(d + b,)``.
        counters: Integer buffers.
        kept: The parameters that stay with the client (``trainer.local_parameters``), ``(p,)``; None where p = 0.
    """

    model: Tensor
    counters: Tensor
    kept: Tensor | None = None


@dataclass(frozen=True)
class Models:
    """The models that are evaluated.

    Attributes:
        z: Global model, parameters and float buffers, ``(d + b,)``.
        counters: Integer buffers of the global model.
        local: Function from a client to its own model; None if clients have no own models.
        local_weights: Function from K clients to the weights of their own models, ``(K, d + p)`` on the CPU; None where
            there is no such function, and ``local`` has to be asked for each client.
        fine_tuning: Fine-tuning of a client's own model before it is evaluated, or None.
        kept: The kept parameters ``(p,)`` of a client that has not trained yet; None where p = 0. Where clients keep
            some, no model is everyone's, so z is not evaluated.
        stamps: Function from a client to objects that are other ones after its own model has changed; None where there
            is none.
    """

    z: Tensor
    counters: Tensor
    local: Callable[[int], ClientModel] | None = None
    local_weights: Callable[[Sequence[int]], Tensor] | None = None
    fine_tuning: FineTuning | None = None
    kept: Tensor | None = None
    stamps: Callable[[int], tuple] | None = None


@dataclass(frozen=True)
class Measurement:
    """Description of one measurement: models, a split of the data, and the step of the module that evaluates.

    Attributes:
        split: Split of the data, ``"test"`` or ``"val"``.
        stage: Stage of Lightning whose step is called, ``"test"`` or ``"validation"``.
        models: Models that are evaluated.
        round: Round, from which seeds are derived.
    """

    split: str
    stage: str
    models: Models
    round: int


class SingleModels:
    """Loads one model after another into the module, and evaluates each on the data of one client or of all.

    Args:
        fabric: Fabric that has been launched.
        find_engine: Returns the engine whose module and workbench are used; another one may replace it before the
            first round is committed.
        datamodule: Data of the clients.
        seed: Seed of the run.
    """

    def __init__(
        self, fabric: Fabric, find_engine: Callable[[], BaseEngine], datamodule: FederatedDataModule, seed: int
    ) -> None:
        self.fabric, self._find_engine, self.datamodule, self._seed = fabric, find_engine, datamodule, seed
        self._writes_buffers = False

    @property
    def engine(self) -> BaseEngine:
        """The engine whose module and workbench are used."""
        return self._find_engine()

    def local_model(self, models: Models, client: int, round: int) -> ClientModel:
        """Return the model that is evaluated as a client's own.

        Args:
            models: Models that are evaluated; ``models.local`` must not be None.
            client: Client 0..N-1.
            round: Round, from which the seed of the fine-tuning is derived, if there is one; the module then holds the
                returned model.
        """
        assert models.local is not None
        if models.fine_tuning is None:
            return models.local(client)
        with self.evaluating("test"):
            self.seed_client(client, round)
            self._load_local(models, client)
        layout = self.engine.layout
        kept = None if models.kept is None else layout.read_kept()
        return ClientModel(torch.cat([layout.read(), layout.read_buffers()]), layout.read_counters(), kept)

    def _load_local(self, models: Models, client: int) -> None:
        """Write a client's own model into the module, and fine-tune it there if the method does."""
        assert models.local is not None
        own, device = models.local(client), models.z.device
        kept = None if own.kept is None else upload(own.kept, device)
        self.engine.bench.load(upload(own.model, device), upload(own.counters, device), kept=kept)
        if models.fine_tuning is not None:
            try:
                self.engine.fine_tune(client, models.fine_tuning)
            except Exception as error:
                locate_step(error, f"client {client}, fine-tuning before its evaluation")
                raise

    @contextmanager
    def evaluating(self, stage: str) -> Iterator[None]:
        """Put the module into evaluation mode, without gradients and with Lightning's attributes set for ``stage``."""
        user = self.engine.bench.user
        user.module.eval()
        user.shim.set(training=False, validating=stage == "validation", testing=stage == "test", current_client=None)
        try:
            with torch.no_grad():
                yield
        finally:
            user.train_mode()
            user.shim.set(validating=False, testing=False)

    def merge(self, results: dict) -> dict:
        """Return the results of all ranks."""
        return {key: value for part in gather_objects(self.fabric, results) for key, value in part.items()}

    def share(self, parts: list) -> list:
        """Return the parts that are assigned to this rank."""
        return parts[self.fabric.global_rank :: self.fabric.world_size]

    def one_by_one(self, tasks: Sequence[Task], what: Measurement) -> Results:
        """Evaluate tasks one after another on this rank.

        Returns:
            The values of each task by name; tasks without data are left out.
        """
        models, results = what.models, dict[Task, dict[str, Any]]()
        loaded, names = None, self.datamodule.client_names
        with self.evaluating(what.stage):
            for which, client in tasks:
                loader = self.loader(what.split, client)
                if loader is None:
                    continue
                self.seed_client(client, what.round)
                # z is loaded once and stays for all clients; own models replace it, so it is loaded again after them.
                if which != "global":
                    self._load_local(models, client)
                elif loaded != "global":
                    self.engine.bench.load(models.z, models.counters, kept=models.kept)
                loaded = which
                user, layout = self.engine.bench.user, self.engine.layout
                user.best_metrics.key = f"{what.split} {which} {client}"
                who = "data of all clients" if client < 0 else called(client, names)
                user.place = place_in_run(f"{who}, {what.stage}", what.round)
                # Compared for the first model alone; from then on, every client finds the buffers of z.
                tensors = [] if results or self._writes_buffers else [place.tensor for place in layout.places]
                before = [tensor if tensor is None else tensor.clone() for tensor in tensors]
                results[which, client] = user.evaluate(loader, what.stage)
                if before:
                    self._find_written(before)
                loaded = None if self._writes_buffers else which
        # Only now are the values read from the device, all at once, so that it need not wait between clients.
        numbers = iter(read(value for values in results.values() for value in values.values()))
        return {task: {name: next(numbers) for name in values} for task, values in results.items()}

    def _find_written(self, before: Sequence[Tensor | None]) -> None:
        """Note whether an evaluation has written into buffers, and say once that this is put back."""
        bench = self.engine.bench
        pairs = zip(bench.layout.places, before, strict=True)
        written = [place.full_name for place, then in pairs if not is_same(place.tensor, then)]
        if written:
            self._writes_buffers = True
            bench.say(
                f"model: evaluation writes into buffer '{written[0]}': each client's evaluation begins with what the "
                "evaluated model has there, and nothing is kept, so that no number depends on who was evaluated "
                "before. What is to be kept, write in training_step or in on_round_end (said once)."
            )

    def seed_client(self, client: int, round: int) -> None:
        """Seed the generators that a client's evaluation steps and its fine-tuning draw from."""
        # By round and client alone: a client's numbers depend neither on who was evaluated before it nor on the rank.
        seed_globals(derive(self._seed, "eval", round, client), self.engine.bench.user.device)

    def loaders(self, split: str, clients: Sequence[int]) -> ClientLoaders | None:
        """Return the loaders of K clients' data; None if one of them has none."""
        device = self.engine.bench.user.device
        return self.datamodule.client_dataloaders(clients, split, device=device)

    def loader(self, split: str, client: int) -> Any:
        """Return a loader of a client's data, or of all clients' data (-1); None if there are none."""
        device = self.engine.bench.user.device
        if client < 0:
            return self.datamodule.pooled_dataloader(split, device=device)
        return self.datamodule.client_eval_dataloader(client, split, device=device)
