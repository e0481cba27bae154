"""Condenses jsonargparse's long errors into one line that suggests what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jsonargparse import ArgumentParser

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.algorithms.base import usual_name
from fedbc_lightning.cli.choices import (
    PART_KINDS,
    base_at,
    choices,
    import_object,
    is_list,
    kind_of,
    subclasses,
)
from fedbc_lightning.cli.command_arguments import OVERLAYS, SUBCOMMANDS, shipped_configs
from fedbc_lightning.cli.imports import about_import, missing_package
from fedbc_lightning.cli.names import fold
from fedbc_lightning.cli.suggestions import PLACES, about_stray_words, did_you_mean_option, takes
from fedbc_lightning.core.errors import nearest
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.local import Penalty
from fedbc_lightning.server import RobustRule

_UNKNOWN_OPTION = re.compile(
    r"(?:^unrecognized arguments: --|does not accept option '|^Option ')([\w.]+)((?:=| (?!-))\S+)?"
)
_NO_VALUE = re.compile(r"argument (--[\w.]+)(?:/\S+)?: expected one argument")
_STRAY_WORDS = re.compile(r"^unrecognized arguments: (.+)")
_UNKNOWN_ARGUMENT = re.compile(
    r"class_path '([\w.]+)':\s+(?:Parser key \"[\w.]+\":\s+)*(?:Option|Key) '([\w.]+)' is not"
)
_UNKNOWN_CLASS = re.compile(r"(?:Expected a dot import path string|Unexpected import path format): (.+)")
_WRONG_CLASS = re.compile(r"Import path does not correspond to a subclass of (\w+)")
_BROKEN_IMPORT = re.compile(
    r"(No module named '[\w.]+'|cannot import name[^\n]*|module '[\w.]+' has no attribute '[\w.]+')"
)
_MISSING_ARGUMENT = re.compile(r"class_path '([\w.]+)':\s+the following arguments are required: ([\w, .]+)")
_EXPECTED = re.compile(r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[([^\]\n]*)\])")
_GIVEN = re.compile(r"(?:Got|Given) value: (.*)")
_CLASS_PATH = re.compile(r"class_path '([\w.]+)':")
_KEY = re.compile(r"Parser key \"([\w.]+)\":")
_HELP = re.compile(r"^--([\w.]+)\.help: ")
_NOISE = re.compile(
    r"^(Subtypes|Given value|Errors|(- )?Does not validate|- Expected a <class 'NoneType'>|- Expected a path but)"
)


def condense(message: str, keys: Iterable[str], bases: Mapping[str, type]) -> str:
    """Condense an error of the parser into one line.

    Args:
        message: Text of jsonargparse's error.
        keys: All keys that the command takes, e.g. ``trainer.max_rounds``.
        bases: Map from the sections that take a class to their base classes.

    Returns:
        The key, its mistake and the nearest right name; the joined lines of the message if its form is unknown.
    """
    message = _deepest(message)
    if match := _UNKNOWN_ARGUMENT.search(message):
        return _unknown_argument(match[1], match[2], _path(message))
    if match := _UNKNOWN_OPTION.search(message):
        return _unknown_option(match[1], list(keys), match[2] or "")
    if match := _STRAY_WORDS.match(message):
        return about_stray_words(match[1], list(keys), bases) or message
    path, chosen = _path(message), _chosen(message)
    place = _place(path, chosen)
    if match := _MISSING_ARGUMENT.search(message):
        if missing := missing_package(match[1]):
            return f"{place}: {missing}"
        is_option = place == path and (path == "trainer.callbacks" or not is_list(path, chosen))
        return f"{place}: {_missing_arguments(match[1], match[2].split(', '), path if is_option else None)}"
    base = base_at(path, bases, chosen)
    if match := _WRONG_CLASS.search(message):
        given = _GIVEN.search(message)
        other = base and given and _other_kind(place, given[1].rpartition(".")[2], base)
        return other or f"{path}: what is given is not a {match[1]}"
    if match := _BROKEN_IMPORT.search(message):
        return f"{place}: {about_import(match[1])}"
    if base is not None and (match := _UNKNOWN_CLASS.search(message)):
        return _unknown_class(place, match[1], base)
    if (expected := _EXPECTED.findall(message)) and (match := _GIVEN.search(message)):
        return f"{place}: {_wrong_value(match[1], expected)}"
    if message.startswith("the following arguments are required:"):
        names = re.sub(rf"(?<=[ ,])(?:{'|'.join(SUBCOMMANDS)})\.", "", message.partition(":")[2]).strip()
        options = " ".join(f"--{name} ..." for name in names.split(", "))
        example = "studies/digits.yaml" if "algorithms" in names else "digits.yaml"
        return f"missing: {names}. Give a --config, such as --config {example}, or {options}"
    if match := _NO_VALUE.search(message):
        return f"{match[1]} needs a value: {match[1]} ..."
    lines = (line.strip() for line in _KEY.sub("", message).splitlines())
    said = "; ".join(dict.fromkeys(line.removeprefix("- ") for line in lines if line and not _NOISE.match(line)))
    return f"{path}: {said}" if path else said


def _path(message: str) -> str:
    """Join the keys of a nested message: ``algorithm`` and ``dual_lr`` give ``algorithm.dual_lr``."""
    return ".".join(_KEY.findall(message) or _HELP.findall(message))


def _deepest(message: str) -> str:
    r"""Reduce the errors of a union's types to one: that inside a class if there is any, for that class was meant.

    Example:
        >>> print(_deepest("Errors:\n  - Parser key \"x\":\n    deep\n  - Not a y\nGiven value: 1"))
        Parser key "x":
            deep
        Given value: 1
    """
    lines = message.splitlines()
    for start, line in enumerate(lines):
        if line.strip() == "Errors:":
            indent = len(line) - len(line.lstrip()) + 2
            end = next((k for k in range(start + 1, len(lines)) if not lines[k].startswith(" " * indent)), len(lines))
            errors = re.split(rf"\n {{{indent}}}- ", "\n" + "\n".join(lines[start + 1 : end]))[1:]
            inside = [error for error in errors if _CLASS_PATH.search(error) or _KEY.search(error)]
            if inside:
                return "\n".join([*lines[:start], _deepest(inside[0]), *lines[end:]])
    return message


def _chosen(message: str) -> dict[str, type]:
    """Map the keys of a nested message to the classes that are given there."""
    chosen: dict[str, type] = {}
    path = ""
    for match in re.finditer(f"{_KEY.pattern}|{_CLASS_PATH.pattern}", message):
        if match[1]:
            path = f"{path}.{match[1]}" if path else match[1]
        else:
            try:
                found = import_object(match[2])
            except (ImportError, AttributeError, ValueError):  # the message itself reports the broken path
                break
            if isinstance(found, type):
                chosen[path] = found
    return chosen


def _place(path: str, chosen: Mapping[str, type]) -> str:
    """Return the path of an option for a message.

    Inside a list it is the key of the list, the class of the element and the rest of the path.
    """
    keys = path.split(".")
    for end in range(1, len(keys)):
        place, inside = ".".join(keys[:end]), ".".join(keys[end:])
        if place in chosen and is_list(place, chosen):
            return f"{place}: {chosen[place].__name__}.{inside}"
    return path


def _wrong_value(value: str, expected: list[tuple[str, str]]) -> str:
    kinds = list(dict.fromkeys(kind for kind, _ in expected if kind and kind != "NoneType"))
    words = [word.strip(" '") for _, literals in expected for word in literals.split(",") if word]
    if kinds == ["list"] and not words:
        return f"{value} is not a list: give a list: [{value if value.isidentifier() else '...'}]"
    if words and "bool" in kinds:
        kinds.remove("bool")
        words = ["true", "false", *words]
    if words and any(kind == "NoneType" for kind, _ in expected):
        words.append("null")
    named = [f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" for kind in kinds]
    if not words:
        return f"{value} is not {_either(named)}"
    return f"got '{value}'; use {_either([*named, *dict.fromkeys(words)])}"


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def _missing_arguments(class_path: str, names: list[str], path: str | None) -> str:
    name = class_path.rpartition(".")[2]
    if path is None:  # inside a list, which no option can set
        arguments = ", ".join(f"{argument}: ..." for argument in names)
        how = f"{{class_path: {name}, init_args: {{{arguments}}}}}"
    else:
        how = " ".join(f"--{path}.{argument} ..." for argument in names)
    return f"{name} needs {_join(names)}: give {how}"


def _near(word: str, known: Iterable[str]) -> str:
    near = nearest(word, known)
    return f"; did you mean '{near}'?" if near else ""


def _unknown_option(key: str, keys: Iterable[str], value: str) -> str:
    known = [name for name in keys if name != "help"]
    section, _, rest = key.partition(".")
    sections = {name.partition(".")[0] for name in known}
    if rest and section in sections:
        inside = [name for name in known if name.startswith(f"{section}.")]
        place = next((place for place, base in PLACES.items() if place != section and takes(base, rest)), None)
        if place is not None:
            return f"'{section}' has no key '{rest}'; it is one of {place}: --{place}.{rest}"
        near = _near(key, inside)
        return f"'{section}' has no key '{rest}'{near or '; it has ' + _join(n.partition('.')[2] for n in inside)}"
    question = None if rest else did_you_mean_option(section, value, known)
    if question:
        return f"no option '--{section}'; {question}"
    near = _near(section, sections)
    return f"no section or option '{section}'{near or '; there are ' + _join(sorted(sections))}"


def _unknown_argument(class_path: str, argument: str, path: str) -> str:
    names = class_arguments(class_path)
    near = _inside(class_path, argument, path) or _near(argument, names)
    return f"{path}: {class_path} has no argument '{argument}'{near or '; it has ' + _join(names)}"


def _inside(class_path: str, argument: str, path: str) -> str:
    """Return the question whether an argument of a part is meant, such as the partitioner of data."""
    cls = import_object(class_path)
    parts = {name: base_at(f"{path}.{name}", {path: cls}, {path: cls}) for name in class_arguments(class_path)}
    found = [name for name, base in parts.items() if base is not None and takes(base, argument)]
    return f"; did you mean --{path}.{found[0]}.{argument}?" if found else ""


def offending_key(message: str) -> tuple[str, str | None]:
    """Return the key that an error of the parser is about, with the value that it was given, if that is known."""
    message = _deepest(message)
    if match := _UNKNOWN_ARGUMENT.search(message):
        return f"{_path(message)}.{match[2]}", None
    if match := _UNKNOWN_OPTION.search(message):
        return match[1], None
    given = _GIVEN.search(message)
    return _path(message), given and given[1]


def _unknown_class(section: str, name: str, base: type) -> str:
    known = choices(base)
    if not known:  # no class to choose, such as Stragglers
        path = f"{base.__module__}.{base.__qualname__}"
        return f"{section}: got '{name}'; give {{{', '.join(f'{key}: ...' for key in class_arguments(path))}}}"
    other = _other_kind(section, name, base)
    if other is not None:
        return other
    ours = [_given_as(cls) for cls in known if is_ours(cls)]
    every = sorted({cls.__name__ for cls in subclasses(base) if not cls.__name__.startswith("_")})
    near = _near(name, [_given_as(cls) for cls in subclasses(base) if is_ours(cls) and cls in known])
    near = near or _near(name, every) or _near(f"{name}{base.__name__.removeprefix('Lightning')}", every)
    return f"{section}: no class '{name}'{near or '; there are ' + _join(ours or every)}"


def _given_as(cls: type) -> str:
    """Return the name by which a class is given: the usual name for an algorithm, else that of the class."""
    return usual_name(cls) if issubclass(cls, FederatedAlgorithm) else cls.__name__


def _other_kind(section: str, name: str, base: type) -> str | None:
    """Explain a name that belongs to another kind of class, and where it goes; None if it is unknown."""
    found = [
        cls for kind in PART_KINDS if kind is not base for cls in choices(kind) if fold(cls.__name__) == fold(name)
    ]
    if not found:
        return None
    part = found[0]
    said = f"{section}: {part.__name__} is a {kind_of(part)}"
    if base is not FederatedAlgorithm or not is_ours(part):
        return f"{said}, not a {PART_KINDS.get(base, base.__name__)}"
    if issubclass(part, RobustRule):
        overlay = f"{OVERLAYS}{re.sub(r'(?<!^)(?=[A-Z])', '_', part.__name__).lower()}.yaml"
        or_overlay = f", or --config {overlay}" if overlay in shipped_configs() else ""
        return f"{said}: --algorithm FedAvg --algorithm.robust_rule {part.__name__}{or_overlay}"
    if issubclass(part, Penalty):
        return f"{said} of --algorithm Fed+: see --config {OVERLAYS}fedplus_layerwise.yaml"
    return f"{said} of --algorithm Composed: see --config {OVERLAYS}composed.yaml"


def class_arguments(class_path: str) -> list[str]:
    """Return the names of the arguments that a class and its base classes take in a config."""
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(import_object(class_path), "class", fail_untyped=False)
    return [key.removeprefix("class.") for key in added]


def _join(names: Iterable[str]) -> str:
    return ", ".join(names)
