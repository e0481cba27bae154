"""How long the command line takes to start, against ``import lightning.pytorch.cli``, in turn within one run.

    python benchmarks/startup.py [import] [help] [fit-help] [fit] [--repeats 5]

import    ``import fedbc_lightning``
help      ``fedbc-cli --help``
fit-help  ``fedbc-cli fit --help``
fit       ``fedbc-cli fit --config digits.yaml --trainer.max_rounds 1``: from the command to the end of the first round

Each is a process of its own. Run it twice: after an installation the first run compiles.

Prints seconds (median, minimum to maximum) and the ratio to Lightning's import of the same turn: machines are noisy,
ratios carry over.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

LIGHTNING = ["-c", "import lightning.pytorch.cli"]

COMMANDS = {
    "import": ["-c", "import fedbc_lightning"],
    "help": ["-m", "fedbc_lightning", "--help"],
    "fit-help": ["-m", "fedbc_lightning", "fit", "--help"],
    "fit": ["-m", "fedbc_lightning", "fit", "--config", "digits.yaml", "--trainer.max_rounds", "1"],
}
"""What follows ``python``."""


def measure(words: list[str]) -> float:
    """Seconds of a process; what it writes is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)
        return time.perf_counter() - started


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; by default all")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    unknown = set(given.commands) - set(COMMANDS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    ways = {"lightning": LIGHTNING, **{name: COMMANDS[name] for name in given.commands or COMMANDS}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, words in ways.items():
            seconds[name].append(measure(words))
    for name, values in seconds.items():
        ratios = [value / first for value, first in zip(values, seconds["lightning"], strict=True)]
        print(
            f"{name:10}{statistics.median(values):7.2f} s ({min(values):.2f} to {max(values):.2f})   "
            f"/ lightning {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
