"""Print how large the repository is: parts and lines of code, and comments.

    python tests/repository/size.py [ROOT]

A part of code is a node of Python's syntax tree: a name, a number, a text, a call, a statement and so on, but no
docstring. The budget counts these, since nobody makes fewer of them by longer lines. A line of code is a line with a
token on it that is neither a comment nor part of a docstring. Comments count where they stand alone and where they
follow code.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ("fedbc_lightning", "models", "datamodules")
WORDS = tuple(f"fedbc_lightning/{name}" for name in ("studies", "pages", "papers", "commands", "cli"))
_KINDS = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
"""Nodes that say of which kind the node above them is."""
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Size(NamedTuple):
    """Size of some source files."""

    files: int = 0
    parts: int = 0
    lines: int = 0
    comments: int = 0

    def __add__(self, other: tuple) -> Size:
        return Size(*(mine + its for mine, its in zip(self, other, strict=True)))


def size_of(source: str) -> Size:
    """Count the parts and the lines of code, and those of comments, of one file."""
    docstrings: set[int] = set()
    parts = 0
    for node in ast.walk(ast.parse(source)):
        parts += not isinstance(node, _KINDS)
        # Also the string below a constant, which documents it
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            parts -= 2  # the statement, and the text in it
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return Size(1, parts, len(code - docstrings), len(comments))


def size_under(*folders: str, root: Path = ROOT) -> Size:
    """Count all Python files below some folders."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return sum((size_of(path.read_text(encoding="utf-8")) for path in paths), Size())


def lines_of_configs(root: Path = ROOT) -> int:
    """Count the lines of all shipped YAML files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (root / "configs").rglob("*.yaml"))


def main(root: Path = ROOT) -> None:
    """Print the table."""
    total = size_under(*PACKAGE, root=root)
    rows = [
        ("fedbc_lightning/ + models/ + datamodules/", total),
        ("  engines/", size_under("fedbc_lightning/engines", root=root)),
        ("  studies/ + pages/ + papers/ + commands/ + cli/", size_under(*WORDS, root=root)),
        ("tests/", size_under("tests", root=root)),
    ]
    folders = sorted(f"fedbc_lightning/{path.parent.name}" for path in (root / "fedbc_lightning").glob("*/__init__.py"))
    rows += [(f"    {folder}/", size_under(folder, root=root)) for folder in (*folders, *PACKAGE[1:])]
    print(f"{'':52}{'files':>6}{'parts':>9}{'lines':>8}{'comments':>9}")
    for name, size in rows:
        print(f"{name:52}{size.files:6}{size.parts:9,}{size.lines:8,}{size.comments:9,}")
    print(f"comments per 100 lines of code in the package: {100 * total.comments / total.lines:.1f}")
    cifar = (root / "configs" / "cifar.yaml").read_text(encoding="utf-8")
    print(f"configs/: {lines_of_configs(root):,} lines, of which cifar.yaml has {len(cifar.splitlines())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
