"""The order of the folders, which pyproject.toml writes down for import-linter."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers.scripts import ROOT

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
"""A process of its own: here the package has been imported, and has `models` and `datamodules` on its path."""

LOWER = {"models": {"core"}, "datamodules": {"core", "partition", "data"}}
"""What may be imported from the package by the folders that are mapped into it, which the linter does not see."""
PACKAGE = "fedbc_lightning"


def test_each_folder_imports_only_what_stands_below_it():
    done = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # some versions colour what they print in CI
    assert "The order of the folders KEPT" in plain


@pytest.mark.parametrize("folder", LOWER)
def test_models_and_data_modules_stand_where_the_order_says(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in found:
                package, _, rest = module.partition(".")
                is_allowed = rest.split(".")[0] in {*LOWER[folder], folder}
                assert package != "fedbc_lightning" or is_allowed, f"{path.name} imports {module}"


def module_of(path: Path) -> str:
    """The name under which a file of the repository is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == PACKAGE else (PACKAGE, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> Iterator[str]:
    """The modules among these that a file imports anywhere: at its top, in functions, and for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            folder = [module_of(path.parents[node.level - 1])] if node.level else []
            source = ".".join([*folder, *filter(None, [node.module])])
            yield from {f"{source}.{alias.name}" for alias in node.names} & modules or {source} & modules
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & modules


def test_no_files_import_each_other_in_a_circle():
    files = {module_of(path): path for folder in (PACKAGE, *LOWER) for path in (ROOT / folder).rglob("*.py")}
    imports = {module: set(imports_of(path, set(files))) - {module} for module, path in files.items()}
    assert sum(map(len, imports.values())) > len(files) > 200
    TopologicalSorter(imports).prepare()  # raises CycleError with the files of a circle


WRITING = r"""(?x) \. (mkdir | rmdir | rmtree | unlink | touch | chmod | symlink_to | write_text | write_bytes | savefig
| print_png | print_svg | save_pretrained) \( | \b
(save_file | SummaryWriter | TemporaryDirectory | os\.open | os\.replace | shutil\.\w+) \(
| \b to_csv \( [^i)] | open \( [^)]* "[rb]* [wax+] """
"""What opens, makes or removes a file or a folder."""

BESIDE_THE_DOOR = {
    "commands/main.py": 1,  # /dev/null
    "data/partition_picture.py": 1,  # into memory
    "run/processes.py": 2,  # the result of a run's processes, outside of its folder
    "run/trained_model.py": 2,  # a private file; peft's folder, which has no links
    "studies/drawing.py": 2,  # into memory; a folder that has just been made
    "studies/study_plan.py": 2,  # what a plan measures, outside of the study's folder
}
"""Files of the package that may, how often, and why."""


def test_files_are_written_through_one_door():
    """``core/files.py`` alone, so that nowhere a link is followed, or half of a file is seen."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / PACKAGE).rglob("*.py")}
    found = {str(path.relative_to(ROOT / PACKAGE)): re.findall(WRITING, text) for path, text in texts.items()}
    assert found.pop("core/files.py")
    found = {name: calls for name, calls in found.items() if len(calls) != BESIDE_THE_DOOR.get(name, 0)}
    assert not found, "open, make and remove files by core/files.py"
