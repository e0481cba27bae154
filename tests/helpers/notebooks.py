"""Notebooks that are executed in a real kernel."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner

from helpers.programs import Forked, forked, wait_until
from helpers.scripts import ROOT


class ForkedKernel:
    """A fork in place of the ``Popen`` of a kernel."""

    stdin = stdout = stderr = None

    def __init__(self, program: Forked) -> None:
        self.pid, self.poll, self.kill, self.send_signal = program.pid, program.poll, program.kill, program.send_signal
        self.terminate, self.wait = program.kill, program.poll
        wait_until(lambda: os.getpgid(program.pid) == program.pid)  # from then on a signal to its group is not for us


def execute_forked(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The same as :func:`execute` in a fork that has imported torch, which is the same seconds sooner."""
    with ExitStack() as ends:

        def launch_kernel(command: Sequence[str], cwd: Path, env: dict[str, str], **_: object) -> ForkedKernel:
            words = command[command.index("-m") :]  # behind the interpreter and its options
            return ForkedKernel(ends.enter_context(forked(words, cwd, env)))

        monkeypatch.setattr(local_provisioner, "launch_kernel", launch_kernel)
        return execute(notebook, folder, monkeypatch)


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
