"""Evaluates Python's expressions one by one, and keeps everything that they read."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedbc_lightning.engines.recorded.proof.attributes import Attributes
from fedbc_lightning.engines.recorded.proof.calls import Calls
from fedbc_lightning.engines.recorded.proof.frames import BATCH_INDEX, Closure
from fedbc_lightning.engines.recorded.proof.interpreter import Interpreter
from fedbc_lightning.engines.recorded.proof.names import Names
from fedbc_lightning.engines.recorded.proof.objects import Objects
from fedbc_lightning.engines.recorded.proof.reads import is_a, is_plain
from fedbc_lightning.engines.recorded.proof.source import inner_definition

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}  # fmt: skip
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


class Expressions:
    """Evaluates expressions for an evaluator.

    Args:
        evaluator: Keeps the functions that are being evaluated.
        attributes: Reads attributes.
        objects: Knows the objects that the step has made.
        names: Reads and stores names.
        calls: Calls functions.
    """

    def __init__(
        self, evaluator: Interpreter, attributes: Attributes, objects: Objects, names: Names, calls: Calls
    ) -> None:
        self._evaluator, self._attributes, self._objects, self._names = evaluator, attributes, objects, names
        self._expressions: dict[type, Callable[[Any], Any]] = {
            ast.Constant: lambda node: node.value, ast.Name: lambda node: names.value(node.id),
            ast.Attribute: self._attribute, ast.Subscript: self._subscript, ast.Slice: self._slice,
            ast.Call: calls.of_node,
            ast.BinOp: self._binary, ast.UnaryOp: self._unary, ast.BoolOp: self._bool,
            ast.Compare: self._compare, ast.IfExp: self._if_expression,
            ast.Tuple: lambda node: tuple(self._evaluator.values(node.elts)), ast.List: self._list, ast.Set: self._set,
            ast.Dict: self._dict, ast.JoinedStr: self._joined, ast.FormattedValue: self._formatted,
            ast.Lambda: self.closure, ast.ListComp: self._comprehension, ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension, ast.DictComp: self._comprehension, ast.NamedExpr: self._named,
        }  # fmt: skip

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        evaluate = self._expressions.get(type(node))
        if evaluate is None:
            self._evaluator.refuse(f"has the expression `{ast.unparse(node)}`, which is not understood")
        return evaluate(node)

    def _attribute(self, node: ast.Attribute) -> Any:
        return self._attributes.get(self._evaluator.value(node.value), self._evaluator.frame.private(node.attr))

    def _subscript(self, node: ast.Subscript) -> Any:
        return self._objects.item(self._evaluator.value(node.value), self._evaluator.value(node.slice))

    def _slice(self, node: ast.Slice) -> slice:
        parts = [None if part is None else self._evaluator.value(part) for part in (node.lower, node.upper, node.step)]
        for part in parts:
            self._objects.check(part)
        return slice(*parts)

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self._evaluator.value(node.left), self._evaluator.value(node.right)
        self._objects.check_operands(node.op, left, right)
        return self._objects.made(BINARY[type(node.op)](left, right))

    def _unary(self, node: ast.UnaryOp) -> Any:
        operand = self._evaluator.value(node.operand)
        if isinstance(node.op, ast.Not):
            return not self._objects.truth(operand)
        self._objects.check_operand(operand)
        return UNARY[type(node.op)](operand)

    def _bool(self, node: ast.BoolOp) -> Any:
        ends_with = isinstance(node.op, ast.Or)
        for part in node.values[:-1]:
            value = self._evaluator.value(part)
            if self._objects.truth(value) is ends_with:
                return value
        return self._evaluator.value(node.values[-1])

    def _compare(self, node: ast.Compare) -> Any:
        left, result = self._evaluator.value(node.left), True
        for position, (kind, other) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self._evaluator.value(other)
            result = self._compared(kind, left, right)
            if position + 1 < len(node.ops) and not self._objects.truth(result):
                return result
            left = right
        return result

    def _compared(self, kind: ast.cmpop, left: Any, right: Any) -> Any:
        if left is BATCH_INDEX or right is BATCH_INDEX:
            self._evaluator.refuse("uses batch_idx")
        if isinstance(kind, (ast.Is, ast.IsNot)):
            if is_a(left, Tensor) and is_a(right, Tensor):
                self._objects.check_identity(left)
            return (left is right) == isinstance(kind, ast.Is)
        if isinstance(kind, (ast.In, ast.NotIn)):
            return self._objects.contains(right, left) == isinstance(kind, ast.In)
        is_equality = isinstance(kind, (ast.Eq, ast.NotEq))
        for operand in (left, right):
            if not (is_equality and self._objects.has_plain_equality(operand)):
                self._objects.check(operand)
            if not is_a(operand, Tensor):
                self._objects.check_identity(operand)
        return COMPARISONS[type(kind)](left, right)

    def _if_expression(self, node: ast.IfExp) -> Any:
        return self._evaluator.value(
            node.body if self._objects.truth(self._evaluator.value(node.test)) else node.orelse
        )

    def _list(self, node: ast.List) -> Any:
        return self._objects.made(self._evaluator.values(node.elts))

    def _set(self, node: ast.Set) -> Any:
        items = self._evaluator.values(node.elts)
        for item in items:
            self._objects.check(item)
            self._objects.check_key(item)
        return self._objects.made(set(items))

    def _dict(self, node: ast.Dict) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found |= self._objects.mapping(self._evaluator.value(value))
                continue
            name = self._evaluator.value(key)
            self._objects.check(name)
            found[name] = self._evaluator.value(value)
        return self._objects.made(found)

    def _joined(self, node: ast.JoinedStr) -> str:
        return "".join(str(self._evaluator.value(part)) for part in node.values)

    def _formatted(self, node: ast.FormattedValue) -> str:
        value = self._evaluator.value(node.value)
        if not is_plain(value):
            self._evaluator.refuse(f"writes `{ast.unparse(node.value)}` into a string")
        value = {-1: value, 115: str(value), 114: repr(value), 97: ascii(value)}[node.conversion]
        return format(value, "" if node.format_spec is None else self._evaluator.value(node.format_spec))

    def closure(self, node: ast.FunctionDef | ast.Lambda) -> Closure:
        """Return the function that a definition makes."""
        frame, arguments = self._evaluator.frame, node.args
        keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return Closure(
            node, inner_definition(frame.code, node), frame, tuple(self._evaluator.values(arguments.defaults)),
            {name.arg: self._evaluator.value(default) for name, default in keyword if default is not None},
            list(frame.inner),
        )  # fmt: skip

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Any:
        found: list[Any] = []
        names: dict[str, Any] = {}
        first = self._objects.items(self._evaluator.value(node.generators[0].iter))
        self._evaluator.frame.inner.append(names)
        self._evaluator.num_generators += isinstance(node, ast.GeneratorExp)
        try:
            self._generate(node, 0, first, names, found)
        finally:
            self._evaluator.frame.inner.pop()
            self._evaluator.num_generators -= isinstance(node, ast.GeneratorExp)
        if isinstance(node, ast.GeneratorExp):
            return self._objects.iterator(
                found, self._objects.lazy(self._evaluator.frame, self._evaluator.frame.locals)
            )
        if isinstance(node, ast.DictComp):
            return self._objects.made(dict(found))
        return self._objects.made(set(found) if isinstance(node, ast.SetComp) else found)

    def _generate(self, node: Any, depth: int, items: list[Any], names: dict[str, Any], found: list[Any]) -> None:
        generator = node.generators[depth]
        if generator.is_async:
            self._evaluator.refuse("is asynchronous")
        lists = [pair for pair in self._objects.gone_through if pair[1] is items]
        for item in items:
            self._evaluator.count()
            self._store_inner(generator.target, item, names)
            if all(self._objects.truth(self._evaluator.value(test)) for test in generator.ifs):
                self._generate_one(node, depth, names, found)
            self._objects.check_lists(lists)

    def _generate_one(self, node: Any, depth: int, names: dict[str, Any], found: list[Any]) -> None:
        """Return what a comprehension gives for the current values of its names, from one of its loops inwards."""
        if depth + 1 < len(node.generators):
            more = self._objects.items(self._evaluator.value(node.generators[depth + 1].iter))
            self._generate(node, depth + 1, more, names, found)
        elif isinstance(node, ast.DictComp):
            key = self._evaluator.value(node.key)
            self._objects.check(key)
            found.append((key, self._evaluator.value(node.value)))
        else:
            value = self._evaluator.value(node.elt)
            if isinstance(node, ast.SetComp):
                self._objects.check_key(value)
            found.append(value)

    def _store_inner(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and not any(isinstance(t, ast.Starred) for t in target.elts):
            for part, item in zip(target.elts, self._objects.items(value), strict=True):
                self._store_inner(part, item, names)
        else:
            self._evaluator.refuse(f"has a comprehension over `{ast.unparse(target)}`, which is not understood")

    def _named(self, node: ast.NamedExpr) -> Any:
        value = self._evaluator.value(node.value)
        self._names.store_name(node.target.id, value)
        return value
