"""Files that are damaged, of another time, edited, or gone."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.runs import REFUSED, Bench, Case, is_one_line, kind

PART = 2
"""Rounds of the run whose files are changed."""

EDITS: dict[str, Callable[[str], str]] = {
    "semicolons": lambda text: text.replace(",", ";"),
    "a byte-order mark": lambda text: "\ufeff" + text,
    "2.0": lambda text: text.replace("\n2,", "\n2.0,"),
    "a word": lambda text: text.replace("\n1,", "\none,"),
    "a comma more": lambda text: text.replace("\n1,", "\n1,,", 1),
    "a name twice": lambda text: text.replace("round,", "round,round,", 1),
    "a line less": lambda text: text[: text[:-1].rfind("\n") + 1],
    "nothing": lambda text: "",
}


def refused_or_whole(bench: Bench, root: Path, name: str, *warnings: str) -> str | None:
    """A resume that says in one line which file is wrong, or warns of it, or loses nothing."""
    status, said = bench.resume(root, REFUSED)
    if status:
        return None if is_one_line(said) and name in said else said[-500:]
    lost = bench.lost(root)
    return None if lost is None or any(warning in said for warning in warnings) else lost


@kind("flipped-bit", 60)
def flipped_bits(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """One bit of ``last.ckpt`` or of ``clients.bin``."""
    for _ in range(count):
        name, draw = rng.choice(["last.ckpt", "clients.bin"]), rng.random()

        def try_it(root: Path, name: str = name, draw: float = draw) -> str | None:
            path = bench.copy_part(PART, root) / "checkpoints" / name
            content = bytearray(path.read_bytes())
            written = [place for place, byte in enumerate(content) if byte]  # most of clients.bin is a hole
            content[written[int(draw * len(written))]] ^= 1 << int(draw * 1e6) % 8
            path.write_bytes(content)
            return refused_or_whole(bench, root, name)

        yield Case(f"bit of {name} at {draw:.4f} of its length", try_it)


@kind("other-time", 12)
def copies_of_two_times(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """``last.ckpt`` and ``clients.bin`` of two rounds, as a copy of a live folder leaves them."""
    pairs = [(ckpt, rows) for ckpt in (1, 2, 3) for rows in (1, 2, 3) if ckpt != rows]
    for index in range(count):
        ckpt, rows = pairs[index % len(pairs)]

        def try_it(root: Path, ckpt: int = ckpt, rows: int = rows) -> str | None:
            run, old = bench.copy_part(1, root), root.with_name(root.name + "_old")
            if min(ckpt, rows) > 1:
                bench.resume_to(root, min(ckpt, rows))
            shutil.copytree(run / "checkpoints", old)
            bench.resume_to(root, max(ckpt, rows))
            shutil.copy(old / ("clients.bin" if rows < ckpt else "last.ckpt"), run / "checkpoints")
            return refused_or_whole(bench, root, "clients.bin")

        yield Case(f"last.ckpt of round {ckpt}, clients.bin of round {rows}", try_it)


@kind("edited-table", 24)
def edited_tables(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """Tables that were saved by a spreadsheet, or cut."""
    cases = [(name, edit) for edit in EDITS for name in ("metrics.csv", "clients.csv", "evaluation.csv")]
    for name, edit in cases[:count]:

        def try_it(root: Path, name: str = name, edit: str = edit) -> str | None:
            path = bench.copy_part(PART, root) / name
            path.write_text(EDITS[edit](path.read_text()))
            return refused_or_whole(bench, root, name, f"{name}' has ")

        yield Case(f"{name}: {edit}", try_it)
