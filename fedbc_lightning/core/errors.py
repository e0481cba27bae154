"""The one exception for mistakes that the user can mend, and what its messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """Something the user gave cannot be honoured: says what, where, and how to fix it, in one line.

    The command line prints it without a traceback and exits with status 1. Everything else that is raised is a bug,
    ours or the user's, and keeps its traceback.

    Attributes:
        is_said_elsewhere: Whether another process of the run raised the same and tells the user.
    """

    is_said_elsewhere = False


def first_line(error: BaseException) -> str:
    r"""What another library's exception says, for a message of ours; its class, if it says nothing.

    Example:
        >>> first_line(ValueError("no such file\nsee the manual")), first_line(KeyError())
        ('no such file', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What was probably meant by a word that is not known; None: nothing is like it.

    Example:
        >>> nearest("dual_ir", ["dual_lr", "dual_min"]), nearest("fedbc", ["FedAvg", "FedBC"]), nearest("x", ["FedBC"])
        ('dual_lr', 'FedBC', None)
    """
    names = list(known)
    lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word, names, n=1) or difflib.get_close_matches(word.lower(), lower, n=1)
    return lower.get(found[0], found[0]) if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a message about a word that is not known: the nearest one that is, or ``otherwise``."""
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near else otherwise
