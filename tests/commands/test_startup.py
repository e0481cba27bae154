"""Commands import what they use: seen in ``sys.modules``, never by the clock, which ``benchmarks/startup.py`` asks."""

import gc
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from fedbc_lightning.datamodules import vision
from sklearn.datasets import load_digits

from fedbc_lightning.commands.main import main

HEAVY = {
    "datasets", "flwr_datasets", "matplotlib", "moviepy", "pandas", "pyarrow", "pytorch_lightning", "scipy", "sklearn",
    "sympy", "tensorboard", "tensorflow", "torchvision",
}  # fmt: skip

SCRIPT = """\
import importlib, json, sys

first, commands, path = json.loads(sys.argv[1])
for module in first:
    importlib.import_module(module)
before, found = set(sys.modules), []
from fedbc_lightning.commands.main import main

for words in commands:
    try:
        main(words)
    except SystemExit:
        pass
    print("ended", file=sys.stderr)
    found.append(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
with open(path, "w") as file:
    json.dump(found, file)
"""


def imported(folder, *commands, after=()):
    """The packages of which each command and those before it, in one process, import something new.

    Args:
        folder: Where they run.
        *commands: Their words.
        after: What is imported beforehand and does not count.
    """
    path = folder / "imported.json"
    arguments = json.dumps([after, commands, str(path)])
    command = [sys.executable, "-c", SCRIPT, arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.split("ended\n")
    assert (said[0], said[-1]) == ("", ""), "extension modules report what is never freed"
    return [set(packages) for packages in json.loads(path.read_text())]


def test_help_and_mistakes_are_answered_without_lightning(tmp_path):
    commands = [["--help"], ["--version"], ["configs"], ["fti"], ["fit", "--help"], ["fit", "--config", "digit"]]
    assert not imported(tmp_path, *commands)[-1] & (HEAVY | {"torch", "lightning", "torchmetrics", "numpy", "jinja2"})


# Lightning imports torchmetrics, and that torchvision, matplotlib and scipy, which is not ours to mend:
# https://github.com/Lightning-AI/torchmetrics/issues/3457
LIGHTNING = ("lightning.pytorch.cli",)


def test_what_describes_the_options_imports_no_more_than_lightning_and_a_run_what_it_uses(tmp_path):
    """In one process, because Lightning takes seconds: each command after those before it."""
    commands = [
        ["fit", "--help", "all"],
        ["fit", "--algorithm.help"],
        ["fit", "--model.help"],
        ["fit", "--data.help"],
        ["fit", "--data.help", "MNISTDataModule"],
        ["fit", "--config", "mnist.yaml", "--print_config"],
        ["fit", "--data", "DigitDataModule"],
    ]
    fit = ["fit", "--config", "digits.yaml", "--trainer.max_rounds", "1"]
    runs = [*fit, "--trainer.logger", "false"], fit
    *_, described, bare, usual = imported(tmp_path, *commands, *runs, after=LIGHTNING)
    assert not described & HEAVY
    assert len(list(tmp_path.glob("runs/digits/*-0*/checkpoints/last.ckpt"))) == 2
    assert bare & HEAVY <= {"matplotlib"}  # draws the partition
    assert usual & HEAVY <= {"matplotlib", "tensorboard"}


def test_the_console_script_imports_without_collecting_garbage(monkeypatch, capsys):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    for args in (None, ["fit", "--help", "all"]):  # only the first is sure to have the process for itself
        monkeypatch.setattr(sys, "argv", ["fedbc-cli", "fit", "--help", "all"])
        with pytest.raises(SystemExit):
            main(args)
        assert frozen == [False]
        assert gc.isenabled()


def test_digits_are_those_of_scikit_learn():
    images, targets = vision.read_digits()
    expected_images, expected_targets = load_digits(return_X_y=True)
    np.testing.assert_array_equal(images, expected_images)
    np.testing.assert_array_equal(targets, expected_targets)
    assert (images.dtype, targets.dtype) == (np.uint8, expected_targets.dtype)
