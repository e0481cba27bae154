"""Frames of functions that are being evaluated: their names, arguments and closures."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType
from typing import Any

from fedbc_lightning.engines.recorded.proof.reads import MISSING
from fedbc_lightning.engines.recorded.proof.source import Definition, inner_codes
from fedbc_lightning.engines.recorded.recording import NotRecordableError

GENERATOR_FLAGS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class BatchIndex:
    """Stands for ``batch_idx``, which a step may hand on, and do nothing else with."""


BATCH_INDEX = BatchIndex()


@dataclass
class Frame:
    """Holds one call of a Python function.

    Attributes:
        name: The function's name for messages.
        code: The function's code object, which says for each name where it lies.
        globals: The global names of the function's module.
        cells: What the function has closed over, by name: a cell of a real function, the frame of a function that is
            being evaluated, or the names of a comprehension in it.
        locals: Values of local variables by name.
        inner: Names of the comprehensions around the current node, innermost last.
        yielded: What a generator has yielded so far.
        caught: Exceptions whose handlers are being run, innermost last.
    """

    name: str
    code: CodeType
    globals: dict[str, Any]
    cells: dict[str, CellType | Frame | dict[str, Any]]
    locals: dict[str, Any] = field(default_factory=dict)
    inner: list[dict[str, Any]] = field(default_factory=list)
    yielded: list[Any] = field(default_factory=list)
    caught: list[BaseException] = field(default_factory=list)

    def is_local(self, name: str) -> bool:
        """Return whether a name is a local variable, which inner functions may use as well."""
        return name in self.code.co_varnames or name in self.code.co_cellvars

    def private(self, name: str) -> str:
        """Return a name as the compiler stores it: it puts the name of the class before ``__x`` inside a class.

        Raises:
            NotRecordableError: The class is not known.
        """
        if not name.startswith("__") or name.endswith("__"):
            return name
        parts = getattr(self.code, "co_qualname", "").split(".")  # Python 3.10 has no co_qualname
        known = {name for code in (self.code, *inner_codes(self.code)) for name in (*code.co_names, *code.co_varnames)}
        found = {f"_{part.lstrip('_')}{name}" for part in parts} & known
        if len(found) != 1:
            raise NotRecordableError(f"{self.name} uses the private name {name}")
        return found.pop()


@dataclass
class Closure:
    """A function that was made while another one was evaluated.

    Attributes:
        node: The definition of the function.
        code: Its code object.
        parent: The frame in which it was made.
        defaults: Defaults of its last positional arguments.
        keyword_defaults: Defaults of its keyword-only arguments.
        inner: Names of the comprehensions around it.
    """

    node: Definition
    code: CodeType
    parent: Frame
    defaults: tuple[Any, ...]
    keyword_defaults: dict[str, Any]
    inner: list[dict[str, Any]]

    def frame(self) -> Frame:
        """Return a frame for one call of the function."""
        cells = {name: self._cell(name) for name in self.code.co_freevars}
        return Frame(f"{self.parent.name}.{self.code.co_name}", self.code, self.parent.globals, cells)

    def _cell(self, name: str) -> Any:
        found = next((names for names in reversed(self.inner) if name in names), None)
        if found is not None:
            return found
        return self.parent if self.parent.is_local(name) else self.parent.cells[name]


def bind(
    code: CodeType, args: Sequence[Any], kwargs: dict[str, Any], defaults: Sequence[Any],
    keyword_defaults: dict[str, Any], name: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the local variables that a call begins with.

    Raises:
        TypeError: The function does not take these arguments, as Python would say.
    """
    num, num_keyword = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    positional, keyword_only = names[:num], names[num : num + num_keyword]
    takes_more, takes_any = bool(code.co_flags & inspect.CO_VARARGS), bool(code.co_flags & inspect.CO_VARKEYWORDS)
    bound = dict(zip(positional, args, strict=False))
    if len(args) > num and not takes_more:
        raise TypeError(f"{name}() takes {num} positional arguments but {len(args)} were given")
    more: dict[str, Any] = {}
    by_name = {*positional[code.co_posonlyargcount :], *keyword_only}
    for key, value in kwargs.items():
        if key in by_name and key not in bound:
            bound[key] = value
        elif takes_any and key not in by_name:
            more[key] = value
        else:
            raise TypeError(f"{name}() got an unexpected argument '{key}', or got it twice")
    known = dict(zip(positional[num - len(defaults) :], defaults, strict=True)) | keyword_defaults
    for key in (*positional, *keyword_only):
        value = bound.get(key, known.get(key, MISSING))
        if value is MISSING:
            raise TypeError(f"{name}() missing the argument '{key}'")
        bound[key] = value
    rest = num + num_keyword
    if takes_more:
        bound[names[rest]] = tuple(args[num:])
    if takes_any:
        bound[names[rest + takes_more]] = more
    return bound


def is_generator(code: CodeType) -> bool:
    """Return whether a call of the function gives a generator."""
    return bool(code.co_flags & inspect.CO_GENERATOR)


def body_of(node: Definition) -> list[ast.stmt]:
    """Return the statements of a definition."""
    if isinstance(node, ast.Lambda):
        return [ast.copy_location(ast.Return(node.body), node.body)]
    return node.body
