"""The private parts of Lightning's command line, jsonargparse and argparse that the package uses, in one place.

Each text says in which versions the part was read and what happens without it. ``pyproject.toml`` allows no version
that is newer than these, and ``tests/core/test_private.py`` fails if a part is gone or means something else.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import jsonargparse
from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, _get_module_type, _InstantiatorFn


def read_config(path: jsonargparse.Path, otherwise: Callable[[jsonargparse.Path], str]) -> str:
    """Read a config in UTF-8, as all that this package writes.

    Read in jsonargparse 4.53. Without it Windows reads configs in an encoding of its own, before Python 3.15.
    """
    file = Path(path.absolute)
    return file.read_text("utf-8") if file.is_file() else otherwise(path)


jsonargparse.Path.read_text = partialmethod(read_config, jsonargparse.Path.read_text)  # type: ignore[assignment]


def import_telling(*arguments: Any, **options: Any) -> Any:
    """Import a module for jsonargparse; an exception without a text gets its name as one.

    Read in jsonargparse 4.53. Without it, such an exception in a user's module ends in an IndexError of jsonargparse's.
    """
    try:
        return __import__(*arguments, **options)
    except (Exception, SystemExit) as error:
        if str(error) and isinstance(error, Exception):
            raise
        raise ImportError(type(error).__name__) from error


jsonargparse._util.__import__ = import_telling  # type: ignore[attr-defined]


class OpenCLI(LightningCLI):
    """LightningCLI whose private steps are called, and may be replaced, under public names.

    Read in Lightning 2.6. If a step is gone, a command line would do what Lightning does instead of what FederatedCLI
    says, or fail when it is built; ``tests/core/test_private.py`` says which step it is.
    """

    # steps that a derived class replaces

    def add_commands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Add the commands to the parser, each by :meth:`command_parser`."""

    def set_seed(self) -> None:
        """Seed what is random."""

    def add_instantiators(self) -> None:
        """Tell the parser how model and data are built."""

    def run_command(self, command: str) -> None:
        """Run the command."""

    # what these steps may use

    @property
    def command_parsers(self) -> dict[str, LightningArgumentParser]:
        """Map from commands to their parsers; empty if there are no commands."""
        return getattr(self, "_subcommand_parsers", {})

    def command_parser(self, owner: type, command: str, **options: Any) -> LightningArgumentParser:
        """Return a new parser with the sections of a run and the arguments of the method ``command`` of ``owner``."""
        self._subcommand_parsers[command] = self._prepare_subcommand_parser(owner, command, **options)
        return self._subcommand_parsers[command]

    def command_arguments(self, command: str) -> list[str]:
        """Return the names of a command's arguments that its method takes from the command line."""
        return self._subcommand_method_arguments[command]

    def method_arguments(self, command: str) -> dict[str, Any]:
        """Return the arguments of a command's method: those of the command line, model and data."""
        return self._prepare_subcommand_kwargs(command)

    def setting(self, config: Namespace, key: str) -> Any:
        """Return what a config holds under a key, for the command that runs; None if it has no such key."""
        return self._get(config, key)

    # Lightning's names

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        self._subcommand_parsers = {}
        self.add_commands(parser, **kwargs)

    def _set_seed(self) -> None:
        self.set_seed()

    def _add_instantiators(self) -> None:
        self.add_instantiators()

    def _parse_ckpt_path(self) -> None:
        """Do nothing, unlike Lightning: the model comes from a config only, at need that of the checkpoint's run."""

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_command(subcommand)


class Instantiator(_InstantiatorFn):
    """Builds the model or the data of a command line, and gives it the hyper-parameters that a checkpoint needs.

    Read in Lightning 2.6. Without it, checkpoints of models without ``save_hyperparameters`` do not hold their
    arguments.
    """

    def setting(self) -> Any:
        """Return what the config of the command line holds for this object."""
        return self.cli._get(self.cli.config, self.key)


def built_class(factory: Any) -> type:
    """Return the class that a factory builds, from its annotation; a class itself.

    Read in Lightning 2.6. Without it, read the annotation here.
    """
    return _get_module_type(factory)


class OpenHelpFormatter(DefaultHelpFormatter):
    """jsonargparse's formatter of ``--help``, whose texts a derived class may shorten.

    Read in jsonargparse 4.53. Without it, the help of an argument for a module lists hundreds of classes.
    """

    def shortened(self, text: str) -> str:
        """Return the help of an argument as it is to be printed."""
        raise NotImplementedError

    def _expand_help(self, action: Action) -> str:
        return self.shortened(super()._expand_help(action))


def actions(parser: ArgumentParser) -> list[Action]:
    """Return the arguments of a parser.

    Read in jsonargparse 4.53, on argparse of Python 3.10 and 3.11. Without it, messages cannot suggest what was meant,
    and classes cannot be explained.
    """
    return parser._actions


def type_hint(action: Action) -> Any:
    """Return the type of an argument, or None if it has none.

    Read in jsonargparse 4.53. Without it, short names of classes inside of other classes are not found.
    """
    return getattr(action, "_typehint", None)
