"""Files that are damaged, of another time, edited, or gone."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from helpers.folders import only_run

from faults.runs import REFUSED, Bench, Case, is_one_line, kind

PART = 2
"""Rounds of the run whose files are changed."""

NUMBERS: dict[str, Callable[[dict[str, Any]], list[torch.Tensor]]] = {
    "last.ckpt": lambda state: [state["server"]["z"]],
    "clients.bin": lambda state: [row for rows in state["rows"].values() for row in rows],
}
"""File -> numbers of a run that stand there."""

EDITS: dict[str, Callable[[str], str | None]] = {
    "semicolons": lambda text: text.replace(",", ";"),
    "a byte-order mark": lambda text: "\ufeff" + text,
    "2.0": lambda text: text.replace("\n2,", "\n2.0,"),
    "a word": lambda text: text.replace("\n1,", "\none,"),
    "a comma more": lambda text: text.replace("\n1,", "\n1,,", 1),
    "no UTF-8": lambda text: text.replace("round", "r\udcffund", 1),
    "a name twice": lambda text: text.replace("round,", "round,round,", 1),
    "a line less": lambda text: text[: text[:-1].rfind("\n") + 1],
    "a line twice": lambda text: text.replace(text.splitlines()[-1], text.splitlines()[-2]),
    "nothing": lambda text: "",
    "no file": lambda text: None,
}


def refused_or_whole(bench: Bench, root: Path, words: str, *warnings: str) -> str | None:
    """A resume that says these words in one line, or warns, or loses nothing."""
    status, said = bench.resume(root, REFUSED)
    if status:
        return None if is_one_line(said) and words in said else said[-500:]
    lost = bench.lost(root)
    return None if lost is None or any(warning in said for warning in warnings) else lost


@kind("flipped-bit", 40, 2, is_general=True)
def flipped_bits(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """One bit of ``last.ckpt`` or of ``clients.bin``: first of a weight of z and of a client's row, then anywhere."""
    folder = only_run(bench.part(PART) / "default") / "checkpoints"
    names = [name for name in NUMBERS if (folder / name).exists()]
    for index in range(count):
        name, draw = names[index % len(names)], rng.random() if index >= len(names) else None

        def try_it(root: Path, name: str = name, draw: float | None = draw) -> str | None:
            path = bench.copy_part(PART, root) / "checkpoints" / name
            content = bytearray(path.read_bytes())
            if draw is None:
                numbers = NUMBERS[name](torch.load(path.parents[1] / "state.pt", weights_only=True))
                places = [content.find(number.numpy().tobytes()[:16]) + 2 for number in numbers]
                content[max(places)] ^= 1  # the last bit of the mantissa's upper part
            else:
                written = [place for place, byte in enumerate(content) if byte]  # most of clients.bin is a hole
                content[written[int(draw * len(written))]] ^= 1 << int(draw * 1e6) % 8
            path.write_bytes(content)
            return refused_or_whole(bench, root, f"{name}'")

        yield Case(f"bit of {name} at {'a number' if draw is None else f'{draw:.4f} of its length'}", try_it)


@kind("other-time", 12, is_general=True)
def copies_of_two_times(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """``last.ckpt`` and ``clients.bin`` of two rounds, as a copy of a live folder leaves them."""
    pairs = [(ckpt, rows) for ckpt in (1, 2, 3) for rows in (1, 2, 3) if ckpt != rows]
    for index in range(count):
        ckpt, rows = pairs[index % len(pairs)]

        def try_it(root: Path, ckpt: int = ckpt, rows: int = rows) -> str | None:
            run, old = bench.copy_part(1, root), root.with_name(root.name + "_old")
            if min(ckpt, rows) > 1:
                bench.timed(lambda: bench.train(root, min(ckpt, rows)))
            shutil.copytree(run / "checkpoints", old)
            bench.timed(lambda: bench.train(root, max(ckpt, rows)))
            shutil.copy(old / ("clients.bin" if rows < ckpt else "last.ckpt"), run / "checkpoints")
            return refused_or_whole(bench, root, "clients.bin")

        yield Case(f"last.ckpt of round {ckpt}, clients.bin of round {rows}", try_it)


@kind("edited-table", 33, 3)
def edited_tables(bench: Bench, count: int, rng: random.Random) -> Iterator[Case]:
    """Tables that were saved by a spreadsheet, or cut."""
    cases = [(name, edit) for name in ("clients.csv", "metrics.csv", "evaluation.csv") for edit in EDITS]
    for name, edit in cases[:count]:

        def try_it(root: Path, name: str = name, edit: str = edit) -> str | None:
            path = bench.copy_part(PART, root) / name
            text = EDITS[edit](path.read_text())
            path.unlink()
            if text is not None:
                path.write_text(text, errors="surrogateescape")
            return refused_or_whole(bench, root, f"{name}', line ", f"{name}' has ")

        yield Case(f"{name}: {edit}", try_it)
