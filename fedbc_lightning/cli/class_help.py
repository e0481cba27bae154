"""The help of classes: ``--algorithm.help`` lists what can be chosen, ``--algorithm.help FedBC`` explains one."""

from __future__ import annotations

import re
import textwrap

from jsonargparse import SUPPRESS, ArgumentParser
from rich.console import Console

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.choices import base_at, choices, find_class
from fedbc_lightning.cli.command_arguments import option_values
from fedbc_lightning.cli.docstrings import Block, import_path, plain, read_docstring
from fedbc_lightning.cli.names import class_name, fold, named_algorithms
from fedbc_lightning.cli.parser import CLASS_KEYS, BriefHelpFormatter
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
    base = base_at(key, CLASS_KEYS, _named_classes(words))
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


def _named_classes(words: list[str]) -> dict[str, type]:
    """Return the classes of algorithm, data and model by their keys, as ``--<key>.help Class`` or ``--<key> Class``."""
    names = [name for _, name in named_algorithms(words) if name]
    cls = find_class(class_name(names[-1]), FederatedAlgorithm) if names else None
    found = {"algorithm": cls} if cls else {}
    options = {word.partition("=")[0] for word in words if word.startswith(("--algorithm", "--data", "--model"))}
    for option in sorted(options, key=len):  # a key before those that lie inside of its class
        key = option.removeprefix("--").removesuffix(".help")
        base = base_at(key, CLASS_KEYS, found)
        named = [find_class(name, base) for _, name in option_values(words, (option,))] if base else []
        for cls in filter(None, named):  # the last one counts
            found[key] = cls
    return found


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
    doc = read_docstring(cls)
    summary = plain(doc.summary)
    if fold(doc.name) == fold(cls.__name__):
        return doc.name, summary
    return cls.__name__, f"{doc.name}: {summary}"


def print_class(key: str, cls: type) -> None:
    """Print the docstring of an algorithm, or of a part of one, then its options.

    Args:
        key: Key under which the class is given, e.g. ``algorithm``.
        cls: Class to explain.
    """
    doc = read_docstring(cls)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_wrap(f"{doc.name}: {plain(doc.summary)}", console.width, 0), style="bold", soft_wrap=True)
    console.print(f"class {import_path(cls)}", style="dim", soft_wrap=True)
    for title, blocks in doc.sections.items():
        if title != "Args":  # the options below have the same texts
            console.print(f"\n{title}" if title else "", style="bold")
            for block in blocks:
                _print_block(console, block)
    parser = ArgumentParser(add_help=False, usage=SUPPRESS, formatter_class=BriefHelpFormatter)
    parser.add_class_arguments(cls, key, fail_untyped=False, as_group=False)
    for action in private_cli.actions(parser):
        action.help = action.help and plain(action.help)
    console.print(f"\n{parser.format_help().strip() or 'no options'}", soft_wrap=True)


def _print_block(console: Console, block: Block) -> None:
    for line in block.lines:
        if block.kind == "literal":
            console.print(f"    {line}" if line else "", soft_wrap=True)
        else:
            mark, width = ("- ", 6) if block.kind == "items" and len(block.lines) > 1 else ("", 4)
            console.print(_wrap(f"{' ' * 4}{mark}{plain(line)}", console.width, width), soft_wrap=True)


def _wrap(text: str, width: int, indent: int) -> str:
    """Wrap a text at spaces only, so that a formula with a hyphen is not broken."""
    return textwrap.fill(
        text, max(width, 40), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
