"""The vectorized engine: many clients at once, one mapped step for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.core.errors import NotVectorizableError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.engines.recorded.recording import NotRecordableError
from fedbc_lightning.engines.recorded.step_recorder import is_hooked
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.engines.stacked.cohort_optimizer_run import CohortOptimizerRun
from fedbc_lightning.engines.stacked.cohort_solver_run import CohortSolverRun
from fedbc_lightning.engines.stacked.mappable import check_step, not_a_function
from fedbc_lightning.engines.stacked.mapped_evaluation import MappedEvaluation
from fedbc_lightning.engines.stacked.stacked_optimizer import StackedOptimizer
from fedbc_lightning.local import AfterStep, Solver, Term
from fedbc_lightning.module.hooks import CLIENT_HOOKS, STEP_HOOKS
from fedbc_lightning.module.optimizers import configure
from fedbc_lightning.state.cohort import Cohort

if TYPE_CHECKING:
    from fedbc_lightning.engines.stacked.lockstep import Member

MAX_COHORT = 1024
BYTES_OF_ROWS = 2**30
"""Memory for the matrices (K, d) of a stack."""
NUM_MATRICES = 6
"""w, gradients, optimizer state, differences."""


class VectorizedEngine(SequentialEngine):
    """Trains K clients in lockstep: the user's ``training_step`` under ``torch.func``, one stacked optimizer step.

    A cohort of one client is the sequential engine's, so everything else that an engine does is inherited.

    Args:
        *args: Arguments of :class:`~fedbc_lightning.engines.sequential.SequentialEngine`.

    Attributes:
        draws: Whether ``training_step`` draws random numbers, as far as is known.
        beside: Where its run stands beside others of the process; None: it is the only one.
        most_rows: Largest number of clients whose (K, d) matrices fit into the memory that is meant for them.

    Raises:
        NotVectorizableError: Something in the module, the trainer or a callback that cannot be mapped, by name.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for problem, is_there in self._problems().items():
            if is_there:
                raise NotVectorizableError(f"cannot train with {problem}")
        self.stacked_optimizer = StackedOptimizer(configure(self.user), self.layout)
        self.draws = False
        self.beside: Member | None = None
        self._checked: set[tuple] = set()
        self._evaluations: dict[str, MappedEvaluation] = {}
        self.most_rows = BYTES_OF_ROWS // (NUM_MATRICES * self.row.nbytes)
        self.cohort_size = max(2, min(MAX_COHORT, self.most_rows))

    @property
    def seconds_elsewhere(self) -> float:
        """See the base class."""
        return 0.0 if self.beside is None else self.beside.seconds_elsewhere

    def _problems(self) -> dict[str, bool]:
        user, layout, local = self.user, self.layout, self.local
        listened = [name for name in (*STEP_HOOKS, *CLIENT_HOOKS) if user.hooks.listens(name)]
        overridden = [name for name, own in self.overridden.items() if own]
        optimizer = type(self.optimizer.optimizer).__name__
        return {
            f"the hook {', '.join(listened)}, which is called for each client or step": bool(listened),
            f"the module's own {', '.join(overridden)}": bool(overridden),
            f"the optimizer {optimizer}, which is not elementwise": not self.optimizer.is_flat,
            "learning-rate schedulers inside clients": bool(self.optimizer.schedulers),
            "a configure_optimizers that reads self.trainer": self.optimizer.is_made_anew,
            "buffers that training moves, such as BatchNorm's": layout.has_buffers,
            "precision other than 32-true and 64-true": self._is_half or isinstance(user.precision, MixedPrecision),
            "accumulate_grad_batches above 1": local.accumulate_grad_batches > 1,
            "hooks that transfer batches": user.has_transfer_hooks,
            "hooks on its parameters": any(map(is_hooked, user.module.parameters())),
            "hooks on the steps of its optimizer": self.optimizer.has_step_hooks,
        }

    def group(self, positions: Sequence[int], num_steps: Sequence[int], alone: Collection[int]) -> list[list[int]]:
        """Cohorts of clients of similar length, the longest first; a solver's have one length each."""
        together = sorted((p for p in positions if p not in alone), key=lambda p: (-num_steps[p], p))
        parts = [together]
        if self.has_solver:
            parts = [list(part) for _, part in itertools.groupby(together, num_steps.__getitem__)]
        size = self.cohort_size
        cohorts = [part[start : start + size] for part in parts for start in range(0, len(part), size)]
        return cohorts + [[p] for p in positions if p in alone]

    def check_solver(self, name: str, solver: Solver | type[Solver]) -> None:
        """See the base class; from then on the clients of a cohort take as many steps each.

        Raises:
            NotVectorizableError: Also where the solver cannot train several clients at once.
        """
        if solver.one_by_one:
            raise NotVectorizableError(f"cannot train with {name}: {solver.one_by_one}")
        super().check_solver(name, solver)

    def check_step(self, w: Tensor, batch: list[Tensor]) -> None:
        """Check a step once for each shape of a batch, while it is proven: see ``stacked/mappable.py``.

        Args:
            w: (K, d), of which the first client's is taken.
            batch: Each (K, B, ...).

        Raises:
            NotVectorizableError: The step may not be mapped.
        """
        shape = tuple([part.shape[1:] for part in batch])
        if shape in self._checked and self.recorder.knows([part[0] for part in batch]):
            return
        self._checked.add(shape)
        draws, self.draws = self.draws, check_step(self, w[0], [part[0] for part in batch]) or self.draws
        if self.draws and not draws and not self.is_trial:
            rank_zero_info(
                "trainer.engine: vectorized draws what training_step draws, such as dropout, for a whole cohort at "
                "once, so its masks depend on who is in it; the sequential engine's depend on the client alone."
            )

    def check_visit(self, batch: list[Tensor]) -> None:
        """After a client's batch of a stack was made: its making must leave alone what the step of all of them reads.

        Args:
            batch: A batch of one client.

        Raises:
            NotVectorizableError: It does not.
        """
        try:
            self.recorder.check_visit(self.user.to_device(batch))
        except NotRecordableError as error:
            raise not_a_function(error) from error

    def mapped_evaluation(self, stage: str) -> MappedEvaluation | None:
        """See the base class."""
        if stage not in self._evaluations:
            self._evaluations[stage] = MappedEvaluation(self, stage)
        return self._evaluations[stage]

    def _is_sorted(self, cohort: Cohort, local: LocalTraining) -> bool:
        """Whether those with the most steps stand first; cohorts are sorted by the steps of the trainer's training."""
        steps = list(map(local.num_steps, self.datamodule.num_batches()[cohort.ids].tolist()))
        return steps == sorted(steps, reverse=True)

    def solve(
        self, cohort: Cohort, start: Tensor, terms: Sequence[Term] = (), *, solver: Solver | None = None,
        after_step: AfterStep | None = None, epochs: int | None = None, lr_scale: float = 1.0,
        record_gradient_mean: bool = False, purpose: str = "client", is_last: bool = True,
    ) -> None:  # fmt: skip
        """See the base class; K clients at once."""
        if self.beside is not None:
            self.beside.check()
        local = self._planned(cohort, epochs)
        if len(cohort) == 1 or (solver is None and epochs is not None and not self._is_sorted(cohort, local)):
            super().solve(
                cohort, start, terms, solver=solver, after_step=after_step, epochs=epochs, lr_scale=lr_scale,
                record_gradient_mean=record_gradient_mean, purpose=purpose, is_last=is_last,
            )  # fmt: skip
            return
        self.user.train_mode()
        self.user.shim.set(training=True, current_client=None)
        if solver is not None:
            CohortSolverRun(self, cohort, local, terms, solver).run(start, lr_scale, purpose)
            return
        run = CohortOptimizerRun(self, cohort, local, terms, after_step, record_gradient_mean)
        (run.run if self.beside is None else partial(self.beside.train, run))(start, lr_scale, purpose)
