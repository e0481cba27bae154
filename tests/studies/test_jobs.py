"""Jobs of submitit do a study: real ones, as processes of this machine, of which one is killed."""

import json
import os
import signal

import pandas as pd
import psutil
import pytest
import yaml
from helpers.command_line import run_cli
from helpers.programs import forked, is_over, wait_until

from fedbc_lightning.studies.study import Study

pytest.importorskip("submitit", reason="the extra cluster is not installed")

STUDY = {
    "base": "tiny.yaml",
    "algorithms": {"FedAvg": {}, "FedBC": {"dual_lr": 0.01}},
    "overrides": {"trainer.max_rounds": 40},
    "seeds": 1,
}
JOBS = {"backend": "local", "jobs": 2, "workers": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_killed_job_leaves_its_runs_to_the_others(project):
    (project / "whole.yaml").write_text(yaml.safe_dump(STUDY))
    (project / "study.yaml").write_text(yaml.safe_dump(STUDY | JOBS))
    with forked(["-m", "fedbc_lightning", "compare", "--config", "study.yaml"], project) as program:
        wait_until(lambda: list(project.glob("studies/study/runs/**/last.ckpt")), program)
        first, _ = json.loads((project / "studies/study/jobs/jobs.json").read_text())["jobs"]
        (job,) = psutil.Process(int(first)).children()
        job.kill()
        done = program.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Jobs submitted: " in done.stdout
    assert run_cli("compare", "--config", "whole.yaml") == 0
    results = [pd.read_csv(project / "studies" / name / "results.csv") for name in ("study", "whole")]
    results[0]["folder"] = results[0]["folder"].str.replace("studies/study/", "studies/whole/")
    pd.testing.assert_frame_equal(*[found.drop(columns="seconds") for found in results])
    tables = [(project / "studies" / name / "table.md").read_text() for name in ("study", "whole")]
    assert tables[0].replace("# study", "# whole") == tables[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.nightly(reason="as Ctrl-C in test_compare.py")), signal.SIGKILL],
)
def test_jobs_of_this_machine_end_with_the_command(project, number):
    endless = {"jobs": 1, "overrides": {"trainer.max_rounds": 100_000}}
    (project / "study.yaml").write_text(yaml.safe_dump(STUDY | JOBS | endless))
    ignored = "import signal\nsignal.signal(2, signal.SIG_IGN)\n"  # as for what a script starts in the background
    script = "from fedbc_lightning.commands.main import program\nraise SystemExit(program())"
    (project / "background.py").write_text(ignored + script)
    command = ["-m", "fedbc_lightning"] if number == signal.SIGINT else ["background.py"]
    with forked([*command, "compare", "--config", "study.yaml"], project) as program:
        wait_until(lambda: list(project.glob("studies/study/runs/**/last.ckpt")), program)
        started = psutil.Process(program.pid).children(recursive=True)
        os.killpg(program.pid, number) if number == signal.SIGINT else program.kill()
        done = program.finish()  # when the last of them has ended
    assert done.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in done.stderr
    wait_until(lambda: all(map(is_over, started)), seconds=30)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"resources": {"tiemout_min": 3}},
            "local (Unknown executor 'tiemout' in parameter 'tiemout_min'.); resources",
        ),
        ({"resources": {"timeout_min": "soon"}}, 'backend: local (Parameter "timeout_min" expected type'),
        ({"resources": {"nodes": 2}}, "backend: local (LocalExecutor can use only one node"),
    ],
)
def test_mistakes_are_one_line(project, capfd, given, message):
    (project / "study.yaml").write_text(yaml.safe_dump(STUDY | JOBS | given))
    assert run_cli("compare", "--config", "study.yaml") == 1
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert message in line
    assert not list(project.glob("studies/*/runs"))


def test_a_plan_knows_how_many_runs_jobs_do_at_a_time():
    study = Study("digits.yaml", {"FedAvg": {}}, backend="slurm", jobs=3, resources={"gpus_per_node": 2})
    assert study.num_workers * study.jobs == 6
