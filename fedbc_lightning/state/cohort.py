"""The K clients that are trained together: their iterates, declared state and messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbc_lightning.core.devices import pieces, wide_dtype
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.state.declaration import EMPTY, ClientStore, Records, check_declared, check_tensor, joined


class Taken(NamedTuple):
    """Counts the epochs and steps that a client has trained in all rounds so far.

    Attributes:
        epochs: Passes over the client's data; an epoch that was broken off counts by the fraction of its batches.
        steps: Number of optimizer steps.
    """

    epochs: float = 0.0
    steps: int = 0

    def whole_epochs(self, num_batches: int) -> int:
        """Return the number of complete epochs of a client that has `num_batches` batches per epoch."""
        return self._batches(num_batches) // num_batches

    def plus(self, batches: int, steps: int, num_batches: int) -> Taken:
        """Return the counts after `batches` more batches and `steps` more steps."""
        return Taken((self._batches(num_batches) + batches) / num_batches, self.steps + steps)

    def _batches(self, num_batches: int) -> int:
        """Return the batches as a whole number, so that rounding errors do not add up over the rounds."""
        # Epochs are kept as a fraction of batches, because the number of batches may change between runs.
        return round(self.epochs * num_batches)


@dataclass
class LocalResult:
    """What local training of K clients gave; an engine hands it to :meth:`Cohort.take`.

    Attributes:
        w: (K, d) iterates at the end of local training, in the master dtype.
        buffers: (K, b) floating-point buffers at its end.
        counters: (K, c) integer buffers at its end.
        steps: K_i of each client, the number of optimizer steps that moved w.
        losses: Mean over each client's batches of the loss before each step; NaN for a client without a loss.
        step_size: (K, d) or (K, 1) mean over the steps of the learning rate of each parameter's optimizer group; a step
            in which a layer was frozen for a time counts with 0. It is 0 in manual optimization.
        taken: The epochs and steps of each client including this round's.
        records: What each client counted and logged, by column of ``clients.csv``.
        gradient_mean: (K, d) mean of the raw mini-batch gradients, or None if it was not asked for. Each layer's mean
            is over the steps in which it was trained.
        num_gradients: (K, 1) or (K, d) number of gradients in this mean.
        kept: (K, p) kept parameters at the end of local training.
    """

    w: Tensor
    buffers: Tensor
    counters: Tensor
    steps: list[int]
    losses: list[float]
    step_size: Tensor
    taken: list[Taken]
    records: Records
    gradient_mean: Tensor | None = None
    num_gradients: Tensor = EMPTY
    kept: Tensor = EMPTY


class Cohort:
    """Holds K clients in one round: their iterates, their declared state and their messages.

    Declared client state is read by its name: ``cohort["dual"]`` is (K,), ``cohort["local_model"]`` (K, d + b). It is
    the value that was committed in the round before; :meth:`stage` gives the value for the next round.

    Attributes:
        ids: The K client indices.
        positions: The place of each client in the round's order of sampling.
        steps: K_i of each client, the number of optimizer steps as counted by the engine.
        w: (K, d) iterates at the end of local training, in the master dtype; the next cohort overwrites this memory.
        buffers: (K, b) floating-point buffers after local training; ``counters`` (K, c) holds the integer ones.
        start_buffers: (K, b) buffers that local training starts from; None takes the buffers of the start model.
        start_counters: (K, c) integer buffers that local training starts from.
        kept: (K, p) kept parameters (``trainer.local_parameters``) after local training; they are no message.
        start_kept: (K, p) kept parameters that local training starts from; None takes those that the module has.
        gradient_mean: (K, d) mean of the raw mini-batch gradients, if the algorithm asks for it; each layer's is over
            the steps in which it was trained, not those in which it was frozen or another optimizer stepped.
        num_gradients: (K, 1) or (K, d) number of gradients in this mean.
        step_size: (K, d) or (K, 1) mean over the steps of the learning rate of each parameter's optimizer group; a step
            in which a layer was frozen for a time counts with 0. It is 0 in manual optimization.
        losses: Mean over each client's batches of the loss before each step; NaN for a client without a loss.
        local: The shortened local training of these clients if they are stragglers; None for the trainer's.
        started: The clients for which ``on_client_start`` was called in this round, and what it left there: the
            frozen layers, or None for those that hooks of rounds have frozen, and what it set in the optimizer.
        taken_before: The epochs and steps of each client in earlier rounds, at which its local schedules continue; None
            if the schedules begin anew in every round.
        taken_after: The epochs and steps of each client including this round's; empty before local training, and if
            the schedules begin anew in every round.
        messages: Further messages of the clients to the server callbacks, by name, (K, ...).
        valid: (K,) bool; False if ‖w_i‖², or that of another row that a client sends or keeps, is not finite, but for
            what was so before, such as the -inf of a mask. Such a client gets weight 0 and keeps its state.
        start: The models (d,), (d + b,) or (K, ...) that local training starts from.
        records: One dict per client that becomes its row in ``clients.csv``.
    """

    # A method that sets an attribute of its own would lose it after the cohort: state is declared and staged, and what
    # a server part reads is a message. So Python refuses any other name at the very line that sets it.
    __slots__ = (
        "_device", "_num_samples", "_staged", "_state", "_store", "buffers", "counters", "gradient_mean", "ids", "kept",
        "local", "losses", "messages", "num_gradients", "positions", "records", "start", "start_buffers",
        "start_counters", "start_kept", "started", "step_size", "steps", "taken_after", "taken_before", "valid", "w",
    )  # fmt: skip

    def __init__(self, ids: list[int], positions: list[int], num_samples: list[int], store: ClientStore,
                 device: torch.device) -> None:  # fmt: skip
        self.ids = ids
        self.positions = positions
        self._num_samples = num_samples
        self.steps = [0] * len(ids)
        self.losses = [math.nan] * len(ids)
        self.valid = torch.ones(len(ids), dtype=torch.bool)
        self.w = self.buffers = self.gradient_mean = self.num_gradients = self.step_size = EMPTY
        self.counters = self.start_counters = EMPTY
        self.start_buffers: Tensor | None = None
        self.kept = EMPTY
        self.start_kept: Tensor | None = None
        self.local: LocalTraining | None = None
        self.started: dict[int, tuple[frozenset[str] | None, Any]] = {}
        self.taken_before: list[Taken] | None = None
        self.taken_after: list[Taken] = []
        self.messages: dict[str, Tensor] = {}
        self.records: Records = [
            {"client": client, "num_samples": size} for client, size in zip(ids, num_samples, strict=True)
        ]
        self.start = EMPTY
        self._store, self._device = store, device
        self._state: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Number of clients, K."""
        return len(self.ids)

    def __getitem__(self, name: str) -> Tensor:
        """Return the committed value (K, ...) of a declared client state; the store is read at the first call only.

        Raises:
            ConfigurationError: No client state of this name is declared.
        """
        # Read once per cohort: a row may lie in a file, or on another device.
        if name not in self._state:
            check_declared(f"cohort['{name}']", name, self._store.names)
            rows = self._store.gather(name, self.ids)
            self._state[name] = rows if name in self._store.scalar_names else rows.to(self._device)
        return self._state[name]

    def __contains__(self, name: object) -> bool:
        """Return whether a client state of this name is declared."""
        return name in self._store.names

    def take(self, result: LocalResult) -> None:
        """Take what local training gave, and mark the clients as invalid whose results became NaN or infinite."""
        self.w, self.buffers, self.counters = result.w, result.buffers, result.counters
        self.steps, self.losses, self.step_size = result.steps, result.losses, result.step_size
        self.kept = result.kept
        self.require_finite(self.w)
        buffers = self.start[..., self.w.shape[1] :] if self.start_buffers is None else self.start_buffers
        self.require_finite(self.buffers, buffers)
        self.require_finite(result.kept, self.start_kept)
        if result.gradient_mean is not None:
            self.gradient_mean, self.num_gradients = result.gradient_mean, result.num_gradients
            self.require_finite(self.gradient_mean)
        if self.taken_before is not None:
            self.taken_after = result.taken
        for record, more in zip(self.records, result.records, strict=True):
            record.update(more)

    def start_from_trained(self) -> None:
        """Let a further training in this round start from the kept parameters and buffers at which the last one ended.

        The method gives the model itself as the start, e.g. :attr:`model`.
        """
        self.start_kept = self.kept
        if self.start_buffers is not None:
            self.start_buffers = self.buffers
        self.start_counters = self.counters

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of each client, n_i; (K,) float64."""
        return torch.tensor(self._num_samples, dtype=torch.float64)

    @property
    def num_steps(self) -> Tensor:
        """Number of optimizer steps of each client, K_i; (K,) float64."""
        return torch.tensor(self.steps, dtype=torch.float64)

    @property
    def is_all_valid(self) -> bool:
        """Whether all clients are :attr:`valid`."""
        return all(self.valid.tolist())

    @property
    def valid_positions(self) -> list[int]:
        """The :attr:`positions` of the valid clients."""
        return [*compress(self.positions, self.valid.tolist())]

    def of_valid(self, values: Tensor) -> Tensor:
        """Return the rows of the valid clients in `values` (K, ...)."""
        return values if self.is_all_valid else values[self.valid.to(values.device)]

    @property
    def model(self) -> Tensor:
        """The clients' models (K, d + b): w followed by the floating-point buffers, as client models are stored."""
        return joined(self.w, self.buffers)

    def stage(self, name: str, value: Tensor) -> None:
        """Give a declared state its value (K, ...) for the next round.

        Raises:
            ConfigurationError: There is no such state, or the shape is another one.
        """
        check_declared(f"cohort['{name}']", name, self._store.names)
        expected = self._store.row_shape(name)
        shape = None if expected is None else (len(self), *expected)
        check_tensor(f"cohort.stage('{name}', ...), a row for each client,", value, shape)
        self._staged[name] = value

    def is_staged(self, name: str) -> bool:
        """Return whether a declared state was given a value for the next round."""
        return name in self._staged

    def staged(self, name: str) -> Tensor:
        """Return the value (K, ...) for the next round: the staged one, or the committed one if none was staged."""
        return self._staged[name] if name in self._staged else self[name]

    def change(self, name: str) -> Tensor:
        """Return a vector as the next round will read it, minus as this round read it: (K, ...), in the wide dtype.

        The store may round rows. The difference is taken after rounding, so that the sum of these changes over the
        rounds equals the change of the rows themselves.
        """
        # Rounded first, then subtracted, since the store may keep rows in bfloat16.
        kept = self._store.as_kept(name, self.staged(name))
        change = kept.to(wide_dtype(kept.device), copy=True)
        for part, before in pieces(change, self[name]):
            part -= before
        return change

    def squared_distance(self, center: Tensor) -> Tensor:
        """Return ‖w_i − center‖² of each client, (K,) in the wide dtype; `center` is (d,)."""
        wide = wide_dtype(self.w.device)
        # A norm that sums in float64 takes a quarter of the time of a copy in float64, and its square.
        norms = (torch.linalg.vector_norm(w - c, dim=1, dtype=wide) for w, c in pieces(self.w, center))
        # One after another, so that a client's bits do not depend on how many others are here.
        return sum((norm.square_() for norm in norms), torch.zeros((), dtype=wide, device=self.w.device))

    def check_finite(self) -> None:
        """Mark the clients as invalid whose staged state or messages are not finite."""
        for name, values in self._staged.items():
            # A staged model without buffers is w itself, which is checked where it is made.
            if values.data_ptr() != self.w.data_ptr() and not self._are_finite(values).all():
                # As the store keeps them, for which -3.4e38 may be -inf
                self.require_finite(*(self._store.as_kept(name, each) for each in (values, self[name])))
        for values in self.messages.values():
            self.require_finite(values)

    def require_finite(self, values: Tensor, before: Tensor | None = None) -> None:
        """Mark the clients as invalid whose rows of `values` (K, ...) are not finite, but for what was so before."""
        are_finite = self._are_finite(values)
        if before is not None and before.numel() and not are_finite.all():
            is_known = torch.isclose(values, before.to(values), rtol=0, atol=0, equal_nan=True)
            are_finite = self._are_finite(values.masked_fill(is_known, 0))
        self.valid &= are_finite

    def _are_finite(self, values: Tensor) -> Tensor:
        """Return whether the squared norm of each client's row of `values` (K, ...) is finite in the dtype of w."""
        if not values.numel() or not values.is_floating_point():
            return torch.ones(len(self), dtype=torch.bool)
        # A mean with 3e38, or with a message of 1e300 in float64, is of no use to the server.
        own, of_w = (torch.promote_types(dtype, torch.float32) for dtype in (values.dtype, self.w.dtype))
        norms = torch.linalg.vector_norm(values.reshape(len(self), -1), dim=1, dtype=own)
        return norms.to(of_w).square().isfinite().cpu()

    def record(self, name: str, values: Tensor) -> None:
        """Write the numbers `values` (K,) into the clients' rows of ``clients.csv``, in the column `name`."""
        for record, value in zip(self.records, values.tolist(), strict=True):
            record[name] = value

    def write_back(self, store: ClientStore) -> None:
        """Stage the values of the valid clients in the store."""
        clients = [*compress(self.ids, self.valid.tolist())]
        for name, values in self._staged.items():
            store.stage(name, clients, self.of_valid(values))
