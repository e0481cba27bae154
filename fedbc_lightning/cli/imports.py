"""Says why a class cannot be imported: which package or file is missing, and what is there instead."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

from fedbc_lightning.core.errors import nearest

_EXTRAS = {"flwr_datasets": "flower"}
"""Map from a package to the extra of ``pyproject.toml`` that installs it."""
_NEEDED = {"Flower": "flwr_datasets"}
"""Map from a class of ours to the package without which it cannot be used."""
_NO_MODULE = re.compile(r"No module named '(\w+)([\w.]*)'")
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")


def about_import(said: str) -> str:
    """Return the reason of a failed import with what to do about it.

    Args:
        said: What Python said of it.
    """
    how = ""
    if match := _NO_MODULE.search(said):
        how = _install(match[1]) if match[1] in _EXTRAS else "" if match[2] else _where_modules_are(match[1])
    elif match := _NO_ATTRIBUTE.search(said):
        how = _question(match[2], [name for name in dir(sys.modules.get(match[1])) if not name.startswith("_")])
    return f"cannot import it: {said}{how}"


def missing_package(class_path: str) -> str | None:
    """Return which package a class of ours needs that is not installed; None if there is none."""
    package = _NEEDED.get(class_path.rpartition(".")[2])
    if package is None:
        return None
    try:
        import_module(package)
    except ImportError:
        return f"{class_path.rpartition('.')[2]} needs the package {package}, which is not installed{_install(package)}"
    return None


def _install(package: str) -> str:
    return f"; pip install 'fedbc-lightning[{_EXTRAS[package]}]'"


def _where_modules_are(name: str) -> str:
    """Say where a module was looked for, and which one there has a similar name."""
    question = _question(name, sorted(path.stem for path in Path.cwd().glob("*.py")))
    return f": no package of that name is installed, and there is no {name}.py in the current folder{question}"


def _question(word: str, known: list[str]) -> str:
    near = nearest(word, known)
    return f"; did you mean '{near}'?" if near else ""
