"""How the tests of this folder run the trainer and its NumPy reference on the same quadratics."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.quadratics import QuadraticData, QuadraticModule, Recorder, RecordingSampler

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.core import seeding

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "precision": "64-true",
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "logger": False,
}


Reference = Callable[..., dict[str, np.ndarray]]


@dataclass(frozen=True)
class Setting:
    """One algorithm with one choice of options, and the NumPy loop it must equal.

    Attributes:
        name: Name of the test case.
        build: Makes a fresh algorithm.
        reference: ``(clients, rounds, z, local) -> trajectories``.
        scalars: Client scalars to compare, by their state names.
        vectors: Client vectors to compare.
        server: Server vectors to compare.
        tolerance: Largest difference allowed; section 4.1 asks for 1e-6.
        options: Settings of the trainer that the algorithm needs; they override those of a test.
    """

    name: str
    build: Callable[[], Any]
    reference: Reference
    scalars: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9


def fit(root: Path, algorithm: Any, data: QuadraticData, recorder: Recorder, **options: Any) -> tuple[Any, Any]:
    """Fit; ``options`` with a name of QuadraticModule's go to the module, the others to the trainer."""
    module_keys = {"lr", "momentum", "tail_lr", "decay", "lbfgs"}
    module = QuadraticModule(**{key: options.pop(key) for key in module_keys & options.keys()})
    options.setdefault("sampler", RecordingSampler())
    settings = QUIET | {"callbacks": [recorder], "default_root_dir": str(root)} | options
    trainer = FederatedTrainer(**settings)
    trainer.fit(module, datamodule=data, algorithm=algorithm)
    return trainer, module


def start_point() -> np.ndarray:
    """z of round 0 as (head, tail)."""
    return QuadraticModule().vector()


@dataclass(frozen=True)
class ShuffledSteps:
    """Optimizer steps over mini-batches of the documented shuffles (contract: data), accumulated.

    Attributes:
        data: Whose clients.
        batch_size: Samples per batch; the last batch of an epoch is short.
        seed: The run's seed.
        accumulate: Batches per optimizer step.
        epochs: Number of epochs, or
        num_steps: of optimizer steps.
    """

    data: QuadraticData
    batch_size: int
    seed: int = 0
    accumulate: int = 1
    epochs: int | None = None
    num_steps: int | None = None

    def __call__(self, round: int, client: int) -> list[list[np.ndarray | None]]:
        out: list[list[np.ndarray | None]] = []
        epoch = 0
        while epoch < self.epochs if self.epochs is not None else len(out) < (self.num_steps or 0):
            batches = self._epoch(round, client, epoch)
            out += [batches[start : start + self.accumulate] for start in range(0, len(batches), self.accumulate)]
            epoch += 1
        return out[: self.num_steps]

    def batches(self, round: int, client: int) -> Iterator[np.ndarray | None]:
        """Batches without an end: epochs 0, 1, 2, ..."""
        for epoch in count():
            yield from self._epoch(round, client, epoch)

    def batches_per_epoch(self, client: int) -> int:
        return -(-self._size(client) // self.batch_size)

    def _size(self, client: int) -> int:
        """The samples of a client; -1: of all."""
        sizes = [len(centres) for _, centres in self.data.clients]
        return sum(sizes) if client < 0 else sizes[client]

    def _epoch(self, round: int, client: int, epoch: int) -> list[np.ndarray | None]:
        size = self._size(client)
        order = torch.randperm(size, generator=seeding.generator(self.seed, "shuffle", round, client, epoch)).numpy()
        return [order[start : start + self.batch_size] for start in range(0, size, self.batch_size)]


def shuffled_steps(data: QuadraticData, batch_size: int, **options: Any) -> ShuffledSteps:
    """See :class:`ShuffledSteps`."""
    return ShuffledSteps(data, batch_size, **options)
