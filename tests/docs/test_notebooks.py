"""Tutorials and examples run in a real kernel, and what is stored of their outputs names no folder of the machine."""

import json
import re

import nbformat
import pandas as pd
import pytest
from helpers.notebooks import execute_forked
from helpers.scripts import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
EXAMPLES = sorted((ROOT / "examples").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", [*TUTORIALS, *EXAMPLES], ids=lambda path: path.stem)


SHORTER = [
    (r"(max_rounds\W+)\d\d", r"\g<1>3"), ("round == 30", "round == 3"),
    ("seeds=5", "seeds=2, workers=1"), ("seeds: 3", "seeds: 2\nworkers: 1"),
    ("import subprocess", "from helpers import programs"), (r"subprocess\.run", "programs.run_forked"),
]  # fmt: skip
"""What the test puts into notebooks, which are written for a reader with more time."""


@pytest.mark.slow
@notebooks
def test_a_notebook_runs_and_has_few_outputs(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    for written, shorter in SHORTER:
        for cell in notebook.cells:
            cell.source = re.sub(written, shorter, cell.source)
    cells = execute_forked(notebook, tmp_path, monkeypatch)
    shown = [sum(out.output_type != "stream" for out in cell.outputs) for cell in cells]
    assert max(shown) <= 2  # the bar of a run or study is one output, which is updated
    for metrics in tmp_path.rglob("metrics.csv"):  # who is sampled differs, so that the loss of training may rise
        losses = pd.read_csv(metrics).filter(regex="loss(/global|/local)?$")
        assert (losses.ffill().iloc[-1] < losses.bfill().iloc[0]).any()


@notebooks
def test_outputs_are_stored_and_say_nothing_of_the_machine(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in cells)
    said = json.dumps([cell["outputs"] for cell in cells])
    assert "/tmp" not in said
    assert "site-packages" not in said
    assert '"error"' not in said
    assert len(said) < 250_000  # a reader on GitHub does not wait for it


def test_readme_and_site_lead_to_all_examples():
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/start/index.md")]
    assert EXAMPLES
    assert all(f"examples/{path.name}" in page for path in EXAMPLES for page in pages)
