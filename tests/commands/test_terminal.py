"""What a person sees on a terminal: the first line, a run that goes on, Ctrl-C, and how to go on."""

import re
import shlex
import sys

import pytest
from helpers.command_line import write_project
from helpers.programs import run_python, wait_until

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals", allow_module_level=True)

from helpers.terminal import CTRL_C, on_terminal

MODULE = """\
import os
import time
from pathlib import Path

from fedbc_lightning.models import LogisticRegression


class Waiting(LogisticRegression):
    # Waits in a step of round 2 until a file is there.
    def training_step(self, batch, batch_idx):
        self._wait("training")
        loss = super().training_step(batch, batch_idx)
        self.log("train_double", 2 * loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        self._wait("evaluation")
        return super().test_step(batch, batch_idx)

    def _wait(self, where):
        if os.environ.get("WAIT") == where and self.trainer.current_round == 2:
            Path("waits").touch()
            while not Path("go").exists():
                time.sleep(0.01)
"""
FIT = ["-m", "fedbc_lightning", "fit", "--config", "tiny.yaml", "--trainer.enable_progress_bar", "true"]
STOPPING = "Ctrl-C: stopping after this step; the last finished round is kept."
STILL = "Ctrl-C: still stopping; once more ends the process at once."


@pytest.fixture
def project(tmp_path):
    write_project(tmp_path)
    (tmp_path / "waiting.py").write_text(MODULE)
    return tmp_path


def starting(lines, words):
    return [line for line in lines if line.startswith(words)]


def live(lines, name):
    """The lines below the bar that show a metric; the table at the end has a frame."""
    return [line for line in lines if f"{name} " in line and "│" not in line]


@pytest.mark.parametrize(
    ("width", "where", "presses"), [(60, "training", 1), (80, "evaluation", 2), (120, "training", 3)]
)
def test_ctrl_c_leaves_every_line_once_and_says_how_to_go_on(project, width, where, presses):
    words = [*FIT, "--model", "waiting.Waiting", "--trainer.max_rounds", "3"]
    with on_terminal(words, project, width, is_fresh=presses == 3, WAIT=where) as program:
        wait_until((project / "waits").exists)
        program.wait_for("round 2/3")
        for said in (STOPPING, STILL, "Ctrl-C: ended at once.")[:presses]:
            program.press_until(CTRL_C, said[:50])
        (project / "go").touch()
        assert program.finish() == 130
        lines, has_cursor = program.lines, program.has_cursor
    assert has_cursor
    assert lines[0] == "Loading PyTorch ..."
    assert len(starting(lines, "round ")) == len(live(lines, "accuracy/global")) == 1
    assert len(live(lines, "train/double")) == 1  # the module asks for it
    for said in (STOPPING, STILL)[: min(presses, 2)]:
        assert sum(said[:50] in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines)
    if presses == 3:
        return
    go_on = "fedbc-cli fit --ckpt_path runs/tiny/FedAvg-0"
    assert lines[-3:] == [
        "Run folder:  runs/tiny/FedAvg-0", f"Go on:       {go_on}", "fedbc-cli: interrupted after round 1",
    ]  # fmt: skip
    again = run_python(["-m", "fedbc_lightning", *shlex.split(go_on)[1:]], project)
    assert again.returncode == 0, again.stderr
    assert ", resumed after round 1" in again.stdout
    assert "round    3/3" in again.stdout


def test_ctrl_c_during_the_imports_has_no_traceback(project):
    with on_terminal(FIT, project, 80, is_fresh=True) as program:
        program.wait_for("Loading PyTorch")
        program.press(CTRL_C)
        assert program.finish() == 130
        # The terminal may put its ^C before the end of the line, and throws away what is printed at that very moment.
        assert program.lines[0].startswith("Loading PyTorch")
        assert program.lines[-1] == "fedbc-cli: interrupted before the run began" or program.lines[-1].endswith("^C")
        assert not any("Traceback" in line for line in program.lines)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_of_two_processes_one_draws(project, strategy):
    words = [*FIT, "--model", "waiting.Waiting", "--trainer.devices", "2", "--trainer.strategy", strategy]
    with on_terminal([*words, "--trainer.max_rounds", "3"], project, 80, WAIT="training") as program:
        wait_until((project / "waits").exists)
        program.wait_for("×2")
        program.press_until(CTRL_C, STOPPING)
        (project / "go").touch()
        assert program.finish() == 130
        lines = program.lines
    assert len(starting(lines, "round ")) == len(live(lines, "accuracy/global")) == 1
    assert sum(STOPPING in line for line in lines) == 1
    assert "Go on:       fedbc-cli fit --ckpt_path runs/tiny/FedAvg-0" in lines
    assert any(line.startswith("fedbc-cli: interrupted") and "nothing to resume" not in line for line in lines)


def test_a_pipe_gets_plain_lines(project):
    done = run_python(FIT, project)
    assert done.returncode == 0
    assert "Loading PyTorch" not in done.stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)
    assert len(re.findall(r"^round +\d+/2  train/loss ", done.stdout, re.M)) == 2
