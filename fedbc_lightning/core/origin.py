"""Where code comes from: whether a function or class is ours, and which state of the code made a run."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from reprlib import Repr
from textwrap import dedent
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = __name__.partition(".")[0]
FOLDER = Path(__file__).parents[1]
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
INSTALLED = {"site-packages", "dist-packages"}
"""Folders into which packages are installed."""
ADDRESS = re.compile(" at 0x[0-9a-f]+")
"""Where an object lies in memory, as ``repr`` says of many; it changes from process to process."""
SORTED = Repr()
"""``repr`` that sorts sets, whose order changes from process to process, and cuts what is very long."""
for most in ("maxdict", "maxlist", "maxtuple", "maxset", "maxfrozenset", "maxother", "maxstring"):
    setattr(SORTED, most, 10_000)


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
    """Return 12 digits of a hash of the code of a class: itself, its bases, and what it names.

    Of functions and classes of the user's that is their code again, also where a value holds or wraps them, of
    installed ones their name, because packages have versions, and of other values what ``repr`` says, with the
    attributes of a loss or metric: one that is another at each start counts as changed. Of the user's modules
    that a function imports as it runs it is the code of the whole file, and they are not imported for this. Comments,
    docstrings and line breaks do not count. It is empty for code without a source, such as a class that was typed at a
    prompt.

    Example:
        >>> source_hash(dict)
        ''
    """
    waiting, found = list[Any](kind.__mro__), dict[Any, str]()
    packages = dict[Path, str]()
    while waiting:
        part = waiting.pop()
        with suppress(Exception):  # sources may be missing, and in the place of a module may be anything
            if part in found or not (part in packages or _is_users(part)):
                continue
            tree = ast.parse(part.read_bytes() if part in packages else dedent(inspect.getsource(part)))
            found[part] = _dumped(tree)
            module = None if part in packages else sys.modules[part.__module__]
            inside = _imported_files(tree, packages[part] if module is None else module.__package__ or "")
            packages |= inside
            waiting += inside
            for named, value in _named_values(tree, {} if module is None else vars(module)):
                with suppress(Exception):
                    held = value.values() if isinstance(value, dict) else (value, getattr(value, "func", value))
                    for code in (getattr(each, "__wrapped__", each) for each in held):
                        kind = code if isinstance(code, type) else type(code)
                        waiting += [code] if isinstance(code, FunctionType) else kind.__mro__
                    found[part, named] = f"{named} = {_told(value)}"
    return sha256(repr(sorted(found.values())).encode()).hexdigest()[:12] if found else ""


def _told(value: Any) -> str:
    """Return the name of a module, function or class, and what ``repr`` says of another value."""
    name = getattr(value, "__qualname__", getattr(value, "__name__", None))
    if isinstance(name, str):
        return name
    attributes = vars(value) if hasattr(value, "state_dict") else {}  # a loss does not show its arguments
    return ADDRESS.sub("", SORTED.repr((value, attributes)))


def _imported_files(tree: ast.AST, package: str) -> dict[Path, str]:
    """Return the files of the user's modules that a syntax tree imports, with the packages that they belong to."""
    names = list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # too many dots
                name = resolve_name("." * node.level + (node.module or ""), package)
                names += [name, *(f"{name}.{alias.name}" for alias in node.names)]
    found = dict[Path, str]()
    for name in names:
        with suppress(Exception):  # there may be no such file, and whoever finds modules may raise anything
            own, *below = name.split(".")
            spec: Any = find_spec(own)
            for own in below:  # without the packages above it, which would be imported for this
                spec = PathFinder.find_spec(own, spec.submodule_search_locations or [])
            if spec.origin.endswith(".py") and _is_users_file(spec.origin):
                found[Path(spec.origin)] = name if spec.submodule_search_locations else name.rpartition(".")[0]
    return found


def _is_users(part: Any) -> bool:
    module = part if isinstance(part, ModuleType) else sys.modules.get(part.__module__)
    if module is None or (module is not part and is_ours(part)) or module.__name__ in sys.builtin_module_names:
        return False
    return _is_users_file(getattr(module, "__file__", None) or "a notebook")


def _is_users_file(name: str) -> bool:
    file = Path(name)
    is_known = file.is_relative_to(STANDARD_LIBRARY) or file.is_relative_to(FOLDER)
    return not (is_known or INSTALLED.intersection(file.parts))


def _dumped(tree: ast.AST) -> str:
    """Return a syntax tree as text, without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree)


def _named_values(tree: ast.AST, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names in a syntax tree, also those behind modules and dots, with the values that they have outside."""
    for node in ast.walk(tree):
        path = ast.unparse(node).split(".") if isinstance(node, (ast.Name, ast.Attribute)) else [""]
        if path[0] in known:
            value = known[path[0]]
            for name in path[1:]:
                # What libraries hold is no code of the user's, and may differ between starts: os.environ, sys.argv.
                is_users = isinstance(value, ModuleType) and _is_users(value)
                value = vars(value).get(name) if is_users else None
            if value is not None:
                yield ".".join(path), value
