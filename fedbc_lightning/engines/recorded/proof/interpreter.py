"""Protocol of what the parts of the evaluator ask it for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

from fedbc_lightning.engines.recorded.proof.frames import Frame
from fedbc_lightning.engines.recorded.proof.reads import Reads


class Interpreter(Protocol):
    """Evaluates functions and expressions by its parts, which call it where the program goes deeper.

    The parts stand one above the other, each knows those below it, and none knows the evaluator's class.

    Attributes:
        reads: Keeps what is read.
        num_catching: Number of ``try`` statements with handlers around the current node.
        num_generators: Number of generator expressions, and of functions that Python would call later, around it.
    """

    reads: Reads
    num_catching: int
    num_generators: int

    @property
    def frame(self) -> Frame:
        """The function that is being evaluated."""

    def is_own(self, module: Any) -> bool:
        """Return whether a module is part of the user's module, so that the engine sets its training mode."""

    def is_made(self, value: Any) -> bool:
        """Return whether the step has made the value."""

    def refuse(self, reason: str) -> NoReturn:
        """Raise, because the step does something else than computing its result, or may do so.

        Raises:
            NotRecordableError: Always.
        """

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function, see :class:`~fedbc_lightning.engines.recorded.proof.calls.Calls`."""

    def run(self, frame: Frame, node: ast.FunctionDef | ast.Lambda) -> Any:
        """Run a function whose arguments are in its frame, and return its result."""

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression."""

    def values(self, nodes: Iterable[ast.expr]) -> list[Any]:
        """Return the values of expressions; a starred expression gives all its items."""

    def count(self) -> None:
        """Count an expression, or a turn of a loop; too many are refused."""

    def known_error(self, error: Exception) -> Exception:
        """Return an error after marking it as one that Python itself raises, which alone the step may catch."""

    def check_known(self, error: Exception) -> None:
        """Refuse to handle any error but those that Python raises for the form of a program."""

    def check_not_caught(self) -> None:
        """Refuse to compute with tensors where the step handles errors: kernels raise them for values."""
