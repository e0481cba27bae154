"""What a round is worth: the global model, every client's own model, and how evenly the first serves the clients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.engines.cohort_run import FEW
from fedbc_lightning.engines.recording import NotRecordableError
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.errors import ConfigurationError, first_line
from fedbc_lightning.fabric import gather_objects
from fedbc_lightning.local import FineTuning
from fedbc_lightning.metric_names import is_lower_better
from fedbc_lightning.module import step_stage
from fedbc_lightning.seeding import Generators, derive, numpy_generator, seed_globals

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from fedbc_lightning.engines.mapped_evaluation import MappedEvaluation

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


class Evaluator:
    """Evaluates z and the clients' models; the tasks are dealt out over the ranks.

    Args:
        fabric: Launched.
        engine: Its module and workbench are used.
        datamodule: The clients' data.
        eval_clients: How many clients: a number, a fraction, ``"all"``, or None for all up to 1,000, else 1,000.
        seed: The run's seed; which clients are drawn depends on it alone, not on the round.
    """

    def __init__(
        self,
        fabric: Fabric,
        engine: SequentialEngine,
        datamodule: FederatedDataModule,
        eval_clients: int | float | str | None,
        seed: int,
    ) -> None:
        self._fabric, self._engine, self._datamodule, self._seed = fabric, engine, datamodule, seed
        self.client_ids = draw_clients(datamodule.num_clients, eval_clients, seed)

    def run(self, splits: Sequence[str], models: Models, round: int) -> Evaluation:
        """Evaluate models on splits.

        Args:
            splits: ``"test"``, ``"val"``.
            models: What is evaluated.
            round: For the seeds.
        """
        evaluation = Evaluation()
        for split in splits:
            stage = step_stage(self._engine.user.module, split)
            if stage is not None:
                results = self._measure(split, stage, models, round)
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
        with self._evaluating("test", round):
            seed_globals(derive(self._seed, "eval", round, client), self._engine.user.device)
            self._load_local(models, client)
        layout = self._engine.layout
        return torch.cat([layout.read(), layout.read_buffers()]), layout.read_counters()

    def _load_local(self, models: Models, client: int) -> None:
        """Write a client's own model into the module, and fine-tune it there if the method does."""
        assert models.local is not None
        model, counters = models.local(client)
        self._engine.load(model.to(models.z.device), counters.to(models.z.device))
        if models.fine_tuning is not None:
            self._engine.fine_tune(client, models.fine_tuning)

    @contextmanager
    def _evaluating(self, stage: str, round: int) -> Iterator[None]:
        """What the module sees while it is evaluated."""
        user = self._engine.user
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
        counts = self._datamodule.num_samples(split)
        clients = [i for i in self.client_ids if counts[i]]
        tasks = [("global", -1)] + [("global", i) for i in clients]
        if models.local is not None:
            tasks += [("local", i) for i in clients]
        return tasks

    def _measure(self, split: str, stage: str, models: Models, round: int) -> dict[Task, dict[str, float]]:
        """Task -> name -> value, from all ranks."""
        tasks, mapped = self.tasks(split, models), self._engine.mapped_evaluation(stage)
        if mapped is not None and split not in mapped.reasons:
            results = self._settle(mapped, tasks, split, stage, models, round)
        elif mapped is None or mapped.reasons[split] is not None:
            results = self.do(self._share(tasks), split, stage, models, round)
        else:
            units = self._share(self._units(mapped, tasks, split, models))
            results = self._do_units(mapped, units, split, stage, models, round)
        merged: dict[Task, dict[str, float]] = {}
        for part in gather_objects(self._fabric, results):
            merged |= part
        return {task: merged[task] for task in tasks if task in merged}

    def _share(self, parts: list) -> list:
        """Those of this rank."""
        return parts[self._fabric.global_rank :: self._fabric.world_size]

    def do(
        self, tasks: Sequence[Task], split: str, stage: str, models: Models, round: int
    ) -> dict[Task, dict[str, float]]:
        """Task -> name -> value, where there are data; one after another."""
        user, engine, results = self._engine.user, self._engine, dict[Task, dict[str, float]]()
        loaded = None
        with self._evaluating(stage, round):
            for which, client in tasks:
                loader = self._loader(split, client)
                if loader is None:
                    continue
                seed_globals(derive(self._seed, "eval", round, client), user.device)
                if which == "local":
                    self._load_local(models, client)
                elif loaded != "global":
                    engine.load(models.z, models.counters)
                loaded = which
                results[which, client] = user.evaluate(loader, stage)
        return results

    # several clients by one mapped step

    def _units(self, mapped: MappedEvaluation, tasks: Sequence[Task], split: str, models: Models) -> list[list[Task]]:
        """The tasks, together those that a mapped step may do: of clients with as many samples, in one batch in all.

        They are the same whatever the number of ranks.
        """
        most, counts = self._datamodule.eval_batch_size, self._datamodule.num_samples(split)
        groups = defaultdict[Any, list[Task]](list)
        for task in tasks:
            which, client = task
            is_alone = client < 0 or not counts[client] or (which == "local" and models.fine_tuning is not None)
            groups[task if is_alone else (which, "of", counts[client])].append(task)
        units = []
        for group in groups.values():
            which, client = group[0]
            size = max(1, most // counts[client]) if len(group) > 1 else 1
            size = min(size, mapped.most_models) if which == "local" else size
            units += [group[start : start + size] for start in range(0, len(group), size)]
        return units

    def _settle(
        self, mapped: MappedEvaluation, tasks: list[Task], split: str, stage: str, models: Models, round: int
    ) -> dict[Task, dict[str, float]]:
        """The first evaluation: one client after another, each once, and then by mapped steps.

        These count from now on, on all ranks, unless the step changes something or draws, or the numbers are others.
        """
        reason = next(filter(None, gather_objects(self._fabric, mapped.obstacle())), None)  # callbacks may differ
        units = self._share(self._units(mapped, tasks, split, models) if reason is None else [[t] for t in tasks])
        together = [unit for unit in units if len(unit) >= FEW]
        mine = {task for unit in units for task in unit}
        alone = [task for task in tasks if task in mine]
        results, found = dict[Task, dict[str, float]](), dict[Task, dict[str, float]]()

        def evaluate(some: Sequence[Task]) -> None:
            results.update(self.do([task for task in some if task not in results], split, stage, models, round))

        try:
            if together:
                first, second, *_ = together[0]
                evaluate([first])  # which may set up things
                self._loader(split, second[1])  # whose data are kept
                if self._has_drawn(first[1], round):
                    raise NotRecordableError("it draws random numbers")
                before, num_tensors = mapped.described(), mapped.num_tensors()
                evaluate([second])
                if mapped.num_tensors() > num_tensors:
                    raise NotRecordableError("it keeps what it computes")
                evaluate(alone)
                if mapped.described() != before:
                    raise NotRecordableError("it changes the module, or a global")
        except NotRecordableError as error:
            reason = str(error)
        evaluate(alone)
        try:
            for unit in together if reason is None else ():
                with mapped.watched():
                    found |= self._do_mapped(mapped, unit, split, stage, models, round)
        except Exception as error:  # whatever it is, one after another the clients have been evaluated
            reason = first_line(error)
        if reason is None and not _agree(found, results):
            reason = "mapped over clients, it gives other numbers"
        reason = next(filter(None, gather_objects(self._fabric, reason)), None)
        mapped.reasons[split] = reason
        if reason is not None:
            mapped.say(reason)
            return results
        return results | found

    def _has_drawn(self, client: int, round: int) -> bool:
        """Whether the step that has just been taken for a client drew random numbers."""
        now = Generators(self._engine.user.device)
        seed_globals(derive(self._seed, "eval", round, client), self._engine.user.device)
        return Generators(self._engine.user.device) != now

    def _do_units(
        self, mapped: MappedEvaluation, units: Sequence[Sequence[Task]], split: str, stage: str, models: Models,
        round: int,
    ) -> dict[Task, dict[str, float]]:  # fmt: skip
        """Those of clients together by mapped steps, unless one fails this time, and the others one after another."""
        results, can_map = dict[Task, dict[str, float]](), True
        alone: list[Task] = []
        for unit in units:
            try:
                if can_map and len(unit) >= FEW:
                    results |= self._do_mapped(mapped, unit, split, stage, models, round)
                    continue
            except Exception as error:  # one after another they give the same error, or none
                can_map = False
                mapped.say(f"this time, {first_line(error)}")
            alone += unit
        return results | self.do(alone, split, stage, models, round)

    def _do_mapped(
        self, mapped: MappedEvaluation, unit: Sequence[Task], split: str, stage: str, models: Models, round: int
    ) -> dict[Task, dict[str, float]]:
        clients = [client for _, client in unit]
        with self._evaluating(stage, round):
            found = mapped.run([self._loader(split, i) for i in clients], self._weights(models, unit[0][0], clients))
        return dict(zip(unit, found, strict=True))

    def _weights(self, models: Models, which: str, clients: Sequence[int]) -> Tensor:
        """Those of z (d,), or of the clients' own models (K, d)."""
        if which == "global" or models.local is None:
            return models.z[: self._engine.layout.num_parameters]
        own = torch.stack([models.local(client)[0] for client in clients])
        return own[:, : self._engine.layout.num_parameters].to(models.z.device)

    def _loader(self, split: str, client: int) -> Any:
        device = self._engine.user.device
        if client < 0:
            return self._datamodule.pooled_dataloader(split, device=device)
        return self._datamodule.client_eval_dataloader(client, split, device=device)

    def _summarise(self, evaluation: Evaluation, split: str, results: dict[tuple[str, int], dict[str, float]]) -> None:
        metrics, sizes = evaluation.metrics, self._datamodule.num_samples(split)
        train_sizes = self._datamodule.num_samples("train")
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


def _agree(found: dict[Task, dict[str, float]], expected: dict[Task, dict[str, float]]) -> bool:
    """Whether two ways give the same numbers, but for a client in a hundred, with logits equal but for rounding."""
    num_others = 0
    for task, values in found.items():
        others = expected.get(task, {})
        if values.keys() != others.keys() or any(math.isfinite(values[k]) != math.isfinite(others[k]) for k in values):
            return False
        pairs = [(values[name], others[name]) for name in values if math.isfinite(values[name])]
        num_others += not all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) for a, b in pairs)
    return num_others <= max(1, len(found) // 100)


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
