"""The sequential engine: one client after another through one workbench, with the user's own steps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.engines.base import BaseEngine, Training
from fedbc_lightning.engines.client_run import ClientRun, OptimizerRun
from fedbc_lightning.engines.hooked_step import MissingGradientError
from fedbc_lightning.engines.solver_run import SolverRun
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.local.rows import of_each
from fedbc_lightning.server.base import FEW_ROWS
from fedbc_lightning.state.cohort import Cohort, LocalResult

log = logging.getLogger("lightning.pytorch." + __name__)  # a child of Lightning's logger, whose lines are shown

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
        num_clients, how = len(cohort), (asked.lr_scale, asked.purpose)
        if asked.solver is not None:
            if num_clients > 1:
                raise ConfigurationError(
                    "algorithm: a method with a solver of its own must call engine.check_solver in check()."
                )
            solved = SolverRun(self.bench, cohort, asked.local, asked.solver, asked.terms)
            cohort.take(self._result([solved.run(asked.start.reshape(-1), *how, is_last=asked.is_last)]))
            return
        runs: list[OptimizerRun] = []
        # The method made terms for all K clients; each client's run sees its own row of them.
        own_terms = [[term] if num_clients == 1 else of_each(term, num_clients) for term in asked.terms]
        own_after = [asked.after_step] * num_clients
        if asked.after_step is not None and num_clients > 1:
            own_after = list(of_each(asked.after_step, num_clients))
        own_contrasts = [None] * num_clients if asked.contrast is None else asked.contrast.rows(num_clients)
        for k in range(num_clients):
            own_start = asked.start if asked.start.ndim == 1 else asked.start[k]
            of_client = [term[k] for term in own_terms], own_after[k]
            args = (self.bench, cohort, k, asked.local, *of_client, asked.record_gradient_mean, asked.trains)
            contrast = own_contrasts[k]
            try:
                run = OptimizerRun(*args, contrast=contrast)
                run.run(own_start, *how, is_last=asked.is_last)
            except MissingGradientError:
                # The optimizer's state lies in flat slices and is lost with them, so the client starts again.
                log.info(
                    "A step left a parameter without a gradient, which torch leaves alone: from here on the optimizer "
                    "gets the module's own parameters, not flat slices. Same numbers, a little slower."
                )
                self.bench.optimizer.use_per_tensor()
                run = OptimizerRun(*args, contrast=contrast)
                run.run(own_start, *how, is_last=asked.is_last)
            runs.append(run)
        cohort.take(self._result(runs))

    def _result(self, runs: Sequence[ClientRun]) -> LocalResult:
        """Return what the local training of single clients gave, as that of a cohort."""
        # Clients share their rates nearly always: a vector of d step sizes is made once for each different tuple.
        sizes = {rates: self.bench.step_sizes(rates) for rates in {run.mean_rates for run in runs}}
        gradient_means = [run.gradient_mean for run in runs if run.gradient_mean is not None]
        return LocalResult(
            w=_stacked([run.w for run in runs]),
            buffers=_stacked([run.buffers for run in runs]),
            counters=runs[-1].counters,
            steps=[run.num_updates for run in runs],
            losses=[run.loss for run in runs],
            are_losses_finite=[run.is_finite for run in runs],
            step_size=torch.cat([sizes[run.mean_rates] for run in runs]),
            taken=[run.taken for run in runs],
            records=[run.record for run in runs],
            gradient_mean=_stacked(gradient_means) if gradient_means else None,
            kept=_stacked([run.kept for run in runs]),
        )


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return K rows as (K, n); a single one is not copied."""
    return torch.stack(list(rows)) if len(rows) > 1 else rows[0][None]
