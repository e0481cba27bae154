"""The command ``completion``, which prints a script that completes command lines in a shell."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser, capture_parser

from fedbc_lightning.algorithms.base import usual_name
from fedbc_lightning.cli.classes import arguments_of, choices
from fedbc_lightning.cli.command_arguments import PROG, STUDY_COMMANDS, SUBCOMMANDS, shipped_configs
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.cli.parser import CLASS_KEYS, FederatedArgumentParser
from fedbc_lightning.commands import adopt, deploy
from fedbc_lightning.commands.studies import command_parser
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.errors import UsageError, needs
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.papers.reproductions import REPRODUCTIONS

SHELLS = ("bash", "zsh")

# Functions in the language of a shell, which offer shipped configs and files. In bash, names with ``_file`` make shtab
# complete folders step by step.
FUNCTIONS = {
    "bash": """\
_fedbc_config_files() {{
  compgen -W '{configs}' -- "$1"; compgen -d -S / -- "$1"; compgen -f -X '!*.y*ml' -- "$1"
}}""",
    "zsh": "_fedbc_config_files() {{ compadd -- {configs}; _files -g '*.y*ml'; }}",
}

DESCRIPTION = """\
Print a script that completes commands, options, shipped configs, classes and files, for example into
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
        ConfigurationError: The package ``shtab`` is not installed; the message says how to install it.
    """
    shell = _own_parser().parse_args(words).shell
    if shell is None:
        raise UsageError(f"for which shell? {PROG} completion {' or '.join(SHELLS)}")
    print(script(shell))
    return 0


def _own_parser() -> FederatedArgumentParser:
    parser = FederatedArgumentParser(prog="fedbc-cli completion", description=DESCRIPTION)
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="Shell that reads the script.")
    return parser


def script(shell: str) -> str:
    """Return the script for a shell, which jsonargparse makes with shtab."""
    with needs("completion needs the package shtab", "completion"):
        import shtab
    parser, parsers = _parsers_of_all_commands()
    known = {key: choices(base) for key, base in CLASS_KEYS.items()}
    ours = {key: [cls for cls in classes if is_ours(cls)] or classes for key, classes in known.items()}
    for option in sorted({
        f"--{key}.{name}" for key in ("algorithm", "model", "data") for cls in ours[key] for name in arguments_of(cls)
    }):  # fmt: skip
        for command in SUBCOMMANDS:
            parsers[command].add_argument(option)
    actions: list[Any] = [action for each in parsers.values() for action in private_cli.actions(each)]
    for action in actions:
        key = action.dest.removesuffix(".help")
        if key == "config":
            action.complete = dict.fromkeys(SHELLS, "_fedbc_config_files")
        elif key in ("ckpt_path", "file", "folder"):
            action.complete = shtab.FILE
        elif key in ours:
            # By the name alone. jsonargparse 4.53 would go on to the arguments of every class that may stand in a class
            # below it: 45 MB of script for the methods alone.
            action.choices = [usual_name(cls) if key == "algorithm" else cls.__name__ for cls in ours[key]]
    preamble = FUNCTIONS[shell].format(configs=" ".join(shipped_configs()))
    return parser.get_completion_script(f"shtab-{shell}", preambles=[preamble])


def _parsers_of_all_commands() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Return the parser of the program, and those of its commands."""
    parser = capture_parser(FederatedCLI, args=[], parser_kwargs={"prog": PROG})
    others: dict[str, Any] = {command: command_parser(command) for command in STUDY_COMMANDS}
    others |= {
        "adopt": adopt.command_parser(),
        "completion": _own_parser(),
        "deploy": deploy.command_parser(),
        "configs": ArgumentParser(description="List the shipped configs."),
    }
    others["reproduce"].add_argument("names", nargs="+", choices=list(REPRODUCTIONS))
    group: Any = next(action for action in private_cli.actions(parser) if isinstance(action.choices, dict))
    for command, other in others.items():
        group.add_subcommand(command, other)
    return parser, group.choices
