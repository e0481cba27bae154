"""Evaluation of the global model after a few local steps on the data of clients that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedbc_lightning.evaluation.measurement import Measurement, Results, Task, read_results
from fedbc_lightning.evaluation.single_models import SingleModels

# Values of tasks by name, for each split
BySplit = dict[str, Results]


class FineTunedClients:
    """Trains a copy of z on each held-out client, by steps of the user's optimizer, and evaluates it on that client.

    The engine trains as many clients at once as in a round.

    Args:
        evaluator: Evaluates what is in the module.
        clients: The held-out clients to evaluate.
        num_steps: Number of local steps; 0: nothing is done.

    Attributes:
        num_steps: The argument of this name.
    """

    def __init__(self, evaluator: SingleModels, clients: Sequence[int], num_steps: int) -> None:
        self._evaluator, self._clients, self.num_steps = evaluator, clients, num_steps

    def evaluate(self, wanted: Sequence[Measurement]) -> BySplit:
        """Evaluate the fine-tuned models on all splits, on all ranks, under the task name ``"finetuned"``.

        Args:
            wanted: What is measured, with equal models and rounds; it may be empty.
        """
        evaluator, found = self._evaluator, BySplit({what.split: {} for what in wanted})
        if not self.num_steps or not wanted:
            return found
        shared = evaluator.share(self.cohorts())
        evaluator.engine.bench.work.start_round(sum(map(len, shared)))
        for cohort in shared:
            for split, values in self.evaluate_cohort(cohort, wanted).items():
                found[split] |= values
        evaluator.engine.bench.user.best_metrics.join(evaluator.fabric)
        return {split: evaluator.merge(values) for split, values in found.items()}

    def cohorts(self) -> list[list[int]]:
        """Return the clients that are trained together, which do not depend on the number of ranks."""
        clients = self._clients
        positions = self._evaluator.engine.group(range(len(clients)), [self.num_steps] * len(clients), ())
        return [[clients[position] for position in cohort] for cohort in positions]

    def evaluate_cohort(self, clients: Sequence[int], wanted: Sequence[Measurement]) -> BySplit:
        """Fine-tune z on some clients and evaluate the result on each of them, on this rank."""
        engine, models = self._evaluator.engine, wanted[0].models
        shim = engine.bench.user.shim
        logged = shim.callback_metrics
        with engine.bench.layout.frozen.kept():
            cohort = engine.fine_tune_by_steps(clients, models.z, models.counters, self.num_steps)
        shim.set(callback_metrics=logged)  # in training they are what the client has logged
        own, found = cohort.model.clone(), BySplit()
        for what in wanted:
            found[what.split] = self._evaluate_models(clients, own, cohort.counters, what)
        return found

    def _evaluate_models(self, clients: Sequence[int], own: Tensor, counters: Tensor, what: Measurement) -> Results:
        evaluator = self._evaluator
        results = dict[Task, dict[str, Any]]()
        with evaluator.evaluating(what.stage, what.round):
            for client, model in zip(clients, own, strict=True):
                loader = evaluator.loader(what.split, client)
                if loader is not None:
                    evaluator.seed_client(client, what.round)
                    evaluator.engine.bench.load(model, counters)
                    results["finetuned", client] = evaluator.evaluate_loaded(("finetuned", client), loader, what)
            return read_results(results)
