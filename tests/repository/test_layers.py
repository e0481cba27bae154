"""The order of the folders, which pyproject.toml writes down for import-linter."""

import ast
import re
import subprocess
import sys

import pytest
from helpers.scripts import ROOT

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
"""A process of its own: here the package has been imported, and has `models` and `datamodules` on its path."""

LOWER = {
    "models": {"core"},
    "datamodules": {"core", "distributed", "partition", "data"},
}
"""What may be imported from the package by the folders that are mapped into it, which the linter does not see."""


def test_each_folder_imports_only_what_stands_below_it():
    done = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # some versions colour what they print in CI
    assert "The order of the folders KEPT" in plain


@pytest.mark.parametrize("folder", LOWER)
def test_models_and_data_modules_stand_where_the_order_says(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedbc_lightning."):
                assert node.module.split(".")[1] in LOWER[folder], f"{path.name} imports {node.module}"
