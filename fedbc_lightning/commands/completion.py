"""The command ``completion``, which prints a script that completes command lines in a shell."""

from __future__ import annotations

import enum
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, get_args, get_origin

from lightning.pytorch.cli import LightningArgumentParser

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.algorithms.base import usual_name
from fedbc_lightning.cli.choices import choices
from fedbc_lightning.cli.command_arguments import (
    COMMANDS,
    CONFIG_OPTIONS,
    PROG,
    STUDIES,
    STUDY_COMMANDS,
    SUBCOMMANDS,
    TOOLS,
    UsageError,
    shipped_configs,
)
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.cli.messages import class_arguments
from fedbc_lightning.cli.parser import CLASS_KEYS
from fedbc_lightning.commands.studies import StudyParser, study_parser
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.papers.reproductions import REPRODUCTIONS

SHELLS = ("bash", "zsh")
MANY = ("model", "optimizer", "lr_scheduler", "trainer.callbacks", "trainer.logger")
"""Keys that take classes of other packages, too: those imported so far would be an accidental choice."""

FUNCTIONS = {
    "bash": """\
_fedbc_yaml() {{ compgen -d -S / -- "$1"; compgen -f -X '!*.y*ml' -- "$1"; }}
_fedbc_configs() {{ compgen -W '{configs}' -- "$1"; _fedbc_yaml "$1"; }}
_fedbc_studies() {{ compgen -W '{studies}' -- "$1"; _fedbc_yaml "$1"; }}
_fedbc_run_dirs() {{ compgen -d -- "${{1:-runs/}}"; }}
_fedbc_checkpoint_files() {{ compgen -W last -- "$1"; _fedbc_run_dirs "$1"; compgen -f -X '!*.ckpt' -- "$1"; }}""",
    "zsh": """\
_fedbc_configs() {{ compadd -- {configs}; _files -g '*.y*ml'; }}
_fedbc_studies() {{ compadd -- {studies}; _files -g '*.y*ml'; }}
_fedbc_run_dirs() {{ _files -/; }}
_fedbc_checkpoint_files() {{ compadd last; _files -g '*.ckpt'; }}""",
}
"""Functions in the language of a shell, which look at the user's folders when a word is completed.

In bash, names with ``_dir`` or ``_file`` make shtab complete folders step by step.
"""


DESCRIPTION = """\
Print a script that completes commands, options, shipped configs and run folders, for example into
~/.local/share/bash-completion/completions/fedbc-cli (bash) or a file _fedbc-cli in a folder of $fpath (zsh). Options of
methods, models and data are those of all that are shipped. Print it again after an update."""


class _BuiltError(Exception):
    """Raised when the parsers of all commands are there."""


class _AllParsers(FederatedCLI):
    """Builds the parsers of all commands, and parses nothing."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> NoReturn:
        """Stop before the words are parsed."""
        raise _BuiltError

    @classmethod
    def by_command(cls) -> dict[str, ArgumentParser]:
        """Return the parsers of the commands on one run by their names."""
        cli = cls.__new__(cls)
        try:
            cls.__init__(cli, args=[], parser_kwargs={"prog": PROG})
        except _BuiltError:
            return dict(cli.command_parsers)
        raise AssertionError("the command line was parsed")


def completion(words: list[str]) -> int:
    """Run ``fedbc-cli completion``: print the script of a shell.

    Args:
        words: Words of the command line after the command.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: No shell is named.
        ModuleNotFoundError: The package ``shtab`` is not installed; the message says how to install it.
    """
    parser = StudyParser(prog=f"{PROG} completion", description=DESCRIPTION)
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="Shell that reads the script.")
    shell = parser.parse_args(words).shell
    if shell is None:
        raise UsageError(f"for which shell? {PROG} completion {' or '.join(SHELLS)}")
    print(script(shell))
    return 0


def script(shell: str) -> str:
    """Return the script for a shell.

    The parser of ``fit`` itself would name every argument of every class that may stand below another one, which takes
    longer than ten minutes; this one knows the arguments of the shipped classes only.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "completion needs the package shtab: pip install 'fedbc-lightning[completion]'"
        ) from None
    return shtab.complete(shallow_parser(), shell, preamble=_functions(shell))


def _functions(shell: str) -> str:
    shipped = list(shipped_configs())
    names = {
        "configs": " ".join(name for name in shipped if not name.startswith(STUDIES)),
        "studies": " ".join(name for name in shipped if name.startswith(STUDIES)),
    }
    return FUNCTIONS[shell].format(**names)


def shallow_parser() -> ArgumentParser:
    """Return a parser of argparse with the commands, their options and the values that are few and known."""
    root = ArgumentParser(prog=PROG)
    root.add_argument("--version", action="store_true", help="Show the version.")
    parsers = root.add_subparsers()
    options = _options_of_classes()
    for command, full in _AllParsers.by_command().items():
        shallow = parsers.add_parser(command, help=SUBCOMMANDS[command])
        _copy_options(full, shallow)
        for option, classes in options.items():
            shallow.add_argument(option, help=f"Argument of {', '.join(classes)}.")
    for command in STUDY_COMMANDS | TOOLS:
        _add_study_command(parsers.add_parser(command, help=COMMANDS[command]), command)
    return root


def _add_study_command(shallow: ArgumentParser, command: str) -> None:
    if command == "report":
        _complete_by(shallow.add_argument("folder", help="Folder of a run or of a study."), "_fedbc_run_dirs")
    elif command == "completion":
        shallow.add_argument("shell", choices=SHELLS)
    else:
        if command == "reproduce":
            shallow.add_argument("name", nargs="+", choices=list(REPRODUCTIONS), help="Table or figure.")
        _copy_options(study_parser(command), shallow)


def _copy_options(full: ArgumentParser, shallow: ArgumentParser) -> None:
    """Add the options of a parser to a shallow one, without what lies below a class."""
    for action in private_cli.actions(full):
        if action.option_strings and action.help != SUPPRESS and action.dest != "help":
            _copy_option(action, shallow, is_of_study=full.prog.split()[1] in STUDY_COMMANDS)


def _copy_option(action: Action, shallow: ArgumentParser, *, is_of_study: bool) -> None:
    text = None if action.help is None else action.help.partition("\n")[0].replace("%", "%%")
    names = action.option_strings
    if set(names) & set(CONFIG_OPTIONS):
        made = shallow.add_argument(*names, action="append", help=text)
        _complete_by(made, "_fedbc_studies" if is_of_study else "_fedbc_configs")
    elif action.dest == "ckpt_path":
        _complete_by(shallow.add_argument(*names, help=text), "_fedbc_checkpoint_files")
    elif action.nargs == 0:
        shallow.add_argument(*names, action="store_true", help=text)
    else:
        key = action.dest.removesuffix(".help")
        base = CLASS_KEYS.get(key)
        known = _names(key, base) if base else list(_values(private_cli.type_hint(action)))
        shallow.add_argument(*names, choices=known or None, help=text)


def _complete_by(action: Action, function: str) -> None:
    action.complete = dict.fromkeys(SHELLS, function)  # type: ignore[attr-defined]


def _names(key: str, base: type) -> list[str]:
    """Return the names of the classes that a key takes, of the shipped ones where other packages bring more."""
    known = [cls for cls in choices(base) if is_ours(cls) or key not in MANY]
    return [usual_name(cls) if issubclass(cls, FederatedAlgorithm) else cls.__name__ for cls in known or choices(base)]


def _values(hint: Any) -> Iterable[str]:
    """Yield the values of a type that has few."""
    if hint is bool:
        yield from ("true", "false")
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield from (member.name for member in hint)
    elif get_origin(hint) is Literal:
        yield from (str(value) for value in get_args(hint))
    elif get_origin(hint) not in (list, dict, tuple):
        for inner in get_args(hint):
            yield from _values(inner)


def _options_of_classes() -> dict[str, list[str]]:
    """Map options such as ``--algorithm.mu`` to the names of the shipped classes that have them."""
    options: dict[str, list[str]] = {}
    for section in ("algorithm", "model", "data"):
        for cls in choices(CLASS_KEYS[section]):
            if is_ours(cls):
                for argument in class_arguments(f"{cls.__module__}.{cls.__qualname__}"):
                    options.setdefault(f"--{section}.{argument}", []).append(cls.__name__)
    return options
