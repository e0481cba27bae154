"""SIGKILL: at random moments, before operations on files, and in the middle of what they write."""

import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from faults.runs import Bench, Case, Child, kind

EVENTS = ("os.rename", "os.link", "os.truncate", "os.mkdir", "os.remove")
CALLS = ("fsync", "fdatasync", "pwrite", "ftruncate")
TEMPORARY = re.compile(r"^\.(.+)\.[0-9a-f]+\.tmp$")
BYTES_OF_A_WRITE = 10
"""How much of a write is done before the process dies inside it: less than any row of a table."""


class Operation(NamedTuple):
    """An operation on a file in a run folder.

    Attributes:
        name: What is done with which file, such as ``write last.ckpt``; a temporary file has the name of the other one.
        nth: How many of this name there have been, itself included.
    """

    name: str
    nth: int

    def __str__(self) -> str:
        return f"{self.name} ({self.nth})"


PLACED = (
    ("inside", Operation("write last.ckpt", 3)),  # in the temporary file
    ("inside", Operation("create .lock", 1)),  # in what it says of its owner
    ("before", Operation("os.rename last.ckpt", 3)),  # it is complete, and not replaced
    ("inside", Operation("open clients.csv", 3)),  # in a row of round 2
    ("before", Operation("create last.ckpt", 3)),  # between tables and checkpoint
    ("inside", Operation("pwrite clients.bin", 6)),  # in the row of a client
    ("before", Operation("open metrics.csv", 5)),  # between tables
    ("before", Operation("fsync checkpoints", 3)),  # replaced, and perhaps not on the disk
    ("inside", Operation("write metrics.csv", 2)),  # in a table that gets new columns
)


def watch(root: Path, see: Callable[[Operation, int], None]) -> None:
    """From now on, in this process: call a function before each operation that changes a file in ``root``.

    Args:
        root: The folder.
        see: Gets the operation, and the byte of the file at which it writes.
    """
    counts: Counter[str] = Counter()

    def seen(verb: str, path: Any, begin: int = 0) -> None:
        path = os.path.abspath(str(path))
        if path.startswith(f"{root}/"):
            counts[name := f"{verb} " + TEMPORARY.sub(r"\1", Path(path).name)] += 1
            see(Operation(name, counts[name]), begin)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            seen(event, arguments[event in ("os.rename", "os.link")])
        elif event == "open" and arguments[1] is None:  # os.open, by which the package opens all files
            path, _, flags = arguments
            if flags & (os.O_EXCL | os.O_TRUNC):
                seen("create" if flags & os.O_EXCL else "write", path)
            elif flags & os.O_RDWR:
                seen("open", path, os.path.getsize(path))

    def seeing(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def called(descriptor: int, *arguments: Any) -> Any:
            begin = arguments[1] if call.__name__ == "pwrite" else 0
            seen(call.__name__, os.readlink(f"/proc/self/fd/{descriptor}"), begin)
            return call(descriptor, *arguments)

        return called

    sys.addaudithook(hook)
    for name in CALLS:
        setattr(os, name, seeing(getattr(os, name)))


def at_operation(moment: Operation, root: Path, act: Callable[[], None]) -> None:
    """From now on, in this process: act before the given operation on a file in ``root``."""
    watch(root, lambda operation, _: act() if operation == moment else None)


def die_inside(moment: Operation, root: Path) -> None:
    """From now on, in this process: let the system kill it in the middle of what the given operation writes."""

    def limit(operation: Operation, begin: int) -> None:
        if operation == moment:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (begin + BYTES_OF_A_WRITE, resource.RLIM_INFINITY))

    watch(root, limit)


def operations(bench: Bench) -> list[Operation]:
    """All that there are in a whole run."""
    root, file = bench.folder / "counted", bench.folder / "operations.json"
    if not file.exists():

        def note() -> None:
            found: list[Operation] = []
            watch(root, lambda operation, _: found.append(operation))
            bench.train(root)
            file.write_text(json.dumps(found))

        bench.expect(Child(note, bench.folder))
    return [Operation(*one) for one in json.loads(file.read_text())]


@kind("kill", 40, 0, is_general=True)
def at_random_moments(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """The parent kills the run while it trains or writes."""
    for _ in range(count):
        seconds = rng.uniform(0, bench.seconds)

        def try_it(root: Path, seconds: float = seconds) -> str | None:
            child = Child(lambda: bench.train(root), root.with_name(root.name + "_said"))
            time.sleep(seconds)
            os.kill(child.pid, signal.SIGKILL)
            bench.expect(child, -signal.SIGKILL)
            return bench.resumed(root)

        yield Case(f"SIGKILL after {seconds:.3f} s", try_it)


@kind("kill-at-operation", 60, 2, is_general=True)
def at_operations(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """The run dies before an operation on a file, or in the middle of what it writes."""
    found = operations(bench)
    placed = [(where, moment) for where, moment in PLACED if moment in found]
    written = [("inside", one) for one in found if one.name.startswith(("write", "pwrite", "create"))]
    others = [one for one in [("before", one) for one in found] + written if one not in placed]
    for where, moment in [*placed, *rng.sample(others, min(max(0, count - len(placed)), len(others)))][:count]:

        def try_it(root: Path, where: str = where, moment: Operation = moment) -> str | None:
            def die() -> None:
                if where == "inside":
                    die_inside(moment, root)
                else:
                    at_operation(moment, root, lambda: os.kill(os.getpid(), signal.SIGKILL))
                bench.train(root)
                raise RuntimeError(f"the run ended without '{moment}'")

            status, _ = bench.expect(Child(die, root.with_name(root.name + "_said")), -signal.SIGKILL, -signal.SIGXFSZ)
            return bench.resumed(root) if status else "it did not die"

        yield Case(f"killed {where} {moment}", try_it)
