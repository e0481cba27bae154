"""Notebooks that are executed in a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from helpers.scripts import ROOT


def execute(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Execute a notebook in a folder, with nothing of the user's own settings, and return its cells of code."""
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    place = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    return [cell for cell in notebook.cells if cell["cell_type"] == "code"]


def execute_code(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Execute cells of code as a notebook, and return the cells with their outputs."""
    return execute(nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells))), folder, monkeypatch)
