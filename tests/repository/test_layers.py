"""The order of the folders, which pyproject.toml writes down for import-linter."""

import ast

import pytest
from helpers.scripts import ROOT
from importlinter.cli import lint_imports

LOWER = {
    "models": {"core"},
    "datamodules": {"core", "distributed", "partition", "data"},
}
"""What may be imported from the package by the folders that are mapped into it, which the linter does not see."""


def test_each_folder_imports_only_what_stands_below_it(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename="pyproject.toml")
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("folder", LOWER)
def test_models_and_data_modules_stand_where_the_order_says(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedbc_lightning."):
                assert node.module.split(".")[1] in LOWER[folder], f"{path.name} imports {node.module}"
