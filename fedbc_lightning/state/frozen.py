"""Detection of writes to the parameters of a module that have ``requires_grad=False``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbc_lightning.core.described import content_hash
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.private_torch import writes_into

# Largest number of elements of a frozen parameter that is copied before the first round whatever its shape, and that
# ``last.ckpt`` holds itself, not its hash.
SMALL = 2**16


class Mark(NamedTuple):
    """Identifies a frozen parameter's object, storage and version, so that a later write to it is noticed.

    Attributes:
        name: Full name of the parameter.
        root: The user's module, in which training may replace the parameter or the module that holds it.
        parameter: The parameter object.
        version: Torch's count of in-place writes, which misses those through ``.data``.
        address: Address of the storage; ``parameter.data = ...`` changes it.
    """

    name: str
    root: nn.Module
    parameter: nn.Parameter
    version: int
    address: int

    @property
    def has_changed(self) -> bool:
        """Whether the object, its version or its storage has changed since the mark was made."""
        was = self.parameter
        return self._now is not was or writes_into(was) != self.version or was.data_ptr() != self.address

    @property
    def is_lost(self) -> bool:
        """Whether what has its name now cannot stand for it: it is trained, or has another shape or dtype."""
        was, now = self.parameter, self._now
        return now is not was and (now is None or now.requires_grad or now.shape != was.shape or now.dtype != was.dtype)

    @property
    def _now(self) -> Tensor | None:
        prefix, _, key = self.name.rpartition(".")
        return getattr(self.root.get_submodule(prefix), key, None)


class FrozenParameters:
    """Watches the parameters that are not trained, such as a teacher network's, and copies them if need be.

    Args:
        module: The user's module.
        shapes: Shapes of the trained parameters. A frozen parameter of one of these shapes is copied, since it may be
            a copy of a trained parameter that follows it.

    Attributes:
        marks: The present state of all watched parameters.
    """

    def __init__(self, module: nn.Module, shapes: set[torch.Size]) -> None:
        self._module, self._shapes = module, shapes
        self._all = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        self.take_out([])
        self._hashes: dict[str, str] = {}

    def mark(self) -> None:
        """Note the present state of the frozen parameters, with which later calls compare."""
        self.marks = [self._mark(name) for name in self._names]
        self._sums = self._summed()

    def take_out(self, names: Collection[str]) -> list[str]:
        """Watch all but the parameters `names`, which travel as buffers; return those of them that there are."""
        self._names = [name for name in self._all if name not in names]
        self.mark()
        return [name for name in names if name in self._all]

    def written(self, *, through_data: bool = False) -> list[str]:
        """Return the names of those that were replaced or written in place, or also ``through_data``."""
        found = [mark.name for mark in self.marks if mark.has_changed]
        # Marks compare no values, so they are quick; a write through ``.data`` leaves no trace but the values.
        if found or not through_data or not self._sums.numel():
            return found
        is_same = torch.isclose(self._summed(), self._sums, rtol=0, atol=0, equal_nan=True).tolist()
        return [mark.name for mark, same in zip(self._copied_marks(), is_same, strict=True) if not same]

    def large(self) -> dict[str, Tensor]:
        """Return the frozen parameters of more than :data:`SMALL` elements themselves, which ``last.ckpt`` lacks."""
        return {mark.name: mark.parameter.detach() for mark in self.marks if mark.parameter.numel() > SMALL}

    def hashes(self) -> dict[str, str]:
        """Return a hash of dtype, shape and bytes of each large parameter, which ``last.ckpt`` holds in its place.

        Raises:
            ConfigurationError: A value is another one than at the last call; the message names the parameter.
        """
        found = {name: content_hash(parameter) for name, parameter in self.large().items()}
        changed = [name for name, value in found.items() if self._hashes.get(name, value) != value]
        if changed:
            raise ConfigurationError(
                f"model: '{changed[0]}' has requires_grad=False and was written during training, through .data; "
                "checkpoints do not hold frozen parameters. Make it a buffer (register_buffer), or let it train."
            )
        self._hashes = found
        return found

    def forget_hashes(self) -> None:
        """Compare the next hashes with no earlier ones, since a checkpoint's values were loaded."""
        self._hashes = {}

    def copies(self, *, of_all: bool = False) -> dict[str, Tensor]:
        """Return copies, by name, of the small ones and of those that may follow a trained parameter, or ``of_all``."""
        marks = self.marks if of_all else self._copied_marks()
        return {mark.name: mark.parameter.detach().clone() for mark in marks}

    def put_back(self, copies: Mapping[str, Tensor]) -> None:
        """Restore the values that :meth:`copies` returned, but for parameters that became buffers meanwhile."""
        for name in {mark.name for mark in self.marks}.intersection(copies):
            self._module.get_parameter(name).data.copy_(copies[name])
        self.mark()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the present values on exit, whatever the trial steps in between write."""
        copies = self.copies()
        try:
            yield
        finally:
            self.put_back(copies)

    def _mark(self, name: str) -> Mark:
        parameter = self._module.get_parameter(name)
        return Mark(name, self._module, parameter, writes_into(parameter), parameter.data_ptr())

    def _copied_marks(self) -> list[Mark]:
        return [
            mark
            for mark in self.marks
            if mark.parameter.is_floating_point()
            and (mark.parameter.shape in self._shapes or mark.parameter.numel() <= SMALL)
        ]

    def _summed(self) -> Tensor:
        """Return the sum of each parameter that :meth:`copies` copies, on the CPU."""
        parameters = [mark.parameter.detach() for mark in self._copied_marks()]
        # float64: a sum in float32 could hide the change of a small element.
        dtype = None if any(parameter.device.type == "mps" for parameter in parameters) else torch.float64
        sums = [parameter.sum(dtype=dtype) for parameter in parameters]
        return torch.stack(sums).cpu() if sums else torch.empty(0)
