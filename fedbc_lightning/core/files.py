"""Writing into a run folder: each file atomically, and the errors of its disk in one line.

A reader finds the old file or the new one, even if the process is killed while writing.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.units import bytes_said

# Reported by writes into an open file, which name no file.
_NAMELESS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it atomically replaces ``path``, on an error it is removed."""
    partial = path.with_name(path.name + ".tmp")
    try:
        yield partial
        # POSIX replaces a name in one step, on one disk alone: so the temporary file lies in the same folder.
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # if the disk is full, the space is needed
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8; the old content stays until the new one is complete."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def told(folder: Path, go_on: str = "") -> Iterator[None]:
    """Explain in one line why a file in a run folder could not be written.

    Args:
        folder: The run folder; errors about files elsewhere are raised unchanged.
        go_on: Sentence on what to do afterwards, appended to the message.

    Raises:
        ConfigurationError: The file system reported an error; torch's writer may have raised another one from it.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        cause = os_error(error)
        # os.replace names two files: the temporary one, and the one that the user knows
        name = None if cause is None else cause.filename2 or cause.filename
        place = folder if name is None else Path(str(name))
        is_other = name is None and (cause is None or cause.errno not in _NAMELESS)  # such as a logger's server
        if cause is None or is_other or not place.absolute().is_relative_to(folder.absolute()):
            raise
        free = ""
        with suppress(OSError):  # there is no such folder any more
            free = f"; {bytes_said(shutil.disk_usage(folder).free)} are free on its disk"
        raise ConfigurationError(
            f"trainer.default_root_dir: '{place}' cannot be written ({cause.strerror}{free}). {go_on}".rstrip()
        ) from error


def os_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error in an exception's chain of causes, or None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def quiet_event_writers() -> Iterator[None]:
    """Keep TensorBoard's writer thread from printing a traceback; the next flush raises the same error."""
    previous = threading.excepthook

    def hook(args: Any) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":
            previous(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = previous
