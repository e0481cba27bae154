"""Checks of what a part of a method was given."""

from __future__ import annotations

import math

from fedbc_lightning.core.errors import ConfigurationError


def check_choice(where: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``.

    Raises:
        ConfigurationError: It is not.
    """
    if value not in choices:
        raise ConfigurationError(f"{where}: got '{value}'; use {' or '.join(choices)}.")


def check_at_least(where: str, value: float, bound: float, *, strict: bool = False, whole: bool = False) -> None:
    """Raise unless ``value`` is a number >= ``bound`` (> if strict), a whole one if asked for.

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigurationError(f"{where}: got '{value}'; give a number.")
    if whole and not isinstance(value, int):
        raise ConfigurationError(f"{where}: got {value}; give a whole number.")
    if not (value > bound if strict else value >= bound):
        raise ConfigurationError(f"{where}: got {value}; it must be {'>' if strict else '>='} {bound:g}.")


def check_share(where: str, value: float, *, closed: bool = False) -> None:
    """Raise unless ``value`` is a number in [0, 1), or in [0, 1] if closed.

    Raises:
        ConfigurationError: It is not.
    """
    check_at_least(where, value, 0)
    if not (value <= 1 if closed else value < 1):
        raise ConfigurationError(f"{where}: got {value}; it must lie in [0, 1{']' if closed else ')'}.")


def check_finite(where: str, value: float) -> None:
    """Raise if ``value`` is infinite or NaN.

    Raises:
        ConfigurationError: It is.
    """
    if not math.isfinite(value):
        raise ConfigurationError(f"{where}: got {value}; give a finite number.")
