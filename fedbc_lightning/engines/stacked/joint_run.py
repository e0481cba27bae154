"""Local training of the cohorts of several runs as one cohort."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.seeding import Generators
from fedbc_lightning.engines.recorded.proof import Proof
from fedbc_lightning.engines.stacked.cohort_batches import Stack
from fedbc_lightning.engines.stacked.cohort_optimizer_run import CohortOptimizerRun
from fedbc_lightning.engines.step_function import StepOutput, at_entries
from fedbc_lightning.local import Linear, Proximal, Term
from fedbc_lightning.state.cohort import Cohort

JOINABLE = (Proximal, Linear)
"""Terms that treat each row by itself, whatever the other rows are; a run has at most one of them."""


class NotJoinableError(Exception):
    """Runs cannot be trained as one; the message gives the reason."""


class DifferentStepsError(NotJoinableError):
    """The steps of runs have become different functions; until then they were the same, and so were their bits."""


@dataclass
class KnownSteps:
    """What was learned about steps that are taken for several runs at once.

    Attributes:
        compared: Shapes of mapped steps that were compared with the steps of single runs.
        separate_sizes: Batch sizes whose steps each run takes by itself, because the bits depend on the place of a row.
            This holds for single samples in most models: a product of matrix and vector is computed differently at
            different memory addresses.
    """

    compared: set[tuple] = field(default_factory=set)
    separate_sizes: set[int] = field(default_factory=lambda: {1})


class JointRun(CohortOptimizerRun):
    """Trains the cohorts of several runs as one: all their rows share one mapped step and one optimizer step.

    Each row gets the bits that it gets in its own run, or :class:`NotJoinableError` is raised. To find out, results for
    all runs are compared with what single runs compute for their own rows: in the first full step of every round with
    all runs, and for each new shape of a step with one run. It is proven that the modules' steps are the same function,
    which includes the values that they read, such as options. The rest of a step (terms, clipping, optimizer) treats
    each row by itself and is not compared.

    Args:
        runs: Runs that are loaded, with one model, optimizer and local training, in the same round.
        lr_scale: Factor on the user's learning rates.
        known_steps: What was learned in earlier rounds; this run adds to it.

    Raises:
        NotJoinableError: The bits of some row are different, or the step draws random numbers.
    """

    def __init__(self, runs: Sequence[CohortOptimizerRun], lr_scale: float, known_steps: KnownSteps) -> None:
        leader, bench = runs[0], runs[0].bench
        keeps_mean = any(run.gradient_sum is not None for run in runs)
        cohort = Cohort.of_all([run.cohort for run in runs])
        super().__init__(leader.stacked, cohort, leader.local, (), None, keeps_mean)
        self.runs, self._known_steps, self._is_compared = runs, known_steps, False
        self._alike: set[tuple] = set()
        self._model = type(bench.user.module), str(bench.layout.fingerprint())
        loaders = [loader for run in runs for loader in run.loaders]
        order = np.argsort([-self.local.num_steps(len(loader)) for loader in loaders], kind="stable")
        self.loaders = [loaders[k] for k in order]
        sizes = [len(run.cohort) for run in runs]
        self._owner = np.repeat(np.arange(len(runs)), sizes)[order]
        self._own_row = np.concatenate([np.arange(size) for size in sizes])[order]
        place = upload(torch.from_numpy(order), self.w.device)
        self._rows = torch.argsort(place).split(sizes)
        torch.index_select(torch.cat([run.w for run in runs]), 0, place, out=self.w)
        self.terms = [term for kind in JOINABLE for term in joined_terms(kind, runs, place)]
        for run in runs[1:]:
            run.bench.recorder.start(bench.round, has_visitors=self.has_visitors())
        self.start_steps(lr_scale, self.grad)

    def train_all(self) -> None:
        """Take all steps of the clients of all runs, and hand each run's cohort its result."""
        before = Generators(self.user.device)
        steps = self.train()
        if Generators(self.user.device) != before:
            raise NotJoinableError("something in their steps draws random numbers")
        means = self.counted.means()
        for run, rows in zip(self.runs, self._rows, strict=True):
            torch.index_select(self.w, 0, rows, out=run.w)
            run.optimizer = self.optimizer
            summed = self.gradient_sum[rows] if self.gradient_sum is not None else None
            is_asked = run.gradient_sum is not None
            run.finish([steps[row] for row in rows.tolist()], means.of(rows.cpu()), summed if is_asked else None)

    def gradients(self, w: Tensor, stack: Stack, grad: Tensor) -> Iterator[tuple[Stack, StepOutput]]:
        """Write the gradients of one stack of batches as the base class does, if each row gets its own run's bits."""
        if stack.is_aligned or stack.size not in self._known_steps.separate_sizes:
            self._check_alike([part[:1] for part in self.user.to_device(stack.tensors)])
            taken = list(super().gradients(w, stack, grad))
            if self.stacked.draws_random_numbers:
                raise NotJoinableError("training_step draws random numbers")
            if self._is_as_alone(w, stack, taken):
                yield from taken
                return
            if stack.is_aligned:
                raise NotJoinableError("the step of a client has other bits when more clients are mapped with it")
            self._known_steps.separate_sizes.add(stack.size)
        for k in np.unique(self._owner[stack.rows]).tolist():
            yield from self._own_gradients(k, w, stack, grad)

    def _check_alike(self, batch: list[Tensor]) -> None:
        """Raise unless the steps of all runs are the same function of weights and batches of this form, (1, B, ...)."""
        form = tuple([(part.shape, part.stride(), part.dtype) for part in batch])
        if form in self._alike:
            return
        proofs: list[Proof | None] = []
        weights: dict[int, str] = {}
        for run in self.runs:
            run.stacked.check_step(run.w, batch)
            proofs.append(run.bench.recorder.proof([part[0] for part in batch]))
            weights |= {id(p): e.name for p, e in zip(run.layout.parameters, run.layout.entries, strict=True)}
        first = proofs[0]
        if first is None or any(proof is None or not first.agrees_with(proof, weights) for proof in proofs[1:]):
            raise DifferentStepsError("their steps read different values, such as options of their models")
        self._alike.add(form)

    def _own_gradients(self, k: int, w: Tensor, stack: Stack, grad: Tensor) -> Iterator[tuple[Stack, StepOutput]]:
        """Take the step of one run's rows of a stack as this run does by itself, with the weights in its own matrix."""
        run, mine = self.runs[k], self._owner[stack.rows] == k
        rows, own_rows = stack.rows[mine], self._own_row[stack.rows[mine]]
        of_row = dict(zip(own_rows.tolist(), rows.tolist(), strict=True))
        entries = rows if stack.is_aligned else np.flatnonzero(mine)
        if stack.is_aligned:  # entry i belongs to row i; the places of other rows are filled with any entry
            filled = np.full(own_rows.max() + 1, entries[0])
            filled[own_rows] = entries
            entries = filled
        here, there = (upload(torch.from_numpy(some), w.device) for some in (rows, own_rows))
        run.w[there] = w[here]
        chosen = upload(torch.from_numpy(entries), w.device)
        own = Stack(own_rows, [part[chosen] for part in stack.tensors], stack.size, stack.is_aligned)
        for part, output in run.gradients(run.w, own, run.grad):
            if part.is_aligned:
                output = at_entries(output, part.rows)
            rows_now = np.array([of_row[row] for row in part.rows.tolist()])
            yield part._replace(rows=rows_now, is_aligned=False), output
        grad[here] = run.grad[there]

    def _is_as_alone(self, w: Tensor, stack: Stack, taken: Sequence[tuple[Stack, StepOutput]]) -> bool:
        """Return whether a step of all runs gave what the runs' own steps give; most steps are not compared again."""
        compared = self._known_steps.compared
        shape = (*self._model, stack.is_aligned, *[part.shape for part in stack.tensors])
        is_first = stack.is_aligned and not self._is_compared
        if shape in compared and not is_first:
            return True
        self._is_compared |= is_first
        compared.add(shape)
        owner = self._owner[stack.rows]
        there = np.unique(owner).tolist()
        chosen = there if is_first else [there[len(compared) % len(there)]]
        grad = torch.zeros_like(self.grad)
        values = {row: value for part, output in taken for row, value in _values(part, output)}
        for k in chosen:
            for part, output in self._own_gradients(k, w, stack, grad):
                if not all(_is_same(values[row], value) for row, value in _values(part, output)):
                    return False
            rows = stack.rows[owner == k]
            if not _is_same(grad[rows], self.grad[rows]):
                return False
        return True


def joined_terms(kind: type, runs: Sequence[CohortOptimizerRun], place: Tensor) -> list[Term]:
    """Return at most one term of this kind for the rows of all runs; it is zero for runs without such a term."""
    terms = [next((term for term in run.terms if type(term) is kind), None) for run in runs]
    return [kind.joined(terms, [run.w for run in runs], place)] if any(terms) else []  # type: ignore[attr-defined]


def _values(part: Stack, output: StepOutput) -> Iterator[tuple[int, Tensor]]:
    """Yield each row of a part with its loss and logged values."""
    columns = [
        torch.as_tensor(value).reshape(-1).double() for value in (output.loss, *(c.value for c in output.logged))
    ]
    for entry, row in zip(part.rows if part.is_aligned else range(len(part.rows)), part.rows.tolist(), strict=True):
        yield row, torch.stack([column[entry if len(column) > 1 else 0] for column in columns])


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; any two NaN are equal."""
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
