"""The decorator by which a user vouches for a function that the proof of a step does not evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

VOUCHED = "__fedbc_recordable__"


def recordable(function: Function) -> Function:
    """Vouch for a function or method: what it returns depends on its arguments alone, and it changes nothing.

    Put it on ``training_step``, or on a function that it calls, if the line about steps that are not recorded names an
    obstacle which you know to be harmless. The function is then called as it is when a step is proven. Recorded steps
    are compared with the step as written now and then all the same.

    Args:
        function: The function, which is returned as it is.

    Example:
        >>> @recordable
        ... def smooth(loss):
        ...     return loss * 0.9
        >>> smooth(1.0)
        0.9
    """
    # The value is the function itself: functools.wraps copies attributes to wrappers, for which nobody vouches.
    setattr(function, VOUCHED, function)
    return function
