"""A private part of filelock: how a lease is found to be dead.

``SoftFileLease._try_break_stale_lock`` of filelock 3.32 compares the time of the last touch, which a server may have
written, with the clock of this machine, so that a clock of another time would end the lock of a run that is alive.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import SoftFileLease
from filelock._identity import owner_is_stale
from filelock._util import break_lock_file


class Lease(SoftFileLease):
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
