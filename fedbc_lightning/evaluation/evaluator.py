"""What a round is worth: the global model, every client's own model, and how evenly the first serves the clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import is_lower_better
from fedbc_lightning.core.seeding import derive, numpy_generator, seed_globals
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.evaluation.clients_together import ClientsTogether
from fedbc_lightning.local import FineTuning
from fedbc_lightning.module.adapter import step_stage

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MAX_CLIENTS_BY_DEFAULT = 1000
Task = tuple[str, int]
"""Which model, "global" or "local", on whose data: a client's, or -1: the pooled ones."""


@dataclass
class Evaluation:
    """The numbers of one evaluation.

    Attributes:
        metrics: Name (``global/test_accuracy``, ...) -> value.
        clients: Name (``global/test_accuracy``, ``local/test_accuracy``) -> client -> value.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[int, float]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, float]]:
        """One per evaluated client: ``client`` and its values."""
        found: dict[int, dict[str, float]] = {}
        for name, values in self.clients.items():
            for client, value in values.items():
                found.setdefault(client, {"client": client})[name] = value
        return [found[client] for client in sorted(found)]


@dataclass(frozen=True)
class Models:
    """What is evaluated.

    Attributes:
        z: The global model (d + b,).
        counters: The integer buffers.
        local: Client -> its own model (d + b,) and integer buffers; None: there are none.
        fine_tuning: What is done to a client's own model before it is evaluated, or None.
    """

    z: Tensor
    counters: Tensor
    local: Callable[[int], tuple[Tensor, Tensor]] | None = None
    fine_tuning: FineTuning | None = None


@dataclass(frozen=True)
class Measurement:
    """Models, the data that they meet, and the step that does it.

    Attributes:
        split: ``"test"``, ``"val"``.
        stage: ``"test"``, ``"validation"``: whose step.
        models: What is evaluated.
        round: For the seeds.
    """

    split: str
    stage: str
    models: Models
    round: int


class Evaluator:
    """Evaluates z and the clients' models; the tasks are dealt out over the ranks.

    Args:
        fabric: Launched.
        engine: Its module and workbench are used.
        datamodule: The clients' data.
        eval_clients: How many clients: a number, a fraction, ``"all"``, or None for all up to 1,000, else 1,000.
        seed: The run's seed; which clients are drawn depends on it alone, not on the round.

    Attributes:
        has_told_writes: Whether it was said that what hooks around an evaluation write is not kept.
    """

    def __init__(
        self,
        fabric: Fabric,
        engine: SequentialEngine,
        datamodule: FederatedDataModule,
        eval_clients: int | float | str | None,
        seed: int,
    ) -> None:
        self.fabric, self.engine, self.datamodule, self._seed = fabric, engine, datamodule, seed
        self.client_ids = draw_clients(datamodule.num_clients, eval_clients, seed)
        self.has_told_writes = False

    def run(self, splits: Sequence[str], models: Models, round: int) -> Evaluation:
        """Evaluate models on splits.

        Args:
            splits: ``"test"``, ``"val"``.
            models: What is evaluated.
            round: For the seeds.
        """
        evaluation = Evaluation()
        for split in splits:
            stage = step_stage(self.engine.user.module, split)
            if stage is not None:
                results = self._measure(Measurement(split, stage, models, round))
                self._summarise(evaluation, split, results)
        return evaluation

    def local_model(self, models: Models, client: int, round: int) -> tuple[Tensor, Tensor]:
        """The model (d + b,) and the integer buffers that are evaluated as a client's own; there are such.

        Args:
            models: What is evaluated.
            client: 0..N-1.
            round: For the seed of the fine-tuning, if there is one; the module then holds the model.
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
        self.engine.load(upload(model, models.z.device), upload(counters, models.z.device))
        if models.fine_tuning is not None:
            self.engine.fine_tune(client, models.fine_tuning)

    @contextmanager
    def evaluating(self, stage: str, round: int) -> Iterator[None]:
        """What the module sees while it is evaluated."""
        user = self.engine.user
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
        """What is evaluated on a split, in order."""
        counts = self.datamodule.num_samples(split)
        clients = [i for i in self.client_ids if counts[i]]
        tasks = [("global", -1)] + [("global", i) for i in clients]
        if models.local is not None:
            tasks += [("local", i) for i in clients]
        return tasks

    def _measure(self, what: Measurement) -> dict[Task, dict[str, float]]:
        """Task -> name -> value, from all ranks."""
        tasks, mapped = self.tasks(what.split, what.models), self.engine.mapped_evaluation(what.stage)
        results = self.do(self.share(tasks), what) if mapped is None else ClientsTogether(self, mapped, what).do(tasks)
        self.engine.user.best_metrics.join(self.fabric)
        merged: dict[Task, dict[str, float]] = {}
        for part in gather_objects(self.fabric, results):
            merged |= part
        return {task: merged[task] for task in tasks if task in merged}

    def share(self, parts: list) -> list:
        """Those of this rank."""
        return parts[self.fabric.global_rank :: self.fabric.world_size]

    def do(self, tasks: Sequence[Task], what: Measurement) -> dict[Task, dict[str, float]]:
        """Task -> name -> value, where there are data; one after another."""
        user, engine, models = self.engine.user, self.engine, what.models
        results = dict[Task, dict[str, float]]()
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
                    engine.load(models.z, models.counters)
                loaded = which
                user.best_metrics.key = f"{what.split} {which} {client}"
                results[which, client] = user.evaluate(loader, what.stage)
        return results

    def seed_client(self, client: int, round: int) -> None:
        """Seed what a client's steps draw from, and its fine-tuning."""
        seed_globals(derive(self._seed, "eval", round, client), self.engine.user.device)

    def loader(self, split: str, client: int) -> Any:
        """The batches of a client, or those of all (-1); None: it has none."""
        device = self.engine.user.device
        if client < 0:
            return self.datamodule.pooled_dataloader(split, device=device)
        return self.datamodule.client_eval_dataloader(client, split, device=device)

    def _summarise(self, evaluation: Evaluation, split: str, results: dict[tuple[str, int], dict[str, float]]) -> None:
        metrics, sizes = evaluation.metrics, self.datamodule.num_samples(split)
        train_sizes = self.datamodule.num_samples("train")
        for name, value in results.get(("global", -1), {}).items():
            metrics[f"global/{split}_{name}"] = value
        for which in ("local", "global"):
            evaluated = [client for w, client in results if w == which and client >= 0]
            for name in dict.fromkeys(name for client in evaluated for name in results[which, client]):
                clients = [client for client in evaluated if name in results[which, client]]
                values = np.array([results[which, i][name] for i in clients])
                evaluation.clients[f"{which}/{split}_{name}"] = dict(zip(clients, values.tolist(), strict=True))
                if which == "local":
                    metrics[f"local/{split}_{name}"] = float(values.mean())
                    metrics[f"local/{split}_{name}_weighted"] = float(np.average(values, weights=sizes[clients]))
                elif split == "test":
                    metrics |= fairness(name, values, train_sizes[clients])
                    metrics["fairness/num_clients"] = float(len(clients))


def fairness(name: str, values: np.ndarray, sizes: np.ndarray) -> dict[str, float]:
    """How evenly the global model serves the clients.

    Args:
        name: Of the metric; names with loss, error, rmse or perplexity are worse when higher.
        values: One per client.
        sizes: Their numbers of training samples.

    Returns:
        ``fairness/<name>_std`` (population), ``_worst10`` (mean of the worst ceil(n/10) clients), ``_least_data`` and
        ``_most_data`` (of the client with the fewest and the most samples).

    Example:
        >>> fairness("accuracy", np.array([0.5, 1.0]), np.array([10, 20]))["fairness/accuracy_worst10"]
        0.5
    """
    ranked = np.sort(values)[::-1] if is_lower_better(name) else np.sort(values)
    return {
        f"fairness/{name}_std": float(values.std()),
        f"fairness/{name}_worst10": float(ranked[: math.ceil(len(values) / 10)].mean()),
        f"fairness/{name}_least_data": float(values[sizes.argmin()]),
        f"fairness/{name}_most_data": float(values[sizes.argmax()]),
    }


def draw_clients(num_clients: int, eval_clients: int | float | str | None, seed: int) -> list[int]:
    """The clients that are evaluated, the same in every round.

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
