"""SIGKILL: at random moments, and at chosen operations on files."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults.runs import Bench, Case, Child, kind, train

EVENTS = ("open", "os.rename", "os.truncate", "os.mkdir", "os.remove")
CALLS = ("fsync", "fdatasync", "pwrite", "ftruncate")


def at_operation(number: int, root: Path, act: Callable[[], None]) -> Callable[[], int]:
    """From now on, in this process: act at the given operation on a file in ``root``; returns their count so far."""
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1
        if count == number:
            act()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(str(root)):
            counted()

    sys.addaudithook(hook)
    for name in CALLS:
        setattr(os, name, _counting(getattr(os, name), counted))
    return lambda: count


def _counting(call: Callable[..., Any], counted: Callable[[], None]) -> Callable[..., Any]:
    def counting(*arguments: Any) -> Any:
        counted()
        return call(*arguments)

    return counting


def num_operations(bench: Bench) -> int:
    """How many there are in a whole run."""
    root, file = bench.folder / "counted", bench.folder / "count.txt"
    if not file.exists():

        def count() -> None:
            so_far = at_operation(0, root, lambda: None)
            train(root)
            file.write_text(str(so_far()))

        bench.expect(Child(count, bench.folder))
    return int(file.read_text())


@kind("kill", 110)
def at_random_moments(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """The parent kills the run while it trains or writes."""
    for _ in range(count):
        seconds = rng.uniform(0, bench.seconds)

        def try_it(root: Path, seconds: float = seconds) -> str | None:
            child = Child(lambda: train(root), root.with_name(root.name + "_said"))
            time.sleep(seconds)
            child.kill()
            bench.expect(child, -signal.SIGKILL)
            return bench.resumed(root)

        yield Case(f"SIGKILL after {seconds:.3f} s", try_it)


@kind("kill-at-operation", 90)
def at_operations(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """The run kills itself just before an operation on a file."""
    total = num_operations(bench)
    for number in sorted(rng.sample(range(1, total + 1), min(count, total))):

        def try_it(root: Path, number: int = number) -> str | None:
            def die() -> None:
                at_operation(number, root, lambda: os.kill(os.getpid(), signal.SIGKILL))
                train(root)

            bench.expect(Child(die, root.with_name(root.name + "_said")), -signal.SIGKILL)
            return bench.resumed(root)

        yield Case(f"SIGKILL before operation {number} of {total}", try_it)
