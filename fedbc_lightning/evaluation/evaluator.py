"""Evaluation of the global model, of the clients' own models, and of z after a few steps on clients held out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from lightning.fabric import Fabric
from lightning.pytorch.utilities import rank_zero_warn

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.core.recordable import is_promised
from fedbc_lightning.core.seeding import numpy_generator
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.datamodule import POOLED
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.engines.recorded.step_recorder import COMPARE_EVERY, has_torch_hooks
from fedbc_lightning.evaluation.clients_together import ClientsTogether
from fedbc_lightning.evaluation.measurement import ClientModel, Measurement, Models, Results, SingleModels, Task
from fedbc_lightning.evaluation.summary import Evaluation, summarise
from fedbc_lightning.module.adapter import step_stage

# Largest number of clients that are evaluated if `trainer.eval_clients` is None
MAX_CLIENTS_BY_DEFAULT = 1000


class Evaluator(SingleModels):
    """Evaluates the global model z and the clients' own models; the tasks are divided among the ranks.

    Args:
        fabric: Fabric that has been launched.
        find_engine: Returns the engine whose module and workbench are used.
        datamodule: Data of the clients.
        eval_clients: Clients to evaluate: a number, 0 for none, a fraction, or ``"all"``; None is all, but at most
            1,000.
        finetune_steps: Number of local steps after which z is evaluated once more on clients that are held out.
        seed: Seed of the run, which alone determines the clients that are drawn; they are the same in every round.

    Attributes:
        client_ids: The clients to evaluate, of those that train.
        heldout_ids: The clients to evaluate, of those that are held out.
        finetune_steps: The argument of this name.
        elsewhere: Has clients evaluated in place of this process, if it is not None: those that train, those that are
            held out, models and round; it returns values of tasks by split, in the order of the clients.

    Raises:
        ConfigurationError: There are fewer clients than are to be evaluated, or none to fine-tune z on.
    """

    def __init__(
        self,
        fabric: Fabric,
        find_engine: Callable[[], BaseEngine],
        datamodule: FederatedDataModule,
        eval_clients: int | float | str | None,
        finetune_steps: int,
        seed: int,
    ) -> None:
        super().__init__(fabric, find_engine, datamodule, seed)
        trained, heldout = datamodule.training_clients, datamodule.heldout
        self.client_ids = trained[draw_clients(len(trained), eval_clients, seed)].tolist()
        most = min(eval_clients, len(heldout)) if type(eval_clients) is int else eval_clients
        self.heldout_ids = heldout[draw_clients(len(heldout), most, seed, "eval heldout")].tolist()
        if finetune_steps and not len(heldout):
            raise ConfigurationError(
                f"trainer.heldout_finetune_steps: got {finetune_steps}, but no client is held out; set "
                "data.heldout_clients, e.g. 0.2, or leave the steps out."
            )
        self.finetune_steps = finetune_steps
        self._reuses, self._num_reused = True, 0
        self._known: dict[tuple, dict[str, float]] = {}  # by split, task and stamps; only the last ones come again
        self.elsewhere: Callable[[list[int], list[int], Models, int], dict[str, Results]] | None = None

    def run(self, splits: Sequence[str], models: Models, round: int) -> Evaluation:
        """Evaluate models on splits; nothing is done if the module has no ``test_step`` and no ``validation_step``.

        Args:
            splits: Splits of the data, ``"test"`` or ``"val"``.
            models: Models that are evaluated.
            round: Round, from which seeds are derived.
        """
        # Data of all clients together, such as a test set of the server's, are where the run is.
        found = self.measure(splits, models, round, None if self.elsewhere is None else {POOLED})
        if self.elsewhere is not None and found:
            heldout = self.heldout_ids if models.kept is None else []
            theirs = self.elsewhere(self.client_ids, heldout, models, round)
            found = {split: values | theirs.get(split, {}) for split, values in found.items()}
        evaluation = Evaluation()
        for split, results in found.items():
            summarise(evaluation, split, results, self.datamodule)
        return evaluation

    def measure(
        self, splits: Sequence[str], models: Models, round: int, clients: Collection[int] | None = None
    ) -> dict[str, Results]:
        """Return the values of each task by split; see :meth:`run` for the other arguments.

        Args:
            splits: As there.
            models: As there.
            round: As there.
            clients: Clients whose tasks are done, -1 for the pooled data; None: all.
        """
        wanted = self.measurements(splits, models, round)
        found = {what.split: self._measure(what, clients) for what in wanted}
        if self.finetune_steps and wanted:
            for split, values in self._measure_fine_tuned(wanted, clients).items():
                found[split] |= values
        return found

    def measurements(self, splits: Sequence[str], models: Models, round: int) -> list[Measurement]:
        """Return what is measured on these splits; see :meth:`run` for the arguments."""
        stages = {split: step_stage(self.engine.bench.user.module, split) for split in splits}
        return [Measurement(split, stage, models, round) for split, stage in stages.items() if stage is not None]

    def tasks(self, split: str, models: Models) -> list[Task]:
        """Return the tasks of a split in order: the global model on pooled data, then on clients', then own models.

        Where clients keep parameters of their own, no model is everyone's, and only own models are evaluated.
        """
        counts = self.datamodule.num_samples(split)
        clients = [i for i in self.client_ids if counts[i]]
        heldout = [i for i in self.heldout_ids if counts[i]]
        tasks = [] if models.kept is not None else [("global", i) for i in (-1, *clients, *heldout)]
        if models.local is not None:
            tasks += [("local", i) for i in clients]
        return tasks

    def _measure(self, what: Measurement, clients: Collection[int] | None) -> Results:
        """Do a measurement of these clients on all ranks, and return the values of each task by name."""
        tasks, mapped = self.tasks(what.split, what.models), self.engine.mapped_evaluation(what.stage)
        if clients is not None:
            tasks = [task for task in tasks if task[1] in clients]
        if mapped is not None:
            found = self.merge(ClientsTogether(self, mapped, what).evaluate(tasks))
        else:
            found = self._measure_what_changed(what, tasks)
        self.engine.bench.user.best_metrics.join(self.fabric)
        return {task: found[task] for task in tasks if task in found}

    def _measure_what_changed(self, what: Measurement, tasks: Sequence[Task]) -> Results:
        """Do tasks on all ranks, but for own models that have not changed, whose values are known."""
        keys = self._keys(what, tasks)
        known = {task: self._known[keys[task]] for task in keys if keys[task] in self._known}
        again = [task for k, task in enumerate(known, self._num_reused) if k % COMPARE_EVERY == 0]
        self._num_reused += len(known)
        todo = [task for task in tasks if task not in known or task in again]
        found = self.merge(self.one_by_one(self.share(todo), what))
        if any(repr(found[task]) != repr(known[task]) for task in again):
            rank_zero_warn(
                f"{type(self.engine.bench.user.module).__name__}.{what.stage}_step is no function of weights and "
                "batch, as fedbc_lightning.recordable promises: it gave other numbers for the same ones. The models of "
                "clients that had not trained may have older numbers in evaluation.csv; from here on all are evaluated."
            )
            self._reuses = False
            found |= self.merge(self.one_by_one(self.share([task for task in known if task not in again]), what))
        self._known = {k: values for k, values in self._known.items() if k[0] != what.split}
        found = known | found
        self._known |= {keys[task]: found[task] for task in keys}
        return found

    def _keys(self, what: Measurement, tasks: Sequence[Task]) -> dict[Task, tuple]:
        """Return what the values of own models depend on, if all of that is known."""
        bench, stamps, own = self.engine.bench, what.models.stamps, [task for task in tasks if task[0] == "local"]
        user = bench.user
        has_promised = self._reuses and is_promised(user.module, f"{what.stage}_step")
        # Hooks may change between rounds what the step reads beside weights and batch.
        is_alone = not (bench.has_hooks or user.has_transfer_hooks or user.metrics or has_torch_hooks(user.module))
        if not (own and stamps and has_promised and is_alone) or what.models.fine_tuning is not None:
            return {}
        loaders = self.loaders(what.split, [client for _, client in own])
        sets: Any = loaders.datasets if loaders is not None and loaders.gathers else []
        is_plain = all(data.transform is None or is_ours(data.transform) for data in sets)
        return {task: (what.split, task, stamps(task[1])) for task in own} if sets and is_plain else {}

    def _measure_fine_tuned(self, wanted: Sequence[Measurement], clients: Collection[int] | None) -> dict[str, Results]:
        """Train a copy of z on each held-out client by the user's optimizer, and evaluate it there, on all ranks.

        Args:
            wanted: What is measured, with equal models and rounds; the task name is ``"finetuned"``.
            clients: The clients among whom they are; None: all.
        """
        engine, cohorts = self.engine, self.share(self.fine_tuned_cohorts(clients))
        engine.bench.work.start_round(sum(map(len, cohorts)))
        found = {what.split: Results() for what in wanted}
        for cohort in cohorts:
            for split, values in self.fine_tune(cohort, wanted).items():
                found[split] |= values
        engine.bench.user.best_metrics.join(self.fabric)
        return {split: self.merge(values) for split, values in found.items()}

    def fine_tuned_cohorts(self, among: Collection[int] | None = None) -> list[list[int]]:
        """Return the held-out clients, of some or all, that are trained together; there are none without steps."""
        # The engine trains as many clients at once as in a round; which ones does not depend on the number of ranks.
        clients = [i for i in self.heldout_ids if self.finetune_steps and (among is None or i in among)]
        positions = self.engine.group(range(len(clients)), [self.finetune_steps] * len(clients), ())
        return [[clients[position] for position in cohort] for cohort in positions]

    def fine_tune(self, clients: Sequence[int], wanted: Sequence[Measurement]) -> dict[str, Results]:
        """Take a few local steps from z on some clients, and evaluate each client's result on it, on this rank."""
        models = wanted[0].models
        with self.engine.bench.layout.frozen.kept():
            cohort = self.engine.fine_tune_by_steps(clients, models.z, models.counters, self.finetune_steps)
        tuned = dict(zip(clients, map(ClientModel, cohort.model.clone(), cohort.counters), strict=True))
        own = Models(models.z, models.counters, local=tuned.__getitem__)
        tasks: list[Task] = [("finetuned", client) for client in clients]
        return {what.split: self.one_by_one(tasks, replace(what, models=own)) for what in wanted}


def draw_clients(
    num_clients: int, eval_clients: int | float | str | None, seed: int, purpose: str = "eval"
) -> list[int]:
    """Draw the clients that are evaluated, which are the same in every round.

    Args:
        num_clients: Number of clients N.
        eval_clients: A number of clients, 0 for none, a fraction of them, or ``"all"``; None is all, but at most 1,000.
        seed: Seed of the run.
        purpose: Name of the draw.

    Returns:
        The clients, ascending.

    Raises:
        ConfigurationError: ``eval_clients`` is a number above N.

    Example:
        >>> draw_clients(4, "all", seed=0), len(draw_clients(40, 0.25, seed=0)), len(draw_clients(2000, None, seed=0))
        ([0, 1, 2, 3], 10, 1000)
    """
    words: dict[Any, int] = {None: min(num_clients, MAX_CLIENTS_BY_DEFAULT), "all": num_clients}
    count: Any = words.get(eval_clients, eval_clients)
    if isinstance(eval_clients, float):
        count = min(num_clients, max(1, round(eval_clients * num_clients)))
    if count > num_clients:
        raise ConfigurationError(f"trainer.eval_clients: got {count}; give at most {num_clients}, that of all clients.")
    return sorted(numpy_generator(seed, purpose).choice(num_clients, count, replace=False).tolist())
