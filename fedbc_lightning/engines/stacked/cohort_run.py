"""Local training of K clients at once: their start, gradients and result, and steps of an optimizer or a solver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import ConfigurationError, NotVectorizableError, first_line
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.engines.local_step import LocalStep, Training
from fedbc_lightning.engines.recorded.recording import NotRecordableError
from fedbc_lightning.engines.solver_run import SolverSteps, weight_decay_terms
from fedbc_lightning.engines.stacked.cohort_batches import Stack, StackedBatches, like, stacked_batches
from fedbc_lightning.engines.stacked.stacked_bench import StackedBench
from fedbc_lightning.engines.step_function import StepOutput
from fedbc_lightning.local.solvers import Client
from fedbc_lightning.module.collector import by_plain_name
from fedbc_lightning.module.mistakes import locate_step, place_in_run
from fedbc_lightning.state.cohort import Cohort, LocalResult, Taken

# Number of clients below which single steps cost less than a mapped step on batches of an unusual size.
FEW = 6


class CohortRun:
    """Trains K clients in lockstep: one mapped step of the user's gives the gradients of all.

    Args:
        stacked: The workbench for many clients at once.
        cohort: The K clients, those with the most steps first; it takes the result.
        asked: What the method asks for.

    Attributes:
        w: The iterates, (K, d + p).
        buffers: The module's persistent buffers of each client, (K, ...) each.
    """

    def __init__(self, stacked: StackedBench, cohort: Cohort, asked: Training) -> None:
        self.stacked, self.bench = stacked, stacked.bench
        self.user, self.layout = self.bench.user, self.bench.layout
        self.cohort, self.asked, self.local = cohort, asked, asked.local
        row = self.bench.row
        self.w = torch.empty((len(cohort), len(row)), dtype=self.layout.dtype, device=row.device)
        self.counted = Counts(len(cohort))

    def begin(self, grad: Tensor) -> None:
        """Seed the generators, load the start models, and make loaders and optimizer as new.

        Args:
            grad: Matrix (K, d) in which the optimizer will find the gradients.
        """
        seed_globals(
            derive(self.bench.seed, self.asked.purpose, self.bench.round, self.cohort.ids[0]), self.user.device
        )
        num_parameters, num_clients = self.layout.num_parameters, len(self.cohort)
        self.layout.shared(self.w).copy_(self.asked.start[..., :num_parameters])
        own, start = self.cohort.start_buffers, self.asked.start[..., num_parameters:]
        values = start.expand(num_clients, -1) if own is None else own
        self.buffers = self.layout.buffer_rows(values, self.cohort.start_counters)
        if self.layout.num_kept:
            kept = self.cohort.start_kept
            self.w[:, num_parameters:] = self.bench.row[num_parameters:] if kept is None else kept
        self.user.put_scratch_back()
        self.loaders = self.bench.train_loaders(self.cohort.ids)
        self.optimizer = self.stacked.optimizer
        self.optimizer.start(self.w, grad, self.bench.optimizer, self.asked.lr_scale)

    # a gradient

    def gradients(self, w: Tensor, stack: Stack, grad: Tensor) -> Iterator[tuple[Stack, StepOutput]]:
        """Write the gradients at ``w`` (K, d) of one stack of batches into their rows of ``grad`` (K, d).

        Yields:
            Parts of the stack, with the results of their steps.
        """
        batch = self.user.to_device(stack.tensors)
        try:
            yield from self._gradients(w, stack, batch, grad)
        except Exception:
            self._find_culprit(w, stack, batch)
            raise

    def _find_culprit(self, w: Tensor, stack: Stack, batch: Any) -> None:
        """Take the step of one client after another as it is written, after a step of all of them has failed.

        Raises:
            Exception: What the user's step raises by itself, with the client; a mapped step hides both.
        """
        # vmap reports an error without a client, from inside of batched tensors: only a rerun names the culprit.
        bench = self.bench
        for k, row in enumerate(stack.rows.tolist()):
            own = like(batch, (part[row if stack.is_aligned else k] for part in batch))
            bench.row.copy_(w[row])
            self.user.shim.set(current_client=self.cohort.ids[row])
            try:
                bench.recorder.function.written(own)
            except NotRecordableError:
                return
            except Exception as error:
                locate_step(error, self.place(row), own)
                raise error from None

    def place(self, row: int) -> str:
        """Return the client of a row and the round, for a note on an exception."""
        return place_in_run(self.cohort.ids[row], self.bench.round, self.bench.datamodule.client_names)

    def _gradients(self, w: Tensor, stack: Stack, batch: Any, grad: Tensor) -> Iterator[tuple[Stack, StepOutput]]:
        self.stacked.check_step(self.w, batch)
        num_entries, num_optimized, buffers = len(batch[0]), self.layout.num_optimized, self.buffers
        is_few = num_entries == 1 or (not stack.is_aligned and num_entries < FEW)
        # vmap costs about as much as a few single steps, however small K is: FEW of them are taken one by one.
        if not is_few:
            rows = None if stack.is_aligned else upload(torch.from_numpy(stack.rows), w.device)
            chosen: Any = slice(num_entries) if rows is None else rows
            parameters = [*self.layout.views(w[chosen]), *(buffer[chosen] for buffer in buffers)]
            output = self._step("mapped", parameters, batch)
            for own, new in zip(buffers, output.buffers, strict=True):  # entries of other rows hold any samples
                own[stack.rows] = new[stack.rows] if rows is None else new
            into = grad[:num_entries, :num_optimized]
            flat = [gradient.reshape(num_entries, -1) for gradient in output.gradients]
            if rows is None:
                torch.cat(flat, dim=1, out=into)
            else:
                grad[rows, :num_optimized] = torch.cat(flat, dim=1)
            yield stack, output
            return
        for k, row in enumerate(stack.rows.tolist()):
            parameters = [*self.layout.views(w[row]), *(buffer[row] for buffer in buffers)]
            output = self._step("single", parameters, like(batch, (part[k] for part in batch)))
            for own, new in zip(buffers, output.buffers, strict=True):
                own[row] = new
            torch.cat([gradient.reshape(-1) for gradient in output.gradients], out=grad[row, :num_optimized])
            yield stack._replace(rows=np.array([row]), is_aligned=False), output

    def _step(self, kind: str, parameters: Sequence[Tensor], batch: Any) -> StepOutput:
        try:
            return self.bench.recorder.take(kind, parameters, batch)
        except ConfigurationError:
            raise
        except Exception as error:
            name = type(self.user.module).__name__
            raise NotVectorizableError(f"cannot map {name}.training_step over clients ({first_line(error)})") from error

    # the end

    def finish(self, steps: list[int], passed: list[int], gradient_sum: Tensor | None = None) -> None:
        """Hand the cohort what local training ended with after so many steps and batches of each client."""
        num_clients, counts = len(self.cohort), upload(torch.tensor(steps), self.w.device)[:, None]
        losses, records = self.counted.read(steps)
        mean = None if gradient_sum is None else self.layout.shared(gradient_sum) / counts
        values, counters = self.layout.pack_rows(self.buffers, num_clients)
        result = LocalResult(
            w=self.layout.shared(self.w).contiguous(), kept=self.w[:, self.layout.num_parameters :].contiguous(),
            buffers=values, counters=counters, steps=steps, losses=losses.tolist(), taken=self._taken(steps, passed),
            records=records, gradient_mean=mean,
            step_size=self.bench.step_sizes(self.optimizer.rates).expand(num_clients, -1), num_gradients=counts,
        )  # fmt: skip
        self.cohort.take(result)

    def _taken(self, steps: list[int], passed: list[int]) -> list[Taken]:
        """Return the epochs and steps of each client including this round's, if local schedules go on with them."""
        before = self.cohort.taken_before
        if before is None:
            return []
        columns = zip(before, passed, steps, self.loaders.num_batches.tolist(), strict=True)
        return [taken.plus(*more) for taken, *more in columns]


class CohortOptimizerRun(CohortRun):
    """Trains K clients: each step is one mapped step, the K gradients of the terms, and one elementwise optimizer step.

    The clients with the most steps stand first, so those that are still training are always the first rows. Which
    clients are mapped together depends on their numbers of samples alone, never on what is recorded, so recording does
    not change a number.

    Args:
        stacked: The workbench for many clients at once.
        cohort: The K clients.
        asked: What the method asks for, with the terms of all K clients.
    """

    def __init__(self, stacked: StackedBench, cohort: Cohort, asked: Training) -> None:
        super().__init__(stacked, cohort, asked)
        self.grad = torch.zeros_like(self.w)
        self.step = LocalStep(self.layout, asked, self.w, self.grad)
        self._steps_taken = 0

    def run(self) -> None:
        """Train all clients, and hand the cohort the result."""
        self.begin(self.grad)
        optimizer = self.optimizer
        self.step.start(lambda active: partial(optimizer.step, active), lambda: self.bench.step_sizes(optimizer.rates))
        steps = self.train()
        self.finish(steps, steps, self.step.gradient_sum)

    def place(self, row: int) -> str:
        """Return the client of a row, the round, and the batch within the epoch, for a note on an exception."""
        return f"{super().place(row)}, batch {self._steps_taken % int(self.loaders.num_batches[row])}"

    def train(self) -> list[int]:
        """Take all steps of all clients, and return how many each has taken."""
        num_batches = self.loaders.num_batches
        steps = list(map(self.local.num_steps, num_batches.tolist()))
        self.bench.work.begin(self.cohort.ids, sum(steps))
        num_epochs = self.local.epochs or int((-(-np.array(steps) // num_batches)).max())
        batches = stacked_batches(self.loaders, num_epochs, steps)
        for self._steps_taken, (active, stacks) in enumerate(batches):
            for stack in stacks:
                for part, output in self.gradients(self.w, stack, self.grad):
                    self.counted.add(part, output)
            with torch.no_grad():
                self.step.take(active)
            self.bench.work.num_steps += active
        return steps


@dataclass
class CohortBatch:
    """The next batch of every client.

    Attributes:
        stacks: The batches, stacked by size.
        is_counted: Whether their losses and what they logged were counted already; the first gradient on them counts.
    """

    stacks: list[Stack]
    is_counted: bool = False


class CohortSolverRun(CohortRun, SolverSteps):
    """Trains K clients by a solver, which takes equally many steps for each of them.

    Args:
        stacked: The workbench for many clients at once.
        cohort: The K clients.
        asked: What the method asks for: the solver, and the terms of all K clients.

    Attributes:
        num_steps: Number of steps taken so far.
        num_batches: Number of batches per epoch of each client, (K, 1) float64.
        rates: The user's learning rates: (1, 1), or (1, d) if they differ between parameters.
    """

    def __init__(self, stacked: StackedBench, cohort: Cohort, asked: Training) -> None:
        super().__init__(stacked, cohort, asked)
        self.terms = [*(term for term in asked.terms if not term.is_zero), *weight_decay_terms(stacked.bench)]
        self.solver: Any = asked.solver
        self.num_steps = self.num_drawn = 0
        self._batches: StackedBatches = iter(())

    def run(self) -> None:
        """Train all clients, and hand the cohort the result.

        Raises:
            ConfigurationError: The solver takes different numbers of steps for the clients.
        """
        self.begin(self.w)
        # `check_solver` lets only solvers pass that do without component gradients, which a cohort cannot give.
        client = cast(Client, self)
        solver, lengths = self.solver, self.loaders.num_batches.tolist()
        self.num_batches = torch.tensor(lengths, dtype=torch.float64)[:, None]
        self.rates = self.bench.step_sizes(self.optimizer.rates)
        steps = torch.as_tensor(solver.num_steps(client)).unique()
        if len(steps) > 1:
            raise ConfigurationError(
                f"algorithm: {type(solver).__name__} takes {int(steps[0])} to {int(steps[-1])} steps for clients that "
                "are trained at once; call engine.check_solver in the method's check, or use engine: sequential."
            )
        num_steps = int(steps)
        num_drawn = num_steps * solver.batches_per_step
        # The shortest client passes through the most epochs until all have drawn as many batches.
        num_epochs = -(-num_drawn // min(lengths))
        self._batches = stacked_batches(self.loaders, num_epochs, [num_drawn] * len(lengths))
        self.bench.work.begin(self.cohort.ids, num_steps * len(lengths))
        solver.begin(client)
        for _ in range(num_steps):
            solver.step(client)
            self.num_steps += 1
            self.bench.work.num_steps += len(lengths)
        solver.end(client)
        self.finish([num_steps] * len(lengths), [self.num_drawn] * len(lengths))

    # what a solver asks for

    def next_batch(self) -> CohortBatch:
        """Return the next batch of each client's shuffled data; a new epoch starts whenever one ends.

        Raises:
            ConfigurationError: The solver draws more batches than its ``batches_per_step`` allows.
        """
        try:
            _, stacks = next(self._batches)
        except StopIteration:
            raise ConfigurationError(
                f"algorithm.solver: {type(self.solver).__name__} draws more batches in a step than its "
                f"batches_per_step, {self.solver.batches_per_step}; correct that number."
            ) from None
        self.num_drawn += 1
        return CohortBatch(stacks)

    def evaluate(self, w: Tensor, batch: CohortBatch) -> tuple[Tensor, Tensor]:
        """Return the losses (K, 1) and their gradients (K, d), both without the terms."""
        loss, gradient = w.new_empty(len(w), 1), torch.zeros_like(w)
        for stack in batch.stacks:
            for part, output in self.gradients(w, stack, gradient):
                losses = output.loss.reshape(-1).to(loss)
                rows = upload(torch.from_numpy(part.rows), w.device)
                loss[rows, 0] = losses[rows] if part.is_aligned else losses
                if not batch.is_counted:
                    self.counted.add(part, output)
        batch.is_counted = True
        return loss, gradient

    def evaluate_loss(self, w: Tensor, batch: CohortBatch) -> Tensor:
        """Return the losses at w, (K, 1), without the terms."""
        before, self.buffers = self.buffers, [buffer.clone() for buffer in self.buffers]
        loss = super().evaluate_loss(w, batch)
        self.buffers = before
        return loss


class Counts:
    """Keeps the losses and logged values of K clients' steps, and reads them at the end.

    To read a value of a GPU waits for all of its work, so no step reads one.

    Args:
        num_clients: Number of clients, K.
    """

    def __init__(self, num_clients: int) -> None:
        self._num_clients = num_clients
        # Stacks whose tensors are the values of their batches, and whose sizes are the weights; what is logged, by name
        self._losses: list[Stack] = []
        self._logged: dict[str, list[Stack]] = defaultdict(list)

    def add(self, stack: Stack, output: StepOutput) -> None:
        """Keep the loss and the logged values of a step."""
        self._losses.append(stack._replace(tensors=output.loss))
        for call in output.logged:
            weight = stack.size if call.batch_size is None else call.batch_size
            value, is_aligned = call.value, stack.is_aligned
            if not isinstance(value, Tensor):  # a number counts for all rows
                value, is_aligned = output.loss.new_full((len(stack.rows),), value, dtype=torch.float64), False
            self._logged[call.name].append(Stack(stack.rows, value, weight, is_aligned))

    def read(self, steps: Sequence[int]) -> tuple[Tensor, list[dict[str, Any]]]:
        """Return the plain mean (K,) of each client's losses, and its columns of ``clients.csv``.

        These are its number of steps, and the means of losses and logged values, weighted by batch size.
        """
        losses, records = torch.zeros(0), [{"num_steps": num_steps} for num_steps in steps]
        for name, parts in (*[("loss", self._losses)] * bool(self._losses), *by_plain_name(self._logged).items()):
            rows, values = torch.from_numpy(np.concatenate([part.rows for part in parts])), _joined(parts)
            weights = np.repeat([part.size for part in parts], [len(part.rows) for part in parts]).astype(float)
            if parts is self._losses:
                losses = self._sums(rows, values) / self._sums(rows, np.ones(len(rows)))
            totals = self._sums(rows, weights)
            means = self._sums(rows, values * torch.from_numpy(weights)) / totals
            for record, mean, total in zip(records, means.tolist(), totals.tolist(), strict=True):
                if total > 0:  # else the client has logged no value of this name
                    record[f"train_{name}"] = mean
        return losses, records

    def _sums(self, rows: Tensor, values: Tensor | np.ndarray) -> Tensor:
        sums = torch.zeros(self._num_clients, dtype=torch.float64)
        return sums.index_add_(0, rows, torch.as_tensor(values))


def _joined(parts: list[Stack]) -> Tensor:
    """Return the values that count, step after step, in float64; they are copied from the device at once."""
    chosen, start = [], 0
    for part in parts:
        chosen.append(start + (part.rows if part.is_aligned else np.arange(len(part.rows))))
        start += part.tensors.numel()
    values = torch.cat([part.tensors.reshape(-1).double() for part in parts])
    return values.cpu()[torch.from_numpy(np.concatenate(chosen))]
