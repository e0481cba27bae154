"""Disks that are full: for one operation, and for good."""

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

from faults.kills import Operation, at_operation, operations
from faults.runs import REFUSED, Bench, Case, Child, is_one_line, kind

NEW_MOUNTS, PRIVATE, REMOUNT = 0x20000, 0x40000 | 0x4000, 32

PLACED = (
    Operation("open metrics.csv", 5),  # round 2 is not recorded, and may not be saved
    Operation("create evaluation.csv", 1),  # round 0 is not
    Operation("open clients.csv", 3),
    Operation("fsync last.ckpt", 3),
)


@kind("full-for-one-operation", 20, 2, is_general=True)
def for_one_operation(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """One operation on a file fails; the run says so in one line, or does without, and loses nothing."""
    others = [moment for moment in operations(bench) if moment not in PLACED]
    for moment in [*PLACED, *rng.sample(others, min(max(0, count - len(PLACED)), len(others)))][:count]:

        def try_it(root: Path, moment: Operation = moment) -> str | None:
            def fail() -> None:
                raise OSError(28, "No space left on device")

            def run() -> None:
                at_operation(moment, root, fail)
                bench.train(root)

            status, said = bench.expect(Child(run, root.with_name(root.name + "_said")), REFUSED)
            if status and not is_one_line(said):
                return said[-500:]
            return bench.resumed(root)

        yield Case(f"ENOSPC at {moment}", try_it)


@kind("full-disk", 20, is_general=True)
def for_good(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """A file system in memory of a given size, which grows after the run has said that it is full."""
    allowed = bench.expect(Child(lambda: _mount(bench.folder / "probe", 100), bench.folder), REFUSED, 2)[0] == 0
    if not allowed:
        print("full-disk: this user may not mount a file system; not tried")
        return
    for _ in range(count):
        kilobytes = rng.choice(range(8, 200, 4))

        def try_it(root: Path, kilobytes: int = kilobytes) -> str | None:
            said = root.with_name(root.name + "_said")

            def run() -> None:
                _mount(root, kilobytes)
                status, text = Child(lambda: bench.train(root, logger=True), said).finish()
                if status not in (0, REFUSED) or (status and not is_one_line(text)):
                    raise RuntimeError(text[-1500:])
                _mount(root, 10_000, REMOUNT)
                lost = bench.resumed(root)
                if lost is not None:
                    raise RuntimeError(lost)

            status, text = Child(run, said).finish()
            return text[-1500:] if status else None

        yield Case(f"a disk of {kilobytes} kB", try_it)


def _mount(folder: Path, kilobytes: int, flags: int = 0) -> None:
    """Mount, or resize, a file system of a given size, seen by this process and those that it starts."""
    library = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(parents=True, exist_ok=True)
    is_done = flags == REMOUNT or (
        library.unshare(NEW_MOUNTS) == 0 and library.mount(b"none", b"/", None, PRIVATE, None) == 0
    )
    options = f"size={kilobytes}k".encode()
    if not is_done or library.mount(b"none", os.fsencode(folder), b"tmpfs", flags, options):
        raise OSError(ctypes.get_errno(), "mount")
