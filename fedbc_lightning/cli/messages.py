"""jsonargparse's errors, many lines long, said in one line with what was probably meant."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping

from jsonargparse import ArgumentParser

_UNKNOWN_OPTION = re.compile(r"(?:^unrecognized arguments: --|does not accept option '|^Option ')([\w.]+)")
_UNKNOWN_ARGUMENT = re.compile(
    r"class_path '([\w.]+)':\s+(?:Parser key \"[\w.]+\":\s+)*(?:Option|Key) '([\w.]+)' is not"
)
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: ([\w.]+)")
_WRONG_CLASS = re.compile(r"Import path does not correspond to a subclass of (\w+)")
_BROKEN_IMPORT = re.compile(
    r"(No module named '[\w.]+'|cannot import name[^\n]*|module '[\w.]+' has no attribute '[\w.]+')"
)
_MISSING_ARGUMENT = re.compile(r"class_path '([\w.]+)':\s+the following arguments are required: ([\w, .]+)")
_WRONG_VALUE = re.compile(r"Expected (?:a|an) (<class '\w+'>)\.? Got value: (.*)")
_KEY = re.compile(r"Parser key \"([\w.]+)\":")
_HELP = re.compile(r"^--([\w.]+)\.help: ")
_NOISE = re.compile(
    r"^(Subtypes|Given value|Errors|(- )?Does not validate|- Expected a <class 'NoneType'>|- Expected a path but)"
)


def condense(message: str, keys: Iterable[str], bases: Mapping[str, type]) -> str:
    """One line for an error of the parser.

    Args:
        message: What jsonargparse says.
        keys: All keys that the command takes, e.g. ``trainer.max_rounds``.
        bases: The sections that take a class, with its base class.

    Returns:
        The key, what is wrong with it, and the nearest right name; for a message of unknown form its lines, joined.
    """
    if match := _UNKNOWN_ARGUMENT.search(message):
        return _unknown_argument(match[1], match[2], _path(message))
    if match := _UNKNOWN_OPTION.search(message):
        return _unknown_option(match[1], keys)
    path = _path(message)
    if match := _MISSING_ARGUMENT.search(message):
        return f"{path}: {match[1]} needs {match[2]}: give --{path}.{match[2].partition(',')[0]} ..."
    if match := _WRONG_CLASS.search(message):
        return f"{path}: what is given is not a {match[1]}"
    if match := _BROKEN_IMPORT.search(message):
        return f"{path}: cannot import it: {match[1]}"
    if path in bases and (match := _UNKNOWN_CLASS.search(message)):
        return _unknown_class(path, match[1], bases[path])
    if match := _WRONG_VALUE.search(message):
        kind = match[1].removeprefix("<class '").removesuffix("'>")
        article = "an" if kind[0] in "aeiou" else "a"
        return f"{path}: {match[2]} is not {article} {kind}"
    if message.startswith("the following arguments are required:"):
        names = re.sub(r"(?<=[ ,])(?:fit|validate|test|partition)\.", "", message.partition(":")[2]).strip()
        return f"missing: {names}. Give a --config, or " + " ".join(f"--{name} ..." for name in names.split(", "))
    lines = (line.strip() for line in _KEY.sub("", message).splitlines())
    said = "; ".join(dict.fromkeys(line.removeprefix("- ") for line in lines if line and not _NOISE.match(line)))
    return f"{path}: {said}" if path else said


def _path(message: str) -> str:
    """The keys of a nested message, joined: ``algorithm`` and ``dual_lr`` make ``algorithm.dual_lr``."""
    return ".".join(_KEY.findall(message) or _HELP.findall(message))


def _near(word: str, known: Iterable[str]) -> str:
    names = list(known)
    lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word, names, n=1) or difflib.get_close_matches(word.lower(), lower, n=1)
    return f"; did you mean '{lower.get(found[0], found[0])}'?" if found else ""


def _unknown_option(key: str, keys: Iterable[str]) -> str:
    known = [name for name in keys if name != "help"]
    section, _, rest = key.partition(".")
    sections = {name.partition(".")[0] for name in known}
    if rest and section in sections:
        inside = [name for name in known if name.startswith(f"{section}.")]
        near = _near(key, inside)
        return f"'{section}' has no key '{rest}'{near or '; it has ' + _join(n.partition('.')[2] for n in inside)}"
    near = _near(section, sections)
    return f"no section or option '{section}'{near or '; there are ' + _join(sorted(sections))}"


def _unknown_argument(class_path: str, argument: str, path: str) -> str:
    names = class_arguments(class_path)
    near = _near(argument, names)
    return f"{path}: {class_path} has no argument '{argument}'{near or '; it has ' + _join(names)}"


def _unknown_class(section: str, name: str, base: type) -> str:
    known = sorted(cls.__name__ for cls in subclasses(base))
    ours = sorted(cls.__name__ for cls in subclasses(base) if cls.__module__.startswith("fedbc_lightning."))
    near = _near(name, ours) or _near(name, known)
    return f"{section}: no class '{name}'{near or '; there are ' + _join(ours or known)}"


def class_arguments(class_path: str) -> list[str]:
    """Names of the arguments that a class takes in a config, its base classes' included."""
    module, _, name = class_path.rpartition(".")
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(getattr(importlib.import_module(module), name), "class", fail_untyped=False)
    return [key.removeprefix("class.") for key in added]


def subclasses(base: type) -> set[type]:
    """All classes below ``base`` that have been imported."""
    below: set[type] = set()
    children: list[type] = base.__subclasses__()
    for child in children:
        below |= {child, *subclasses(child)}
    return below


def _join(names: Iterable[str]) -> str:
    return ", ".join(names)
