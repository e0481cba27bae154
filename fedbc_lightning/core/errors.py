"""Exceptions: mistakes that the user can correct, notes on where in a run one came up, and how they are printed."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fedbc_lightning.core.text import printable

# Packages whose frames are shown without their code; a user cannot change them
FRAMEWORKS = ("fedbc_lightning", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "jsonargparse")

_PLACES = ("client ", "clients ", "round ", "data of ")


class ConfigurationError(ValueError):
    """A setting or an input of the user cannot be used; the message says in one line what, where, and how to fix it.

    The command line prints the message without a traceback and exits with status 1. Every other exception is a bug, in
    this package or in the user's code, and keeps its traceback.
    """


class UsageError(Exception):
    """A mistake in the command line itself; it is printed in one line, and the exit status is 2."""


class NotVectorizableError(ConfigurationError):
    """The vectorized engine cannot do what is asked of it; the sequential engine can.

    ``engine: auto`` catches this error alone: any other mistake is one for both engines.

    Args:
        reason: What the engine cannot do, worded to stand behind its name, such as "cannot train with dropout".

    Example:
        >>> print(NotVectorizableError("cannot train with batches that are dictionaries"))
        trainer.engine: vectorized cannot train with batches that are dictionaries; use engine: sequential.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)  # alone, so that a copy made by pickle is given the same
        self.reason = reason

    def __str__(self) -> str:
        return f"trainer.engine: vectorized {self.reason}; use engine: sequential."


@contextmanager
def needs(what: str, extra: str, otherwise: str = "") -> Iterator[None]:
    """Say in one line, in place of an import that fails, which of this package's extras has it.

    Raises:
        ConfigurationError: An import failed; the message begins with ``what`` and ends with ``otherwise``.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"{what}: pip install 'fedbc-lightning[{extra}]'{otherwise}") from error


def first_line(error: BaseException) -> str:
    r"""Return the first line of an exception's message, or the name of its class if the message is empty.

    Example:
        >>> first_line(ValueError("no such file\nsee the manual")), first_line(KeyError())
        ('no such file', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def in_one_line(before: str, after: str = "") -> Iterator[None]:
    """Put the first line of whatever another library raises between two texts; a line of this package's passes.

    Raises:
        ConfigurationError: Something was raised.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{before}{first_line(error)}{after}") from error


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar to an unknown one, or None if none has a similarity of ``cutoff``.

    Example:
        >>> nearest("dual_ir", ["dual_lr", "dual_min"]), nearest("fedbc", ["FedAvg", "FedBC"]), nearest("x", ["FedBC"])
        ('dual_lr', 'FedBC', None)
    """
    names = list(known)
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches
    same = [lower[word.lower()]] if word.lower() in lower else []
    found = same or close(word, names, 1, cutoff) or close(word.lower(), lower, 1, cutoff)
    return lower.get(found[0], found[0]) if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of a message about an unknown word: a suggestion of a similar known word, or ``otherwise``."""
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near else otherwise


def add_note(error: BaseException, note: str) -> None:
    """Add a note that a traceback prints below the exception's message.

    Example:
        >>> error = ValueError("boom")
        >>> add_note(error, "client 3, round 1")
        >>> error.__notes__
        ['client 3, round 1']
    """
    # Not error.add_note, which Python 3.10 lacks; it does not print notes by itself, but Rich does on the command line.
    vars(error)["__notes__"] = [*notes_of(error), note]


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception."""
    return list(getattr(error, "__notes__", ()))


def locate(error: BaseException, place: str) -> None:
    """Note the place in the run at which an exception came up, unless a closer one is noted already.

    Args:
        error: The exception; what an engine cannot do gets no place, because it holds for every client.
        place: The place, such as ``client 3, round 1, batch 0``.
    """
    if not isinstance(error, NotVectorizableError) and not any(n.startswith(_PLACES) for n in notes_of(error)):
        add_note(error, place)


def one_line(error: BaseException) -> str:
    """Return an exception's message for a terminal, with its notes in brackets.

    Example:
        >>> error = ValueError("boom")
        >>> locate(error, "client 3, round 1")
        >>> one_line(error)
        'boom (client 3, round 1)'
    """
    notes = notes_of(error)
    return printable(f"{error} ({'; '.join(notes)})" if notes else error)


def report(error: BaseException) -> str:
    """Return the traceback of an exception as the command line prints it, with notes and with the user's code alone."""
    from rich.console import Console  # here, because only a failing program needs it
    from rich.traceback import Traceback

    console = Console(width=120, color_system=None)  # as wide in a log file and behind the prefix of a rank
    known = [sys.modules[name] for name in FRAMEWORKS if name in sys.modules]
    found = type(error), error, error.__traceback__
    with console.capture() as captured:
        console.print(Traceback.from_exception(*found, width=None, extra_lines=1, suppress=known))
    return printable(captured.get())
