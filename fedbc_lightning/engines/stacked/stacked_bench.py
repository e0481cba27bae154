"""The workbench for many clients at once: one optimizer on K rows, and the checks that a step may be mapped."""

from __future__ import annotations

from torch import Tensor

from fedbc_lightning.engines.stacked.mappable import check_step
from fedbc_lightning.engines.stacked.stacked_optimizer import StackedOptimizer
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.schedulers import configure

# Bytes that the matrices (K, d) of a cohort may take.
BYTES_OF_ROWS = 2**30
# Number of these matrices: w, gradients, optimizer state, differences.
NUM_MATRICES = 6


class StackedBench:
    """Holds what the steps of K clients at once need beside the workbench.

    Args:
        bench: The workbench.

    Attributes:
        bench: The workbench.
        optimizer: The user's optimizer on K rows.
        draws_random_numbers: Whether ``training_step`` is known to draw random numbers.
        most_rows: Largest number of clients whose (K, d) matrices fit into the memory that is meant for them.
    """

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.optimizer = StackedOptimizer(configure(bench.user), bench.layout)
        self.draws_random_numbers = False
        self.most_rows = BYTES_OF_ROWS // (NUM_MATRICES * bench.row.nbytes)
        self._checked: set[tuple] = set()
        self._checked_in = -1

    def check_step(self, w: Tensor, batch: list[Tensor]) -> None:
        """Check once for each shape of a batch, and once in each round, that a step may be mapped.

        Args:
            w: Weights (K, d), of which the first client's are taken.
            batch: The batches of K clients, (K, B, ...) each.

        Raises:
            NotVectorizableError: The step may not be mapped.
        """
        bench = self.bench
        # A check takes several single steps; one in a round finds a step that changes its mind in the course of a run.
        shape = tuple([part.shape[1:] for part in batch])
        if shape in self._checked and bench.round == self._checked_in:
            return
        self._checked.add(shape)
        self._checked_in = bench.round
        self.draws_random_numbers |= check_step(bench, w[0], [part[0] for part in batch])
        if self.draws_random_numbers:
            bench.say(
                "trainer.engine: vectorized draws what training_step draws, such as dropout, for a whole cohort at "
                "once, so its masks depend on who is in it; the sequential engine's depend on the client alone."
            )
