"""One process at a time writes to a run folder."""

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
"""The file in the run folder that is locked; it holds the process id, the host and the time of its owner."""

_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_held: set[Path] = set()


class RunLock:
    """The lock of at most one run folder, given back when the context ends, or by the system when the process dies.

    It is a POSIX lock: worker processes do not inherit it, so that a killed run does not stay locked by what it leaves
    behind, and NFS passes it on to other machines. On a file system without locks the process named in the file is
    looked for; that works within one machine.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        """Nothing is locked yet."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the folder back."""
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
        """Lock a run folder, unless another process has it."""
        return self._owner_after_trying(folder) is None

    def _owner_after_trying(self, folder: Path) -> str | None:
        """Who else has the folder; None: it is locked now."""
        path = folder.resolve() / NAME
        if path in _held:  # to open and close the file again would end the lock
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
    """Whether the process that a lock file names runs on this machine; one on another cannot be seen.

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
    except PermissionError:  # another user's
        return True
    return True
