"""Locks a folder of a run or study, so that one process at a time writes to it, on whatever machine."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from fedbc_lightning.core import files
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.private_filelock import Lease

log = logging.getLogger(__name__)

NAME = ".lock"
"""Name of the lock file in a folder; it names the owner's process and host, and has a random token."""

SECONDS_BETWEEN_TOUCHES = 30.0
"""Seconds after which the owner touches its lock file again."""

SECONDS_TO_LIVE = 300.0
"""Seconds without a touch after which an owner counts as dead; one of this machine also does once its process ended."""

SECONDS_BETWEEN_LOOKS = 0.5
"""Seconds between two looks at a lock file whose owner may be alive, or at the runs of a study."""

_held: set[Path] = set()


class RunLock(ExitStack):
    """Locks at most one folder until the context ends.

    The lock is filelock's lease: a file that only one process can make, with a thread that touches it. So it needs no
    locks of the file system, which many that several machines share do not have, and nothing that reads or copies the
    folder ends it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lease: Lease | None = None

    def take(self, folder: Path) -> None:
        """Lock a run folder; where its owner is on another machine and may be dead, wait until that is known.

        Raises:
            ConfigurationError: Another process writes to it, or its lock file cannot be written.
        """
        touched = None
        copy = "To start a run of your own from its checkpoint, copy the checkpoint and give the copy."
        with files.told(folder, copy, "ckpt_path"):
            while (owner := self.owner_after_trying(folder)) is not None:
                try:
                    before, touched = touched, (folder / NAME).stat().st_mtime
                except FileNotFoundError:  # its owner has just ended, or the last try has found it dead
                    continue
                if owner.endswith(f" on {socket.gethostname()}") or before not in (None, touched):
                    who = f"'{folder}' is being written by {owner}{_run_in(folder)}"
                    raise ConfigurationError(f"ckpt_path: {who}; stop that, or wait until it has ended.")
                if before is None:
                    log.warning("'%s' has the lock of %s; waiting %d s for a touch.", folder, owner, SECONDS_TO_LIVE)
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def check(self) -> None:
        """Raise if the locked folder belongs to another process by now, as after a sleep of this machine.

        Raises:
            ConfigurationError: It does; nothing may be written to it any more.
            OSError: There is no such folder any more.
        """
        if self._lease is None:
            return
        folder, owner = Path(self._lease.lock_file).parent, self._lease.owner
        folder.stat()
        if owner is None or owner.token != self._lease.token:
            raise ConfigurationError(
                f"'{folder}' was taken over by {_said(self._lease)}, as this run did not "
                f"touch its {NAME} for {SECONDS_TO_LIVE:.0f} s; it ends here and writes nothing more."
            )

    def owner_after_trying(self, folder: Path) -> str | None:
        """Try to lock a folder and return who else has it, or may have it; None means that it is locked now."""
        files.refuse_link(folder / NAME)
        path = folder.resolve() / NAME
        lease = Lease(
            path, lease_duration=SECONDS_TO_LIVE, heartbeat_interval=SECONDS_BETWEEN_TOUCHES, thread_local=False
        )
        if lease.is_lock_held_by_us and path not in _held:
            files.remove(path)  # it came with a copy of a folder that this process has locked
        for _ in range(2):  # the first try removes the file of a dead owner
            with suppress(Timeout):
                lease.acquire(blocking=False)
                self._lease = lease
                _held.add(path)
                self.callback(_held.discard, path)
                self.callback(lease.release)
                files.remove_partial(folder)
                return None
        return _said(lease)


def _said(lease: Lease) -> str:
    return "another process" if (owner := lease.owner) is None else f"process {owner.pid} on {owner.hostname}"


def _run_in(folder: Path) -> str:
    """Say by which hash its identity is known, and its job of a cluster, as far as ``run.json`` of the folder does."""
    # Not above: commands that end at a mistake need no torch, which takes seconds.
    from fedbc_lightning.run.identity import read

    known = read(folder)
    return "" if known is None else f" (run {', job '.join([known[0].hash, *known[1]])})"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process has locked a study's folder; in the context it is locked, and errors are told."""
    with files.told(folder, setting="out"), RunLock() as lock:
        while lock.owner_after_trying(folder) is not None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        yield
