"""The command ``completion``, which prints a script that completes command lines in a shell."""

from __future__ import annotations

from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.algorithms.base import usual_name
from fedbc_lightning.cli.classes import arguments_of, choices
from fedbc_lightning.cli.command_arguments import (
    COMMANDS,
    CONFIG_OPTIONS,
    PROG,
    STUDIES,
    STUDY_COMMANDS,
    TOOLS,
    UsageError,
    shipped_configs,
)
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.cli.parser import CLASS_KEYS
from fedbc_lightning.commands.studies import StudyParser, study_parser
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.papers.reproductions import REPRODUCTIONS

SHELLS = ("bash", "zsh")

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
    """Return the script for a shell, which jsonargparse makes with shtab."""
    try:
        import shtab  # noqa: F401 (jsonargparse needs it, and says so in other words)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "completion needs the package shtab: pip install 'fedbc-lightning[completion]'"
        ) from None
    shipped = list(shipped_configs())
    names = {
        "configs": " ".join(name for name in shipped if not name.startswith(STUDIES)),
        "studies": " ".join(name for name in shipped if name.startswith(STUDIES)),
    }
    return _AllCommands.parser_of_all().get_completion_script(
        f"shtab-{shell}", preambles=[FUNCTIONS[shell].format(**names)]
    )


class _BuiltError(Exception):
    """Raised when the parsers of all commands are there."""


class _AllCommands(FederatedCLI):
    """Builds the parsers of all commands, and parses nothing."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> NoReturn:
        """Stop before the words are parsed."""
        raise _BuiltError

    @classmethod
    def parser_of_all(cls) -> ArgumentParser:
        """Return a parser of all commands whose options know what completes them."""
        cli = cls.__new__(cls)
        try:
            cls.__init__(cli, args=[], parser_kwargs={"prog": PROG})
        except _BuiltError:
            parsers: dict[str, Any] = dict(cli.command_parsers)
        for parser in parsers.values():
            for option in _options_of_classes():
                parser.add_argument(option)
        subcommands: Any = next(
            action for action in private_cli.actions(cli.parser) if isinstance(action.choices, dict)
        )
        for command in STUDY_COMMANDS | TOOLS:
            parsers[command] = _parser_on_studies(command)
            subcommands.add_subcommand(command, parsers[command], help=COMMANDS[command])
        for command, parser in parsers.items():
            for action in private_cli.actions(parser):
                _complete(action, is_of_study=command in STUDY_COMMANDS)
        return cli.parser


def _parser_on_studies(command: str) -> ArgumentParser:
    if command not in ("report", "completion"):
        parser = study_parser(command)
        if command == "reproduce":
            parser.add_argument("names", nargs="+", choices=list(REPRODUCTIONS))
        return parser
    parser = StudyParser(prog=f"{PROG} {command}")
    if command == "report":
        parser.add_argument("folder")
    else:
        parser.add_argument("shell", choices=SHELLS)
    return parser


def _complete(action: Any, *, is_of_study: bool) -> None:
    """Say what completes an option.

    A class is completed by its name. jsonargparse 4.53 would go on to the arguments of every class that may stand in a
    class below it: 45 MB of script for the methods alone.
    """
    key = action.dest.removesuffix(".help")
    if set(action.option_strings) & set(CONFIG_OPTIONS):
        function = "_fedbc_studies" if is_of_study else "_fedbc_configs"
        action.complete = dict.fromkeys(SHELLS, function)
    elif key in ("ckpt_path", "folder"):
        function = "_fedbc_checkpoint_files" if key == "ckpt_path" else "_fedbc_run_dirs"
        action.complete = dict.fromkeys(SHELLS, function)
    elif key in CLASS_KEYS:
        known = [cls for cls in choices(CLASS_KEYS[key]) if is_ours(cls)] or choices(CLASS_KEYS[key])
        action.choices = [usual_name(cls) if issubclass(cls, FederatedAlgorithm) else cls.__name__ for cls in known]


def _options_of_classes() -> list[str]:
    """Return the options of all shipped methods, models and data, such as ``--algorithm.mu``."""
    return sorted(
        {
            f"--{section}.{argument}"
            for section in ("algorithm", "model", "data")
            for cls in choices(CLASS_KEYS[section])
            if is_ours(cls)
            for argument in arguments_of(cls)
        }
    )
