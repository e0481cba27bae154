"""Errors of the file system as one-line messages: disk full, folder gone, no permission, a folder where a file was."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.units import bytes_said

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_KIND = {errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST}
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENOTCONN}
_BROKEN = {errno.EIO, errno.ENXIO, errno.EBUSY, errno.ENAMETOOLONG}


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
        problem = None if cause is None else _problem(cause, folder)
        if problem is None:
            raise
        raise ConfigurationError(f"trainer.default_root_dir: {problem} {go_on}".rstrip()) from error


def os_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error in an exception's chain of causes, or None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _problem(error: OSError, folder: Path) -> str | None:
    name = error.filename2 or error.filename  # os.replace names two: the temporary file, and the one the user knows
    place = folder if name is None else Path(str(name))
    if error.errno is None or not place.absolute().is_relative_to(folder.absolute()):
        return None
    said = error.strerror
    if error.errno in _FULL:
        return f"the disk of '{folder}' is full ({said}{_room(folder)}). Make room, or raise your quota."
    if not folder.is_dir():
        return f"the run folder '{folder}' is no longer there ({said}): was it moved or deleted, is its disk mounted?"
    if error.errno in _FORBIDDEN:
        return f"'{place}' cannot be written ({said}): it may be another user's; give a folder that you can write to."
    if error.errno in _WRONG_KIND:
        return f"'{place}' cannot be written ({said}): a file and a folder stand in each other's place; move it away."
    if error.errno in _GONE:
        return f"'{place}' is no longer there ({said}): was it moved or deleted while the run wrote to it?"
    if error.errno in _BROKEN:
        return f"'{place}' cannot be written ({said}): look after its disk."
    return None


def _room(folder: Path) -> str:
    """Return how much space is free and how much the next checkpoint needs, as far as both are known."""
    last = folder / "checkpoints" / "last.ckpt"
    said = ""
    with suppress(OSError):  # there is no last.ckpt yet, or no folder
        said = f"; {bytes_said(shutil.disk_usage(folder).free)} are free"
        said += f", last.ckpt needs {bytes_said(last.stat().st_size)} once more while it is written anew"
    return said


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
