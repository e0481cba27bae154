"""Where code comes from: whether a function or class is ours, and which state of the code made a run."""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from textwrap import dedent
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = __name__.partition(".")[0]
FOLDER = Path(__file__).parents[1]
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
INSTALLED = {"site-packages", "dist-packages"}
"""Folders into which packages are installed."""


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
    files = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*.py")}
    for name in ("models", "datamodules"):  # in a source tree, these stand beside the package
        if not (FOLDER / name).is_dir():
            beside = FOLDER.parent
            files |= {path.relative_to(beside).as_posix(): path for path in (beside / name).rglob("*.py")}
    found = sha256()
    # Sorted, and with the names in the hash: file systems list in any order, and a renamed module is other code.
    for name in sorted(files):
        found.update(f"{name}\n".encode() + files[name].read_bytes())
    return found.hexdigest()[:12]


@cache
def source_hash(kind: type) -> str:
    """Return 12 digits of a hash of the code of a class: itself, its bases, and functions and classes that it names.

    Comments, docstrings and line breaks do not count, nor does what is installed: packages have versions. It is empty
    for code without a source, such as a class that was typed at a prompt.

    Example:
        >>> source_hash(dict)
        ''
    """
    waiting, found = list[Any](kind.__mro__), dict[str, str]()
    while waiting:
        part = waiting.pop()
        name = f"{part.__module__}.{part.__qualname__}"
        if name in found or not _is_users(part):
            continue
        try:
            tree = ast.parse(dedent(inspect.getsource(part)))
        except (OSError, TypeError, SyntaxError):
            continue
        found[name] = _dumped(tree)
        for named, value in _named_values(tree, vars(sys.modules[part.__module__])):
            if isinstance(value, (FunctionType, type)):
                waiting += value.__mro__ if isinstance(value, type) else (value,)
            elif named.isupper() and isinstance(value, (bool, int, float, str)):  # a constant
                found[f"{name} {named}"] = f"{named} = {value!r}"
    return sha256(repr(sorted(found.values())).encode()).hexdigest()[:12] if found else ""


def _is_users(part: Any) -> bool:
    module = sys.modules.get(part.__module__)
    if module is None or is_ours(part) or part.__module__ in sys.builtin_module_names:
        return False
    file = Path(getattr(module, "__file__", None) or "a notebook")
    return not file.is_relative_to(STANDARD_LIBRARY) and not INSTALLED.intersection(file.parts)


def _dumped(tree: ast.AST) -> str:
    """Return a syntax tree as text, without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree)


def _named_values(tree: ast.AST, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names in a syntax tree, also those behind a module and a dot, with the values that they have outside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, known.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = known.get(node.value.id)
            if isinstance(module, ModuleType):
                yield node.attr, getattr(module, node.attr, None)
