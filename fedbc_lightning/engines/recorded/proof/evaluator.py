"""Evaluates Python functions one node at a time, with everything that they touch in sight."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import nn

from fedbc_lightning.core.errors import first_line
from fedbc_lightning.engines.recorded.proof.attributes import Attributes
from fedbc_lightning.engines.recorded.proof.calls import Calls
from fedbc_lightning.engines.recorded.proof.expressions import Expressions
from fedbc_lightning.engines.recorded.proof.frames import Frame, body_of, is_generator
from fedbc_lightning.engines.recorded.proof.names import Names
from fedbc_lightning.engines.recorded.proof.objects import Objects
from fedbc_lightning.engines.recorded.proof.reads import Reads
from fedbc_lightning.engines.recorded.proof.statements import ReturnError, Statements
from fedbc_lightning.engines.recorded.recording import NotRecordableError

MAX_NODES, MAX_DEPTH = 300_000, 150
"""A step that takes more is not proven: it would take seconds, or never end."""


class Evaluator:
    """Evaluates Python functions, and refuses all that it does not know to be free of side effects before it happens.

    It works on the objects of the program themselves. Objects that existed before may be read, and each read is kept;
    only objects that the step has made may be changed. Python functions are evaluated from their source; functions
    written in C are called if they are on the list of allowed ones. What is not understood is refused.

    Args:
        reads: Keeps what is read.
        module: The user's module.
        log: The function behind its ``self.log``.

    Attributes:
        reads: Keeps what is read.
        attributes: Reads attributes.
        num_catching: Number of ``try`` statements with handlers around the current node.
        num_generators: Number of generator expressions, and of functions that Python would call later, around it.
    """

    def __init__(self, reads: Reads, module: nn.Module, *, log: Any) -> None:
        self._module = module
        self.reads, self._frames, self._num_nodes = reads, list[Frame](), 0
        self._known_errors: list[tuple[BaseException, int]] = []
        self.num_catching = self.num_generators = 0
        self.attributes = attributes = Attributes(self)
        self._objects = objects = Objects(self, attributes)
        names = Names(self, objects)
        self._calls = Calls(self, attributes, objects, names, log)
        self._expressions = Expressions(self, attributes, objects, names, self._calls)
        self._statements = Statements(self, attributes, objects, names, self._expressions)

    # what callers use

    @property
    def frame(self) -> Frame:
        """The function that is being evaluated."""
        return self._frames[-1]

    def is_own(self, module: Any) -> bool:
        """Return whether a module is part of the user's module, so that the engine sets its training mode."""
        return any(module is other for other in self._module.modules())

    def is_made(self, value: Any) -> bool:
        """Return whether the step has made the value."""
        return self._objects.is_made(value)

    def refuse(self, reason: str) -> NoReturn:
        """Raise, because the step does something else than computing its result, or may do so.

        Raises:
            NotRecordableError: Always.
        """
        where = f"{self.frame.name} " if self._frames else "it "
        raise NotRecordableError(where + reason)

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function, see :class:`~fedbc_lightning.engines.recorded.proof.calls.Calls`."""
        return self._calls.call(function, tuple(args), kwargs)

    def run(self, frame: Frame, node: ast.FunctionDef | ast.Lambda) -> Any:
        """Run a function whose arguments are in its frame, and return its result."""
        if len(self._frames) >= MAX_DEPTH:
            self.refuse(f"calls functions inside functions, {MAX_DEPTH} deep")
        self._frames.append(frame)
        arguments = tuple(frame.locals.values())
        try:
            self._statements.block(body_of(node))
        except ReturnError as returned:
            if not is_generator(frame.code):
                return returned.value
        except NotRecordableError as error:
            if not str(error).startswith("it "):
                raise
            raise NotRecordableError(f"{frame.name}{str(error).removeprefix('it')}") from error
        finally:
            self._frames.pop()
        if not is_generator(frame.code):
            return None
        outer = next((cell for cell in frame.cells.values() if isinstance(cell, Frame)), frame)
        return self._objects.iterator(frame.yielded, self._objects.lazy(outer, frame.code.co_freevars, arguments))

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        self.count()
        return self._expressions.value(node)

    def count(self) -> None:
        """Count an expression, or a turn of a loop; too many are refused."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            self.refuse("takes more steps of Python than are looked at")

    def known_error(self, error: Exception) -> Exception:
        """Return an error after marking it as one that Python itself raises, which alone the step may catch."""
        self._known_errors.append((error, self._num_lazy()))
        return error

    def _num_lazy(self) -> int:
        """Return the number of generators around the current node, whose errors Python would raise later."""
        return self.num_generators + sum(is_generator(frame.code) for frame in self._frames)

    def check_known(self, error: Exception) -> None:
        """Refuse to handle any error but those that Python raises for the form of a program."""
        if not any(error is other and num == self._num_lazy() for other, num in self._known_errors):
            self.refuse(f"handles the error `{first_line(error)}`, which may depend on more than the form of the batch")

    def check_not_caught(self) -> None:
        """Refuse to compute with tensors where the step handles errors: kernels raise them for values."""
        if self.num_catching:
            self.refuse("computes inside of a try whose errors it handles")

    def values(self, nodes: Iterable[ast.expr]) -> list[Any]:
        """Return the values of expressions; a starred expression gives all its items."""
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self._objects.items(self.value(node.value))
            else:
                found.append(self.value(node))
        return found
