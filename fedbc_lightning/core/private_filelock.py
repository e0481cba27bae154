"""Private parts of filelock: how a lease is made, and how it is found to be dead.

``SoftFileLock._acquire`` of filelock 3.32 makes the file and then writes into it, so that a process that is killed in
between leaves a lock without an owner, which nobody removes in its first two seconds.
``SoftFileLease._try_break_stale_lock`` compares the time of the last touch, which a server may have written, with the
clock of this machine, so that a clock of another time would end the lock of a run that is alive.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import SoftFileLease
from filelock._identity import owner_is_stale
from filelock._marker import MarkerSoftFileLock
from filelock._util import break_lock_file

from fedbc_lightning.core import files


class _Whole(MarkerSoftFileLock):
    """A lock file that appears with its content."""

    def _acquire(self) -> None:
        path = Path(self.lock_file)
        with suppress(OSError):  # such as that of a file system without hard links: filelock says what else is wrong
            if not path.exists():
                with files.replacing(path, is_new=True) as partial, files.open_file(partial, "wb") as file:
                    self._write_lock_info(file.fileno())
                opened = files.descriptor(path, os.O_WRONLY)
                self._mark_descriptor_owned(opened, (os.fstat(opened).st_dev, os.fstat(opened).st_ino))
                return
        super()._acquire()


class Lease(SoftFileLease, _Whole):
    """A lease whose age is told by the clock of its file system alone."""

    def _try_break_stale_lock(self) -> None:
        peer = self._read_peer()
        if peer is None:  # the file is not one of filelock's leases
            super()._try_break_stale_lock()
            return
        owner, touched, inode = peer
        with suppress(OSError), tempfile.TemporaryFile(dir=Path(self.lock_file).parent) as new:
            age = os.fstat(new.fileno()).st_mtime - touched
            if age >= self.lease_duration or owner_is_stale(owner.pid, owner.hostname, owner.start):
                break_lock_file(self.lock_file, touched, inode)
