"""The K clients that are trained together, and what one of them sends back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedbc_lightning.core.devices import wide_dtype
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.state.declaration import ClientStore

if TYPE_CHECKING:
    from fedbc_lightning.core.local_training import LocalTraining


EMPTY = torch.empty(0)


class Taken(NamedTuple):
    """What a client has taken in all rounds so far.

    Attributes:
        epochs: Passes over its data; one that was broken off counts by the share of its batches that came.
        steps: Optimizer steps.
    """

    epochs: float = 0.0
    steps: int = 0

    def whole_epochs(self, num_batches: int) -> int:
        """The epochs that are complete, of a client with so many batches."""
        return self._batches(num_batches) // num_batches

    def plus(self, batches: int, steps: int, num_batches: int) -> Taken:
        """That after so many more batches and steps."""
        return Taken((self._batches(num_batches) + batches) / num_batches, self.steps + steps)

    def _batches(self, num_batches: int) -> int:
        """As a whole number, so that no rounding error adds up."""
        return round(self.epochs * num_batches)


class Cohort:
    """K clients in one round: their iterates, their declared state, their messages.

    Declared client state is read as an attribute: ``cohort.dual`` is (K,), ``cohort.local_model`` (K, d + b). It holds
    what was committed in the round before; :meth:`stage` gives the value for the next one.

    Attributes:
        ids: The K client indices.
        positions: The place of each client in the round's order of sampling.
        steps: K_i of each client: optimizer steps as counted by the engine.
        w: (K, d) what local training ended with, in the master dtype; a workbench that the next cohort overwrites.
        buffers: (K, b) the floating-point buffers after local training; ``counters`` the integer ones.
        start_buffers: (K, b) buffers that local training starts from whatever the start model's are; None: those.
        start_counters: The integer buffers that local training starts from.
        gradient_mean: (K, d) mean of the raw mini-batch gradients over the steps, where the algorithm asks for it.
        step_size: (K, d) or (K, 1) mean over the steps of the learning rate of every parameter's group.
        losses: The plain mean over each client's batches of the loss before each step; NaN without one.
        local: What these clients do in place of the trainer's local training: a straggler's part of it; None: all.
        started: Those whose training has begun in this round.
        taken_before: The epochs and steps of each client in earlier rounds, from which its local schedules go on; None:
            they begin afresh.
        taken_after: Those with this round's; empty before local training, and where they begin afresh.
        messages: What else the clients send to the server's parts, by name, (K, ...).
        valid: (K,) bool, False where loss or w is not finite: such a client weighs nothing and keeps its state.
        records: One dict per client, to become its row in ``clients.csv``.
    """

    def __init__(self, ids: list[int], positions: list[int], num_samples: list[int], store: ClientStore,
                 device: torch.device) -> None:  # fmt: skip
        self.ids = ids
        self.positions = positions
        self._num_samples = num_samples
        self.steps = [0] * len(ids)
        self.losses = [math.nan] * len(ids)
        self.valid = torch.ones(len(ids), dtype=torch.bool)
        self.w = self.buffers = self.gradient_mean = self.step_size = EMPTY
        self.counters = self.start_counters = EMPTY
        self.start_buffers: Tensor | None = None
        self.local: LocalTraining | None = None
        self.started: set[int] = set()
        self.taken_before: list[Taken] | None = None
        self.taken_after: list[Taken] = []
        self.messages: dict[str, Tensor] = {}
        self.records: list[dict[str, Any]] = [
            {"client": client, "num_samples": size} for client, size in zip(ids, num_samples, strict=True)
        ]
        self._store, self._device = store, device
        self._state: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}

    @classmethod
    def of_all(cls, cohorts: Sequence[Cohort]) -> Cohort:
        """The clients of several runs; their state is read and staged by their own cohorts."""
        ids = [client for cohort in cohorts for client in cohort.ids]
        sizes = [size for cohort in cohorts for size in cohort._num_samples]
        return cls(ids, list(range(len(ids))), sizes, cohorts[0]._store, cohorts[0]._device)

    def __len__(self) -> int:
        """K."""
        return len(self.ids)

    def __getattr__(self, name: str) -> Tensor:
        """The committed rows of a declared client state."""
        if name.startswith("_") or name not in self._store:
            raise AttributeError(f"cohort has no state '{name}': declare it in the algorithm's declare_state")
        return self.committed(name)

    @property
    def num_samples(self) -> Tensor:
        """(K,) float64, n_i."""
        return torch.tensor(self._num_samples, dtype=torch.float64)

    @property
    def num_steps(self) -> Tensor:
        """(K,) float64, K_i."""
        return torch.tensor(self.steps, dtype=torch.float64)

    @property
    def batch_loss(self) -> Tensor:
        """(K,) float64, :attr:`losses`."""
        return torch.tensor(self.losses, dtype=torch.float64)

    @property
    def is_all_valid(self) -> bool:
        """Whether all of :attr:`valid` is True."""
        return all(self.valid.tolist())

    @property
    def valid_positions(self) -> list[int]:
        """Those of the valid clients among :attr:`positions`."""
        return [position for position, is_valid in zip(self.positions, self.valid.tolist(), strict=True) if is_valid]

    def of_valid(self, values: Tensor) -> Tensor:
        """The rows of the valid clients in ``values`` (K, ...)."""
        return values if self.is_all_valid else values[self.valid.to(values.device)]

    @property
    def model(self) -> Tensor:
        """(K, d + b): w followed by the floating-point buffers, as client models are stored."""
        return torch.cat([self.w, self.buffers], dim=1) if self.buffers.numel() else self.w

    def stage(self, name: str, value: Tensor) -> None:
        """Give a declared state its value (K, ...) for the next round."""
        expected = self._store.row_shape(name)
        assert expected is None or value.shape == (len(self), *expected), (name, value.shape, expected)
        self._staged[name] = value

    def committed(self, name: str) -> Tensor:
        """The value of the round before, by name; read from the store when it is first asked for."""
        if name not in self._state:
            self._state[name] = self._store.gather(name, self.ids, self._device)
        return self._state[name]

    def staged(self, name: str) -> Tensor:
        """The value for the next round: what was staged, else the committed one."""
        return self._staged[name] if name in self._staged else self.committed(name)

    def change(self, name: str) -> Tensor:
        """What the next round will read of a vector less what this one did, (K, ...), in the dtype of sums.

        Rows may be kept rounded; a sum of such changes over the rounds stays that of the rows.
        """
        kept = self._store.as_kept(name, self.staged(name))
        return kept.to(wide_dtype(kept.device)) - self.committed(name)

    def check_names(self, names: Iterable[str]) -> None:
        """Raise if declared client state could not be read from a cohort by its name.

        Raises:
            ConfigurationError: It could not, with the name.
        """
        taken = next((name for name in names if name in vars(self) or name in vars(Cohort)), None)
        if taken is not None:
            raise ConfigurationError(f"algorithm: client state cannot be called '{taken}', which cohorts have.")

    def check_finite(self) -> None:
        """A client whose staged state or message is not finite is not valid."""
        for values in (*self._staged.values(), *self.messages.values()):
            if values.data_ptr() != self.w.data_ptr():  # w is checked where it is made
                self.require_finite(values)

    def require_finite(self, values: Tensor) -> None:
        """A client whose row of values (K, ...) is not finite is not valid."""
        if not is_finite(values):
            self.valid &= torch.isfinite(values).reshape(len(self), -1).all(dim=1).cpu()

    def record(self, name: str, values: Tensor) -> None:
        """Write (K,) numbers into the clients' rows of ``clients.csv``."""
        for record, value in zip(self.records, values.tolist(), strict=True):
            record[name] = value

    def write_back(self, store: ClientStore) -> None:
        """Stage the rows of the valid clients in the store."""
        clients = [client for client, is_valid in zip(self.ids, self.valid.tolist(), strict=True) if is_valid]
        for name, values in self._staged.items():
            store.stage(name, clients, self.of_valid(values))


def is_finite(values: Tensor) -> bool:
    """Whether all are; one sum tells it, unless it overflows."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())
