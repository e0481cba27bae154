"""Inject faults into real runs: ``python tests/faults/run.py [--short] [--kind KIND ...] [--seed SEED]``.

Prints per kind of fault how many were tried, how many lost nothing, and what the others lost; exits with 1 if any did.
A run survives a fault if it goes on bit for bit as if never disturbed, or is refused in one line that names the file.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
if str(Path(__file__).parent) in sys.path:
    sys.path.remove(str(Path(__file__).parent))  # a module here called `files` is no top-level one

from faults import disks, files, kills, processes  # noqa: F401 - they register themselves
from faults.runs import KINDS, Bench, Case

SHORT = 1
"""Cases per kind of the short form."""


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help=f"{SHORT} case of each kind")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this one; may be given again")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places (default 0)")
    options = parser.parse_args(words)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        num_tried = num_lost = 0
        for name in options.kind or KINDS:
            make_cases, count = KINDS[name]
            cases = list(make_cases(bench, SHORT if options.short else count, random.Random(f"{options.seed} {name}")))
            lost = [(case.name, problem) for case in cases if (problem := _try(case, Path(folder)))]
            print(f"{name}: tried {len(cases)}, survived {len(cases) - len(lost)}, lost {len(lost)}", flush=True)
            for case_name, problem in lost:
                print(f"    {case_name}: {problem}", flush=True)
            num_tried, num_lost = num_tried + len(cases), num_lost + len(lost)
    print(f"all: tried {num_tried}, survived {num_tried - num_lost}, lost {num_lost}")
    return int(num_lost > 0)


def _try(case: Case, folder: Path) -> str | None:
    """What a case lost; its folders are removed."""
    try:
        return case.try_it(folder / "case")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for left in folder.glob("case*"):
            shutil.rmtree(left, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
