"""Whose code runs between the steps of a client."""

from __future__ import annotations

from typing import Any

PACKAGE = __name__.partition(".")[0]


def is_ours(part: Any) -> bool:
    """Whether a function, or the class of an object, belongs to this package and so leaves the user's module alone."""
    return str(getattr(part, "__module__", "")).partition(".")[0] == PACKAGE
