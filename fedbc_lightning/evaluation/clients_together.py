"""Evaluation of several clients by one mapped step, once it has shown that it may."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.seeding import Generators
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.engines.stacked.cohort_run import FEW

if TYPE_CHECKING:
    from fedbc_lightning.engines.stacked.mapped_evaluation import MappedEvaluation
    from fedbc_lightning.evaluation.evaluator import Evaluator, Measurement, Task

    Results = dict[Task, dict[str, float]]


class ClientsTogether:
    """One measurement in which clients with as many samples share a mapped step.

    Args:
        evaluator: Does the others one after another.
        mapped: The step, and on which splits it may be mapped, from one measurement to the next.
        what: Is measured.
    """

    def __init__(self, evaluator: Evaluator, mapped: MappedEvaluation, what: Measurement) -> None:
        self._evaluator, self._mapped, self._what = evaluator, mapped, what

    def do(self, tasks: list[Task]) -> Results:
        """This rank's part: task -> name -> value, where there are data."""
        evaluator, reasons, split = self._evaluator, self._mapped.reasons, self._what.split
        if split not in reasons:
            return self._settle(tasks)
        if reasons[split] is not None:
            return self._one_by_one(evaluator.share(tasks))
        return self._do_units(evaluator.share(self._units(tasks)))

    def _units(self, tasks: Sequence[Task]) -> list[list[Task]]:
        """The tasks, together those that a mapped step may do: of clients with as many samples, in one batch in all.

        They are the same whatever the number of ranks.
        """
        datamodule, what = self._evaluator.datamodule, self._what
        most, counts = datamodule.eval_batch_size, datamodule.num_samples(what.split)
        groups = defaultdict[Any, list["Task"]](list)
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
        return units

    def _settle(self, tasks: list[Task]) -> Results:
        """The first measurement: one client after another, each once, and then by mapped steps.

        These count from now on, on all ranks, unless the step changes something or draws, or the numbers are others.
        """
        mapped, share = self._mapped, self._evaluator.share
        reason = self._first_reason(mapped.obstacle())  # callbacks may differ
        units = share(self._units(tasks) if reason is None else [[task] for task in tasks])
        together = [unit for unit in units if len(unit) >= FEW]
        mine = {task for unit in units for task in unit}
        alone = [task for task in tasks if task in mine]
        results, found = dict["Task", dict[str, float]](), dict["Task", dict[str, float]]()
        if together:
            reason = self._why_not(together[0], alone, results)
        results |= self._one_by_one([task for task in alone if task not in results])
        try:
            for unit in together if reason is None else ():
                with mapped.watched():
                    found |= self._do_mapped(unit)
        except Exception as error:  # whatever it is, one after another the clients have been evaluated
            reason = first_line(error)
        if reason is None and not _agree(found, results):
            reason = "mapped over clients, it gives other numbers"
        reason = mapped.reasons[self._what.split] = self._first_reason(reason)
        if reason is not None:
            mapped.say(reason)
            return results
        return results | found

    def _why_not(self, unit: Sequence[Task], alone: Sequence[Task], results: Results) -> str | None:
        """Fill in results one after another, and say what of the step makes it more than a function."""
        results |= self._one_by_one(unit[:1])  # which may set up things
        if self._has_drawn(unit[0][1]):
            return "it draws random numbers"
        results |= self._one_by_one([task for task in alone if task not in results])
        return None

    def _has_drawn(self, client: int) -> bool:
        """Whether the step that has just been taken for a client drew random numbers."""
        device = self._evaluator.engine.user.device
        now = Generators(device)
        self._evaluator.seed_client(client, self._what.round)
        return Generators(device) != now

    def _first_reason(self, reason: str | None) -> str | None:
        """That of the first rank that has one."""
        return next(filter(None, gather_objects(self._evaluator.fabric, reason)), None)

    def _do_units(self, units: Sequence[Sequence[Task]]) -> Results:
        """Those of clients together by mapped steps, unless one fails this time, and the others one after another."""
        results, can_map = dict["Task", dict[str, float]](), True
        alone: list[Task] = []
        for unit in units:
            try:
                if can_map and len(unit) >= FEW:
                    results |= self._do_mapped(unit)
                    continue
            except Exception as error:  # one after another they give the same error, or none
                can_map = False
                self._mapped.say(f"this time, {first_line(error)}")
            alone += unit
        return results | self._one_by_one(alone)

    def _one_by_one(self, tasks: Sequence[Task]) -> Results:
        return self._evaluator.do(tasks, self._what)

    def _do_mapped(self, unit: Sequence[Task]) -> Results:
        what, evaluator = self._what, self._evaluator
        clients = [client for _, client in unit]
        with evaluator.evaluating(what.stage, what.round):
            loaders = [evaluator.loader(what.split, client) for client in clients]
            found = self._mapped.run(loaders, self._weights(unit[0][0], clients))
        return dict(zip(unit, found, strict=True))

    def _weights(self, which: str, clients: Sequence[int]) -> Tensor:
        """Those of z (d,), or of the clients' own models (K, d)."""
        models, num_parameters = self._what.models, self._evaluator.engine.layout.num_parameters
        if which == "global" or models.local is None:
            return models.z[:num_parameters]
        own = torch.stack([models.local(client)[0] for client in clients])
        return upload(own[:, :num_parameters], models.z.device)


def _agree(found: Results, expected: Results) -> bool:
    """Whether two ways give the same numbers, but for a client in a hundred, with logits equal but for rounding."""
    num_others = 0
    for task, values in found.items():
        others = expected.get(task, {})
        if values.keys() != others.keys() or any(math.isfinite(values[k]) != math.isfinite(others[k]) for k in values):
            return False
        pairs = [(values[name], others[name]) for name in values if math.isfinite(values[name])]
        num_others += not all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) for a, b in pairs)
    return num_others <= max(1, len(found) // 100)
