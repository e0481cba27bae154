"""Proves one step for batches of one form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.private_torch import has_listeners, num_function_modes, tree_map_only
from fedbc_lightning.engines.recorded.proof import known
from fedbc_lightning.engines.recorded.proof.evaluator import Evaluator
from fedbc_lightning.engines.recorded.proof.frames import BATCH_INDEX
from fedbc_lightning.engines.recorded.proof.operations import OnlyPure
from fedbc_lightning.engines.recorded.proof.reads import Reads
from fedbc_lightning.engines.recorded.recording import NotRecordableError


class Proof:
    """Shows that a step is a function of weights and batch, as long as what it read stays as it was.

    Args:
        reads: What the step read.
    """

    def __init__(self, reads: Reads) -> None:
        self._reads, self._torch = reads, known.patches()

    def holds(self) -> bool:
        """Return whether everything that the step read is as it was."""
        return self._reads.hold()

    def sight(self) -> list[Any]:
        """Return what the step would read now in the same places."""
        return self._reads.sight()

    def holds_for_torch(self) -> bool:
        """Return whether torch's own functions are those that they were; once in a round is often enough."""
        return known.patches() == self._torch


def prove(module: nn.Module, step: str, batch: Any, *, takes_index: bool, log: Callable[..., None]) -> Proof:
    """Prove that a step of the module is a function of weights and batch, for batches of this form.

    The step is evaluated on the module's own weights, and nothing is changed by that.

    Args:
        module: The module, in the mode in which the step runs; its ``log`` is replaced.
        step: Name of the method.
        batch: An example of a batch.
        takes_index: Whether the step takes ``batch_idx``.
        log: The function behind ``self.log``.

    Raises:
        NotRecordableError: The step cannot be proven; the message names the obstacle.
    """
    reads = Reads()
    evaluator = Evaluator(reads, module, log=log)
    for read in (torch.get_default_dtype, _default_device, num_function_modes, has_listeners):
        reads.setting(read)
    if has_listeners():
        raise NotRecordableError("a mode or a hook of torch listens to all that is computed")
    if not known.is_torch_whole():
        raise NotRecordableError("it runs beside functions of torch that were replaced")
    try:
        with torch.set_grad_enabled(step == "training_step"), OnlyPure():
            # A batch belongs to the step that gets it; what may write into it is settled where steps are recorded.
            own = tree_map_only(Tensor, Tensor.clone, batch)
            method = evaluator.attributes.get(module, step)
            evaluator.call(method, (own, BATCH_INDEX) if takes_index else (own,), {})
    except NotRecordableError:
        raise
    except Exception as error:
        raise NotRecordableError(f"evaluated to be looked through, it fails: {first_line(error)}") from error
    if not reads.hold():
        raise NotRecordableError("it changes something that it reads")
    return Proof(reads)


def _default_device() -> torch.device | None:
    """Return the device of new tensors; torch 2.8's own function fails after the device was reset."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return None
