"""A program on a terminal of a given size: what stands on the screen, and the keys that are pressed."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyte
import pytest

from helpers.programs import Forked, Words, kill_session, program_environment, take_streams

ROWS = 200
CTRL_C = "\x03"


class OnTerminal:
    """A process whose controlling terminal this is; the screen is kept as a person sees it.

    Args:
        words: ``[-m module | script] argument ...``
        cwd: Where it runs.
        width: Number of columns.
        is_fresh: Whether it is a new Python, for what depends on how Python starts and ends, or a fork, see
            :class:`helpers.programs.Forked`.
        **changes: Changes of its environment.
    """

    def __init__(self, words: Words, cwd: Path, width: int, is_fresh: bool, **changes: object) -> None:
        environment = program_environment(**{"TERM": "xterm-256color", **changes})
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self._screen = pyte.Screen(width, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._terminal, other_end = pty.openpty()
        fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, width, 0, 0))
        streams = dict.fromkeys(range(3), Path(os.ttyname(other_end)))
        if is_fresh:
            command, take = [sys.executable, *map(str, words)], partial(take_streams, streams)
            self.program: Any = subprocess.Popen(command, cwd=cwd, env=environment, preexec_fn=take)
        else:
            self.program = Forked(words, cwd, streams, environment)
        os.close(other_end)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen that are not empty."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    @property
    def has_cursor(self) -> bool:
        """Whether the cursor is shown."""
        return not self._screen.cursor.hidden

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    def wait_for(self, words: str, seconds: float = 120.0) -> None:
        """Wait until words stand on the screen."""
        deadline = time.monotonic() + seconds
        while not any(words in line for line in self.lines):
            if not self._read() or time.monotonic() > deadline:
                pytest.fail(f"{words!r} did not come: {self.lines}")

    def press_until(self, keys: str, words: str) -> None:
        """Press keys until words stand on the screen: signals within half a second count as one."""
        for _ in range(100):
            self.press(keys)
            for _ in range(10):
                if any(words in line for line in self.lines) or not self._read():
                    return
        pytest.fail(f"{words!r} did not come: {self.lines}")

    def finish(self, seconds: float = 120.0) -> int | None:
        """Wait for the end of the process, and return its exit status."""
        deadline = time.monotonic() + seconds
        while self._read():
            if time.monotonic() > deadline:
                pytest.fail(f"it hangs: {self.lines}")
        return self.program.poll()

    def _read(self) -> bool:
        """Read what was printed, and return whether more may come."""
        if not select.select([self._terminal], [], [], 0.05)[0]:
            return True
        try:
            printed = os.read(self._terminal, 65536)
        except OSError:  # the other end is closed, or not yet open
            time.sleep(0.01)
            return self.program.poll() is None
        self._stream.feed(printed)
        return bool(printed)


@contextmanager
def on_terminal(
    words: Words, cwd: Path, width: int, is_fresh: bool = False, **changes: object
) -> Iterator[OnTerminal]:  # fmt: skip
    """``python`` with these words on a terminal, killed at the end with all that it has started."""
    program = OnTerminal(words, cwd, width, is_fresh, **changes)
    try:
        yield program
    finally:
        kill_session(program.program)
        os.close(program._terminal)
        program.program.wait()
