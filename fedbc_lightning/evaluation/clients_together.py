"""Evaluation of several clients at once by a step that is mapped over them, after a check that this is allowed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import first_line
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.engines.stacked.cohort_batches import gathered_whole
from fedbc_lightning.engines.stacked.cohort_run import FEW
from fedbc_lightning.evaluation.measurement import Measurement, Results, SingleModels, Task

if TYPE_CHECKING:
    from fedbc_lightning.engines.stacked.stacked_bench import MappedEvaluation


class ClientsTogether:
    """A measurement in which clients with equal numbers of samples are evaluated by one mapped step.

    Args:
        evaluator: Evaluator that does all other tasks one after another.
        mapped: The mapped step; it remembers between measurements on which splits it may be used.
        what: Description of the measurement.
    """

    def __init__(self, evaluator: SingleModels, mapped: MappedEvaluation, what: Measurement) -> None:
        self._evaluator, self._mapped, self._what = evaluator, mapped, what
        self._clients: list[int] = []  # of the last mapped step, and their batch: own models come after z
        self._batch: list[Tensor] = []

    def evaluate(self, tasks: list[Task]) -> Results:
        """Evaluate this rank's part of the tasks.

        Returns:
            The values of each task by name; tasks without data are left out.
        """
        evaluator, reasons, split = self._evaluator, self._mapped.reasons, self._what.split
        self._mapped.recorder.start_round(evaluator.engine.bench.has_hooks)
        if split not in reasons:
            return self._settle(tasks)
        if reasons[split] is not None:
            return self._one_by_one(evaluator.share(tasks))
        return self._evaluate_units(evaluator.share(self._units(tasks)))

    def _units(self, tasks: Sequence[Task]) -> list[list[Task]]:
        """Group the tasks into units that one mapped step can do.

        A unit has clients with equal numbers of samples that together fit into one evaluation batch; a task that cannot
        be mapped is a unit of its own. The units do not depend on the number of ranks.
        """
        datamodule, what = self._evaluator.datamodule, self._what
        most, counts = datamodule.eval_batch_size, datamodule.num_samples(what.split)
        # Units are made before they are shared out, so that one process and several evaluate the same batches and get
        # the same bits: a product of larger matrices may round in another way.
        groups = defaultdict[Any, list[Task]](list)
        for task in tasks:
            which, client = task
            is_alone = client < 0 or not counts[client] or (which == "local" and what.models.fine_tuning is not None)
            groups[task if is_alone else (which, "of", counts[client])].append(task)
        units = []
        for group in groups.values():
            which, client = group[0]
            size = max(1, most // counts[client]) if len(group) > 1 else 1
            size = min(size, self._mapped.most_models) if which == "local" else size
            units += [group[start : start + size] for start in range(0, len(group), size)]
        of_clients = defaultdict[tuple, list[list[Task]]](list)  # z and own models of the same clients share a batch
        for unit in units:
            of_clients[tuple(client for _, client in unit)].append(unit)
        return [unit for same in of_clients.values() for unit in same]

    def _settle(self, tasks: list[Task]) -> Results:
        """Do the first measurement, one client after another and again by mapped steps, and decide between the two.

        Mapped steps are used from now on, on all ranks, unless the step fails when it is mapped, as it does where it
        draws random numbers, or gives other numbers.
        """
        mapped, share = self._mapped, self._evaluator.share
        if all(len(unit) < FEW for unit in self._units(tasks)):  # nothing would be compared
            return self._one_by_one(share(tasks))
        reason = self._first_reason(mapped.obstacle())  # ranks must agree, and their callbacks may differ
        units = share(self._units(tasks) if reason is None else [[task] for task in tasks])
        mine = {task for unit in units for task in unit}
        # The first measurement is done both ways and compared. The module's own numbers are the ones that count,
        # whatever a mapped step does with global state, in-place writes or Python branches.
        results = self._one_by_one([task for task in tasks if task in mine])
        found, why_not = self._map(units, mapped.watched)
        if reason is None and why_not is None and not _agree(found, results):
            why_not = "mapped over clients, it gives other numbers"
        reason = mapped.reasons[self._what.split] = self._first_reason(reason or why_not)
        if reason is not None:
            mapped.say(reason)
            return results
        return results | found

    def _first_reason(self, reason: str | None) -> str | None:
        """Return the first reason reported by any rank, or None."""
        return next(filter(None, gather_objects(self._evaluator.fabric, reason)), None)

    def _evaluate_units(self, units: Sequence[Sequence[Task]]) -> Results:
        """Evaluate units of several clients by mapped steps, and all other tasks one after another.

        If a mapped step fails, the remaining units of this measurement are evaluated one after another, too: the
        clients raise the same error then, or none.
        """
        found, why_not = self._map(units)
        if why_not is not None:
            self._mapped.say(f"this time, {why_not}")
        return found | self._one_by_one([task for unit in units for task in unit if task not in found])

    def _map(
        self, units: Sequence[Sequence[Task]], watched: Callable[[], AbstractContextManager] = nullcontext
    ) -> tuple[Results, str | None]:
        """Evaluate the units of several clients by mapped steps until one fails, and return why it did, or None."""
        found = Results()
        try:
            for unit in units:
                if len(unit) >= FEW:
                    with watched():
                        found |= self._evaluate_mapped(unit)
        except Exception as error:  # of any class: it is the user's step
            return found, first_line(error)
        return found, None

    def _one_by_one(self, tasks: Sequence[Task]) -> Results:
        return self._evaluator.one_by_one(tasks, self._what)

    def _evaluate_mapped(self, unit: Sequence[Task]) -> Results:
        what, evaluator = self._what, self._evaluator
        clients = [client for _, client in unit]
        with evaluator.evaluating(what.stage):
            if clients != self._clients:
                self._clients, self._batch = clients, gathered_whole(evaluator.loaders(what.split, clients))
            batch = [part.clone() for part in self._batch]  # the step may write into it
            found = self._mapped.run(batch, self._weights(unit[0][0], clients))
        return dict(zip(unit, found, strict=True))

    def _weights(self, which: str, clients: Sequence[int]) -> Tensor:
        """Return the weights to evaluate: those of z, ``(d,)``, or of the clients' own models, ``(K, d + p)``."""
        models, num_parameters = self._what.models, self._evaluator.engine.layout.num_parameters
        if which == "global" or models.local is None:
            return models.z[:num_parameters]
        if models.local_weights is not None:
            return upload(models.local_weights(clients), models.z.device)
        found = [models.local(client) for client in clients]
        own = torch.stack([client.model[:num_parameters] for client in found])
        kept = [client.kept for client in found if client.kept is not None]
        return upload(torch.cat([own, torch.stack(kept)], dim=1) if kept else own, models.z.device)


def _agree(found: Results, expected: Results) -> bool:
    """Return whether two ways of evaluation give the same numbers, up to rounding.

    One client in a hundred (at least one) may differ, because rounding can change the class of a sample whose logits
    are equal.
    """
    num_others = 0
    for task, values in found.items():
        others = expected.get(task, {})
        if values.keys() != others.keys() or any(math.isfinite(values[k]) != math.isfinite(others[k]) for k in values):
            return False
        pairs = [(values[name], others[name]) for name in values if math.isfinite(values[name])]
        num_others += not all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) for a, b in pairs)
    return num_others <= max(1, len(found) // 100)
