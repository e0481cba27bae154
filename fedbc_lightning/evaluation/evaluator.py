"""Evaluation of the global model and of the clients' own models, and measures of fairness among clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.devices import read, upload
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import NUM_EVALUATED, Measured, is_lower_better
from fedbc_lightning.core.seeding import derive, numpy_generator, seed_globals
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.evaluation.clients_together import ClientsTogether
from fedbc_lightning.evaluation.measurement import Measurement, Models, Task
from fedbc_lightning.module.adapter import step_stage
from fedbc_lightning.module.mistakes import place_in_run, raise_located

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MAX_CLIENTS_BY_DEFAULT = 1000
"""Largest number of clients that are evaluated if ``trainer.eval_clients`` is None."""


@dataclass
class Evaluation:
    """The results of one evaluation.

    Attributes:
        metrics: Value of each metric by its name (``accuracy/global``, ...).
        clients: Value of each metric at each client, by name (``accuracy/global``, ``accuracy/local``) and client.
        num_samples: Number of samples on which each client was evaluated, by name (``num_test_samples``) and client.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[int, float]] = field(default_factory=dict)
    num_samples: dict[str, dict[int, int]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, float]]:
        """Return one row per evaluated client: its number under ``client``, its samples, and its values by name."""
        found: dict[int, dict[str, float]] = {}
        for name, values in (self.num_samples | self.clients).items():
            for client, value in values.items():
                found.setdefault(client, {"client": client})[name] = value
        return [found[client] for client in sorted(found)]


class EngineHolder(Protocol):
    """An object that holds the engine.

    Attributes:
        engine: The engine, which another one may replace before the first round is committed.
    """

    engine: BaseEngine


class Evaluator:
    """Evaluates the global model z and the clients' own models; the tasks are divided among the ranks.

    Args:
        fabric: Fabric that has been launched.
        holder: Object that holds the engine whose module and workbench are used.
        datamodule: Data of the clients.
        eval_clients: Clients to evaluate: a number, 0 for none, a fraction, or ``"all"``; None is all, but at most
            1,000.
        seed: Seed of the run, which alone determines the clients that are drawn; they are the same in every round.

    Attributes:
        has_told_writes: Whether the user was told that values written by hooks around an evaluation are not kept.
    """

    def __init__(
        self,
        fabric: Fabric,
        holder: EngineHolder,
        datamodule: FederatedDataModule,
        eval_clients: int | float | str | None,
        seed: int,
    ) -> None:
        self.fabric, self._holder, self.datamodule, self._seed = fabric, holder, datamodule, seed
        self.client_ids = draw_clients(datamodule.num_clients, eval_clients, seed)
        self.has_told_writes = False

    @property
    def engine(self) -> BaseEngine:
        """The engine whose module and workbench are used."""
        return self._holder.engine

    def run(self, splits: Sequence[str], models: Models, round: int) -> Evaluation:
        """Evaluate models on splits; nothing is done if the module has no ``test_step`` and no ``validation_step``.

        Args:
            splits: Splits of the data, ``"test"`` or ``"val"``.
            models: Models that are evaluated.
            round: Round, from which seeds are derived.
        """
        evaluation = Evaluation()
        for split in splits:
            stage = step_stage(self.engine.bench.user.module, split)
            if stage is not None:
                results = self._measure(Measurement(split, stage, models, round))
                self._summarise(evaluation, split, results)
        return evaluation

    def local_model(self, models: Models, client: int, round: int) -> tuple[Tensor, Tensor]:
        """Return the model ``(d + b,)`` and the integer buffers that are evaluated as a client's own.

        Args:
            models: Models that are evaluated; ``models.local`` must not be None.
            client: Client 0..N-1.
            round: Round, from which the seed of the fine-tuning is derived, if there is one; the module then holds the
                returned model.
        """
        assert models.local is not None
        if models.fine_tuning is None:
            return models.local(client)
        with self.evaluating("test", round):
            self.seed_client(client, round)
            self._load_local(models, client)
        layout = self.engine.layout
        return torch.cat([layout.read(), layout.read_buffers()]), layout.read_counters()

    def _load_local(self, models: Models, client: int) -> None:
        """Write a client's own model into the module, and fine-tune it there if the method does."""
        assert models.local is not None
        model, counters = models.local(client)
        self.engine.bench.load(upload(model, models.z.device), upload(counters, models.z.device))
        if models.fine_tuning is not None:
            try:
                self.engine.fine_tune(client, models.fine_tuning)
            except Exception as error:
                raise_located(error, f"client {client}, fine-tuning before its evaluation")
                raise

    @contextmanager
    def evaluating(self, stage: str, round: int) -> Iterator[None]:
        """Put the module into evaluation mode, without gradients and with Lightning's attributes set for ``stage``."""
        user = self.engine.bench.user
        user.eval_mode()
        user.shim.set(training=False, validating=stage == "validation", testing=stage == "test", current_client=None,
                      current_epoch=round, global_step=round)  # fmt: skip
        try:
            with torch.no_grad():
                yield
        finally:
            user.train_mode()
            user.shim.set(validating=False, testing=False)

    def tasks(self, split: str, models: Models) -> list[Task]:
        """Return the tasks of a split in order: the global model on pooled data, then on clients', then own models."""
        counts = self.datamodule.num_samples(split)
        clients = [i for i in self.client_ids if counts[i]]
        tasks = [("global", -1)] + [("global", i) for i in clients]
        if models.local is not None:
            tasks += [("local", i) for i in clients]
        return tasks

    def _measure(self, what: Measurement) -> dict[Task, dict[str, float]]:
        """Do a measurement on all ranks, and return the values of each task by name."""
        tasks, mapped = self.tasks(what.split, what.models), self.engine.mapped_evaluation(what.stage)
        if mapped is None:
            results = self.one_by_one(self.share(tasks), what)
        else:
            results = ClientsTogether(self, mapped, what).evaluate(tasks)
        self.engine.bench.user.best_metrics.join(self.fabric)
        merged: dict[Task, dict[str, float]] = {}
        for part in gather_objects(self.fabric, results):
            merged |= part
        return {task: merged[task] for task in tasks if task in merged}

    def share(self, parts: list) -> list:
        """Return the parts that are assigned to this rank."""
        return parts[self.fabric.global_rank :: self.fabric.world_size]

    def one_by_one(self, tasks: Sequence[Task], what: Measurement) -> dict[Task, dict[str, float]]:
        """Evaluate tasks one after another on this rank.

        Returns:
            The values of each task by name; tasks without data are left out.
        """
        bench, models = self.engine.bench, what.models
        user = bench.user
        results = dict[Task, dict[str, Any]]()
        loaded = None
        with self.evaluating(what.stage, what.round):
            for which, client in tasks:
                loader = self.loader(what.split, client)
                if loader is None:
                    continue
                self.seed_client(client, what.round)
                if which == "local":
                    self._load_local(models, client)
                elif loaded != "global":
                    bench.load(models.z, models.counters)
                loaded = which
                user.best_metrics.key = f"{what.split} {which} {client}"
                who = "data of all clients" if client < 0 else f"client {client}"
                user.place = place_in_run(f"{who}, {what.stage}", what.round)
                results[which, client] = user.evaluate(loader, what.stage)
            numbers = iter(read(value for values in results.values() for value in values.values()))
        return {task: {name: next(numbers) for name in values} for task, values in results.items()}

    def seed_client(self, client: int, round: int) -> None:
        """Seed the generators that a client's evaluation steps and its fine-tuning draw from."""
        seed_globals(derive(self._seed, "eval", round, client), self.engine.bench.user.device)

    def loader(self, split: str, client: int) -> Any:
        """Return a loader of a client's data, or of all clients' data (-1); None if there are none."""
        device = self.engine.bench.user.device
        if client < 0:
            return self.datamodule.pooled_dataloader(split, device=device)
        return self.datamodule.client_eval_dataloader(client, split, device=device)

    def _summarise(self, evaluation: Evaluation, split: str, results: dict[Task, dict[str, float]]) -> None:
        metrics, sizes = evaluation.metrics, self.datamodule.num_samples(split)
        train_sizes = self.datamodule.num_samples("train")
        for name, value in results.get(("global", -1), {}).items():
            metrics[Measured(name, split=split).name] = value
        measured = sorted({client for _, client in results if client >= 0})
        evaluation.num_samples[f"num_{split}_samples"] = {client: int(sizes[client]) for client in measured}
        for which in ("local", "global"):
            evaluated = [client for w, client in results if w == which and client >= 0]
            for name in dict.fromkeys(name for client in evaluated for name in results[which, client]):
                clients = [client for client in evaluated if name in results[which, client]]
                values = np.array([results[which, i][name] for i in clients])
                what = Measured(name, which, split)
                evaluation.clients[what.name] = dict(zip(clients, values.tolist(), strict=True))
                if which == "local":
                    weighted = what._replace(place="local_weighted")
                    metrics[what.name] = float(values.mean())
                    metrics[weighted.name] = float(np.average(values, weights=sizes[clients]))
                elif split == "test":
                    metrics |= fairness(name, values, train_sizes[clients])
                    metrics[NUM_EVALUATED] = float(len(clients))


def fairness(name: str, values: np.ndarray, sizes: np.ndarray) -> dict[str, float]:
    """Measure how evenly the global model serves the clients.

    Args:
        name: Name of the metric, which tells whether smaller values are better, see
            :func:`~fedbc_lightning.core.metric_names.is_lower_better`.
        values: Value of the metric at each of the n clients.
        sizes: Number of training samples of each client.

    Returns:
        ``<name>/std`` (the population's standard deviation), ``worst10`` (the mean of the worst ceil(n/10) clients),
        ``least_data`` and ``most_data`` (the values of the clients with the fewest and the most samples).

    Example:
        >>> fairness("accuracy", np.array([0.5, 1.0]), np.array([10, 20]))["accuracy/worst10"]
        0.5
    """
    ranked = np.sort(values)[::-1] if is_lower_better(name) else np.sort(values)
    found = {
        "std": float(values.std()),
        "worst10": float(ranked[: math.ceil(len(values) / 10)].mean()),
        "least_data": float(values[sizes.argmin()]),
        "most_data": float(values[sizes.argmax()]),
    }
    return {Measured(name, place).name: value for place, value in found.items()}


def draw_clients(num_clients: int, eval_clients: int | float | str | None, seed: int) -> list[int]:
    """Draw the clients that are evaluated, which are the same in every round.

    Args:
        num_clients: Number of clients N.
        eval_clients: A number of clients, 0 for none, a fraction of them, or ``"all"``; None is all, but at most 1,000.
        seed: Seed of the run.

    Returns:
        The clients, ascending.

    Raises:
        ConfigurationError: ``eval_clients`` is a number above N.

    Example:
        >>> draw_clients(4, "all", seed=0), len(draw_clients(40, 0.25, seed=0)), len(draw_clients(2000, None, seed=0))
        ([0, 1, 2, 3], 10, 1000)
    """
    if eval_clients is None:
        count = min(num_clients, MAX_CLIENTS_BY_DEFAULT)
    elif eval_clients == "all":
        count = num_clients
    elif isinstance(eval_clients, float):
        count = max(1, round(eval_clients * num_clients))
    else:
        count = int(eval_clients)
        if count > num_clients:
            raise ConfigurationError(
                f"trainer.eval_clients: got {count}, but the data has {num_clients} clients; give at most that."
            )
    return sorted(numpy_generator(seed, "eval").choice(num_clients, count, replace=False).tolist())
