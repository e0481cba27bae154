"""Description of a measurement: which models are evaluated on which data, and by which step of the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedbc_lightning.core.devices import read
from fedbc_lightning.local import FineTuning

# A model ("global", "local" or "finetuned") and the client on whose data it is evaluated; -1 is the pooled data
Task = tuple[str, int]
# Values of tasks by name
Results = dict[Task, dict[str, float]]


class ClientModel(NamedTuple):
    """A client's own model.

    Attributes:
        model: Shared parameters and floating-point buffers, ``(d + b,)``.
        counters: Integer buffers.
        kept: The parameters that stay with the client (``trainer.local_parameters``), ``(p,)``; None where p = 0.
    """

    model: Tensor
    counters: Tensor
    kept: Tensor | None = None


@dataclass(frozen=True)
class Models:
    """The models that are evaluated.

    Attributes:
        z: Global model, parameters and float buffers, ``(d + b,)``.
        counters: Integer buffers of the global model.
        local: Function from a client to its own model; None if clients have no own models.
        local_weights: Function from K clients to the weights of their own models, ``(K, d + p)`` on the CPU; None where
            there is no such function, and ``local`` has to be asked for each client.
        fine_tuning: Fine-tuning of a client's own model before it is evaluated, or None.
        kept: The kept parameters ``(p,)`` of a client that has not trained yet; None where p = 0. Where clients keep
            some, no model is everyone's, so z is not evaluated.
    """

    z: Tensor
    counters: Tensor
    local: Callable[[int], ClientModel] | None = None
    local_weights: Callable[[Sequence[int]], Tensor] | None = None
    fine_tuning: FineTuning | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class Measurement:
    """Description of one measurement: models, a split of the data, and the step of the module that evaluates.

    Attributes:
        split: Split of the data, ``"test"`` or ``"val"``.
        stage: Stage of Lightning whose step is called, ``"test"`` or ``"validation"``.
        models: Models that are evaluated.
        round: Round, from which seeds are derived.
    """

    split: str
    stage: str
    models: Models
    round: int


def read_results(results: dict[Task, dict[str, Any]]) -> Results:
    """Read values from the device, all at once."""
    numbers = iter(read(value for values in results.values() for value in values.values()))
    return {task: {name: next(numbers) for name in values} for task, values in results.items()}
