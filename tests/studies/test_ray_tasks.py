"""Tasks of Ray do a study: real ones, of which one is killed."""

import os
import signal
import sys

import pandas as pd
import psutil
import pytest
import yaml
from helpers.command_line import run_cli
from helpers.programs import forked, is_over, run_python, wait_until

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.distributed

STUDY = {
    "base": "tiny.yaml",
    "algorithms": {"FedAvg": {}, "FedBC": {"dual_lr": 0.01}},
    "overrides": {"trainer.max_rounds": 40},
    "seeds": 1,
}


def at_work(program):
    """The processes in which runs are."""
    found = []
    for process in psutil.Process(program.pid).children(recursive=True):
        try:
            found += [process] * any(file.path.endswith("log.txt") for file in process.open_files())
        except psutil.Error:  # it has ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    "is_interrupted",
    [False, pytest.param(True, marks=pytest.mark.nightly(reason="a cluster starts once more, for twenty seconds"))],
)
def test_a_killed_task_goes_on_in_another_one_and_all_end_with_the_command(project, is_interrupted):
    (project / "whole.yaml").write_text(yaml.safe_dump(STUDY))
    (project / "study.yaml").write_text(yaml.safe_dump(STUDY | {"backend": "ray", "workers": 1}))
    words = ["-m", "fedbc_lightning", "compare", "--config", "study.yaml"]
    with forked(words, project) as program:
        wait_until(lambda: list(project.glob("studies/study/runs/**/last.ckpt")), program)
        (killed,) = at_work(program)
        killed.kill()
        wait_until(lambda: at_work(program), program)
        started = psutil.Process(program.pid).children(recursive=True)
        if is_interrupted:
            os.killpg(program.pid, signal.SIGINT)
        done = program.finish()
    wait_until(lambda: all(map(is_over, started)), seconds=30)
    if is_interrupted:
        assert done.returncode == 130, done.stdout + done.stderr
        done = run_python(words, project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run_cli("compare", "--config", "whole.yaml") == 0
    results = [pd.read_csv(project / "studies" / name / "results.csv") for name in ("study", "whole")]
    results[0]["folder"] = results[0]["folder"].str.replace("studies/study/", "studies/whole/")
    pd.testing.assert_frame_equal(*[found.drop(columns="seconds") for found in results])


MISTAKES = {
    "resources are those of a task of Ray, e.g. num_cpus": {"gpus": 1},
    "a run asks for num_gpus=3.5, and there are 0": {"num_gpus": 3.5},
    "fedbc-lightning[ray]": {},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_line(project, capfd, monkeypatch, message):
    monkeypatch.setattr("ray.init", lambda **options: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    if not MISTAKES[message]:
        monkeypatch.setitem(sys.modules, "ray", None)
    (project / "study.yaml").write_text(yaml.safe_dump(STUDY | {"backend": "ray", "resources": MISTAKES[message]}))
    assert run_cli("compare", "--config", "study.yaml") == 1
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert message in line
    assert not list(project.glob("studies/*/runs"))
