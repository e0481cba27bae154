"""Measure what the start of the command line costs against ``import lightning.pytorch.cli``, in turn within one run.

    python benchmarks/startup.py [import] [help] [fit-help] [fit] [--repeats 6] [--wall]

import    ``import fedbc_lightning``
help      ``fedbc-cli --help``
fit-help  ``fedbc-cli fit --help all``
fit       ``fedbc-cli fit --config digits.yaml --trainer.max_rounds 1``: from the command to the end of the first round

Each is a process of its own. Run it twice, because the first run after an installation compiles.

Prints CPU seconds of the process (median, minimum to maximum) and the ratio to Lightning's import of the same turn:
machines are noisy, ratios carry over. ``--wall`` prints seconds instead.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from engines import describe

LIGHTNING = ["-c", "import lightning.pytorch.cli"]

COMMANDS = {
    "import": ["-c", "import fedbc_lightning"],
    "help": ["-m", "fedbc_lightning", "--help"],
    "fit-help": ["-m", "fedbc_lightning", "fit", "--help", "all"],
    "fit": ["-m", "fedbc_lightning", "fit", "--config", "digits.yaml", "--trainer.max_rounds", "1"],
}
"""Words after ``python``."""


def measure(words: list[str], wall: bool = False) -> float:
    """Return the CPU seconds, or the seconds, of a process whose output is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        started, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)
        seconds, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds if wall else cpu


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; by default all")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--wall", action="store_true", help="measure seconds instead of CPU seconds")
    given = parser.parse_args(arguments)
    unknown = set(given.commands) - set(COMMANDS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    ways = {"lightning": LIGHTNING, **{name: COMMANDS[name] for name in given.commands or COMMANDS}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, words in ways.items():
            seconds[name].append(measure(words, given.wall))
    for name, values in seconds.items():
        print(
            f"{name:10}{statistics.median(values):7.2f} s ({min(values):.2f} to {max(values):.2f})   "
            f"/ lightning {describe(values, seconds['lightning'])}"
        )


if __name__ == "__main__":
    main()
