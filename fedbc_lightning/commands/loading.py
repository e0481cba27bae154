"""The seconds in which torch and Lightning are imported: a line that says so, and Ctrl-C without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fedbc_lightning.cli.command_arguments import CONFIG_OPTIONS, option_values


def say_what_is_loaded(words: Sequence[str]) -> None:
    """Print what the program does in its first seconds, on a terminal alone; helps and dumped configs go without it.

    Args:
        words: The words of the command line, as the user has typed them.
    """
    is_answered_with_text = any(word == "-h" or word.startswith("--print_config") or "help" in word for word in words)
    if is_answered_with_text or not sys.stdout.isatty() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    files = [value for _, value in option_values(list(words), (*CONFIG_OPTIONS, "--ckpt_path"))]
    named = [name for name in files if "\n" not in name and "{" not in name]
    reading = f"Reading {', '.join(named)}, loading" if named else "Loading"
    print(f"{reading} PyTorch ...", flush=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end an import as ``KeyboardInterrupt``, whatever the imported code makes of it.

    Some modules catch every exception, and C code turns one into an ``ImportError``.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed in the context.
    """
    presses: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        presses.append(number)
        raise KeyboardInterrupt

    before: Any = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or someone else's
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    except BaseException:
        if presses:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if presses:
        raise KeyboardInterrupt
