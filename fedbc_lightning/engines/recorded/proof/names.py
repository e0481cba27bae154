"""Reads names where the compiler has placed their values, and stores values under them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from typing import Any

from fedbc_lightning.engines.recorded.proof.frames import Frame
from fedbc_lightning.engines.recorded.proof.interpreter import Interpreter
from fedbc_lightning.engines.recorded.proof.objects import Objects
from fedbc_lightning.engines.recorded.proof.reads import MISSING


class Names:
    """Reads and stores names for an evaluator.

    Args:
        evaluator: Evaluates what a target of an assignment is made of.
        objects: Knows the objects that the step has made.
    """

    def __init__(self, evaluator: Interpreter, objects: Objects) -> None:
        self._evaluator, self._objects, self._reads = evaluator, objects, evaluator.reads

    def value(self, name: str) -> Any:
        """Return the value of a name from the place where the compiler looks it up.

        Raises:
            NameError: The name has no value.
        """
        frame = self._evaluator.frame
        name = frame.private(name)
        for names in reversed(frame.inner):
            if name in names:
                return names[name]
        if frame.is_local(name):
            if name not in frame.locals:
                raise UnboundLocalError(f"'{name}' has no value")
            return frame.locals[name]
        if name in frame.code.co_freevars:
            return self._closed_over(frame.cells[name], name)
        return self._global(name)

    def _closed_over(self, cell: Any, name: str) -> Any:
        names = cell.locals if isinstance(cell, Frame) else cell
        if not isinstance(names, dict):
            return self._reads.cell(cell)
        if name not in names:
            raise NameError(f"'{name}' has no value")
        return names[name]

    def _global(self, name: str) -> Any:
        names = self._evaluator.frame.globals
        value = self._reads.item(names, names, name)
        if value is MISSING:
            builtins = self._reads.item(names, names, "__builtins__")
            known_names = builtins if isinstance(builtins, dict) else vars(sys.modules["builtins"])
            value = self._reads.item(known_names, known_names, name)
        if value is MISSING:
            raise NameError(f"'{name}' has no value")
        return value

    def store(self, target: ast.expr, value: Any) -> None:
        """Assign a value to a target."""
        self._objects.keep(value)
        if isinstance(target, ast.Name):
            self.store_name(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, self._objects.items(value))
        elif isinstance(target, ast.Attribute):
            owner, name = self._evaluator.value(target.value), self._evaluator.frame.private(target.attr)
            self._objects.set_attribute(owner, name, value, target)
        elif isinstance(target, ast.Subscript):
            self._objects.set_item(
                self._evaluator.value(target.value), self._evaluator.value(target.slice), value, target
            )
        else:
            self._evaluator.refuse(f"assigns to `{ast.unparse(target)}`, which is not understood")

    def store_name(self, name: str, value: Any) -> None:
        """Assign a value to a name in the place where the compiler puts it."""
        frame = self._evaluator.frame
        name = frame.private(name)
        if frame.is_local(name):
            frame.locals[name] = value
        elif name in frame.code.co_freevars:
            cell = frame.cells.get(name)
            if not isinstance(cell, Frame):
                self._evaluator.refuse(f"changes `{name}`, a variable of the function around it")
            cell.locals[name] = value
        else:
            self._evaluator.refuse(f"changes the global `{name}`")

    def _unpack(self, targets: Sequence[ast.expr], items: list[Any]) -> None:
        starred = [k for k, target in enumerate(targets) if isinstance(target, ast.Starred)]
        num_fixed = len(targets) - len(starred)
        if len(items) < num_fixed or (not starred and len(items) > num_fixed):
            raise self._evaluator.known_error(ValueError(f"{len(items)} values for {num_fixed} names"))
        if not starred:
            for target, item in zip(targets, items, strict=True):
                self.store(target, item)
            return
        first, num_after = starred[0], len(targets) - starred[0] - 1
        middle = self._objects.made(items[first : len(items) - num_after])
        after = items[len(items) - num_after :]
        for target, item in zip(targets, [*items[:first], middle, *after], strict=True):
            self.store(target.value if isinstance(target, ast.Starred) else target, item)
