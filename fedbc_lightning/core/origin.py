"""Where code comes from: whether a function or class is ours, and which state of the code made a run."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from symtable import SymbolTable, symtable
from textwrap import dedent
from typing import Any

PACKAGE = __name__.partition(".")[0]
FOLDER = Path(__file__).parents[1]
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
INSTALLED = {"site-packages", "dist-packages"}
"""Folders into which packages are installed."""
ADDRESS = re.compile(" at 0x[0-9a-f]+")
"""Where an object lies in memory, as ``repr`` says of many; it changes from process to process."""
DOTTED = re.compile(r"(?<![\w.])[^\W\d]\w*(?:\.\w+)*")
"""Names in Python, each with all that follows its dots."""
IMPORTS = (ast.Import, ast.ImportFrom)
MAKERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_ours(part: Any) -> bool:
    """Return whether a function or class, or the class of an object, belongs to this package.

    Example:
        >>> is_ours(is_ours), is_ours(dict)
        (True, False)
    """
    return str(getattr(part, "__module__", "")).partition(".")[0] == PACKAGE


@cache
def code_hash() -> str:
    """Return the first 12 digits of a SHA-256 hash of all Python files of this package; it takes 10 ms.

    An installed package and its source tree have the same hash.
    """
    beside = FOLDER if (FOLDER / "models").is_dir() else FOLDER.parent  # in a source tree, two stand beside the package
    places = ((FOLDER, "."), (beside, "models"), (beside, "datamodules"))
    files = {path.relative_to(top).as_posix(): path for top, name in places for path in (top / name).rglob("*.py")}
    found = sha256()
    # Sorted, and with the names in the hash: file systems list in any order, and a renamed module is other code.
    for name in sorted(files):
        found.update(f"{name}\n".encode() + files[name].read_bytes())
    return found.hexdigest()[:12]


@cache
def source_hash(kind: type) -> str:
    """Return 12 digits of a hash of the code of a class: itself, its bases, and what it names.

    Of functions, classes and values of the user's that is the code that makes them, wherever it stands, and what that
    names in turn; of a module that is used as a whole, its file; of what others wrote it is the name, because packages
    have versions. Code is read, and neither run nor imported for this: the hash depends neither on the machine nor on
    what the program has done before. Comments, docstrings and line breaks do not count. What no text names is not
    found, such as a module whose name is computed. It is empty for code without a source, such as a class that was
    typed at a prompt.

    Example:
        >>> source_hash(dict)
        ''
    """
    code = _Code()
    for base in kind.__mro__:
        with suppress(Exception):  # sources may be missing, and in the place of a module may be anything
            module = sys.modules[base.__module__]
            if not is_ours(base) and _is_users_file(inspect.getfile(module)):
                code.modules[base.__module__] = _Module(inspect.getsource(module), module.__package__)
                code.add(ast.parse(dedent(inspect.getsource(base))), base.__module__)
    found = sorted(filter(None, code.found.values()))
    return sha256(repr(found).encode()).hexdigest()[:12] if found else ""


class _Module:
    """A file as a syntax tree, with what makes its names: statements, and absolute names of what is imported."""

    def __init__(self, source: str, package: str | None, folders: list[str] | None = None) -> None:
        self.tree, self.package, self.folders = ast.parse(source), package or "", folders or []
        self.makers = _makers(_statements(self.tree), self.package)


class _Code:
    """Collects the code behind syntax trees in :attr:`found`."""

    def __init__(self) -> None:
        self.found = dict[Any, str]()
        self.modules = dict[str, Any]()
        self._waiting = list[tuple[ast.AST, str]]()

    def add(self, tree: ast.AST, name: str) -> None:
        """Collect a syntax tree of a module, and all that it names."""
        self._waiting.append((tree, name))
        while self._waiting:
            tree, name = self._waiting.pop()
            if tree not in self.found:
                self.found[tree] = _dumped(tree)
                text, imports = ast.unparse(tree), (x for x in ast.walk(tree) if isinstance(x, IMPORTS))
                inside, outside = (
                    _makers(imports, self.modules[name].package),
                    _global_names(symtable(text, "", "exec")),
                )
                for path in (found.split(".") for found in DOTTED.findall(text)):
                    if path[0] in inside:
                        self._follow(inside[path[0]], path, name)
                    elif path[0] in outside:
                        self._find(name, path)

    def _follow(self, makers: list[Any], path: list[str], name: str) -> None:
        for maker in makers:
            if isinstance(maker, str):
                top, *inner = maker.split(".")
                self._find(top, [*inner, *path[1:]])
            else:
                self._waiting.append((maker, name))

    def _find(self, name: str, path: list[str]) -> None:
        """Follow a dotted name that a module has."""
        module, key = self._module(name), (name, *path)
        if key in self.found:
            return
        self.found[key] = "" if module else ".".join(key)  # others' packages have versions
        if module and not path:
            self._waiting.append((module.tree, name))
        elif module and path[0] in module.makers:
            self._follow(module.makers[path[0]], path, name)
        elif module:
            others = [star.replace("*", path[0]) for star in module.makers.get("*", [])]
            self._follow([*others, *module.makers.get("__getattr__", [])], path, name)
            if module.folders:
                self._find(f"{name}.{path[0]}", path[1:])

    def _module(self, name: str) -> _Module | None:
        """Return a module of the user's; it is looked for without its package, which need not have been imported."""
        if name not in self.modules:
            above, _, own = name.rpartition(".")
            self.modules[name] = None
            with suppress(Exception):  # there may be no source, and whoever finds modules may raise anything
                spec: Any = PathFinder.find_spec(own, self.modules[above].folders) if above else find_spec(own)
                folders = spec.submodule_search_locations
                if not spec.origin:  # a folder without an __init__.py
                    self.modules[name] = _Module("", name, folders)
                elif spec.has_location and _is_users_file(spec.origin):
                    self.modules[name] = _Module(spec.loader.get_source(spec.name), name if folders else above, folders)
        return self.modules[name]


def _is_users_file(name: str) -> bool:
    file = Path(name)
    is_known = file.is_relative_to(STANDARD_LIBRARY) or file.is_relative_to(FOLDER)
    return not (is_known or INSTALLED.intersection(file.parts))


def _dumped(tree: ast.AST) -> str:
    """Return a syntax tree as text, without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (*MAKERS, ast.Module)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the single statements that run when a module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, MAKERS) or (isinstance(node, ast.stmt) and not hasattr(node, "body")):
            yield node
        else:
            yield from _statements(node)


def _makers(statements: Iterable[ast.AST], package: str) -> dict[str, list[Any]]:
    """Return which statements make a name, or which absolute name it is imported as; ``*`` stands for all names."""
    found = defaultdict[str, list[Any]](list)
    for node in statements:
        if isinstance(node, MAKERS):
            found[node.name].append(node)
        elif isinstance(node, IMPORTS):
            for alias in node.names:
                if isinstance(node, ast.ImportFrom):
                    name = f"{'.' * node.level}{node.module or ''}"
                    with suppress(ImportError):  # too many dots
                        found[alias.asname or alias.name].append(f"{resolve_name(name, package)}.{alias.name}")
                else:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or name].append(name)
        else:
            for part in ast.walk(node):
                if isinstance(getattr(part, "ctx", None), ast.Store):  # of table["a"] = 1 it is the table
                    found[re.split(r"\W", ast.unparse(part))[0]].append(node)
    return found


def _global_names(table: SymbolTable) -> set[str]:
    """Return the names that code looks up in its module."""
    found = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    return found.union(*(_global_names(inner) for inner in table.get_children()))
