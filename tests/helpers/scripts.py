"""Scripts of the repository, such as its benchmarks, as modules."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


@contextmanager
def imported_script(path: str) -> Iterator[ModuleType]:
    """Import a script by its path in the repository; it and those beside it are forgotten afterwards."""
    file = ROOT / path
    sys.path.insert(0, str(file.parent))
    try:
        yield importlib.import_module(file.stem)
    finally:
        sys.path.remove(str(file.parent))
        theirs = [name for name, module in sys.modules.items() if _folder(module) == file.parent]
        for name in theirs:
            del sys.modules[name]


def _folder(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).parent
