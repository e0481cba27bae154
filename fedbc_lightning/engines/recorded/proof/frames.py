"""A function that is being evaluated: its names, its arguments, and what it has closed over."""

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


@dataclass
class Frame:
    """One call of a Python function.

    Attributes:
        name: The function's name for messages.
        code: Its code, which tells the kinds of its names.
        globals: Its module's names.
        cells: Name -> what it has closed over: a cell of a real function, or the frame of a function that is being
            evaluated, or the names of a comprehension in it.
        locals: Name -> value.
        inner: Names of comprehensions around the present node, innermost last.
        yielded: What a generator has yielded so far.
        caught: The exceptions whose handlers are being run, innermost last.
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
        """Whether a name is a local variable, maybe of an inner function too."""
        return name in self.code.co_varnames or name in self.code.co_cellvars

    def private(self, name: str) -> str:
        """A name as the compiler has it: ``__x`` inside a class has the name of the class before it.

        Raises:
            NotRecordableError: It cannot be told.
        """
        if not name.startswith("__") or name.endswith("__"):
            return name
        parts = getattr(self.code, "co_qualname", "").split(".")  # Python 3.10 does not have it
        known = {name for code in (self.code, *inner_codes(self.code)) for name in (*code.co_names, *code.co_varnames)}
        found = {f"_{part.lstrip('_')}{name}" for part in parts} & known
        if len(found) != 1:
            raise NotRecordableError(f"{self.name} uses the private name {name}")
        return found.pop()


@dataclass
class Closure:
    """A function that came into being while another one was evaluated.

    Attributes:
        node: Its definition.
        code: Its code.
        parent: The frame that it was made in.
        defaults: The defaults of its last positional arguments.
        keyword_defaults: The defaults of its keyword-only arguments.
        inner: The names of comprehensions around it.
    """

    node: Definition
    code: CodeType
    parent: Frame
    defaults: tuple[Any, ...]
    keyword_defaults: dict[str, Any]
    inner: list[dict[str, Any]]

    def frame(self) -> Frame:
        """A frame for one call."""
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
    """The local variables that a call begins with.

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
    """Whether calling the function gives a generator."""
    return bool(code.co_flags & inspect.CO_GENERATOR)


def body_of(node: Definition) -> list[ast.stmt]:
    """The statements of a definition."""
    if isinstance(node, ast.Lambda):
        return [ast.copy_location(ast.Return(node.body), node.body)]
    return node.body
