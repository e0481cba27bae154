"""Formats that the pages of studies and runs share."""

from __future__ import annotations


def megabytes(size: float) -> str:
    """Format bytes in MB.

    Example:
        >>> megabytes(4888000)
        '4.89'
    """
    return f"{size / 1e6:,.2f}"
