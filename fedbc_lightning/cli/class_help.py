"""The help of classes: ``--algorithm.help`` lists what can be chosen, ``--algorithm.help FedBC`` explains one."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

from jsonargparse import SUPPRESS, ArgumentParser
from rich.console import Console

from fedbc_lightning.algorithms.base import usual_name
from fedbc_lightning.cli.classes import base_at, choices, find_class, fold, import_path
from fedbc_lightning.cli.command_arguments import option_values
from fedbc_lightning.cli.parser import CLASS_KEYS, BriefHelpFormatter, plain
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.origin import is_ours


def show_class_help(words: list[str]) -> bool:
    """Answer the last ``--<key>.help [Class]`` of a command line, if the key takes a class of ours.

    Returns:
        Whether it was answered; everything else is for the parser's own help.
    """
    options = [word for word in words if re.fullmatch(r"--[\w.]+\.help(=.*)?", word)]
    if not options:
        return False
    option = options[-1].partition("=")[0]
    key = option.removeprefix("--").removesuffix(".help")
    base = base_at(key, CLASS_KEYS)
    names = [name for _, name in option_values(words, (option,)) if not name.startswith("-")]
    if base is None:
        return False
    if not names:
        print_classes(key, base)
        return True
    cls = find_class(names[-1], base)
    if cls is None or key.partition(".")[0] not in ("algorithm", "data", "model"):
        return False
    print_class(key, cls)
    return True


def print_classes(section: str, base: type) -> None:
    """Print the classes that a section takes by name, those of this package first, each with its first line.

    Args:
        section: For example ``algorithm``.
        base: Base class of the classes.
    """
    lines = [
        _name_and_line(cls)
        for cls in choices(base)
        if is_ours(cls) or cls.__module__.split(".")[0] == "torch" or section.startswith("trainer.")
    ]
    width = max((len(name) for name, _ in lines), default=0) + 2
    console = Console(highlight=False, markup=False, emoji=False)
    print(f"--{section}")
    for name, summary in lines:
        line = f"{name:{width}}{summary}"
        print(_wrap(line, console.width, width) if console.is_terminal else line)  # a file or grep gets whole lines
    print(f"\nor the path of your own, package.module.Class. The options of one: --{section}.help Class")


def _name_and_line(cls: type) -> tuple[str, str]:
    """Return the name by which a class can be given, the usual one if there is one, and its docstring's first line."""
    name, summary = usual_name(cls), _summary(cls)
    return (name, summary) if fold(name) == fold(cls.__name__) else (cls.__name__, f"{name}: {summary}")


def _summary(cls: type) -> str:
    """Return the first sentence of a docstring in one line, without the usual name of the class before it."""
    first = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    return plain(" ".join(first.split()).removesuffix("::").removeprefix(f"{usual_name(cls)}: "))


def print_class(key: str, cls: type) -> None:
    """Print the docstring of an algorithm, or of a part of one, then its options.

    Args:
        key: Key under which the class is given, e.g. ``algorithm``.
        cls: Class to explain.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_wrap(f"{usual_name(cls)}: {_summary(cls)}", console.width, 0), style="bold", soft_wrap=True)
    console.print(f"class {import_path(cls)}", style="dim", soft_wrap=True)
    _print_sections(console, (inspect.getdoc(cls) or "").partition("\n\n")[2])
    parser = ArgumentParser(add_help=False, usage=SUPPRESS, formatter_class=BriefHelpFormatter)
    parser.add_class_arguments(cls, key, fail_untyped=False, as_group=False)
    for action in private_cli.actions(parser):
        action.help = action.help and plain(action.help)
    console.print(f"\n{parser.format_help().strip() or 'no options'}", soft_wrap=True)


def _print_sections(console: Console, text: str) -> None:
    """Print the sections of a docstring, prose wrapped anew, formulas and columns as they stand.

    A section has a title in the first column that ends in ``:`` (prose) or ``::`` (formulas).
    """
    before, *sections = re.split(r"^([A-Z][\w -]*?)(::?)$", text, flags=re.MULTILINE)
    titles, marks, bodies = sections[::3], sections[1::3], sections[2::3]
    for title, mark, body in zip(["", *titles], ["", *marks], [before, *bodies], strict=True):
        if title == "Args" or not body.strip():  # the options below have the same texts
            continue
        console.print(f"\n{title}" if title else "", style="bold")
        body = textwrap.dedent(body).strip("\n")
        for paragraph in [body] if mark == "::" else re.split(r"\n\s*\n", body):
            for line in _lines(paragraph, title, is_literal=mark == "::", width=console.width):
                console.print(line, soft_wrap=True)


def _lines(paragraph: str, title: str, *, is_literal: bool, width: int) -> Iterator[str]:
    if is_literal or re.search(r"\S {2,}\S|^>>> ", paragraph, re.MULTILINE):
        yield textwrap.indent(paragraph, "    ")
        return
    # Of a list, and of the classes in Raises, each line that is not indented begins an item.
    is_list = title in ("Attributes", "Raises") or paragraph.startswith("- ")
    items = re.split(r"\n(?=\S)", paragraph) if is_list else [paragraph]
    mark = "- " if len(items) > 1 else ""
    for item in items:
        said = re.sub("::$", ":", " ".join(item.removeprefix("- ").split()))
        yield _wrap(f"    {mark}{plain(said)}", width, 4 + len(mark))


def _wrap(text: str, width: int, indent: int) -> str:
    """Wrap a text at spaces only, so that a formula with a hyphen is not broken."""
    return textwrap.fill(
        text, max(width, 40), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
