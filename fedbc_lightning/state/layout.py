"""The layout of a module's trainable parameters in one vector of length d; buffers lie in a vector of their own.

The whole package uses these shapes, with K clients that are trained together and N clients in all:

===========  =======================================================================================
``z``        (d,)      the global model at the server
``w, grad``  (K, d)    the clients' iterates and gradients
``dual``     (K,)      one number per client of the cohort; (N,) in the store
a *model*    (d + b,)  trainable parameters followed by the b elements of the floating-point buffers
``kept``     (K, p)    parameters that stay with their client (``trainer.local_parameters``); usually p = 0
===========  =======================================================================================

Where p > 0, d counts the shared parameters alone, and methods see no others. A *row* (d + p,) holds all.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.private_torch import buffers_of, is_persistent
from fedbc_lightning.state.frozen import FrozenParameters


class WrittenParametersError(ConfigurationError):
    """Raised when training wrote frozen parameters for the first time: they become buffers, and the round restarts.

    Args:
        names: The names of the parameters.
    """

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return self.args[0]

    def __str__(self) -> str:
        return (
            f"model: '{self.names[0]}' has requires_grad=False and was written between the rounds (by a hook such as "
            "on_round_end), after the first round while clients' rows lie in clients.bin, or though it is too large to "
            "be copied before; no client's training may find what another left there. Make it a buffer "
            "(register_buffer), which hooks and steps may write in any round."
        )


class Weights(NamedTuple):
    """The values of a module at one moment.

    Attributes:
        parameters: The shared parameters, (d,).
        buffers: The floating-point buffers, (b,).
        counters: The integer buffers.
        kept: The parameters that stay with each client, (p,).
    """

    parameters: Tensor
    buffers: Tensor
    counters: Tensor
    kept: Tensor

    def differ_from(self, others: Weights) -> bool:
        """Return whether any values are different."""
        # Mostly there are no kept parameters, and a comparison waits for the device.
        return any(len(mine) > 0 and not is_same(mine, theirs) for mine, theirs in zip(self, others, strict=True))


class Place(NamedTuple):
    """Says where a buffer lies, and which form it has at the start: None if it is None."""

    full_name: str
    root: nn.Module
    shape: torch.Size | None
    dtype: torch.dtype | None

    @property
    def module(self) -> nn.Module:
        """The module that holds it, looked up each time, because training may replace it (a new copy as teacher)."""
        return self.root.get_submodule(self.full_name.rpartition(".")[0])

    @property
    def name(self) -> str:
        """Its name in that module."""
        return self.full_name.rpartition(".")[2]

    @property
    def tensor(self) -> Tensor:
        """The present tensor."""
        return getattr(self.module, self.name)

    @property
    def has_changed(self) -> bool:
        """Whether its shape or dtype has changed."""
        return _place(self.root, self.full_name) != self


@dataclass(frozen=True)
class Entry:
    """Says where one parameter lies in the vector: its name, shape and first index."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def end(self) -> int:
        """Index one past the parameter's last element."""
        return self.offset + self.shape.numel()


class ParameterLayout:
    """Maps the names of a module's trainable parameters to slices of one vector and back.

    The vector is ordered by optimizer group and, within a group, as in ``named_parameters()``; parameters that no
    group holds stand at the end.

    Args:
        module: The module, already moved to its device and converted to its precision.
        groups: The parameters of each optimizer group; each group becomes one slice.
        kept_names: Names of the parameters that stay with their client; in a row they stand behind all others.

    Attributes:
        entries: One :class:`Entry` per trainable parameter, in the order of a row: first the shared ones, then the
            kept ones.
        shared_entries: The entries of the shared parameters, which make up the vector.
        kept_entries: The entries of the kept parameters.
        group_parts: The slices of a row per optimizer group: that of its shared and that of its kept parameters.
        num_parameters: Number of shared trainable parameters, d.
        num_kept: Number of elements of the kept parameters, p.
        num_optimized: Length of the leading part of a row whose parameters belong to an optimizer group.
        optimized_sizes: Number of elements of each of these parameters.
        frozen: The parameters that are not trained.
        frozen_by_hooks: Names of trained parameters that are frozen when a client begins, by hooks of the run or of
            rounds; they have a place in a row, as they may thaw in any round, epoch or step.
        buffer_names: Names of the persistent buffers, which training may change.
        changing: Names of those whose shape training changes; they travel behind the integer buffers, packed.
        num_counters: Number of elements of the persistent integer buffers.
        places: Where the persistent buffers lie, also those that are None so far.
        num_buffers: Number of elements of the persistent floating-point buffers, b.
        written: Names of the frozen parameters that are treated as buffers, because training writes them.
        dtype: Dtype of the parameters.
        master_dtype: Dtype of the vector: float32 if `dtype` has two bytes, else `dtype`.
        buffer_dtype: Dtype of the vector of buffers: float64 if a buffer has it, else `master_dtype`.

    Raises:
        ConfigurationError: No parameter is trainable, one is lazy or complex, their dtypes are mixed, one stands
            twice in the groups, or some are kept and others stand in no group.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[Sequence[nn.Parameter]] = (), kept_names: Collection[str] = ()
    ) -> None:
        named = {p: name for name, p in module.named_parameters() if p.requires_grad}
        for name, child in module.named_modules():
            if getattr(child, "sparse", False) and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
                raise ConfigurationError(f"model: '{name}' gives sparse gradients; use sparse=False.")
        self.dtype = _common_dtype(named)
        # Half precision would lose steps below its spacing (bfloat16: 0.4 %), so the server and w are float32.
        self.master_dtype = torch.float32 if self.dtype.itemsize == 2 else self.dtype
        place = {p: k for k, p in enumerate(named)}
        kept = {p for p, name in named.items() if name in kept_names}
        ordered = [sorted((p for p in group if p in named), key=place.__getitem__) for group in groups]
        # Kept parameters stand behind all shared ones, so that z is the leading part of a row and methods need not know
        # of them; each optimizer group then has up to two parts.
        parts = [[p for p in group if (p in kept) == is_kept] for is_kept in (False, True) for group in ordered]
        order = [p for part in parts for p in part]
        self.num_grouped, in_a_group = len(order), set(order)
        if len(in_a_group) < len(order):
            raise ConfigurationError("model: a parameter stands twice in the groups of the optimizer; give it once.")
        ungrouped = [p for p in named if p not in in_a_group]
        if kept and ungrouped:
            raise ConfigurationError(
                f"trainer.local_parameters: '{named[ungrouped[0]]}' stands in no group of the optimizer; put it into "
                "one, or freeze it (requires_grad_(False))."
            )
        order += ungrouped

        self.parameters: list[nn.Parameter] = order
        self.frozen = FrozenParameters(module, {parameter.shape for parameter in order})
        self.frozen_by_hooks: frozenset[str] = frozenset()
        self._grouped = order[: self.num_grouped]
        *offsets, size = accumulate((p.numel() for p in order), initial=0)
        self.entries = [Entry(named[p], p.shape, offset) for p, offset in zip(order, offsets, strict=True)]
        num_shared = len(order) - len(kept)
        self.shared_entries, self.kept_entries = self.entries[:num_shared], self.entries[num_shared:]
        self.num_kept = sum(p.numel() for p in kept)
        self.num_parameters = size - self.num_kept
        self.optimized_sizes = [parameter.numel() for parameter in self._grouped]
        self.num_optimized = sum(self.optimized_sizes)
        bounds = accumulate((sum(p.numel() for p in part) for part in parts), initial=0)
        slices = [slice(begin, end) for begin, end in pairwise(bounds)]
        self.group_parts: list[list[slice]] = [
            [part for part in (shared, own) if part.start < part.stop] or [shared]
            for shared, own in zip(slices[: len(ordered)], slices[len(ordered) :], strict=True)
        ]

        self._module = module
        self._at_start = [*_persistent_buffers(module)]
        self.take_as_buffers([], [])
        device = order[0].device
        self._no_buffers = torch.empty(0, dtype=self.master_dtype, device=device)
        self._no_counters = torch.empty(0, dtype=torch.int64, device=device)
        self._other_names = {
            **_other_names(module.named_parameters(remove_duplicate=False)),
            **_other_names(module.named_buffers(remove_duplicate=False)),
        }
        self._addresses: list[int] = []  # of the parameters' storages, while they are views of the row

    def take_as_buffers(self, written: Collection[str], changing: Collection[str]) -> None:
        """Treat frozen parameters that training writes, such as a teacher network's, as buffers.

        Args:
            written: Names of these parameters, in the order in which training was found to write them.
            changing: Names of the buffers whose shapes may change.
        """
        self.written, self.changing = self.frozen.take_out(dict.fromkeys(written)), [*changing]
        self.places = [*self._at_start, *(_place(self._module, name) for name in self.written)]
        fixed = [place for place in self.places if place.full_name not in self.changing]
        self._buffers, self._empty = [p for p in fixed if p.shape is not None], [p for p in fixed if p.shape is None]
        self._packed = [p for p in self.places if p.full_name in self.changing]
        self.buffer_names = [place.full_name for place in (*self._buffers, *self._packed)]
        floating = self._of_kind(is_floating=True)
        self.num_buffers = sum(buffer.numel() for buffer in floating)
        self.num_counters = sum(buffer.numel() for buffer in self._of_kind(is_floating=False))
        is_wide = any(buffer.dtype == torch.float64 for buffer in floating)
        self.buffer_dtype = torch.float64 if is_wide else self.master_dtype

    def changed_forms(self) -> list[str]:
        """Return the names of buffers that have another shape or dtype than at the start, and may not."""
        return [p.full_name for p in self.places if p.has_changed and p.full_name not in self.changing]

    # parameters

    @property
    def trains_all(self) -> bool:
        """Whether no hook has frozen a trained parameter for the time being."""
        return all(parameter.requires_grad for parameter in self.parameters)

    def moving_part(self) -> Tensor | bool:
        """Return which elements of a row move in a step, (d + p,); True if no hook has frozen any for a time."""
        resting = self.resting()
        if not resting:
            return True
        moving = torch.ones(self.entries[-1].end, dtype=torch.bool, device=self.parameters[0].device)
        for index in resting:
            moving[self.entries[index].offset : self.entries[index].end] = False
        return moving

    def resting(self) -> list[int]:
        """Return the indices of frozen parameters without a gradient, also where ``zero_grad`` has left zeros."""
        # A layer that was frozen after its backward still takes the step of that gradient, as under Lightning.
        found = enumerate(self.parameters)
        return [k for k, p in found if not p.requires_grad and (p.grad is None or not p.grad.any())]

    def frozen_now(self) -> frozenset[str]:
        """Return the names of the trained parameters that are frozen at present."""
        return frozenset(e.name for p, e in zip(self.parameters, self.entries, strict=True) if not p.requires_grad)

    def put_frozen_back(self, names: frozenset[str] | None = None) -> None:
        """Freeze these parameters alone; None for those that every client begins with."""
        frozen = self.frozen_by_hooks if names is None else names
        if frozen or not self.trains_all:
            for parameter, entry in zip(self.parameters, self.entries, strict=True):
                parameter.requires_grad_(entry.name not in frozen)

    def check_trainable(
        self, where: str = "a hook", *, is_in_client: bool = False, is_round_over: bool = False
    ) -> None:
        """Raise if ``requires_grad`` of a parameter is not as clients begin, or a frozen parameter was written.

        Args:
            where: Whose code may have changed it, for messages.
            is_in_client: Whether a client takes steps of the user's optimizer, between which hooks may freeze trained
                parameters, and thaw them again.
            is_round_over: Whether frozen parameters are also searched for writes through ``.data``, and trained ones
                for others in their place, which takes too long for a look after each client.

        Raises:
            ConfigurationError: ``requires_grad`` has changed, or a trained parameter is another object now; the message
                names the parameter.
            WrittenParametersError: A frozen parameter was written.
        """
        if is_round_over:
            self.check_replaced()
        self.check_thawed(where)
        if not is_in_client and (changed := self.frozen_now() ^ self.frozen_by_hooks):
            raise ConfigurationError(
                f"model: {where} changed requires_grad of '{min(changed)}', which no client would find so. Freeze and "
                "thaw in hooks of rounds (on_round_start); for a method with steps of its own, freeze before training, "
                "in __init__, setup or configure_model."
            )
        written = self.frozen.written(through_data=is_round_over)
        if written:
            self.check_replaced()
            raise WrittenParametersError(written)

    def check_thawed(self, where: str) -> None:
        """Raise if a parameter is trained now that was frozen when training began, so that it has no place in a row.

        Args:
            where: Whose code has thawed it.
        """
        thawed = [mark.name for mark in self.frozen.marks if mark.parameter.requires_grad]
        if thawed:
            raise ConfigurationError(
                f"model: {where} thawed '{thawed[0]}', which was frozen before on_fit_start, so that clients and "
                f"server do not exchange it. Freeze it in on_fit_start (self.{thawed[0]}.requires_grad_(False)), not "
                "before, give it to the optimizer, and thaw it as you do; then start anew, since the checkpoints of "
                "this run lack it."
            )

    def check_finite(self) -> None:
        """Raise if a parameter that is trained and shared has NaN or infinite elements; the message names it."""
        for entry, parameter in zip(self.shared_entries, self.parameters, strict=False):
            if not torch.isfinite(parameter).all():
                raise ConfigurationError(
                    f"model: parameter '{entry.name}' is trained and has NaN or infinite elements before training, and "
                    "has no mean over clients. Make a mask a buffer (register_buffer)."
                )

    def check_replaced(self, *, at_start: bool = False) -> None:
        """Raise if another parameter has the place of one, or a persistent buffer or, ``at_start``, a parameter is new.

        A frozen parameter may be replaced by another frozen one, as teachers are that are copied anew.

        Raises:
            ConfigurationError: The message names it.
        """
        now = dict(self._module.named_parameters())
        trained = {entry.name: p for p, entry in zip(self.parameters, self.entries, strict=True)}
        buffers = (place.full_name for place in _persistent_buffers(self._module))
        known = {*trained, *(mark.name for mark in self.frozen.marks), *(place.full_name for place in self.places)}
        lost = [name for name, parameter in trained.items() if now.get(name) is not parameter]
        lost += [mark.name for mark in self.frozen.marks if mark.is_lost]
        lost += [name for name in (*(now if at_start else ()), *buffers) if name not in known]
        if lost:
            raise ConfigurationError(
                f"model: '{lost[0]}' was replaced by another one, or added during training; nothing would train, send "
                "or reset it. Write into it (copy_, load_state_dict), or make it in __init__ or configure_model (a "
                "buffer may be None there)."
            )

    def shared(self, rows: Tensor) -> Tensor:
        """Return a view of the columns that methods see, (k, d), of rows (k, d + p)."""
        return rows[:, : self.num_parameters] if self.num_kept else rows

    def held_part(self, trains: str) -> slice | None:
        """Return the part of a row that a training of the ``"shared"`` or ``"local"`` parameters leaves as it is."""
        return {"local": slice(0, self.num_parameters), "shared": slice(self.num_parameters, None)}.get(trains)

    def views(self, rows: Tensor) -> list[Tensor]:
        """Return each parameter, (...), as a view of one row (d + p,), or (K, ...) of the rows (K, d + p)."""
        return [rows[..., e.offset : e.end].view((*rows.shape[:-1], *e.shape)) for e in self.entries]

    def attach(self, row: Tensor) -> None:
        """Make every parameter a view into ``row`` (d + p,): writing the row writes the module."""
        for parameter, view in zip(self.parameters, self.views(row), strict=True):
            parameter.data = view
        self.drop_gradients()

    def is_attached(self, row: Tensor) -> bool:
        """Return whether the parameters still are views of ``row``; ``.to()`` and ``assign=True`` would end that."""
        start, size = row.data_ptr(), row.element_size()
        # The addresses are worked out once per row, since this is asked before each step.
        if self._addresses[:1] != [start]:
            # A tensor without elements lies nowhere: its address is 0.
            self._addresses = [start + e.offset * size if e.offset < e.end else 0 for e in self.entries]
        return [parameter.data_ptr() for parameter in self.parameters] == self._addresses

    def detached(self) -> str:
        """Return the name of the first parameter that was no view of the row at the last :meth:`is_attached`."""
        triples = zip(self.parameters, self._addresses, self.entries, strict=True)
        return next(entry.name for parameter, address, entry in triples if parameter.data_ptr() != address)

    def read(self) -> Tensor:
        """Return a copy of the module's shared parameters as one vector (d,) of ``master_dtype``."""
        return self._flat(self.parameters[: len(self.shared_entries)], self.master_dtype)

    def read_kept(self) -> Tensor:
        """Return a copy of the module's kept parameters as one vector (p,) of ``master_dtype``."""
        return self._flat(self.parameters[len(self.shared_entries) :], self.master_dtype)

    def weights(self) -> Weights:
        """Return copies of all values of the module that are trained or exchanged."""
        return Weights(self.read(), self.read_buffers(), self.read_counters(), self.read_kept())

    def _flat(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        flat = [tensor.detach().reshape(-1).to(dtype) for tensor in tensors]
        return torch.cat(flat) if flat else self._no_buffers.to(dtype, copy=True)  # torch.cat refuses an empty list

    def gather_gradients(self, out: Tensor) -> bool:
        """Write ``p.grad`` of the grouped parameters into ``out`` (num_optimized,); return False if one is None."""
        flat = []
        for parameter in self._grouped:
            gradient = parameter.grad
            if gradient is None:
                return False
            flat.append(gradient.reshape(-1))
        # One operation in place of one copy for each tensor.
        torch.cat(flat, out=out)
        return True

    def collect_gradients(self, grad: Tensor) -> list[int]:
        """Copy into ``grad`` every ``p.grad`` that is not a view of it already, zero where there is none.

        Returns:
            The indices of the grouped parameters without a gradient.
        """
        missing = []
        for index, (parameter, entry) in enumerate(zip(self._grouped, self.entries, strict=False)):
            part = grad[entry.offset : entry.end]
            if parameter.grad is None:
                part.zero_()
                missing.append(index)
            elif parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(parameter.grad.reshape(-1))
        return missing

    def drop_gradients(self) -> None:
        """Leave every parameter without a gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def has_gradient(self) -> bool:
        """Return whether any grouped parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._grouped)

    def expose_gradients(self, grad: Tensor) -> None:
        """Make ``p.grad`` of the grouped parameters views of ``grad``, for hooks and per-tensor optimizers."""
        for parameter, view in zip(self._grouped, self.views(grad), strict=False):
            parameter.grad = view

    def show_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Let ``p.grad`` of the grouped parameters be copies of these, as after a step that was not replayed."""
        for parameter, gradient in zip(self._grouped, gradients, strict=False):
            parameter.grad = gradient.clone()

    # buffers

    def _of_kind(self, *, is_floating: bool) -> list[Tensor]:
        found = (_real(place.tensor) for place in self._buffers)
        return [buffer for buffer in found if buffer.is_floating_point() == is_floating]

    def buffers(self) -> list[Tensor]:
        """Return the persistent buffers themselves, in the order of ``buffer_names``."""
        return [place.tensor for place in (*self._buffers, *self._packed)]

    def buffer_rows(self, values: Tensor, counters: Tensor) -> list[Tensor]:
        """Return copies of the buffers of K clients, (K, ...) each, from their vectors (K, b) and (K, c)."""
        found = self._parts(values, counters)
        return [_cast(part, place.dtype) for place, part in found if part is not None and place.dtype]

    def pack_rows(self, buffers: Sequence[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the vectors (K, b) and (K, c) of which :meth:`buffer_rows` makes the buffers (K, ...)."""
        flat = [buffer.reshape(num_rows, math.prod(buffer.shape[1:])) for buffer in map(_real, buffers)]
        values = [each.to(self.buffer_dtype) for each in flat if each.is_floating_point()]
        counters = [each.to(torch.int64) for each in flat if not each.is_floating_point()]
        none = self._no_buffers.to(self.buffer_dtype).expand(num_rows, -1), self._no_counters.expand(num_rows, -1)
        return torch.cat([none[0], *values], dim=1), torch.cat([none[1], *counters], dim=1)

    def read_buffers(self) -> Tensor:
        """Return a copy of the floating-point buffers as one vector (b,) of ``buffer_dtype``."""
        return self._flat(self._of_kind(is_floating=True), self.buffer_dtype)

    def read_counters(self) -> Tensor:
        """Return a copy of the integer and boolean buffers, and of those that change shape, as one int64 vector."""
        counters = (buffer.detach().reshape(-1).to(torch.int64) for buffer in self._of_kind(is_floating=False))
        packed = [_pack([p.tensor for p in self._packed]).to(self._no_counters.device)] if self._packed else []
        return torch.cat([self._no_counters, *counters, *packed])

    def write_buffers(self, values: Tensor, counters: Tensor) -> None:
        """Copy vectors that :meth:`read_buffers` and :meth:`read_counters` returned into the module's buffers."""
        for place, part in self._parts(values, counters):
            write_buffer(place.module, place.name, part, place.dtype)
        for place in self._empty:
            write_buffer(place.module, place.name, None, None)

    def _parts(self, values: Tensor, counters: Tensor) -> Iterator[tuple[Place, Tensor | None]]:
        """Yield each buffer's place and its part of the two vectors or rows, complex ones as pairs of real numbers."""
        vectors, offsets = (counters, values), [0, 0]
        for place in self._buffers:
            assert place.shape is not None
            assert place.dtype is not None
            shape = (*place.shape, 2) if place.dtype.is_complex else place.shape
            kind = place.dtype.is_floating_point or place.dtype.is_complex
            begin, offsets[kind] = offsets[kind], offsets[kind] + math.prod(shape)
            yield place, vectors[kind][..., begin : offsets[kind]].view((*values.shape[:-1], *shape))
        if self._packed:
            for place, tensor in zip(self._packed, _unpack(counters[self.num_counters :]), strict=True):
                yield place._replace(dtype=getattr(tensor, "dtype", None)), tensor

    # files

    def named_slices(self, row: Tensor) -> dict[str, Tensor]:
        """Return clones of the parts of z (d,), or of a whole row (d + p,), under the parameters' names."""
        entries = self.entries if len(row) > self.num_parameters else self.shared_entries
        return {e.name: row[e.offset : e.end].view(e.shape).clone() for e in entries}

    def vector_from(self, named: dict[str, Tensor]) -> Tensor:
        """Return the vector (d,) from parameters by name; this inverts :meth:`named_slices`."""
        return torch.cat([named[e.name].reshape(-1) for e in self.shared_entries]).to(self.master_dtype)

    def named_buffers(self, values: Tensor, counters: Tensor) -> dict[str, Tensor]:
        """Return clones of the parts of two vectors under the buffers' names, in the buffers' dtypes.

        Args:
            values: A vector (b,) as :meth:`read_buffers` returns it.
            counters: A vector as :meth:`read_counters` returns it.
        """
        parts = self._parts(values.cpu(), counters.cpu())
        return {place.full_name: _cast(part, place.dtype) for place, part in parts if part is not None and place.dtype}

    def under_all_names(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add each tensor that the module has under several names, such as tied weights, under its other names."""
        return named | {other: named[name].clone() for other, name in self._other_names.items() if name in named}

    def large_frozen(self) -> dict[str, Tensor]:
        """Return the large frozen parameters themselves, not copies, under each name that the module has for them."""
        named = self.frozen.large()
        return named | {other: named[name] for other, name in self._other_names.items() if name in named}

    def fingerprint(self) -> dict[str, str]:
        """Return "shape dtype" of every parameter and persistent buffer by name, to compare checkpoint and module."""
        kinds = {e.name: (e.shape, self.dtype) for e in self.entries}
        kinds |= {place.full_name: (place.tensor.shape, place.tensor.dtype) for place in self._buffers}
        return {name: f"{tuple(shape)} {dtype}".replace("torch.", "") for name, (shape, dtype) in sorted(kinds.items())}


def is_same(left: Tensor | None, right: Tensor | None) -> bool:
    """Return whether two tensors have the same shape and values; NaN is the same as NaN."""
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left, right) or torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def write_buffer(module: nn.Module, name: str, value: Tensor | None, dtype: torch.dtype | None) -> None:
    """Copy a value into a buffer of a dtype, or put a copy in its place where training has given it another form."""
    buffer = getattr(module, name)
    if value is None or dtype is None:
        setattr(module, name, None)
    elif buffer is not None and buffer.dtype == dtype and _real(buffer).shape == _real(value).shape:
        _real(buffer).copy_(_real(value))
    else:
        setattr(module, name, _cast(value, dtype))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in a dtype; a complex one may come as pairs of real numbers."""
    if not dtype.is_complex:
        return value.to(dtype, copy=True)
    return torch.view_as_complex(_real(value).to(dtype.to_real(), copy=True))


def _pack(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return tensors of any shape and dtype as one int64 vector: the number of bytes, and torch's file of them."""
    file = io.BytesIO()
    torch.save([None if tensor is None else tensor.detach().cpu().clone() for tensor in tensors], file)
    saved = file.getvalue()
    size = len(saved)
    return torch.frombuffer(bytearray(size.to_bytes(8, "little") + saved + bytes(-size % 8)), dtype=torch.int64)


def _unpack(packed: Tensor) -> list[Tensor | None]:
    """Return the tensors that :func:`_pack` was given, on the device of the vector."""
    data = packed.cpu().numpy().tobytes()
    return torch.load(io.BytesIO(data[8 : 8 + int.from_bytes(data[:8], "little")]), map_location=packed.device)


def _real(buffer: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, (..., 2), and any other as it is."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _persistent_buffers(module: nn.Module) -> Iterator[Place]:
    """Yield the places of the persistent buffers; states of metrics are left out."""
    for prefix, child in module.named_modules():
        if isinstance(child, Metric):
            continue
        for name in buffers_of(child):
            if is_persistent(child, name):
                yield _place(module, f"{prefix}.{name}".lstrip("."))


def _place(root: nn.Module, full_name: str) -> Place:
    tensor = Place(full_name, root, None, None).tensor
    return Place(full_name, root, getattr(tensor, "shape", None), getattr(tensor, "dtype", None))


def _other_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return a dict from each further name of a tensor to its first name."""
    first: dict[Tensor, str] = {}
    return {name: first[tensor] for name, tensor in named if first.setdefault(tensor, name) != name}


def _common_dtype(named: dict[nn.Parameter, str]) -> torch.dtype:
    if not named:
        raise ConfigurationError("model: it has no parameter with requires_grad=True, so there is nothing to train.")
    for parameter, name in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"model: parameter '{name}' is lazy; run one batch through the module first, or give its size."
            )
    dtypes = {p.dtype: name for p, name in named.items()}
    if len(dtypes) > 1 or any(dtype.is_complex for dtype in dtypes):
        found = ", ".join(f"'{name}' is {dtype}" for dtype, name in dtypes.items())
        raise ConfigurationError(f"model: its parameters must have one real dtype ({found}); convert it to one.")
    return next(iter(dtypes))
