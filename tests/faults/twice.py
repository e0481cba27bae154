"""Two processes that go on with one run."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

from faults.registry import Case, kind
from faults.runs import REFUSED, Bench, Child, is_one_line, train


@kind("two-at-once", 12)
def two_at_once(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """The second starts while the first trains; one of them goes on."""
    for _ in range(count):
        seconds = rng.uniform(0, 0.5 * bench.seconds)

        def try_it(root: Path, seconds: float = seconds) -> str | None:
            bench.copy_part(1, root)
            first = Child(lambda: train(root), root.with_name(root.name + "_said"))
            time.sleep(seconds)
            second = Child(lambda: train(root), root.with_name(root.name + "_said"))
            ends = [bench.expect(child, REFUSED) for child in (first, second)]
            refused = [said for status, said in ends if status]
            if len(refused) == 2 or not all(is_one_line(said) and "is being written by" in said for said in refused):
                return "\n".join(refused)
            return bench.lost(root)

        yield Case(f"a second resume after {seconds:.3f} s", try_it)
