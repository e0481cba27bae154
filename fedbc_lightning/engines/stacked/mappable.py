"""Checks whether a step of the user's may be mapped over clients: it is taken in several ways, which must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedbc_lightning.core.errors import NotVectorizableError
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
