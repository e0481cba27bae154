"""Handling of Ctrl-C and of the signals that ask a process to end: they stop a run between two steps."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)}
SIGCHLD: Any = getattr(signal, "SIGCHLD", None)  # Windows has none, and of SIGNALS the first two alone
SECONDS_OF_ONE = 0.5
"""Signals that are less than this many seconds apart count as one.

The terminal and the launching process both pass on the same Ctrl-C.
"""

# Number of signals (3: the third) at which the process ends at once, whatever it is doing
MOST_SIGNALS = 3


# Characters that bring back a terminal's cursor, which a live display hides
SHOW_CURSOR = "\x1b[?25h"


class StoppedError(SystemExit):
    """A signal other than Ctrl-C ended the run; the exit status is 128 plus the signal's number, as in shells.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Interrupts:
    """Notes that a signal came, so that :func:`check` raises it between two steps.

    A handler that raises an exception does so wherever the main thread happens to be. Inside ``fork`` or ``__del__``
    Python drops the exception and the run goes on; inside the writing of a checkpoint the exception breaks that off.
    This handler only takes a note.

    Use it as a context manager in the main thread; in other threads it does nothing. Signals that are ignored stay
    ignored, and a handler that the user installed for SIGHUP or SIGUSR1 stays installed.

    Args:
        is_spokesman: Whether this process prints the messages about Ctrl-C, which reaches all processes of a terminal.

    Attributes:
        pending: Exception that :func:`check` will raise; None if no signal came.
    """

    _active: Interrupts | None = None

    def __init__(self, *, is_spokesman: bool = True) -> None:
        self.pending: BaseException | None = None
        self._is_spokesman = is_spokesman
        self._previous: dict[int, Any] = {}
        self._is_over = self._raises = False
        self._num_signals, self._last = 0, -SECONDS_OF_ONE
        self._show: Callable[[str], object] | None = None

    def __enter__(self) -> Interrupts:
        """Install the handlers."""
        if _is_main_thread():
            Interrupts._active = self
            for name, number in SIGNALS.items():
                found = signal.getsignal(number)
                is_users = callable(found) and name in ("SIGHUP", "SIGUSR1")
                if found is not signal.SIG_IGN and not is_users:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        """Put the caller's handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if Interrupts._active is self:
            Interrupts._active = None

    def end(self, error: BaseException) -> BaseException:
        """Stop raising exceptions, because the run is ending, and return the exception that ends it.

        This is ``error``, unless it reports data loader workers that were killed by a signal; then it is the exception
        of that signal.
        """
        self._is_over = True
        is_echo = isinstance(error, RuntimeError) and "DataLoader worker" in str(error)
        return self.pending if is_echo and self.pending is not None else error

    @classmethod
    def show_by(cls, show: Callable[[str], object] | None) -> None:
        """Hand the messages about signals to a function, because a live display would be torn by a line of its own.

        Args:
            show: Function that only keeps a message, for it is called inside a signal handler; None: messages are
                written to standard error again.
        """
        if cls._active is not None:
            cls._active._show = show

    @classmethod
    def lose(cls, error: BaseException) -> None:
        """Let :func:`check` raise ``error``, because another process was lost; called from another thread."""
        if cls._active is not None and cls._active.pending is None:
            cls._active.pending = error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last < SECONDS_OF_ONE:
            return
        self._last = now
        self._num_signals += 1
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._num_signals == MOST_SIGNALS:
            if self._show is not None:
                self._show, name = None, f"\n{SHOW_CURSOR}{name}"
            self._say(f"{name}: ended at once.", number)
            os._exit(128 + number)
        if self._num_signals > 1:
            self._say(f"{name}: still stopping; once more ends the process at once.", number)
        else:
            self._say(f"{name}: stopping after this step; the last finished round is kept.", number)
            # torch's handler would raise, as data loader workers got the signal, too
            if SIGCHLD is not None:
                self._previous[SIGCHLD] = signal.signal(SIGCHLD, signal.SIG_DFL)
        if self.pending is None:
            self.pending = KeyboardInterrupt() if number == signal.SIGINT else StoppedError(number)
        if self._raises:
            check()

    def _say(self, words: str, number: int) -> None:
        if self._show is not None:
            self._show(words)
        elif self._is_spokesman or number != signal.SIGINT:
            with suppress(OSError):  # the terminal may be closed
                os.write(2, f"{words}\n".encode())


def check() -> None:
    """Raise the exception of a signal, or of the loss of another process, if there is one; called between steps."""
    active = Interrupts._active
    if active is not None and active.pending is not None and not active._is_over:
        raise active.pending


@contextmanager
def raising() -> Iterator[None]:
    """Let signals raise at once in this context, in which another library may wait without end."""
    active = Interrupts._active or Interrupts()
    try:
        active._raises = True  # first: a signal between the two lines would only be noted
        check()
        yield
    finally:
        active._raises = False


@contextmanager
def passed_on() -> Iterator[None]:
    """Pass Ctrl-C on to the processes that are started in the context, and raise it when they have ended.

    A notebook interrupts this process alone, and one that does not wait would speak while the others still draw.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed in the context.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _is_main_thread():
        yield
        return
    parent, others, came = os.getpid(), set(multiprocessing.active_children()), False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if os.getpid() != parent:  # a fork that has not installed its own handler yet
            raise KeyboardInterrupt
        came = True
        # On Windows the terminal gives it to all processes, and os.kill would end them
        for process in set(multiprocessing.active_children()) - others if SIGCHLD else ():
            with suppress(ProcessLookupError, TypeError):  # it has ended, or has not begun
                os.kill(process.pid, number)  # type: ignore[arg-type]

    signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    except BaseException:
        if came and os.getpid() == parent:
            raise KeyboardInterrupt from None
        raise
    finally:
        if os.getpid() == parent:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _leave_to_parent() -> None:
    """Let a forked process, such as a data loader worker, ignore signals except SIGTERM, which its parent sends it."""
    active, Interrupts._active = Interrupts._active, None
    if active is not None:
        for number in active._previous:
            signal.signal(number, signal.SIG_DFL if number in (signal.SIGTERM, SIGCHLD) else signal.SIG_IGN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
