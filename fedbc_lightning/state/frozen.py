"""The parameters of a module that have ``requires_grad=False``, and whether training writes them all the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

SMALL = 2**16
"""Elements of a frozen parameter that is copied before the first round whatever its shape."""


class Mark(NamedTuple):
    """By what it is seen that a parameter was written.

    Attributes:
        name: Of the parameter.
        owner: The module that holds it.
        key: Its name there.
        parameter: The object itself, which ``module.weight = nn.Parameter(...)`` replaces.
        version: Counts what is written in place, but not through ``.data``.
        address: Of the storage, which ``parameter.data = ...`` replaces.
    """

    name: str
    owner: nn.Module
    key: str
    parameter: nn.Parameter
    version: int
    address: int

    @property
    def has_changed(self) -> bool:
        """Whether it was written in one of these ways since."""
        now, was = self.owner._parameters.get(self.key), self.parameter
        return now is not was or was._version != self.version or was.data_ptr() != self.address


class FrozenParameters:
    """Copies of what is not trained, such as a teacher network, and what tells that it was written.

    Args:
        module: The user's module.
        shapes: Those of the trained parameters: a frozen one of such a shape may be a copy that follows them.
    """

    def __init__(self, module: nn.Module, shapes: set[torch.Size]) -> None:
        self._module, self._shapes = module, shapes
        self._names = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        self.mark()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them."""
        return [mark.parameter for mark in self._marks]

    def mark(self) -> None:
        """Take them as they are now; from here on they may not change."""
        self._marks = [self._mark(name) for name in self._names]
        self._sums = self._summed()

    def take_out(self, names: Sequence[str]) -> list[str]:
        """Let go of those that travel as buffers, and return which of ``names`` they are, in the module's order."""
        taken = [name for name in self._names if name in names]
        self._names = [name for name in self._names if name not in names]
        self.mark()
        return taken

    def thawed(self) -> list[str]:
        """The names of those that require gradients now."""
        return [mark.name for mark in self._marks if mark.parameter.requires_grad]

    def written(self) -> list[str]:
        """The names of those that were written by ordinary means, or replaced; quickly."""
        return [mark.name for mark in self._marks if mark.has_changed]

    def written_by_any_means(self) -> list[str]:
        """Those that were written, also in place through ``.data``, which leaves no trace but other values."""
        found = self.written()
        if found or not self._sums.numel():
            return found
        is_same = torch.isclose(self._summed(), self._sums, rtol=0, atol=0, equal_nan=True).tolist()
        return [mark.name for mark, same in zip(self._copied_marks(), is_same, strict=True) if not same]

    def copies(self) -> dict[str, Tensor]:
        """Copies of those that may be a copy of what is trained, by name."""
        return {mark.name: mark.parameter.detach().clone() for mark in self._copied_marks()}

    def put_back(self, copies: dict[str, Tensor]) -> None:
        """Write what :meth:`copies` gave."""
        for name, copied in copies.items():
            self._module.get_parameter(name).data.copy_(copied)
        self.mark()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give them back what they hold now, whatever steps that are only tried out write."""
        copies = self.copies()
        try:
            yield
        finally:
            self.put_back(copies)

    def write(self, values: Sequence[Tensor]) -> None:
        """Copy values into all of them, where any are given."""
        if values:
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.data.copy_(value)

    def _mark(self, name: str) -> Mark:
        prefix, _, key = name.rpartition(".")
        owner = self._module.get_submodule(prefix)
        parameter = owner.get_parameter(key)
        return Mark(name, owner, key, parameter, parameter._version, parameter.data_ptr())

    def _copied_marks(self) -> list[Mark]:
        return [
            mark
            for mark in self._marks
            if mark.parameter.is_floating_point()
            and (mark.parameter.shape in self._shapes or mark.parameter.numel() <= SMALL)
        ]

    def _summed(self) -> Tensor:
        """The sum of each one that may be copied, on the CPU."""
        parameters = [mark.parameter.detach() for mark in self._copied_marks()]
        dtype = None if any(parameter.device.type == "mps" for parameter in parameters) else torch.float64
        sums = [parameter.sum(dtype=dtype) for parameter in parameters]
        return torch.stack(sums).cpu() if sums else torch.empty(0)
