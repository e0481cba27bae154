"""The vectorized engine: many clients at once, one mapped step for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import cached_property

from fedbc_lightning.core.errors import NotVectorizableError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.recordable import is_promised
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.engines.local_step import Training
from fedbc_lightning.engines.recorded.step_recorder import has_torch_hooks
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.engines.stacked.cohort_run import CohortOptimizerRun, CohortSolverRun
from fedbc_lightning.engines.stacked.stacked_bench import MappedEvaluation, StackedBench
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.local import Solver
from fedbc_lightning.module.hooks import CLIENT_HOOKS, STEP_HOOKS
from fedbc_lightning.state.cohort import Cohort

# Largest number of clients in a cohort.
MAX_COHORT = 1024


class VectorizedEngine(BaseEngine):
    """Trains K clients in lockstep: the user's ``training_step`` under ``torch.func``, one stacked optimizer step.

    A cohort of one client is trained by a sequential engine on the same workbench.

    Args:
        bench: The workbench.
        by_rule: Whether ``engine: auto`` has chosen this engine. Who chooses it by name promises that evaluation steps
            are functions of weights and batch, too; here they are mapped only if they have the promise themselves.

    Attributes:
        stacked: What the steps of several clients at once need beside the workbench.

    Raises:
        NotVectorizableError: Something in the module, the trainer or a callback cannot be mapped; it is named.
    """

    stacked: StackedBench

    def __init__(self, bench: Workbench, by_rule: bool = False) -> None:
        super().__init__(bench)
        self._by_rule = by_rule
        self._is_one_by_one = False
        for problem in _problems(bench):
            raise NotVectorizableError(f"cannot train with {problem}")
        bench.recorder.promise()
        self.stacked = StackedBench(bench)
        self._one_by_one = SequentialEngine(bench)
        self._evaluations: dict[str, MappedEvaluation] = {}

    @cached_property
    def cohort_size(self) -> int:  # type: ignore[override]
        """Largest number of clients in a cohort: what fits into memory, by the size of a step on the largest client."""
        return max(1, min(MAX_COHORT, self.stacked.most_clients()))

    def start_round(self) -> None:
        """Ask again what cannot be mapped: hooks may be registered in any round.

        Raises:
            NotVectorizableError: Something cannot be mapped, and the user has chosen this engine by its name.
        """
        for problem in () if self._is_one_by_one else _problems(self.bench):
            if not self._by_rule:
                raise NotVectorizableError(f"cannot train with {problem}")
            self._is_one_by_one = True
            self.bench.say(
                f"trainer.engine: auto: from round {self.bench.round} on clients train one after another, because of "
                f"{problem}."
            )

    def group(self, positions: Sequence[int], num_steps: Sequence[int], alone: Collection[int]) -> list[list[int]]:
        """Return cohorts of clients of similar length, the longest first; a solver's have one length each."""
        if self._is_one_by_one:
            return self._one_by_one.group(positions, num_steps, alone)
        together = sorted((p for p in positions if p not in alone), key=lambda p: (-num_steps[p], p))
        # A solver takes as many steps for all clients of a cohort, so only clients of one length go together.
        parts = [together]
        if self.has_solver:
            parts = [list(part) for _, part in itertools.groupby(together, num_steps.__getitem__)]
        size = self.cohort_size if len(together) > 1 else 1  # one client takes no step but its own
        cohorts = [part[start : start + size] for part in parts for start in range(0, len(part), size)]
        return cohorts + [[p] for p in positions if p in alone]

    def check_solver(self, name: str, solver: Solver | type[Solver]) -> None:
        """Refuse a solver as the base class does; from then on the clients of a cohort take as many steps each.

        Raises:
            NotVectorizableError: The solver cannot train several clients at once.
        """
        if solver.one_by_one:
            raise NotVectorizableError(f"cannot train with {name}: {solver.one_by_one}")
        super().check_solver(name, solver)
        self._one_by_one.has_solver = True

    def check_layer(self, name: str, layer: str) -> None:
        """Refuse to read a layer's output, which needs a hook that a mapped step does not call.

        Raises:
            NotVectorizableError: Whenever the module has such a layer.
        """
        super().check_layer(name, layer)
        raise NotVectorizableError(f"cannot train with {name}, whose loss compares features by three models per batch")

    def mapped_evaluation(self, stage: str) -> MappedEvaluation | None:
        """Return what evaluates several clients at once in ``"validation"`` or ``"test"``; None if nobody promised."""
        if self._by_rule and not is_promised(self.bench.user.module, f"{stage}_step"):
            return None
        if stage not in self._evaluations:
            self._evaluations[stage] = MappedEvaluation(self.bench, stage, self.stacked.most_rows)
        return self._evaluations[stage]

    def _is_sorted(self, cohort: Cohort, local: LocalTraining) -> bool:
        """Return whether the clients with the most steps stand first, as they do by the trainer's local training."""
        steps = list(map(local.num_steps, self.datamodule.num_batches()[cohort.ids].tolist()))
        return steps == sorted(steps, reverse=True)

    def train(self, cohort: Cohort, asked: Training) -> None:
        """Train a cohort, all clients at once unless there is only one, or the longest do not stand first."""
        is_unsorted = asked.solver is None and asked.has_own_epochs and not self._is_sorted(cohort, asked.local)
        if len(cohort) == 1 or is_unsorted or self._is_one_by_one:
            self._one_by_one.train(cohort, asked)
            return
        self.bench.user.train_mode()
        self.bench.user.shim.set(training=True, current_client=None)
        (CohortOptimizerRun if asked.solver is None else CohortSolverRun)(self.stacked, cohort, asked).run()


def _problems(bench: Workbench) -> list[str]:
    """Return what is there and cannot be mapped over clients."""
    user, optimizer = bench.user, bench.optimizer
    listened = [name for name in (*STEP_HOOKS, *CLIENT_HOOKS) if user.hooks.listens(name)]
    overridden = [name for name, own in bench.overridden.items() if own]
    name, is_half = type(optimizer.optimizer).__name__, bench.layout.dtype != bench.layout.master_dtype
    problems = {
        "manual optimization": optimizer.by_hand,
        f"the hook {', '.join(listened)}, which is called for each client or step": bool(listened),
        f"the module's own {', '.join(overridden)}": bool(overridden),
        f"the optimizer {name}, which is not elementwise": not optimizer.is_flat,
        "learning-rate schedulers inside clients": optimizer.has_schedulers,
        "a configure_optimizers that reads self.trainer": optimizer.is_made_anew,
        f"the buffers {', '.join(bench.layout.changing)}, whose shapes training changes": bool(bench.layout.changing),
        "precision other than 32-true, 64-true and bf16-mixed": is_half or bench.scaler is not None,
        "accumulate_grad_batches above 1": bench.local.accumulate_grad_batches > 1,
        "hooks that transfer batches": user.has_transfer_hooks,
        "streams, or loaders of the user's own, which draw what only one client at a time may": (
            bench.datamodule.has_own_batches
        ),
        "hooks on its layers or parameters": has_torch_hooks(user.module),
        "layers that hooks have frozen": not bench.layout.trains_all,
        "hooks on the steps of its optimizer": optimizer.has_step_hooks,
    }
    return [problem for problem, is_there in problems.items() if is_there]
