"""Where code comes from: whether a function or class is ours, and which state of the code made a run."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from collections import defaultdict
from contextlib import suppress
from functools import cache, lru_cache
from hashlib import sha256
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name, spec_from_file_location
from pathlib import Path
from symtable import SymbolTable, symtable
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
IMPORTS = re.compile(r"^\s*(?:from|import) .*", re.MULTILINE)
"""Imports, in code as ``ast.unparse`` writes it: what they import counts where it is used."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_ours(part: Any) -> bool:
    """Return whether a function or class, or the class of an object, belongs to this package.

    Example:
        >>> is_ours(is_ours), is_ours(dict)
        (True, False)
    """
    return str(getattr(part, "__module__", "")).partition(".")[0] == PACKAGE


def subclasses(base: type) -> set[type]:
    """Return all imported classes that are derived from ``base``, directly or not."""
    children: list[type] = base.__subclasses__()
    return {cls for child in children for cls in (child, *subclasses(child))}


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

    Of functions, classes and values of the user's that is the text that makes them, wherever it stands, and what that
    names in turn; of what others wrote it is the name, because packages have versions. Code is read, and neither run
    nor imported for this: a value that is another at each start has one text. Comments, docstrings and line breaks do
    not count. A method that a module calls on a name of its own, as a statement or as a decorator, makes that name,
    too. What no text names is not found, such as a module or an entry of a table whose name is computed, what a
    function changes that a module calls, and the arguments of a function that makes the class. It is empty for code
    without a source, such as a class that was typed at a prompt.

    Example:
        >>> source_hash(dict)
        ''
    """
    modules, seen, found = _Modules(), set[Any](), set[str]()
    waiting: list[Any] = [(base.__module__, (base.__name__,)) for base in kind.__mro__ if modules[base.__module__]]
    for part in waiting:  # which grows
        where, path = part
        makers = modules[where]
        if part in seen:
            continue
        seen.add(part)
        if isinstance(path, ast.AST):
            with suppress(RecursionError):
                text = ast.unparse(path)
                found.add(text)
                paths = [tuple(name.split(".")) for name in DOTTED.findall(IMPORTS.sub("", text))]
                names = {name for name, *_ in paths}
                with suppress(SyntaxError):  # a ``nonlocal`` of the function around a class
                    names = _global_names(symtable(text, "", "exec"))
                waiting += [(where, path) for path in paths if path[0] in names]
        elif makers is None:
            found.add(repr(part))
        elif path and modules[inner := f"{where}.{path[0]}"]:
            waiting.append((inner, path[1:]))
        else:
            own = makers.get("".join(path[:1]), [(star, path[:1]) for star, _ in makers["*"]])
            waiting += [(x[0], x[1] + path[1:]) if isinstance(x, tuple) else (where, x) for x in own]
    return sha256(repr(sorted(found)).encode()).hexdigest()[:12] if found else ""


class _Modules(dict[str, Any]):
    """Modules of the user's by their names, each with what makes its names; None for those of others."""

    def __missing__(self, name: str) -> Any:
        self[name] = None
        with suppress(Exception):  # there may be no source, and whoever finds modules may raise anything
            spec = _spec(name)
            file = Path(spec.origin or "")  # a folder without an __init__.py has none
            is_known = file.is_relative_to(STANDARD_LIBRARY) or name.partition(".")[0] == PACKAGE
            if not (is_known or INSTALLED.intersection(file.parts)):
                self[name] = _makers(spec.loader.get_data(spec.origin) if spec.origin else b"", spec.parent)
        return self[name]


def _spec(name: str) -> Any:
    """Find a module; neither it nor the packages above it are imported for this."""
    above, _, own = name.rpartition(".")
    module = sys.modules.get(name)
    if module and not module.__spec__:  # a script
        return spec_from_file_location(name, module.__file__)
    if module or not above:
        return find_spec(name)
    spec: Any = PathFinder.find_spec(own, _spec(above).submodule_search_locations or [])
    spec.name = name
    return spec


@lru_cache
def _makers(source: bytes, package: str) -> dict[str, list[Any]]:
    """Return what makes each name in a file: syntax trees, or the module and name that it is in there.

    The whole file has an empty name.
    """
    tree, makers = _without_docstrings(ast.parse(source)), defaultdict[str, list[Any]](list)
    makers[""] = [tree]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            makers[node.name].append(node)  # also one that a function makes
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                makers[name].append((alias.name if alias.asname else name, ()))
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # too many dots
                where = resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    makers[alias.asname or alias.name].append((where, (alias.name,)))
    for node in tree.body:
        for part in [node] if isinstance(node, DEFINITIONS) else ast.walk(node):
            if isinstance(part, DEFINITIONS):
                makers[part.name].append(node)
            elif isinstance(getattr(part, "ctx", None), ast.Store):  # of table["a"] = 1 it is the table
                makers[re.split(r"\W", ast.unparse(part))[0]].append(node)
            for name in _called_names(part):
                if not any(isinstance(made, tuple) for made in makers.get(name, [()])):  # it is of this file
                    makers[name].append(part)
    return makers


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _called_names(part: ast.AST) -> list[str]:
    """Return the names that a statement calls something on: ``table.update(...)``, or ``@table.register`` above it."""
    calls = [part.value] if isinstance(part, ast.Expr) else getattr(part, "decorator_list", [])
    return re.findall(r"^(\w+)[.[]", "\n".join(map(ast.unparse, calls)), re.MULTILINE)


def _global_names(table: SymbolTable) -> set[str]:
    """Return the names in some code that are not its own."""
    found = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() or symbol.is_imported()}
    return found.union(*map(_global_names, table.get_children()))
