"""Where in a run an exception came up, as a note on it; and its traceback, in which the user's own lines stand out."""

from __future__ import annotations

import sys

from fedbc_lightning.core.errors import NotVectorizableError

# Packages whose frames are shown without their code; a user cannot change them
FRAMEWORKS = ("fedbc_lightning", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "jsonargparse")

_PLACES = ("client ", "clients ", "round ", "data of ")


def add_note(error: BaseException, note: str) -> None:
    """Add a note that a traceback prints below the exception's message.

    Example:
        >>> error = ValueError("boom")
        >>> add_note(error, "client 3, round 1")
        >>> error.__notes__
        ['client 3, round 1']
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # Python 3.10 does not print notes by itself; Rich does, and so the command line
        error.__notes__ = [*notes_of(error), note]


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
    """Return an exception's message with its notes in brackets.

    Example:
        >>> error = ValueError("boom")
        >>> locate(error, "client 3, round 1")
        >>> one_line(error)
        'boom (client 3, round 1)'
    """
    notes = notes_of(error)
    return f"{error} ({'; '.join(notes)})" if notes else str(error)


def report(error: BaseException) -> str:
    """Return the traceback of an exception as the command line prints it, with notes and with the user's code alone."""
    from rich.console import Console  # here, because only a failing program needs it
    from rich.traceback import Traceback

    console = Console(width=120, color_system=None)  # as wide in a log file and behind the prefix of a rank
    suppress = [sys.modules[name] for name in FRAMEWORKS if name in sys.modules]
    with console.capture() as captured:
        console.print(
            Traceback.from_exception(
                type(error), error, error.__traceback__, width=None, extra_lines=1, suppress=suppress
            )
        )
    return captured.get()
