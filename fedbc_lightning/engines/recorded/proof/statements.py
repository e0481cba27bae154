"""Runs Python's statements one by one, and checks everything that they change."""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from fedbc_lightning.engines.recorded.proof import known
from fedbc_lightning.engines.recorded.proof.attributes import Attributes
from fedbc_lightning.engines.recorded.proof.expressions import BINARY, Expressions
from fedbc_lightning.engines.recorded.proof.frames import is_generator
from fedbc_lightning.engines.recorded.proof.interpreter import Interpreter
from fedbc_lightning.engines.recorded.proof.names import Names
from fedbc_lightning.engines.recorded.proof.objects import Objects
from fedbc_lightning.engines.recorded.proof.reads import MISSING, is_a, is_one_of
from fedbc_lightning.engines.recorded.recording import NotRecordableError

IN_PLACE: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    kind: getattr(operator, f"i{function.__name__.rstrip('_')}") for kind, function in BINARY.items()
}


class ReturnError(Exception):
    """Leaves a function, with its value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class BreakError(Exception):
    """Leaves a loop."""


class ContinueError(Exception):
    """Goes on with a loop."""


class Statements:
    """Runs statements for an evaluator.

    Args:
        evaluator: Evaluates functions and expressions.
        attributes: Reads attributes.
        objects: Knows the objects that the step has made.
        names: Reads and stores names.
        expressions: Makes the functions that statements define.
    """

    def __init__(
        self, evaluator: Interpreter, attributes: Attributes, objects: Objects, names: Names, expressions: Expressions
    ) -> None:
        self._evaluator, self._attributes, self._objects, self._names = evaluator, attributes, objects, names
        self._expressions, self._reads = expressions, evaluator.reads
        self._statements: dict[type, Callable[[Any], None]] = {
            ast.Expr: self._expression, ast.Pass: lambda node: None, ast.Return: self._return,
            ast.Assign: self._assign, ast.AugAssign: self._assign_in_place, ast.AnnAssign: self._assign_annotated,
            ast.If: self._if, ast.For: self._for, ast.While: self._while, ast.With: self._with, ast.Try: self._try,
            ast.Raise: self._raise, ast.Assert: self._assert, ast.Delete: self._delete, ast.Import: self._import,
            ast.ImportFrom: self._import_from, ast.FunctionDef: self._define, ast.Global: lambda node: None,
            ast.Nonlocal: lambda node: None, ast.Break: self._break, ast.Continue: self._continue,
        }  # fmt: skip

    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Run statements one after the other."""
        for node in statements:
            run = self._statements.get(type(node))
            if run is None:
                self._evaluator.refuse(
                    f"has the statement `{ast.unparse(node).splitlines()[0]}`, which is not understood"
                )
            run(node)

    def _expression(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Yield):
            self._yield(node.value)
        elif isinstance(node.value, ast.YieldFrom):
            self._yield_from(node.value)
        else:
            self._evaluator.value(node.value)

    def _return(self, node: ast.Return) -> NoReturn:
        raise ReturnError(None if node.value is None else self._evaluator.value(node.value))

    def _break(self, node: ast.Break) -> NoReturn:
        raise BreakError

    def _continue(self, node: ast.Continue) -> NoReturn:
        raise ContinueError

    def _assign(self, node: ast.Assign) -> None:
        value = self._evaluator.value(node.value)
        for target in node.targets:
            self._names.store(target, value)

    def _assign_annotated(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self._evaluator.refuse(f"has the statement `{ast.unparse(node)}`, which is not understood")
        if node.value is not None:
            self._names.store(node.target, self._evaluator.value(node.value))

    def _assign_in_place(self, node: ast.AugAssign) -> None:
        target = node.target
        if isinstance(target, ast.Name):
            name = self._evaluator.frame.private(target.id)
            if not self._evaluator.frame.is_local(name) and name not in self._evaluator.frame.code.co_freevars:
                self._evaluator.refuse(f"changes the global `{name}`")
            self._names.store(target, self._changed(node, self._names.value(target.id)))
            return
        owner = self._evaluator.value(target.value)
        if isinstance(target, ast.Attribute):
            name = self._evaluator.frame.private(target.attr)
            self._objects.check_attribute(owner, target)
            value = self._changed(node, self._attributes.get(owner, name))
            self._objects.set_attribute(owner, name, value, target)
            return
        key = self._evaluator.value(target.slice)
        self._objects.check_item(owner, target)
        value = self._changed(node, self._objects.item(owner, key))
        self._objects.set_item(owner, key, value, target)

    def _changed(self, node: ast.AugAssign, now: Any) -> Any:
        by = self._evaluator.value(node.value)
        if is_a(now, (list, set, dict, np.ndarray)) and not self._objects.is_made(now):
            self._evaluator.refuse(f"changes `{ast.unparse(node.target)}`")
        self._objects.check_operands(node.op, now, by)
        self._objects.changed(now)
        return IN_PLACE[type(node.op)](now, by)

    def _if(self, node: ast.If) -> None:
        self.block(node.body if self._objects.truth(self._evaluator.value(node.test)) else node.orelse)

    def _for(self, node: ast.For) -> None:
        first = len(self._objects.gone_through)
        source = self._evaluator.value(node.iter)
        self._objects.check_new(source)
        items, lazy = self._objects.items(source), self._objects.lazy_of(source)
        lists = self._objects.gone_through[first:]
        goes_on = True
        for item in items:
            self._evaluator.count()
            self._names.store(node.target, item)
            goes_on = self._goes_on(node.body)
            self._objects.check_lists(lists)
            self._objects.check_lazy(lazy)
            if not goes_on:
                return
        self.block(node.orelse)

    def _while(self, node: ast.While) -> None:
        while self._objects.truth(self._evaluator.value(node.test)):
            self._evaluator.count()
            if not self._goes_on(node.body):
                return
        self.block(node.orelse)

    def _goes_on(self, body: Sequence[ast.stmt]) -> bool:
        """Run the body of a loop, and return whether the loop goes on."""
        try:
            self.block(body)
        except ContinueError:
            return True
        except BreakError:
            return False
        return True

    def _with(self, node: ast.With, first: int = 0) -> None:
        if first == len(node.items):
            self.block(node.body)
            return
        item = node.items[first]
        manager = self._evaluator.value(item.context_expr)
        if not is_one_of(type(manager), known.CONTEXTS) or not self._objects.is_made(manager):
            self._evaluator.refuse(f"enters `{ast.unparse(item.context_expr)}`, which may change something")
        with manager as value:
            if item.optional_vars is not None:
                self._names.store(item.optional_vars, value)
            self._with(node, first + 1)

    def _try(self, node: ast.Try) -> None:
        control = (NotRecordableError, ReturnError, BreakError, ContinueError)
        catches = any(not isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)
        try:
            self._evaluator.num_catching += catches
            try:
                self.block(node.body)
            except control:
                raise
            except Exception as error:
                self._handle(node, error)
            else:
                self._evaluator.num_catching -= catches
                catches = False
                self.block(node.orelse)
        except NotRecordableError:
            raise
        except BaseException:
            self._evaluator.num_catching -= catches
            self.block(node.finalbody)
            raise
        self._evaluator.num_catching -= catches
        self.block(node.finalbody)

    def _handle(self, node: ast.Try, error: Exception) -> None:
        self._evaluator.check_known(error)
        for handler in node.handlers:
            kinds = Exception if handler.type is None else self._evaluator.value(handler.type)
            for kind in kinds if type(kinds) is tuple else (kinds,):
                if type(kind) is not type:
                    self._evaluator.refuse(f"catches a {kind!r}")
            if not issubclass(type(error), kinds):
                continue
            self._evaluator.frame.caught.append(error)
            try:
                if handler.name is not None:
                    self._names.store_name(handler.name, error)
                self.block(handler.body)
            finally:
                self._evaluator.frame.caught.pop()
                if handler.name is not None:
                    self._evaluator.frame.locals.pop(handler.name, None)
            return
        raise error

    def _raise(self, node: ast.Raise) -> NoReturn:
        if node.exc is None and self._evaluator.frame.caught:
            raise self._evaluator.frame.caught[-1]
        error = None if node.exc is None else self._evaluator.value(node.exc)
        if isinstance(error, type) and issubclass(error, BaseException):
            error = self._evaluator.call(error, (), {})
        if not isinstance(error, Exception) or (
            is_generator(self._evaluator.frame.code) and isinstance(error, StopIteration)
        ):
            self._evaluator.refuse(f"raises `{ast.unparse(node)}`")
        if node.cause is not None:
            self._evaluator.value(node.cause)
        raise self._evaluator.known_error(error)

    def _assert(self, node: ast.Assert) -> None:
        if not self._objects.truth(self._evaluator.value(node.test)):
            if node.msg is not None:
                self._evaluator.value(node.msg)
            raise self._evaluator.known_error(AssertionError(ast.unparse(node)))

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name) and self._evaluator.frame.is_local(target.id):
                self._evaluator.frame.locals.pop(target.id)
            else:
                self._evaluator.refuse(f"deletes `{ast.unparse(target)}`")

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self._imported(alias.name)
            self._names.store_name(alias.asname or name, self._imported(name))

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            self._evaluator.refuse(f"has the relative import `{ast.unparse(node)}`")
        package = self._imported(node.module)
        for alias in node.names:
            self._names.store_name(alias.asname or alias.name, self._attributes.get(package, alias.name))

    def _imported(self, name: str) -> Any:
        package = self._reads.item(sys.modules, sys.modules, name)
        if package is MISSING:
            self._evaluator.refuse(f"imports {name}")
        return package

    def _define(self, node: ast.FunctionDef) -> None:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        notes = [node.returns, *(argument.annotation for argument in every if argument is not None)]
        if node.decorator_list or any(isinstance(p, ast.Call) for note in notes if note for p in ast.walk(note)):
            self._evaluator.refuse(f"defines {node.name} with a decorator, or calls in its annotations")
        self._names.store_name(node.name, self._expressions.closure(node))

    def _yield(self, node: ast.Yield) -> None:
        self._evaluator.frame.yielded.append(None if node.value is None else self._evaluator.value(node.value))

    def _yield_from(self, node: ast.YieldFrom) -> None:
        self._evaluator.frame.yielded += self._objects.items(self._evaluator.value(node.value))
