"""Checks whether a step of the user's may be mapped over clients: it is taken in several ways, which must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import NotVectorizableError, first_line
from fedbc_lightning.core.seeding import Generators, preserved_globals
from fedbc_lightning.engines.recorded.recording import NotRecordableError
from fedbc_lightning.engines.recorded.step_recorder import is_same
from fedbc_lightning.engines.step_function import StepOutput
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.collector import reduction


def check_step(bench: Workbench, w: Tensor, batch: list[Tensor]) -> bool:
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
    parameters = [view.clone() for view in layout.views(w)]
    draws = False

    def taken(way: Callable[..., StepOutput], *args: Any, batch_idx: int) -> StepOutput:
        nonlocal draws
        with preserved_globals(user.device):
            before = Generators(user.device)
            output = way(*args, [part.clone() for part in batch], batch_idx)
            draws = draws or Generators(user.device) != before
            return output

    try:
        recorder.check_hooks()
        output = taken(recorder.function.written, batch_idx=0)
        recorder.check_metrics()
        # Another batch_idx shows a step that depends on it: K clients in lockstep have only one number for all.
        if not is_same(output, taken(recorder.function.single, parameters, batch_idx=7), tolerance=1e-4):
            raise NotRecordableError("given its weights as arguments, or another batch_idx, it has other gradients")
    except NotRecordableError as error:
        problem = f"needs a training_step that is a function of weights and batch: {error}"
        raise NotVectorizableError(problem) from error
    for call in output.logged:
        # Means are added up for all clients at once at the end; a sum or maximum would need each step's values.
        if reduction(call.reduce_fx) != "mean":
            raise NotVectorizableError(
                "takes numbers averaged over their batch from training_step, and "
                f"self.log('{call.name}') gives something else"
            )
    return draws


def try_step(bench: Workbench) -> None:
    """Take a step on a first batch as it is mapped over two clients; weights and generators are left as they were.

    Raises:
        NotVectorizableError: The step may not be mapped, or it draws random numbers.
    """
    user, data = bench.user, bench.datamodule
    with preserved_globals(user.device):
        batch = user.to_device(next(iter(data.fixed_batches(int(data.training_clients[0]), device=user.device))))
        if not isinstance(batch, (list, tuple)) or not all(isinstance(part, Tensor) for part in batch):
            raise NotVectorizableError("stacks the tensors of batches, and these hold other things")
        user.train_mode()
        user.start_collecting()
        user.shim.set(training=True)
        try:
            if check_step(bench, bench.row, list(batch)):
                raise NotVectorizableError("draws random numbers for a cohort at once, so they depend on who is in it")
            pair = [torch.stack([part, part]) for part in batch]
            bench.recorder.function.mapped(bench.layout.views(bench.row.repeat(2, 1)), pair)
        except NotVectorizableError:
            raise
        except Exception as error:  # a mistake of the step's comes up again in round 1, with its client and batch
            raise NotVectorizableError(f"cannot take training_step on a first batch ({first_line(error)})") from error
        finally:
            user.shim.set(training=False)
            user.start_collecting()
