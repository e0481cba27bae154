"""Locks a run folder, so that one process at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from fedbc_lightning.core.errors import ConfigurationError

NAME = ".lock"
"""Name of the lock file in a run folder; it holds process id, host and starting time of the owner."""

_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# Locks of POSIX belong to a process: to open and close the file a second time in it would end its lock unnoticed.
_held: set[Path] = set()


class RunLock:
    """Locks at most one run folder until the context ends; the system ends the lock when the process dies.

    It is a POSIX lock. Worker processes do not inherit it, so the folder of a killed run does not stay locked by
    processes that outlive it, and NFS enforces it between machines. On a file system without locks the process that is
    named in the file is looked for, which works within one machine.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        """Enter the context; nothing is locked yet."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Unlock the folder."""
        if self._descriptor is not None and self._path is not None:
            with suppress(OSError):  # the disk may be gone
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            _held.discard(self._path)
            self._path = self._descriptor = None

    def take(self, folder: Path) -> None:
        """Lock a run folder.

        Raises:
            ConfigurationError: Another process writes to it, or its lock file cannot be written.
        """
        try:
            owner = self._owner_after_trying(folder)
        except OSError as error:
            raise ConfigurationError(
                f"ckpt_path: cannot write to the run folder '{folder}' ({error.strerror}); to start a run of your own "
                "from its checkpoint, copy the checkpoint and give the copy."
            ) from error
        if owner is not None:
            raise ConfigurationError(
                f"ckpt_path: '{folder}' is being written by {owner}; stop that, or wait until it has ended."
            )

    def try_take(self, folder: Path) -> bool:
        """Lock a run folder unless another process has it, and return whether it is locked."""
        return self._owner_after_trying(folder) is None

    def _owner_after_trying(self, folder: Path) -> str | None:
        """Try to lock a folder and describe who else has it; None means that it is locked now."""
        path = folder.resolve() / NAME
        if path in _held:  # POSIX: to close any descriptor of the file would end this process's lock on it
            return f"another trainer of this process ({os.getpid()})"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            owner = self._lock(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if owner is not None:
            os.close(descriptor)
            return owner
        os.ftruncate(descriptor, 0)
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode(), 0)
        self._path, self._descriptor = path, descriptor
        _held.add(path)
        return None

    @staticmethod
    def _lock(descriptor: int) -> str | None:
        said = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return said or "another process"
            if error.errno not in _NOT_SUPPORTED:
                raise
            return said if _is_alive(said) else None
        return None


def _is_alive(said: str) -> bool:
    """Return whether the process that a lock file names runs on this machine; other machines cannot be checked.

    Example:
        >>> _is_alive(f"process {os.getpid()} on {socket.gethostname()} since ..."), _is_alive("")
        (True, False)
    """
    words = said.split()
    if len(words) < 4 or not words[1].isdigit() or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, and belongs to another user
        return True
    return True
