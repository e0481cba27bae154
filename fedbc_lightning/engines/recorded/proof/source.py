"""Finds the syntax tree of a function, and accepts it only if it compiles to the code that the function runs."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from types import CodeType, FunctionType

from fedbc_lightning.engines.recorded.recording import NotRecordableError

Definition = ast.FunctionDef | ast.Lambda


def definition_of(function: FunctionType) -> Definition:
    """Return the definition of a Python function.

    The file is compiled again, and the function's code must be in the result. This finds files that were edited after
    their import, and code that was changed after it was compiled.

    Raises:
        NotRecordableError: There is no source, or the function runs other code.
    """
    code = function.__code__
    lines = tuple(linecache.getlines(code.co_filename, function.__globals__))
    known = _definitions("".join(lines), code.co_filename) if lines else {}
    found = known.get(code) or next((node for other, node in known.items() if _is_renamed(code, other)), None)
    if found is None:
        raise NotRecordableError(f"the source of {name_of(function)} is not there, or is not what is run")
    return found


def inner_definition(parent: CodeType, node: Definition) -> CodeType:
    """Return the code of a function that is defined inside another one.

    Raises:
        NotRecordableError: Several inner functions begin in the same line.
    """
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    found = [code for code in inner_codes(parent) if (code.co_name, code.co_firstlineno) == (name, node.lineno)]
    if len(found) > 1:
        found = [code for code in found if _is_of(code, node)]
    if len(found) != 1:
        raise NotRecordableError(f"{parent.co_name} defines several functions {name} in line {node.lineno}")
    return found[0]


def name_of(function: object) -> str:
    """Return the name of a function or class for messages, with its module."""
    name = getattr(function, "__qualname__", getattr(function, "__name__", repr(function)))
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module and module not in ("__main__", "builtins") else str(name)


@lru_cache(maxsize=256)
def _definitions(text: str, filename: str) -> dict[CodeType, Definition]:
    """Return the definitions by code, without those that cannot be distinguished."""
    try:
        tree = ast.parse(text)
        compiled = compile(text, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}
    nodes: dict[tuple[str, int], list[Definition]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            nodes.setdefault((name, first), []).append(node)
    found: dict[CodeType, Definition] = {}
    for code in inner_codes(compiled):
        candidates = nodes.get((code.co_name, code.co_firstlineno), [])
        if len(candidates) > 1:
            candidates = [node for node in candidates if _is_of(code, node)]
        if len(candidates) == 1:
            found[code] = candidates[0]
    return found


def _is_renamed(code: CodeType, other: CodeType) -> bool:
    """Return whether two codes differ by name alone: torch's decorators rename functions for profilers."""
    if code.co_firstlineno != other.co_firstlineno:
        return False
    names = {name: getattr(other, name) for name in ("co_name", "co_qualname") if hasattr(other, name)}
    return code.replace(**names) == other


def _is_of(code: CodeType, node: Definition) -> bool:
    """Return whether code comes from this one of several definitions in a line; Python 3.10 does not say it."""
    body = node.body if isinstance(node, ast.Lambda) else node.body[-1]
    place = (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset)
    return hasattr(code, "co_positions") and place in set(code.co_positions())


def inner_codes(code: CodeType) -> list[CodeType]:
    """Return all code inside other code, at every depth."""
    direct = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [*direct, *(inner for other in direct for inner in inner_codes(other))]
