"""Run the cases for two processes, all on the same two: ``python -m digests.ranks FOLDER [PATTERN ...]``.

Lightning starts this command a second time for the other process. The first one writes the results to ``FOLDER``.
"""

import pickle
import sys
from pathlib import Path

import torch

from digests.running import prepare, result_of, selected


def main(folder: Path, patterns: list[str]) -> None:
    """Run them; both processes try the same cases in the same order."""
    prepare()
    found = {case.name: result_of(case, folder) for case in selected(patterns) if case.processes == 2}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        (folder / "results.pkl").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
