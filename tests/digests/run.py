"""Prove that a change of the code changes no number: hash what every method writes, before and after it.

    python tests/digests/run.py write FILE [--only PATTERN ...] [--leaves FOLDER]
    python tests/digests/run.py compare FILE [--only PATTERN ...] [--leaves FOLDER]

All 1,222 cases take about three minutes on two free cores.
A case is a run of three rounds on tiny data, ``setting[+variant]/engine/type/processes``. Its line in FILE has one hash
for each table of the run (without the columns of the clock), for the tensors and numbers of ``last.ckpt``, and for
``clients.bin``. ``compare`` prints the cases whose hashes differ from those in FILE, and exits with 1 if there are any.
A pattern is the name of an algorithm's class, or fits the names of cases: ``--only FedBC 'scaffold-*/vectorized/*'``.
The hashes hold for one machine and one version of torch. ``--leaves`` writes a file for each case, with a line for each
column and tensor: ``diff -r`` of two such folders shows what differs.
"""

import argparse
import os
import platform
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: sums depend on the number of threads
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from digests.digest import digest
from digests.running import Result, results, selected


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["write", "compare"])
    parser.add_argument("file", type=Path, help="the hashes, one line per case")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="run these cases only")
    parser.add_argument("--leaves", type=Path, metavar="FOLDER", help="write every single hash to this folder")
    options = parser.parse_args(words)
    if not selected(options.only):
        parser.error(f"--only: no case fits {' '.join(options.only)}")
    stored = _read(options.file) if options.verb == "compare" else {}
    found: dict[str, str] = {}
    for name, result in results(options.only):
        found[name] = f"failed: {result}" if isinstance(result, str) else digest(result)
        _write_leaves(options.leaves, name, result)
        if found[name].startswith("failed"):
            print(f"{name} {found[name]}", flush=True)
    if options.verb == "write":
        lines = [f"# {_machine()}", *(f"{name} {line}" for name, line in sorted(found.items()))]
        options.file.write_text("\n".join(lines) + "\n")
        print(f"{len(found)} cases written to {options.file}")
        return int(any(line.startswith("failed") for line in found.values()))
    expected = {case.name: "" for case in selected(options.only)} if options.only else dict.fromkeys(stored, "")
    return _compare({name: stored.get(name, "") for name in expected | found}, found)


def _compare(stored: dict[str, str], found: dict[str, str]) -> int:
    """Print what differs; 1 if anything does."""
    differing = [name for name in stored if stored[name] != found.get(name) or "failed" in stored[name]]
    for name in sorted(differing):
        print(f"{name}: {_difference(stored[name], found.get(name, ''))}")
    print(f"{len(stored) - len(differing)} of {len(stored)} cases are equal, {len(differing)} differ")
    return int(bool(differing))


def _difference(stored: str, found: str) -> str:
    """Which files of a case differ, in words."""
    if not stored or not found or "failed" in stored + found:
        return f"{stored or 'absent'} -> {found or 'absent'}"
    before, after = (dict(part.split("=") for part in line.split()) for line in (stored, found))
    return ", ".join(name for name in before | after if before.get(name) != after.get(name)) + " differ"


def _read(file: Path) -> dict[str, str]:
    """The hashes of a file, by the names of the cases; says if they are of another machine."""
    first, *lines = file.read_text().splitlines()
    if first != f"# {_machine()}":
        print(f"warning: {file} was written on another machine or with another version ({first[2:]})", file=sys.stderr)
    return dict(line.split(" ", 1) for line in lines)


def _machine() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()} {capability}"


def _write_leaves(folder: Path | None, name: str, result: Result) -> None:
    if folder is None or isinstance(result, str):
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{file} {leaf} {value}\n" for file, part in result.items() for leaf, value in part.items()]
    (folder / f"{name.replace('/', '-')}.txt").write_text("".join(lines))


if __name__ == "__main__":
    sys.exit(main())
