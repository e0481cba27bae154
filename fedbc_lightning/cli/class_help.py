"""The help of classes: ``--algorithm.help`` lists what can be chosen, ``--algorithm.help FedBC`` explains one."""

from __future__ import annotations

import inspect
import re

from fedbc_lightning.algorithms.base import usual_name
from fedbc_lightning.cli.classes import base_at, choices, find_class, fold, import_path
from fedbc_lightning.cli.command_arguments import option_values
from fedbc_lightning.cli.overview import columns
from fedbc_lightning.cli.parser import CLASS_KEYS, plain
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.core.printing import Console


def show_class_help(words: list[str]) -> bool:
    """Answer the last ``--<key>.help`` of a command line, or begin the answer to ``--<key>.help Class``.

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
    cls = find_class(names[-1], base) if names and base else None
    if cls is not None and key.partition(".")[0] in ("algorithm", "data", "model"):
        print_docstring(cls)
    elif base is not None and not names:
        print_classes(key, base)
    return base is not None and not names


def print_classes(section: str, base: type) -> None:
    """Print the classes that a section takes by name, those of this package first, each with its first line.

    Args:
        section: For example ``algorithm``.
        base: Base class of the classes.
    """
    lines = dict(
        _name_and_line(cls)
        for cls in choices(base)
        if is_ours(cls) or cls.__module__.split(".")[0] == "torch" or section.startswith("trainer.")
    )
    print(f"--{section}\n{columns(lines)}\n")
    print(f"or the path of your own, package.module.Class. The options of one: --{section}.help Class")


def _name_and_line(cls: type) -> tuple[str, str]:
    """Return the name by which a class can be given, the usual one if there is one, and its docstring's first line."""
    name, summary = usual_name(cls), _summary(cls)
    return (name, summary) if fold(name) == fold(cls.__name__) else (cls.__name__, f"{name}: {summary}")


def _summary(cls: type) -> str:
    """Return the first sentence of a docstring in one line, without the usual name of the class before it."""
    first = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    return plain(" ".join(first.split()).removesuffix("::").removeprefix(f"{usual_name(cls)}: "))


def print_docstring(cls: type) -> None:
    """Print the docstring of an algorithm, or of a part of one, as it stands in the source, without its arguments."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"{usual_name(cls)}: {_summary(cls)}", style="bold")
    console.print(f"class {import_path(cls)}", style="dim")
    text = (inspect.getdoc(cls) or "").partition("\n\n")[2].replace("::\n", ":\n")
    # The section Args ends before the next line that is not indented; the parser's own help has the same texts.
    text = plain(re.sub(r"^Args:\n(?: .*\n?|\n)*", "", text, flags=re.MULTILINE)).strip()
    console.print("\n" * bool(text) + text + "\n")
