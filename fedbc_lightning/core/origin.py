"""Which package a function, class or object comes from."""

from __future__ import annotations

from typing import Any

PACKAGE = __name__.partition(".")[0]


def is_ours(part: Any) -> bool:
    """Return whether a function or class, or the class of an object, belongs to this package.

    Example:
        >>> is_ours(is_ours), is_ours(dict)
        (True, False)
    """
    return str(getattr(part, "__module__", "")).partition(".")[0] == PACKAGE
