"""Inject faults into real runs: ``python tests/faults/run.py [--short] [--mutants] [--kind KIND ...]``.

Prints per kind of fault and configuration how many were tried, how many lost nothing, and what the others lost; exits
with 1 if any did. A run survives a fault if it goes on bit for bit as if never disturbed, or is refused in one line
that names the file. ``--mutants`` tries the same on faulty forms of the package, and exits with 1 if one is not found.
"""

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

from faults import disks, files, kills, launches, processes, runs  # noqa: F401 - they register themselves
from faults.mutants import MUTANTS, mutated
from faults.runs import CONFIGURATIONS, KINDS, Bench, Case


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few cases of each kind, and one of most mutants")
    parser.add_argument("--mutants", action="store_true", help="few cases of each kind with each mutant")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this one; may be given again")
    parser.add_argument("--configuration", action="append", choices=list(CONFIGURATIONS), help="as --kind")
    parser.add_argument("--true-limits", action="store_true", help="wait as long as a run of a user does; hours")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places (default 0)")
    options = parser.parse_args(words)
    runs.has_true_limits = options.true_limits
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    configurations, kinds = options.configuration or list(CONFIGURATIONS), options.kind or list(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        if options.mutants:
            return int(bool(_missed(Bench(Path(folder, "plain")), kinds, options.seed)))
        counts = {}
        for configuration in configurations[:1] if options.short else configurations:
            bench = Bench(Path(folder, configuration), configuration)
            for name in kinds:
                if KINDS[name].is_general or configuration == configurations[0]:
                    count = KINDS[name].short if options.short else KINDS[name].count
                    counts[name, configuration] = _try_kind(bench, name, count, options.seed)
        missed = _missed(bench, [], options.seed) if options.short and not options.kind else []
    _print_table(counts)
    num_tried, num_lost = (sum(column) for column in zip(*counts.values(), strict=True))
    print(f"all: tried {num_tried}, survived {num_tried - num_lost}, lost {num_lost}")
    return int(num_lost > 0 or bool(missed))


def _try_kind(bench: Bench, name: str, count: int, seed: int) -> tuple[int, int]:
    cases = list(KINDS[name].cases(bench, count, random.Random(f"{seed} {name}")))
    lost = [(case.name, problem) for case in cases if (problem := _try(case, bench.folder))]
    told = f"tried {len(cases)}, survived {len(cases) - len(lost)}, lost {len(lost)}"
    print(f"{name}, {bench.configuration}: {told}", flush=True)
    for case_name, problem in lost:
        print(f"    {case_name}: {problem}", flush=True)
    return len(cases), len(lost)


def _missed(bench: Bench, kinds: list[str], seed: int) -> list[str]:
    """The mutants that no fault finds: those of the given kinds, or the first case that is placed for a mutant."""
    missed = []
    tried = {name: placed for name, (_, placed) in MUTANTS.items() if kinds or placed}
    for mutant, placed in tried.items():
        num_found = 0
        for name in kinds or [placed]:
            count = max(2, 2 * KINDS[name].short) if kinds else 1
            cases = list(KINDS[name].cases(bench, count, random.Random(f"{seed} {name}")))
            with mutated(mutant):
                found = [case.name for case in cases if _try(case, bench.folder)]
            print(f"mutant '{mutant}', {name}: {len(found)} of {len(cases)}: {'; '.join(found)}", flush=True)
            num_found += len(found)
        missed += [] if num_found else [mutant]
    print(f"mutants: {len(tried)}, missed: {missed}")
    return missed


def _print_table(counts: dict[tuple[str, str], tuple[int, int]]) -> None:
    """Print a row per kind and a column per configuration: tried/survived/lost."""
    configurations = list(dict.fromkeys(configuration for _, configuration in counts))
    print(f"{'tried/survived/lost':24}", *(f"{name:>14}" for name in configurations))
    for name in dict.fromkeys(name for name, _ in counts):
        found = [counts.get((name, configuration)) for configuration in configurations]
        cells = ["" if one is None else f"{one[0]}/{one[0] - one[1]}/{one[1]}" for one in found]
        print(f"{name:24}", *(f"{cell:>14}" for cell in cells))


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
