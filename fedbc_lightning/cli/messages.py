"""Condenses the parser's errors into one line: what is wrong, where it stands, and what was probably meant."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import yaml
from lightning.pytorch import LightningModule

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.algorithms.base import usual_name
from fedbc_lightning.cli.classes import arguments_of, base_at, choices, import_object, why_no_import
from fedbc_lightning.cli.command_arguments import CONFIG_OPTIONS, SUBCOMMANDS, option_values, shipped_configs
from fedbc_lightning.core.errors import did_you_mean, nearest
from fedbc_lightning.core.lightning_arguments import LIGHTNING_ARGUMENTS, advice
from fedbc_lightning.core.origin import is_ours, subclasses
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.partition import Partitioner

# Map from names that options have in other programs to ours
SYNONYMS = {
    "seed": "seed_everything", "datamodule": "data", "dataset": "data", "method": "algorithm",
    "epochs": "trainer.local_epochs", "rounds": "trainer.max_rounds",
    "num_rounds": "trainer.max_rounds", "gpu": "trainer.devices", "gpus": "trainer.devices",
    "device": "trainer.accelerator", "resume": "ckpt_path", "checkpoint": "ckpt_path", "ckpt": "ckpt_path",
    "learning_rate": "model.lr", "output_dir": "trainer.default_root_dir", "clients": "trainer.clients_per_round",
}  # fmt: skip

# Keys that take a class, with the base class; an argument of one of its classes may have been meant
PLACES: dict[str, type] = {
    "model": LightningModule, "data.partitioner": Partitioner, "data": FederatedDataModule,
    "algorithm": FederatedAlgorithm,
}  # fmt: skip

# Keys of the config of a class
FORM = ("class_path", "init_args", "dict_kwargs")

# Forms of jsonargparse 4.53's messages
_UNKNOWN_OPTION = re.compile(r"(?:^unrecognized arguments: --|does not accept option '|^Option ')([\w.]+)")
_STRAY_WORD = re.compile(r"^unrecognized arguments: (\S+)")
_UNKNOWN_ARGUMENT = re.compile(
    r"class_path '([\w.]+)':\s+(?:Parser key \"[\w.]+\":\s+)*(?:Option|Key) '([\w.]+)' is not"
)
_NO_CLASS = re.compile(
    r"(?:Expected a dot import path string|Unexpected import path format): (.+)"
    r"|Import path (?:\S+ )?does not correspond to a subclass of \w+"
)
_IMPORT_PATH = re.compile(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_MISSING_ARGUMENT = re.compile(r"class_path '([\w.]+)':\s+the following arguments are required: ([\w, .]+)")
_EXPECTED = re.compile(r"Expected an? (?:<class '(?:collections\.abc\.)?(\w+)'>|typing\.Literal\[([^\]\n]*)\])")
_NESTED = re.compile(r"NestedArg\(key='([^']*)'")
_GIVEN = re.compile(r"(?:Got|Given) value: (.*)")
_CLASS_PATH = re.compile(r"class_path(?:': |=)'([\w.]+)'")
_KEY = re.compile(r"Parser key \"([\w.]+)\":")
_HELP = re.compile(r"^--([\w.]+)\.help: ")
_NOISE = re.compile(
    r"^(Subtypes|Given value|Errors|(- )?Does not validate|- Expected a <class 'NoneType'>|- Expected a path but)"
)


def one_line_of(message: str, keys: Iterable[str], bases: Mapping[str, type], words: Sequence[str] = ()) -> str:
    """Condense an error of the parser into one line.

    Args:
        message: Text of jsonargparse's error.
        keys: All keys that the command takes, e.g. ``trainer.max_rounds``.
        bases: Map from the sections that take a class to their base classes.
        words: The command line, in whose configs the mistake may stand.

    Returns:
        File and line, if the mistake stands in a config; the key, its mistake and the nearest right name.
    """
    message = _deepest(message)
    known = [key for key in keys if key != "help"]
    path = ".".join(_KEY.findall(message) or _HELP.findall(message))
    given = _GIVEN.search(message)
    key, value = path, given[1] if given else None
    if match := _UNKNOWN_ARGUMENT.search(message):
        cls = import_object(match[1])
        key = _misspelt_part(f"{path}.{match[2]}", [path, *(f"{path}.{name}" for name in arguments_of(cls))])
        said = unknown_key(key, known, path, cls)
    elif match := _UNKNOWN_OPTION.search(message):
        key = _misspelt_part(match[1], known)
        said = unknown_key(key, known)
    elif match := _STRAY_WORD.match(message):
        return _stray_word(match[1], known)
    elif other := next(filter(_near_form, re.findall(r"'(\w+)':", value or "")), None):
        key = f"{path}.{other}"
        said = unknown_key(key, known)
    else:
        said, named = _about_value(message, path, value, bases), _CLASS_PATH.findall(value or "")
        wrong = next((name for name in named if name in said or ("." in name and why_no_import(name))), None)
        if wrong and place_of_key(path, words):
            key, value = f"{path}.class_path", wrong
    place = place_of_key(key, words, value) if key else None
    return f"{place}: {said}" if place else said


def _misspelt_part(key: str, known: Iterable[str]) -> str:
    """Return a key up to that part of it which is unknown; others may stand below it."""
    there = {part for name in known for part in _prefixes(name)}
    return next(part for part in _prefixes(key) if part == key or not (part in there or part.endswith(FORM)))


def _prefixes(key: str) -> Iterator[str]:
    return accumulate(key.split("."), "{}.{}".format)


def _near_form(word: str) -> str | None:
    """Return the key of the form of a class's config that a misspelt word means."""
    return None if word in FORM else next(iter(difflib.get_close_matches(word, FORM, 1, cutoff=0.85)), None)


def unknown_key(key: str, keys: Sequence[str], path: str = "", cls: type | None = None) -> str:
    """Describe a key that does not exist, with the one that was meant: that of another program, or a similar one.

    Args:
        key: The full key.
        keys: All keys that the command takes.
        path: Key of the class that has no such argument.
        cls: That class.
    """
    if (lightnings := key.removeprefix("trainer.")) in LIGHTNING_ARGUMENTS and not path:
        return f"unknown key '{key}', an argument of lightning.Trainer: {advice(lightnings)}"
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    if form := _near_form(last):
        return f"unknown key '{key}': did you mean {form}?"
    inside = [f"{path}.{name}" for name in arguments_of(cls)] if cls else []
    candidates = [*inside, *keys]
    if any(name.startswith("model") for name in keys):  # a command on one run, which has the keys of classes, too
        candidates += [
            f"{place}.{name}"
            for place, base in PLACES.items()
            if place not in (path, key)
            for shipped in choices(base) if is_ours(shipped)
            for name in inspect.signature(shipped).parameters
        ]  # fmt: skip
    sections = {name.partition(".")[0] for name in keys}
    synonyms = {name: meant for name, meant in SYNONYMS.items() if meant.partition(".")[0] in sections}
    meant = synonyms.get(last, "")
    found = [name for name in dict.fromkeys(candidates) if name.rpartition(".")[2] == last and name != key]
    if meant and section in (last, meant.partition(".")[0]):
        found = [meant]
    elif not found:
        by_last = {name.rpartition(".")[2]: name for name in reversed(candidates)}
        own = {name: full for name, full in by_last.items() if full.startswith(f"{section}.")}
        # All keys of a section are alike in its name, so that whole keys must be nearly the same.
        near = (
            nearest(key, candidates, 0.87)
            or own.get(nearest(last, own) or "")
            or synonyms.get(nearest(last, synonyms, 0.85) or "")
            or by_last.get(nearest(last, by_last, 0.7 if "." in key else 0.6) or "")
        )
        found = [near] if near else []
    if found:
        return f"unknown key '{key}': did you mean {' or '.join(f'--{name}' for name in found[:3])}?"
    beside = inside or [name for name in keys if name.startswith(f"{section}.")] or sorted(sections)
    return f"unknown key '{key}': there is {', '.join(beside)}"


def _stray_word(word: str, keys: Sequence[str]) -> str:
    """Describe a word that no option takes: the name of a config, or an option without its dashes."""
    if word.endswith((".yaml", ".yml")) or f"{word}.yaml" in shipped_configs():
        return f"'{word}' stands alone; did you mean --config {word}?"
    name, _, value = word.lstrip("-").partition("=")
    return (
        f"'{word}' is no option; did you mean --{name} {value or '...'}?" if name in keys else unknown_key(name, keys)
    )


def _about_value(message: str, path: str, value: str | None, bases: Mapping[str, type]) -> str:
    """Describe what is wrong with the value of an option that exists."""
    at = f"{path}: " if path else ""
    if match := _MISSING_ARGUMENT.search(message):
        needed = match[2].split(", ")
        how = " ".join(f"--{path}.{name} ..." for name in needed)
        return f"{at}{match[1].rpartition('.')[2]} needs {', '.join(needed)}: give {how}"
    base, given = base_at(path, bases), _CLASS_PATH.findall(value or "") or [value or ""]
    paths = [found for each in given for found in _IMPORT_PATH.findall(each)]
    if base and (why := next(filter(None, map(why_no_import, paths)), None)):
        return f"{at}cannot import it: {why}"
    if (match := _NO_CLASS.search(message)) and base:
        return at + _no_class(match[1] or [*paths, str(value)][0], base, exists=match[1] is None)
    expected = _EXPECTED.findall(message)
    if match := _NESTED.match(value or ""):
        return f"{at}nothing says whose option {match[1]} is; give --{path} and the name of a class, too"
    if expected and value is not None:
        words = {"NoneType": "null", "Sequence": "a list", "list": "a list"}
        kinds = dict.fromkeys(words.get(kind, kind) for kind, _ in expected if kind)
        literals = [word.strip(" '") for _, listed in expected for word in listed.split(",") if word]
        return f"{at}got '{value}'; give {' or '.join([*literals, *kinds])}"
    if message.startswith("the following arguments are required:"):
        needed = re.sub(rf"(?<=[ ,])(?:{'|'.join(SUBCOMMANDS)})\.", "", message.partition(":")[2]).strip().split(", ")
        config = f"--config {'studies/digits.yaml' if 'algorithms' in needed else 'digits.yaml'}"
        # Which client and round are meant no config says.
        how = "" if {"client", "round"}.intersection(needed) else f"a --config, such as {config}, or "
        return f"missing: {', '.join(needed)}. Give {how}{' '.join(f'--{name} ...' for name in needed)}"
    lines = [line.strip() for line in _KEY.sub("", message).splitlines()]
    told = dict.fromkeys(line.removeprefix("- ") for line in lines if line and not _NOISE.match(line))
    return at + ("; ".join(told) or " ".join(lines))


def _no_class(name: str, base: type, *, exists: bool) -> str:
    """Describe the name of a class that does not exist, or that is of another kind."""
    known = {usual_name(cls) if issubclass(cls, FederatedAlgorithm) else cls.__name__: cls for cls in choices(base)}
    if not known:  # no class to choose, such as Stragglers
        return f"got '{name}'; give {{{', '.join(f'{key}: ...' for key in arguments_of(base))}}}"
    if exists:
        return f"{name} is not a {base.__name__}"
    ours = [key for key, cls in known.items() if is_ours(cls)]
    every = [*known, *sorted(cls.__name__ for cls in subclasses(base) if not cls.__name__.startswith("_"))]
    suffix = base.__name__.removeprefix("Lightning")  # Digits is meant for DigitsDataModule
    without = {key.removesuffix(suffix): key for key in every}
    meant = without.get(nearest(name.removesuffix(suffix), without) or "", name)
    return f"no class '{name}'; {did_you_mean(meant, every, 'there are ' + ', '.join(ours or every))}"


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
            inside = [error for error in errors if "class_path '" in error or _KEY.search(error)]
            if inside:
                return "\n".join([*lines[:start], _deepest(inside[0]), *lines[end:]])
    return message


def place_of_key(key: str, words: Sequence[str], value: str | None = None) -> str | None:
    """Return file and line of a key, such as ``mine.yaml, line 3``.

    Args:
        key: The key, such as ``trainer.max_rounds``; ``init_args`` may be left out of it.
        words: The command line, whose last config with the key is meant.
        value: What the key is given there, if several configs have it.

    Returns:
        The place; None if no config file has the key, or the command line itself gives it.
    """
    if any(word.partition("=")[0] == f"--{key}" for word in words):
        return None
    found = []
    for file in reversed([given for _, given in option_values(list(words), CONFIG_OPTIONS) if os.path.isfile(given)]):
        with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):  # the parser's own message says where
            root = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
            found += [(file, *pair) for pair in _below(root, key.split("."))]
    # Each config is parsed by itself, so that a mistake may stand in one whose value a later one replaces.
    found.sort(key=lambda each: value is None or each[2].value != value)
    return next((f"{file}, line {name.start_mark.line + 1}" for file, name, _ in found), None)


def _below(node: yaml.Node | None, keys: list[str]) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield key and value of a path of keys."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _below(child, keys)
    if not isinstance(node, yaml.MappingNode):
        return
    for name, child in node.value:
        if name.value == keys[0] and len(keys) == 1:
            yield name, child
        elif name.value == keys[0]:
            yield from _below(child, keys[1:])
        elif name.value == "init_args":
            yield from _below(child, keys)
