"""The sequential engine: one client after another through one workbench, with the user's own steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.engines.local_step import Training
from fedbc_lightning.engines.optimizer_run import OptimizerRun
from fedbc_lightning.engines.solver_run import SolverRun
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.server.base import FEW_ROWS
from fedbc_lightning.state.cohort import Cohort

# Largest number of clients that the server's parts get at once.
MAX_COHORT = FEW_ROWS
# Largest size of a cohort's matrices (K, d): they fit into a processor's cache together with a step's tensors.
BYTES_OF_ROWS = 2**22
# Number of these matrices: w, start, terms, staged state, and what the server's parts make of them.
NUM_MATRICES = 8


class SequentialEngine(BaseEngine):
    """Trains the clients of a cohort one after another.

    Args:
        bench: The workbench.

    Attributes:
        cohort_size: Largest number of clients that the server's parts get at once; above 1 for small models only.
    """

    def __init__(self, bench: Workbench) -> None:
        super().__init__(bench)
        layout = bench.layout
        row_bytes = NUM_MATRICES * layout.num_parameters * layout.master_dtype.itemsize
        # Hooks and moved buffers see one client after another, so each must be finished before the next one begins.
        is_alone = bench.has_client_hooks or layout.has_buffers
        self.cohort_size = 1 if is_alone else max(1, min(MAX_COHORT, BYTES_OF_ROWS // row_bytes))

    def group(self, positions: Sequence[int], num_steps: Sequence[int], alone: Collection[int]) -> list[list[int]]:
        """Return the cohorts of a round in the order of sampling, and at the end those of one client."""
        together, size = [p for p in positions if p not in alone], 1 if self.has_solver else self.cohort_size
        cohorts = [together[k : k + size] for k in range(0, len(together), size)]
        return cohorts + [[position] for position in positions if position in alone]

    def train(self, cohort: Cohort, asked: Training) -> None:
        """Train a cohort, client by client; a solver is given cohorts of one client."""
        if asked.solver is not None and len(cohort) > 1:
            raise ConfigurationError(
                "algorithm: a method with a solver of its own must call engine.check_solver in check()."
            )
        (OptimizerRun if asked.solver is None else SolverRun)(self.bench, cohort, asked).run()
