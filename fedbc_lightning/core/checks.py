"""Checks of arguments that raise a :class:`ConfigurationError` naming the argument, the value and the fix."""

from __future__ import annotations

import math

from fedbc_lightning.core.errors import ConfigurationError


def check_choice(where: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``.

    Args:
        where: Name of the setting in the configuration, with which the message begins.
        value: Value that the user gave.
        choices: Values that are allowed.

    Raises:
        ConfigurationError: ``value`` is not one of ``choices``.
    """
    if value not in choices:
        raise ConfigurationError(f"{where}: got '{value}'; use {' or '.join(choices)}.")


def check_at_least(where: str, value: float, bound: float, *, strict: bool = False, whole: bool = False) -> None:
    """Raise unless ``value`` is a number of at least ``bound``.

    Args:
        where: Name of the setting in the configuration, with which the message begins.
        value: Value that the user gave.
        bound: Smallest value allowed.
        strict: Whether ``bound`` itself is forbidden.
        whole: Whether the value must be an ``int``.

    Raises:
        ConfigurationError: ``value`` is no number, is not whole where it must be, or is too small.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigurationError(f"{where}: got '{value}'; give a number.")
    if whole and not isinstance(value, int):
        raise ConfigurationError(f"{where}: got {value}; give a whole number.")
    if not (value > bound if strict else value >= bound):
        raise ConfigurationError(f"{where}: got {value}; it must be {'>' if strict else '>='} {bound:g}.")


def check_share(where: str, value: float, *, closed: bool = False) -> None:
    """Raise unless ``value`` is a number in [0, 1), or in [0, 1] if ``closed``.

    Raises:
        ConfigurationError: ``value`` is no number or lies outside the interval.
    """
    check_at_least(where, value, 0)
    if not (value <= 1 if closed else value < 1):
        raise ConfigurationError(f"{where}: got {value}; it must lie in [0, 1{']' if closed else ')'}.")


def check_finite(where: str, value: float) -> None:
    """Raise if ``value`` is infinite or NaN.

    Raises:
        ConfigurationError: ``value`` is infinite or NaN.
    """
    if not math.isfinite(value):
        raise ConfigurationError(f"{where}: got {value}; give a finite number.")
