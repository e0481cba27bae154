"""Ctrl-C and SIGTERM end a run between two commits, never inside one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Turns SIGINT into KeyboardInterrupt and SIGTERM into SystemExit(143), held back inside :meth:`deferred`.

    Use as a context manager in the main thread; elsewhere it does nothing.
    """

    _active: Interrupts | None = None

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._is_deferred = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
            Interrupts._active = self
        return self

    def __exit__(self, *exception: object) -> None:
        """Put the caller's handlers back."""
        Interrupts._active = None
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold signals back; one that came is raised on leaving."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._pending is not None:
            number, self._pending = self._pending, None
            self._handle(number, None)

    @classmethod
    def raise_in_main_thread(cls, error: BaseException) -> None:
        """From another thread: raise ``error`` where the main thread is, if that trains and is not ending already."""
        if cls._active is not None:
            cls._active._error = error
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferred:
            self._pending = number
        elif self._error is not None and number == signal.SIGTERM:
            if sys.exc_info()[0] is None:  # else the run is being taken down: leave its checkpoint to be written
                raise self._error
        elif number == signal.SIGTERM:
            raise SystemExit(143)
        else:
            raise KeyboardInterrupt
