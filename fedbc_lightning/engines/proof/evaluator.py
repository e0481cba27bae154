"""Python's statements and expressions, evaluated one by one with everything that they touch in sight."""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from fedbc_lightning.engines.proof import known
from fedbc_lightning.engines.proof.attributes import Attributes
from fedbc_lightning.engines.proof.calls import Calls
from fedbc_lightning.engines.proof.frames import Closure, Frame, body_of, is_generator
from fedbc_lightning.engines.proof.objects import BATCH_INDEX, Objects, is_one_of
from fedbc_lightning.engines.proof.reads import MISSING, Reads, is_a, is_plain
from fedbc_lightning.engines.proof.source import inner_definition
from fedbc_lightning.engines.recording import NotRecordableError
from fedbc_lightning.errors import first_line

MAX_NODES, MAX_DEPTH = 300_000, 150
"""A step that takes more is not proven: it would take seconds, or never end."""
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}  # fmt: skip
IN_PLACE: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    kind: getattr(operator, f"i{function.__name__.rstrip('_')}") for kind, function in BINARY.items()
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


class ReturnError(Exception):
    """Leaves a function with its value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class BreakError(Exception):
    """Leaves a loop."""


class ContinueError(Exception):
    """Goes on with a loop."""


class Evaluator:
    """Evaluates Python functions, and refuses all that it does not know to be free of side effects before it happens.

    It runs on the objects of the program themselves. What was there before may be read, and each read is taken down;
    only what came into being inside may be changed. Calls go into the source of Python functions; functions written in
    C are called if they are on the list of what is allowed. What is not understood is refused.

    Attributes:
        reads: What was read.
        objects: What came into being inside.
        attributes: How attributes are read.
        calls: How functions are called.
    """

    def __init__(self, reads: Reads, *, log: Any) -> None:
        self.reads, self._frames, self._num_nodes = reads, list[Frame](), 0
        self._known_errors: list[tuple[BaseException, int]] = []
        self.num_catching = self.num_generators = 0
        self.objects = Objects(self)
        self.attributes, self.calls = Attributes(self), Calls(self, log)
        self._statements: dict[type, Callable[[Any], None]] = {
            ast.Expr: self._expression, ast.Pass: lambda node: None, ast.Return: self._return,
            ast.Assign: self._assign, ast.AugAssign: self._assign_in_place, ast.AnnAssign: self._assign_annotated,
            ast.If: self._if, ast.For: self._for, ast.While: self._while, ast.With: self._with, ast.Try: self._try,
            ast.Raise: self._raise, ast.Assert: self._assert, ast.Delete: self._delete, ast.Import: self._import,
            ast.ImportFrom: self._import_from, ast.FunctionDef: self._define, ast.Global: lambda node: None,
            ast.Nonlocal: lambda node: None, ast.Break: self._break, ast.Continue: self._continue,
        }  # fmt: skip
        self._expressions: dict[type, Callable[[Any], Any]] = {
            ast.Constant: lambda node: node.value, ast.Name: lambda node: self.name(node.id),
            ast.Attribute: self._attribute, ast.Subscript: self._subscript, ast.Slice: self._slice,
            ast.Call: lambda node: self.calls.of_node(node), ast.BinOp: self._binary, ast.UnaryOp: self._unary,
            ast.BoolOp: self._bool, ast.Compare: self._compare, ast.IfExp: self._if_expression,
            ast.Tuple: lambda node: tuple(self.values(node.elts)), ast.List: self._list, ast.Set: self._set,
            ast.Dict: self._dict, ast.JoinedStr: self._joined, ast.FormattedValue: self._formatted,
            ast.Lambda: self._closure, ast.ListComp: self._comprehension, ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension, ast.DictComp: self._comprehension, ast.NamedExpr: self._named,
        }  # fmt: skip

    # what callers use

    @property
    def frame(self) -> Frame:
        """The function that is being evaluated."""
        return self._frames[-1]

    def refuse(self, reason: str) -> NoReturn:
        """Stop: the step does, or may do, something beside computing its result.

        Raises:
            NotRecordableError: Always.
        """
        where = f"{self.frame.name} " if self._frames else "it "
        raise NotRecordableError(where + reason)

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function, see :class:`~fedbc_lightning.engines.proof.calls.Calls`."""
        return self.calls.call(function, tuple(args), kwargs)

    def run(self, frame: Frame, node: ast.FunctionDef | ast.Lambda) -> Any:
        """The result of a function whose arguments are in its frame."""
        if len(self._frames) >= MAX_DEPTH:
            self.refuse(f"calls functions inside functions, {MAX_DEPTH} deep")
        self._frames.append(frame)
        arguments = tuple(frame.locals.values())
        try:
            self._block(body_of(node))
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
        return self.objects.iterator(frame.yielded, self.objects.lazy(outer, frame.code.co_freevars, arguments))

    def value(self, node: ast.expr) -> Any:
        """The value of an expression."""
        self.count()
        evaluate = self._expressions.get(type(node))
        if evaluate is None:
            self.refuse(f"has the expression `{ast.unparse(node)}`, which is not understood")
        return evaluate(node)

    def count(self) -> None:
        """One more expression, or turn of a loop."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            self.refuse("takes more steps of Python than are looked at")

    def known_error(self, error: Exception) -> Exception:
        """An error that Python raises just so: only such errors may be caught by the step; itself."""
        self._known_errors.append((error, self._num_lazy()))
        return error

    def _num_lazy(self) -> int:
        """How many generators there are around the present node, whose errors Python would raise later."""
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
        """The values of expressions, with those of starred ones in their place."""
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self.objects.items(self.value(node.value))
            else:
                found.append(self.value(node))
        return found

    # names

    def name(self, name: str) -> Any:
        """The value of a name, as the compiler has settled where it is looked up.

        Raises:
            NameError: It has none.
        """
        frame = self.frame
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
            return self.reads.cell(cell)
        if name not in names:
            raise NameError(f"'{name}' has no value")
        return names[name]

    def _global(self, name: str) -> Any:
        names = self.frame.globals
        value = self.reads.item(names, names, name)
        if value is MISSING:
            builtins = self.reads.item(names, names, "__builtins__")
            known_names = builtins if isinstance(builtins, dict) else vars(sys.modules["builtins"])
            value = self.reads.item(known_names, known_names, name)
        if value is MISSING:
            raise NameError(f"'{name}' has no value")
        return value

    def _store(self, target: ast.expr, value: Any) -> None:
        self.objects.keep(value)
        if isinstance(target, ast.Name):
            self._store_name(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, self.objects.items(value))
        elif isinstance(target, ast.Attribute):
            owner, name = self.value(target.value), self.frame.private(target.attr)
            self.objects.set_attribute(owner, name, value, target)
        elif isinstance(target, ast.Subscript):
            self.objects.set_item(self.value(target.value), self.value(target.slice), value, target)
        else:
            self.refuse(f"assigns to `{ast.unparse(target)}`, which is not understood")

    def _store_name(self, name: str, value: Any) -> None:
        frame = self.frame
        name = frame.private(name)
        if frame.is_local(name):
            frame.locals[name] = value
        elif name in frame.code.co_freevars:
            cell = frame.cells.get(name)
            if not isinstance(cell, Frame):
                self.refuse(f"changes `{name}`, a variable of the function around it")
            cell.locals[name] = value
        else:
            self.refuse(f"changes the global `{name}`")

    def _unpack(self, targets: Sequence[ast.expr], items: list[Any]) -> None:
        starred = [k for k, target in enumerate(targets) if isinstance(target, ast.Starred)]
        num_fixed = len(targets) - len(starred)
        if len(items) < num_fixed or (not starred and len(items) > num_fixed):
            raise self.known_error(ValueError(f"{len(items)} values for {num_fixed} names"))
        if not starred:
            for target, item in zip(targets, items, strict=True):
                self._store(target, item)
            return
        first, num_after = starred[0], len(targets) - starred[0] - 1
        middle = self.objects.made(items[first : len(items) - num_after])
        after = items[len(items) - num_after :]
        for target, item in zip(targets, [*items[:first], middle, *after], strict=True):
            self._store(target.value if isinstance(target, ast.Starred) else target, item)

    # statements

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        for node in statements:
            run = self._statements.get(type(node))
            if run is None:
                self.refuse(f"has the statement `{ast.unparse(node).splitlines()[0]}`, which is not understood")
            run(node)

    def _expression(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Yield):
            self._yield(node.value)
        elif isinstance(node.value, ast.YieldFrom):
            self._yield_from(node.value)
        else:
            self.value(node.value)

    def _return(self, node: ast.Return) -> NoReturn:
        raise ReturnError(None if node.value is None else self.value(node.value))

    def _break(self, node: ast.Break) -> NoReturn:
        raise BreakError

    def _continue(self, node: ast.Continue) -> NoReturn:
        raise ContinueError

    def _assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._store(target, value)

    def _assign_annotated(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.refuse(f"has the statement `{ast.unparse(node)}`, which is not understood")
        if node.value is not None:
            self._store(node.target, self.value(node.value))

    def _assign_in_place(self, node: ast.AugAssign) -> None:
        target = node.target
        if isinstance(target, ast.Name):
            name = self.frame.private(target.id)
            if not self.frame.is_local(name) and name not in self.frame.code.co_freevars:
                self.refuse(f"changes the global `{name}`")
            self._store(target, self._changed(node, self.name(target.id)))
            return
        owner = self.value(target.value)
        if isinstance(target, ast.Attribute):
            name = self.frame.private(target.attr)
            self.objects.check_attribute(owner, target)
            value = self._changed(node, self.attributes.get(owner, name))
            self.objects.set_attribute(owner, name, value, target)
            return
        key = self.value(target.slice)
        self.objects.check_item(owner, target)
        value = self._changed(node, self.objects.item(owner, key))
        self.objects.set_item(owner, key, value, target)

    def _changed(self, node: ast.AugAssign, now: Any) -> Any:
        by = self.value(node.value)
        if is_a(now, (list, set, dict, np.ndarray)) and not self.objects.is_made(now):
            self.refuse(f"changes `{ast.unparse(node.target)}`")
        self.objects.check_operands(node.op, now, by)
        self.objects.changed(now)
        return IN_PLACE[type(node.op)](now, by)

    def _if(self, node: ast.If) -> None:
        self._block(node.body if self.objects.truth(self.value(node.test)) else node.orelse)

    def _for(self, node: ast.For) -> None:
        first = len(self.objects.gone_through)
        source = self.value(node.iter)
        self.objects.check_new(source)
        items, lazy = self.objects.items(source), self.objects.lazy_of(source)
        lists = self.objects.gone_through[first:]
        goes_on = True
        for item in items:
            self.count()
            self._store(node.target, item)
            goes_on = self._goes_on(node.body)
            self.objects.check_lists(lists)
            self.objects.check_lazy(lazy)
            if not goes_on:
                return
        self._block(node.orelse)

    def _while(self, node: ast.While) -> None:
        while self.objects.truth(self.value(node.test)):
            self.count()
            if not self._goes_on(node.body):
                return
        self._block(node.orelse)

    def _goes_on(self, body: Sequence[ast.stmt]) -> bool:
        """Do the body of a loop; whether the loop goes on."""
        try:
            self._block(body)
        except ContinueError:
            return True
        except BreakError:
            return False
        return True

    def _with(self, node: ast.With, first: int = 0) -> None:
        if first == len(node.items):
            self._block(node.body)
            return
        item = node.items[first]
        manager = self.value(item.context_expr)
        if not is_one_of(type(manager), known.CONTEXTS) or not self.objects.is_made(manager):
            self.refuse(f"enters `{ast.unparse(item.context_expr)}`, which may change something")
        with manager as value:
            if item.optional_vars is not None:
                self._store(item.optional_vars, value)
            self._with(node, first + 1)

    def _try(self, node: ast.Try) -> None:
        control = (NotRecordableError, ReturnError, BreakError, ContinueError)
        catches = any(not isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)
        try:
            self.num_catching += catches
            try:
                self._block(node.body)
            except control:
                raise
            except Exception as error:
                self._handle(node, error)
            else:
                self.num_catching -= catches
                catches = False
                self._block(node.orelse)
        except NotRecordableError:
            raise
        except BaseException:
            self.num_catching -= catches
            self._block(node.finalbody)
            raise
        self.num_catching -= catches
        self._block(node.finalbody)

    def _handle(self, node: ast.Try, error: Exception) -> None:
        self.check_known(error)
        for handler in node.handlers:
            kinds = Exception if handler.type is None else self.value(handler.type)
            for kind in kinds if type(kinds) is tuple else (kinds,):
                if type(kind) is not type:
                    self.refuse(f"catches a {kind!r}")
            if not issubclass(type(error), kinds):
                continue
            self.frame.caught.append(error)
            try:
                if handler.name is not None:
                    self._store_name(handler.name, error)
                self._block(handler.body)
            finally:
                self.frame.caught.pop()
                if handler.name is not None:
                    self.frame.locals.pop(handler.name, None)
            return
        raise error

    def _raise(self, node: ast.Raise) -> NoReturn:
        if node.exc is None and self.frame.caught:
            raise self.frame.caught[-1]
        error = None if node.exc is None else self.value(node.exc)
        if isinstance(error, type) and issubclass(error, BaseException):
            error = self.call(error, (), {})
        if not isinstance(error, Exception) or (is_generator(self.frame.code) and isinstance(error, StopIteration)):
            self.refuse(f"raises `{ast.unparse(node)}`")
        if node.cause is not None:
            self.value(node.cause)
        raise self.known_error(error)

    def _assert(self, node: ast.Assert) -> None:
        if not self.objects.truth(self.value(node.test)):
            if node.msg is not None:
                self.value(node.msg)
            raise self.known_error(AssertionError(ast.unparse(node)))

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name) and self.frame.is_local(target.id):
                self.frame.locals.pop(target.id)
            else:
                self.refuse(f"deletes `{ast.unparse(target)}`")

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self._imported(alias.name)
            self._store_name(alias.asname or name, self._imported(name))

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            self.refuse(f"has the relative import `{ast.unparse(node)}`")
        package = self._imported(node.module)
        for alias in node.names:
            self._store_name(alias.asname or alias.name, self.attributes.get(package, alias.name))

    def _imported(self, name: str) -> Any:
        package = self.reads.item(sys.modules, sys.modules, name)
        if package is MISSING:
            self.refuse(f"imports {name}")
        return package

    def _define(self, node: ast.FunctionDef) -> None:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        notes = [node.returns, *(argument.annotation for argument in every if argument is not None)]
        if node.decorator_list or any(isinstance(p, ast.Call) for note in notes if note for p in ast.walk(note)):
            self.refuse(f"defines {node.name} with a decorator, or calls in its annotations")
        self._store_name(node.name, self._closure(node))

    # expressions

    def _attribute(self, node: ast.Attribute) -> Any:
        return self.attributes.get(self.value(node.value), self.frame.private(node.attr))

    def _subscript(self, node: ast.Subscript) -> Any:
        return self.objects.item(self.value(node.value), self.value(node.slice))

    def _slice(self, node: ast.Slice) -> slice:
        parts = [None if part is None else self.value(part) for part in (node.lower, node.upper, node.step)]
        for part in parts:
            self.objects.check(part)
        return slice(*parts)

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        self.objects.check_operands(node.op, left, right)
        return self.objects.made(BINARY[type(node.op)](left, right))

    def _unary(self, node: ast.UnaryOp) -> Any:
        operand = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return not self.objects.truth(operand)
        self.objects.check_operand(operand)
        return UNARY[type(node.op)](operand)

    def _bool(self, node: ast.BoolOp) -> Any:
        ends_with = isinstance(node.op, ast.Or)
        for part in node.values[:-1]:
            value = self.value(part)
            if self.objects.truth(value) is ends_with:
                return value
        return self.value(node.values[-1])

    def _compare(self, node: ast.Compare) -> Any:
        left, result = self.value(node.left), True
        for position, (kind, other) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self.value(other)
            result = self._compared(kind, left, right)
            if position + 1 < len(node.ops) and not self.objects.truth(result):
                return result
            left = right
        return result

    def _compared(self, kind: ast.cmpop, left: Any, right: Any) -> Any:
        if left is BATCH_INDEX or right is BATCH_INDEX:
            self.refuse("uses batch_idx")
        if isinstance(kind, (ast.Is, ast.IsNot)):
            return (left is right) == isinstance(kind, ast.Is)
        if isinstance(kind, (ast.In, ast.NotIn)):
            return self.objects.contains(right, left) == isinstance(kind, ast.In)
        is_equality = isinstance(kind, (ast.Eq, ast.NotEq))
        for operand in (left, right):
            if not (is_equality and self.objects.has_plain_equality(operand)):
                self.objects.check(operand)
        return COMPARISONS[type(kind)](left, right)

    def _if_expression(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.objects.truth(self.value(node.test)) else node.orelse)

    def _list(self, node: ast.List) -> Any:
        return self.objects.made(self.values(node.elts))

    def _set(self, node: ast.Set) -> Any:
        items = self.values(node.elts)
        for item in items:
            self.objects.check(item)
        return self.objects.made(set(items))

    def _dict(self, node: ast.Dict) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found |= self.objects.mapping(self.value(value))
                continue
            name = self.value(key)
            self.objects.check(name)
            found[name] = self.value(value)
        return self.objects.made(found)

    def _joined(self, node: ast.JoinedStr) -> str:
        return "".join(str(self.value(part)) for part in node.values)

    def _formatted(self, node: ast.FormattedValue) -> str:
        value = self.value(node.value)
        if not is_plain(value):
            self.refuse(f"writes `{ast.unparse(node.value)}` into a string")
        value = {-1: value, 115: str(value), 114: repr(value), 97: ascii(value)}[node.conversion]
        return format(value, "" if node.format_spec is None else self.value(node.format_spec))

    def _closure(self, node: ast.FunctionDef | ast.Lambda) -> Closure:
        frame, arguments = self.frame, node.args
        keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return Closure(
            node, inner_definition(frame.code, node), frame, tuple(self.values(arguments.defaults)),
            {name.arg: self.value(default) for name, default in keyword if default is not None},
            list(frame.inner),
        )  # fmt: skip

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Any:
        found: list[Any] = []
        names: dict[str, Any] = {}
        first = self.objects.items(self.value(node.generators[0].iter))
        self.frame.inner.append(names)
        self.num_generators += isinstance(node, ast.GeneratorExp)
        try:
            self._generate(node, 0, first, names, found)
        finally:
            self.frame.inner.pop()
            self.num_generators -= isinstance(node, ast.GeneratorExp)
        if isinstance(node, ast.GeneratorExp):
            return self.objects.iterator(found, self.objects.lazy(self.frame, self.frame.locals))
        if isinstance(node, ast.DictComp):
            return self.objects.made(dict(found))
        return self.objects.made(set(found) if isinstance(node, ast.SetComp) else found)

    def _generate(self, node: Any, depth: int, items: list[Any], names: dict[str, Any], found: list[Any]) -> None:
        generator = node.generators[depth]
        if generator.is_async:
            self.refuse("is asynchronous")
        lists = [pair for pair in self.objects.gone_through if pair[1] is items]
        for item in items:
            self.count()
            self._store_inner(generator.target, item, names)
            if all(self.objects.truth(self.value(test)) for test in generator.ifs):
                self._generate_one(node, depth, names, found)
            self.objects.check_lists(lists)

    def _generate_one(self, node: Any, depth: int, names: dict[str, Any], found: list[Any]) -> None:
        """What a comprehension gives for the present values of its names, up to one of its loops."""
        if depth + 1 < len(node.generators):
            more = self.objects.items(self.value(node.generators[depth + 1].iter))
            self._generate(node, depth + 1, more, names, found)
        elif isinstance(node, ast.DictComp):
            key = self.value(node.key)
            self.objects.check(key)
            found.append((key, self.value(node.value)))
        else:
            value = self.value(node.elt)
            if isinstance(node, ast.SetComp):
                self.objects.check_key(value)
            found.append(value)

    def _store_inner(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and not any(isinstance(t, ast.Starred) for t in target.elts):
            for part, item in zip(target.elts, self.objects.items(value), strict=True):
                self._store_inner(part, item, names)
        else:
            self.refuse(f"has a comprehension over `{ast.unparse(target)}`, which is not understood")

    def _named(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self._store_name(node.target.id, value)
        return value

    def _yield(self, node: ast.Yield) -> None:
        self.frame.yielded.append(None if node.value is None else self.value(node.value))

    def _yield_from(self, node: ast.YieldFrom) -> None:
        self.frame.yielded += self.objects.items(self.value(node.value))
