"""The workbench for many clients at once: one optimizer on K rows, checks of mapped steps, and mapped evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedbc_lightning.core.errors import NotVectorizableError, first_line
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.seeding import Generators, preserved_globals
from fedbc_lightning.engines.recorded.recording import NotRecordableError
from fedbc_lightning.engines.recorded.step_recorder import StepRecorder, is_same
from fedbc_lightning.engines.stacked.cohort_batches import like
from fedbc_lightning.engines.step_function import StepOutput
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.client_optimizers import StackedOptimizer
from fedbc_lightning.module.collector import ColumnCollector, reduction

# Bytes that a cohort may take on a CPU: its matrices (K, d), and what a mapped step holds for its backward pass.
BYTES_OF_COHORT = 2**30
# Part of a GPU's memory that a cohort may take there.
PART_OF_GPU = 1 / 8
# Number of these matrices: w, gradients, optimizer state, differences.
NUM_MATRICES = 6
# Memory of a mapped step at its peak, for each client and in what a single step holds for its backward pass. On a CPU
# ten clients more than two took 6.5 MiB each with the CIFAR CNN, 1.4 of it matrices and 1.6 held by a single step, and
# 64 MiB with a transformer, of 9.3 and 12.8.
TIMES_HELD = 4


class StackedBench:
    """Holds what the steps of K clients at once need beside the workbench.

    Args:
        bench: The workbench.

    Attributes:
        bench: The workbench.
        optimizer: The user's optimizer on K rows.
        draws_random_numbers: Whether ``training_step`` is known to draw random numbers.
        most_rows: Largest number of clients whose (K, d) matrices fit into the memory that is meant for a cohort.
    """

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.optimizer = StackedOptimizer(bench.optimizer.configured.copied(), bench.layout)
        self.draws_random_numbers = False
        device, self._row_bytes = bench.user.device, NUM_MATRICES * bench.row.nbytes
        self._most_bytes = BYTES_OF_COHORT
        if device.type == "cuda":
            self._most_bytes = int(PART_OF_GPU * torch.cuda.get_device_properties(device).total_memory)
        self.most_rows = self._most_bytes // self._row_bytes
        self._checked: set[tuple] = set()
        self._checked_after = 0

    def most_clients(self) -> int:
        """Return the largest number of clients whose matrices and steps fit into the memory meant for a cohort.

        What a step holds for its backward pass is measured on the first batch of the client with the most samples.
        """
        data, held = self.bench.datamodule, dict[int, int]()
        clients = data.training_clients
        largest = int(clients[data.num_samples("train")[clients].argmax()])

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return tensor

        # A mistake of the step's comes up again in training, with its client and batch.
        with first_batch(self.bench, largest) as batch, suppress(Exception), saved_tensors_hooks(count, lambda t: t):
            parameters = [*self.bench.layout.views(self.bench.row), *self.bench.layout.buffers()]
            self.bench.recorder.function.single(parameters, batch)
        held.pop(self.bench.row.untyped_storage().data_ptr(), None)
        return self._most_bytes // (self._row_bytes + TIMES_HELD * sum(held.values()))

    def check_step(self, w: Tensor, batch: Any) -> None:
        """Check that a step may be mapped: once for each shape of a batch, and where it may have changed since.

        Args:
            w: Weights (K, d), of which the first client's are taken.
            batch: The batches of K clients, (K, B, ...) each.

        Raises:
            NotVectorizableError: The step may not be mapped.
        """
        bench = self.bench
        # A check takes several single steps; a later one finds a step that changes its mind in the course of a run.
        shape = tuple([part.shape[1:] for part in batch])
        if shape in self._checked and self._checked_after == bench.recorder.num_changes:
            return
        self._checked.add(shape)
        self._checked_after = bench.recorder.num_changes
        self.draws_random_numbers |= check_step(bench, w[0], like(batch, (part[0] for part in batch)))
        if self.draws_random_numbers:
            bench.say(
                "trainer.engine: vectorized draws what training_step draws, such as dropout, for a whole cohort at "
                "once, so its masks depend on who is in it; the sequential engine's depend on the client alone."
            )


def check_step(bench: Workbench, w: Tensor, batch: Any) -> bool:
    """Take a step of one client in several ways, to find what a mapped step would do differently.

    Args:
        bench: The workbench.
        w: The weights, (d,).
        batch: A batch of one client.

    Returns:
        True if the step draws random numbers.

    Raises:
        NotVectorizableError: The step may not be mapped.
    """
    user, layout, recorder = bench.user, bench.layout, bench.recorder
    bench.row.copy_(w)
    parameters = [*(view.clone() for view in layout.views(w)), *layout.buffers()]
    draws = False

    def taken(way: Callable[..., StepOutput], *args: Any, batch_idx: int) -> StepOutput:
        nonlocal draws
        with preserved_globals(user.device):
            before = Generators(user.device)
            output = way(*args, like(batch, (part.clone() for part in batch)), batch_idx)
            draws = draws or Generators(user.device) != before
            return output

    try:
        recorder.check()
        output = taken(recorder.function.written, batch_idx=0)
        recorder.check()
        # Another batch_idx shows a step that depends on it: K clients in lockstep have only one number for all.
        if not is_same(output, taken(recorder.function.single, parameters, batch_idx=7), tolerance=1e-4):
            raise NotRecordableError("given its weights as arguments, or another batch_idx, it has other gradients")
    except NotRecordableError as error:
        raise NotVectorizableError(f"needs a training_step that is a function of weights and batch: {error}") from error
    for call in output.logged:
        # Means are added up for all clients at once at the end; a sum or maximum would need each step's values.
        if reduction(call.reduce_fx) != "mean":
            raise NotVectorizableError(
                "takes numbers averaged over their batch from training_step, and "
                f"self.log('{call.name}') gives something else"
            )
    return draws


@contextmanager
def first_batch(bench: Workbench, client: int) -> Iterator[Any]:
    """Yield the first batch of a client in training mode; generators and what is logged are then as they were."""
    user = bench.user
    with preserved_globals(user.device):
        batch = user.to_device(next(iter(bench.datamodule.fixed_batches(client, device=user.device))))
        user.train_mode()
        user.start_collecting()
        user.shim.set(training=True)
        try:
            yield batch
        finally:
            user.shim.set(training=False)
            user.start_collecting()


def try_step(bench: Workbench) -> None:
    """Take a step on a first batch as it is mapped over two clients; weights and generators are left as they were.

    Raises:
        NotVectorizableError: The step may not be mapped, or it draws random numbers.
    """
    with first_batch(bench, int(bench.datamodule.training_clients[0])) as batch:
        if not isinstance(batch, (list, tuple)) or not all(isinstance(part, Tensor) for part in batch):
            raise NotVectorizableError("stacks the tensors of batches, and these hold other things")
        try:
            if check_step(bench, bench.row, like(batch, batch)):
                raise NotVectorizableError("draws random numbers for a cohort at once, so they depend on who is in it")
            pair = like(batch, (torch.stack([part, part]) for part in batch))
            buffers = [torch.stack([buffer, buffer]) for buffer in bench.layout.buffers()]
            bench.recorder.function.mapped([*bench.layout.views(bench.row.repeat(2, 1)), *buffers], pair)
        except NotVectorizableError:
            raise
        except Exception as error:  # a mistake of the step's comes up again in round 1, with its client and batch
            raise NotVectorizableError(f"cannot take training_step on a first batch ({first_line(error)})") from error


class MappedEvaluation:
    """Runs the user's ``validation_step`` or ``test_step`` under ``vmap``, for clients of one batch each.

    The step must be a function of weights and batch, which the user promises by ``engine: vectorized``. Nevertheless
    the first evaluation is done in both ways and compared, see
    :class:`~fedbc_lightning.evaluation.clients_together.ClientsTogether`.

    Args:
        bench: The workbench.
        stage: ``"validation"`` or ``"test"``.
        most_rows: Largest number of models that are evaluated together.

    Attributes:
        most_models: Largest number of models that are evaluated together, if each client has its own.
        reasons: Map from a split to the reason why its clients are evaluated one after another, the same on all ranks,
            or to None if they are evaluated together. A split that is not in the map was not evaluated yet.
        recorder: Replays steps that came often.
    """

    def __init__(self, bench: Workbench, stage: str, most_rows: int) -> None:
        self._bench, self._user, self._layout, self._row = bench, bench.user, bench.layout, bench.row
        self._stage = stage
        self.recorder = StepRecorder(bench.user, bench.layout, bench.local.record_steps, f"{stage}_step")
        self.recorder.promise()
        self.most_models = max(1, most_rows)
        self.reasons: dict[str, str | None] = {}

    def obstacle(self) -> str | None:
        """Return what in the module or a callback is called for each client, so that nothing can be mapped, or None."""
        user, stage = self._user, self._stage
        hooks = [name for name in (f"on_{stage}_batch_start", f"on_{stage}_batch_end") if user.hooks.listens(name)]
        of_module = (f"on_{stage}_epoch_start", f"on_{stage}_epoch_end")
        hooks += [name for name in of_module if overrides(user.module, name, LightningModule)]
        if hooks:
            return f"the hook {', '.join(hooks)} is called for each of them"
        if self._layout.places:
            return "the module has buffers, of which each client may have its own"
        return "the module holds a torchmetrics Metric" if user.metrics else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise if torch maps an operation of a step inside by running it once for each client.

        The module's own parameters are NaN meanwhile, so that a step that reaches them in another way than through its
        arguments gives NaN.

        Raises:
            NotRecordableError: torch warns of such an operation.
        """
        kept = self._row.clone()
        self._row.fill_(torch.nan)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        finally:
            self._row.copy_(kept)
        if any("performance drop" in str(warning.message) for warning in caught):
            raise NotRecordableError("torch would do one of its operations for each of them in turn")

    def run(self, batch: list[Tensor], w: Tensor) -> list[dict[str, float]]:
        """Return what each client logged.

        Args:
            batch: The batches of K clients, (K, n, ...) each.
            w: The models of the clients, (K, d), or the one model of all, (d,).

        Raises:
            NotRecordableError: The step logs something else than numbers.
            Exception: Whatever the step raises when it is mapped.
        """
        self._user.start_collecting()  # puts scratch buffers back to what each client finds
        batch = self._user.to_device(batch)
        kind = "shared_evaluation" if w.ndim == 1 else "mapped_evaluation"
        output = self.recorder.take(kind, self._layout.views(w), batch)
        collector = ColumnCollector(len(batch[0]))
        collector.start_batch(batch, batch[0].size(1))
        for call in output.logged:
            collector.log(call.name, call.value, reduce_fx=call.reduce_fx, batch_size=call.batch_size)
        return collector.results()

    def say(self, reason: str) -> None:
        """Log why clients are not evaluated together, each reason once."""
        step = f"{type(self._user.module).__name__}.{self._stage}_step"
        self._bench.say(f"{step}: clients are evaluated one after another: {reason.rstrip('.')}.")
