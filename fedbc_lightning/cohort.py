"""The K clients that are trained together, and what one of them sends back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.state import ClientStore

if TYPE_CHECKING:
    from fedbc_lightning.engines.sequential import LocalTraining


class Cohort:
    """K clients in one round: their iterates, their declared state, their messages. K = 1 in the sequential engine.

    Declared client state is read as an attribute: ``cohort.dual`` is (K,), ``cohort.local_model`` (K, d + b). It holds
    what was committed in the round before; :meth:`stage` gives the value for the next one.

    Attributes:
        ids: The K client indices.
        positions: The place of each client in the round's order of sampling.
        num_samples: (K,) float64, n_i.
        num_steps: (K,) float64, K_i: optimizer steps as counted by the engine.
        w: (K, d) what local training ended with, in the master dtype; a workbench that the next cohort overwrites.
        buffers: (K, b) the floating-point buffers after local training; ``counters`` the integer ones.
        start_buffers: (K, b) buffers that local training starts from whatever the start model's are; None: those.
        start_counters: The integer buffers that local training starts from.
        gradient_mean: (K, d) mean of the raw mini-batch gradients over the steps, where the algorithm asks for it.
        step_size: (K, d) or (K, 1) mean over the steps of the learning rate of every parameter's group.
        batch_loss: (K,) float64, the plain mean over its batches of the loss before each step; NaN without one.
        local: What these clients do in place of the trainer's local training: a straggler's part of it; None: all.
        has_started: Whether their training has begun in this round.
        messages: What else the clients send to the server's parts, by name, (K, ...).
        valid: (K,) bool, False where loss or w is not finite: such a client weighs nothing and keeps its state.
        records: One dict per client, to become its row in ``clients.csv``.
    """

    def __init__(self, ids: list[int], positions: list[int], num_samples: list[int], store: ClientStore,
                 device: torch.device) -> None:  # fmt: skip
        self.ids = ids
        self.positions = positions
        self.num_samples = torch.tensor(num_samples, dtype=torch.float64)
        self.num_steps = torch.zeros(len(ids), dtype=torch.float64)
        self.valid = torch.ones(len(ids), dtype=torch.bool)
        self.w: Tensor = torch.empty(0)
        self.buffers: Tensor = torch.empty(0)
        self.counters: Tensor = torch.empty(0)
        self.start_counters: Tensor = torch.empty(0)
        self.start_buffers: Tensor | None = None
        self.gradient_mean: Tensor = torch.empty(0)
        self.step_size: Tensor = torch.empty(0)
        self.batch_loss = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        self.local: LocalTraining | None = None
        self.has_started = False
        self.messages: dict[str, Tensor] = {}
        self.records: list[dict[str, Any]] = [{} for _ in ids]
        self._state = store.gather(ids, device)
        taken = next((name for name in self._state if name in self.__dict__ or name in vars(Cohort)), None)
        if taken is not None:
            raise ConfigurationError(f"algorithm: client state cannot be called '{taken}', which cohorts have.")
        self._staged: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """K."""
        return len(self.ids)

    def __getattr__(self, name: str) -> Tensor:
        """The committed rows of a declared client state."""
        try:
            return self.__dict__["_state"][name]
        except KeyError:
            raise AttributeError(f"cohort has no state '{name}': declare it in the algorithm's declare_state") from None

    @property
    def model(self) -> Tensor:
        """(K, d + b): w followed by the floating-point buffers, as client models are stored."""
        return torch.cat([self.w, self.buffers], dim=1) if self.buffers.numel() else self.w

    def stage(self, name: str, value: Tensor) -> None:
        """Give a declared state its value (K, ...) for the next round."""
        expected = self._state[name].shape
        assert value.shape == expected or expected == (1, 0), (name, value.shape, expected)
        self._staged[name] = value

    def committed(self, name: str) -> Tensor:
        """The value of the round before, by name."""
        return self._state[name]

    def staged(self, name: str) -> Tensor:
        """The value for the next round: what was staged, else the committed one."""
        return self._staged.get(name, self._state[name])

    def check_finite(self) -> None:
        """A client whose staged state or message is not finite is not valid."""
        for values in (*self._staged.values(), *self.messages.values()):
            if values.data_ptr() != self.w.data_ptr():  # w is checked where it is made
                self.valid &= torch.isfinite(values).reshape(len(self), -1).all(dim=1).cpu()

    def record(self, name: str, values: Tensor) -> None:
        """Write (K,) numbers into the clients' rows of ``clients.csv``."""
        for record, value in zip(self.records, values.tolist(), strict=True):
            record[name] = value

    def write_back(self, store: ClientStore) -> None:
        """Stage the rows of the valid clients in the store."""
        for name, values in self._staged.items():
            for k, client in enumerate(self.ids):
                if self.valid[k]:
                    store.stage(client, name, values[k])
