"""The exception for mistakes that the user can correct, and helpers for its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """A setting or an input of the user cannot be used; the message says in one line what, where, and how to fix it.

    The command line prints the message without a traceback and exits with status 1. Every other exception is a bug, in
    this package or in the user's code, and keeps its traceback.
    """


class NotVectorizableError(ConfigurationError):
    """The vectorized engine cannot do what is asked of it; the sequential engine can.

    ``engine: auto`` and the plan of a run catch this error alone: any other mistake is one for both engines.

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


def first_line(error: BaseException) -> str:
    r"""Return the first line of an exception's message, or the name of its class if the message is empty.

    Example:
        >>> first_line(ValueError("no such file\nsee the manual")), first_line(KeyError())
        ('no such file', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar to an unknown one, or None if no word is similar.

    Example:
        >>> nearest("dual_ir", ["dual_lr", "dual_min"]), nearest("fedbc", ["FedAvg", "FedBC"]), nearest("x", ["FedBC"])
        ('dual_lr', 'FedBC', None)
    """
    names = list(known)
    lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word, names, n=1) or difflib.get_close_matches(word.lower(), lower, n=1)
    return lower.get(found[0], found[0]) if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of a message about an unknown word: a suggestion of a similar known word, or ``otherwise``."""
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near else otherwise
