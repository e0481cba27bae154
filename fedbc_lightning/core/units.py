"""Seconds, bytes and metrics as people read them."""

from __future__ import annotations

# Value from which on the decimals of a metric say nothing
MANY = 1e6


def duration(seconds: float) -> str:
    """Return seconds in units for people.

    Example:
        >>> duration(0.0123), duration(0.0996), duration(0.9996), duration(4.21), duration(400), duration(12000)
        ('12 ms', '100 ms', '1 s', '4.2 s', '6 min 40 s', '3 h 20 min')
        >>> duration(400000)
        '4 d 15 h'
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for large, small, size in (("min", "s", 60), ("h", "min", 3600)):
        if whole < (3600 if large == "min" else 86400):
            return f"{whole // size} {large} {whole % size * 60 // size} {small}"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def bytes_said(size: float) -> str:
    """Return bytes in units for people.

    Example:
        >>> bytes_said(0), bytes_said(1500), bytes_said(3 * 2**30)
        ('0 B', '1.46 KiB', '3 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} TiB"


def megabytes(size: float) -> str:
    """Format bytes in MB.

    Example:
        >>> megabytes(4888000)
        '4.89'
    """
    return f"{size / 1e6:,.2f}"


def decimals(value: float) -> str:
    """Return the value of a metric with four decimals, or with four digits where a loss has exploded.

    Example:
        >>> decimals(0.98765), decimals(54593.85), decimals(1.2072216e36), decimals(float("inf"))
        ('0.9877', '54593.8500', '1.207e+36', 'inf')
    """
    return f"{value:.4f}" if abs(value) < MANY else f"{value:.4g}"
