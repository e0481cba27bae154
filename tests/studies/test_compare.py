"""``fedbc-cli compare`` as a person runs it: real runs by real workers, in a process that is killed and interrupted."""

import gc
import glob
import io
import json
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers.command_line import run_cli
from helpers.folders import only_run
from helpers.programs import forked, run_python, wait_until
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedbc_lightning import ConfigurationError
from fedbc_lightning.core.metric_names import measured
from fedbc_lightning.run.identity import VERSIONS
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.studies.compare import Comparison
from fedbc_lightning.studies.parsed_runs import check_runs
from fedbc_lightning.studies.results import check_pairs, read_results
from fedbc_lightning.studies.statistics import reported_rows
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_progress import StudyProgress
from fedbc_lightning.studies.study_run import LOST, State, is_finished, note_beginning, note_end
from fedbc_lightning.studies.workers import do_if_free

ACCURACY = "accuracy/global"
LOSS = "loss/global"
TINY = {
    "base": "tiny.yaml",
    "algorithms": {"FedAvg": {}, "again": {"algorithm": "FedAvg"}, "FedBC": {"dual_lr": 0.01}},
    "variants": {"E=1": {"trainer.local_epochs": 1}, "E=3": {"trainer.local_epochs": 3}},
    "seeds": 2,
    "workers": 1,
}


pytestmark = pytest.mark.usefixtures("forked_workers", "project")


def write(folder, name="study.yaml", **given):
    (folder / name).write_text(yaml.safe_dump({**TINY, **given}))


COMPARE = ("-m", "fedbc_lightning", "compare", "--config")


@pytest.fixture
def compare(project, monkeypatch, capfd):
    """The command in this process: what it prints; its exit status must be as given."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words, status=0):
        capfd.readouterr()
        found = run_cli("compare", "--config", *words)
        said = "".join(capfd.readouterr())
        assert found == status, said
        return said

    return run


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_seen_of_runs_at_work(monkeypatch, is_terminal):
    """Two runs are being done, one of them from an earlier session; one has failed before anybody looked."""
    study = Study(**{**TINY, "name": "study"})
    states = [State(study.run(variant, method, 0)) for variant in study.variants for method in study.methods]
    states[0].round, states[0].max_rounds = 2, 8
    states[5].status = "failed"
    console = Console(file=(out := io.StringIO()), force_terminal=is_terminal, width=120, color_system=None)
    monkeypatch.setattr("fedbc_lightning.studies.study_progress.SECONDS_BETWEEN_LINES", -1.0)
    now = [0.0]
    console.get_time = lambda: now[0]
    with StudyProgress("runs", console, states) as progress:
        for second, round in ((0.0, 3), (10.0, 4)):
            now[0] = second
            states[0].status, states[0].round = "running", round
            states[3].status = "running"
            progress.show()
    said = out.getvalue()
    assert said.startswith("runs: 6 runs\n")
    assert said.count("failed: E=3 / FedBC / seed 0: None") == 1
    assert re.search(r"E=1 / FedAvg / seed 0 .*round 4/8", said)
    assert re.search(r"E=3 / FedAvg / seed 0 .*starting", said)
    assert "E=1 / FedBC" not in said
    if not is_terminal:
        assert "runs: 0 of 6 runs, 1 failed, 10 s, about 6 min 0 s left; E=1 / FedAvg" in said  # 4.5 runs, 8 × 10 s


def test_the_time_left_is_right_from_the_second_run_on(monkeypatch):
    """A worker starts for 30 s; a run is set up in 4 s and has 8 rounds of 2 s."""
    study, out, now = Study(**{**TINY, "name": "study"}), io.StringIO(), [0.0]
    states = [State(study.run(variant, method, 0)) for variant in study.variants for method in study.methods]
    console = Console(file=out, width=120, color_system=None)
    monkeypatch.setattr("fedbc_lightning.studies.study_progress.SECONDS_BETWEEN_LINES", -1.0)
    console.get_time = lambda: now[0]
    with StudyProgress("runs", console, states) as progress:
        for second in (0.0, *np.arange(30.0, 51.0), 59.0):
            now[0] = second
            for k, state in enumerate(states):
                since = second - 30 - 20 * k
                state.round, state.max_rounds = int(np.clip((since - 4) // 2, 0, 8)), 8
                state.status = "waiting" if since < 0 else "running" if since < 20 else "finished"
            progress.show()
    lines = out.getvalue().splitlines()
    assert next(line for line in lines if "1 of 6" in line).startswith("runs: 1 of 6 runs, 50 s, about 1 min 40 s left")


def results(folder):
    return pd.read_csv(folder / "results.csv")


def check_means_in_tensorboard(folder, finals):
    """The last values of one method are those of its seeds, whose accuracies by method are given."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    accuracies = np.array([of_seed["FedBC"] for of_seed in finals])
    assert events.Scalars(ACCURACY)[-1].value == pytest.approx(accuracies.mean(), abs=1e-6)


def test_a_study(project, compare):
    write(project, workers=2)
    said = compare("study.yaml")
    folder = project / "studies/study"
    table = results(folder)
    assert len(table) == 12
    assert set(table["status"]) == {"finished"}
    for row in table.to_dict("records"):  # what the runs' own tables say
        metrics = pd.read_csv(project / row["folder"] / "metrics.csv")
        assert row["round"] == 2
        assert row[ACCURACY] == metrics[ACCURACY].iloc[-1]
        assert row["bytes_up"] == metrics["comm/bytes_up"].sum()
    differences = pd.read_csv(folder / "differences.csv").set_index(["variant", "algorithm", "metric"])
    of_twin = differences.xs("again", level="algorithm")
    assert (of_twin[["difference", "low", "high"]] == 0).all().all()
    pair = table[(table["variant"] == "E=3") & (table["seed"] == 1)].set_index("algorithm")[ACCURACY]
    other = table[(table["variant"] == "E=3") & (table["seed"] == 0)].set_index("algorithm")[ACCURACY]
    expected = ((pair["FedBC"] - pair["FedAvg"]) + (other["FedBC"] - other["FedAvg"])) / 2
    assert differences.loc[("E=3", "FedBC", ACCURACY), "difference"] == pytest.approx(expected, abs=1e-15)
    assert "| FedBC |" in (folder / "table.md").read_text()
    assert "\\toprule" in (folder / "table.tex").read_text()
    for axis in ("rounds", "bytes", "seconds"):
        assert (folder / f"figures/accuracy_global_{axis}.png").stat().st_size > 10_000
        assert "<svg" in (folder / f"figures/accuracy_global_{axis}.svg").read_text()[:1000]
    assert len(list((folder / "tensorboard").rglob("events.out.tfevents.*"))) == 6  # a run per variant and method
    check_means_in_tensorboard(folder / "tensorboard/E=3/FedBC", (pair, other))
    assert "difference to FedAvg of the same seed" in said

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.csv")}
    said = compare("study.yaml")
    assert "12 runs, 12 of them done before" in said
    assert "warning" not in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.csv")} == before
    pd.testing.assert_frame_equal(results(folder), table)

    said = compare("study.yaml", "--overrides", "{trainer.max_rounds: 3}", status=1)
    assert "was begun with trainer.max_rounds not given, and now it is 3. Give the study another name" in said


def test_failures_are_told_and_stop_nothing(project, compare):
    """A setting that diverges is told at once and at the end, in tuning as in a run that is reported."""
    tuned = {"algorithm": "FedAvg", "model.lr": {"grid": [0.1, 3e38]}}
    given = {"algorithms": {"tuned": tuned, "bad": {"algorithm": "FedAvg", "model.lr": 3e38}}, "variants": {"all": {}}}
    tuning = {"val_fraction": 0.25, "max_rounds": 1}
    write(project, **given, tuning={**tuning, "metric": "f1/val_global"})
    said = compare("study.yaml", status=1)
    assert "metrics: no run logs 'f1/val_global'; there is: " in said
    write(project, metrics=[ACCURACY, "f1/global"], overrides={"trainer.max_rounds": 5000})
    assert "metrics: no run logs 'f1/global'; there is: " in compare("study.yaml", "--name", "long", status=1)
    write(project, "bad.yaml", **given, tuning=tuning, overrides={"trainer.local_epochs": 5})
    said = compare("bad.yaml", status=1)
    error = "round 1: weights, buffers, state or loss of all clients became NaN"
    for title in ("tuned / lr=3e+38 / seed 0", "bad / seed 0"):
        assert said.count(f"failed: all / {title}: {error}") == 1  # at once
    assert said.count(f"failed: all / tuned / lr=3e+38 / seed 0 and 2 more: {error}") == 1  # at the end
    table = results(project / "studies/bad").set_index(["algorithm", "seed"])
    assert list(table.loc["tuned", "status"]) == ["finished"] * 2
    assert list(table.loc["bad", "status"]) == ["failed"] * 2
    assert "became NaN" in table.loc[("bad", 0), "error"]
    log = project / "studies/bad/runs/all/bad/seed_0/log.txt"
    assert log.read_text().startswith("$ fedbc-cli fit --config tiny.yaml")


def checkpoints(folder):
    """Of which runs something was saved; folders may go while one looks."""
    return glob.glob(f"{folder}/**/last.ckpt", recursive=True)


def test_tuning_looks_at_validation_data_alone_and_longer_at_what_has_promise(project, compare):
    tuned = {"algorithm": "FedAvg", "model.lr": {"grid": [1e-6, 0.1, 0.01, 0.001]}}
    tuning = {"val_fraction": 0.25, "max_rounds": [1, None], "seeds": [0, 1]}
    write(project, algorithms={"FedAvg": {}, "tuned": tuned}, variants={"all": {}}, seeds=1, tuning=tuning)
    compare("study.yaml")
    folder = project / "studies/study"
    tried = pd.read_csv(folder / "tuning.csv")
    first, second = tried[tried["rung"] == 0], tried[tried["rung"] == 1]
    assert list(first["model.lr"]) == [1e-6, 0.1, 0.01, 0.001]
    ranked = first.sort_values("accuracy/val_global", ascending=False, kind="stable")
    assert list(second["model.lr"]) == list(ranked["model.lr"][:2])
    for row in tried.to_dict("records"):
        runs = [folder / f"tuning/all/tuned/lr={row['model.lr']:g}/rung_{row['rung']}/seed_{seed}" for seed in (0, 1)]
        tables = [pd.read_csv(only_run(run) / "metrics.csv") for run in runs]
        assert [table["round"].max() for table in tables] == [row["rung"] + 1] * 2
        mean = sum(table["accuracy/val_global"].iloc[-1] for table in tables) / 2
        assert row["accuracy/val_global"] == pytest.approx(mean)
    best = second.loc[second["accuracy/val_global"].idxmax(), "model.lr"]
    assert list(tried.loc[tried["chosen"], "model.lr"]) == [best] * 2  # in both rungs
    config = yaml.safe_load((only_run(folder / "runs/all/tuned/seed_0") / "config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == best
    assert config["trainer"]["max_rounds"] == 2


SEALED = """
    def client_test_dataset(self, client):
        data = Unread()
        data.data = super().client_test_dataset(client)
        return data


class Unread:
    __len__ = lambda self: len(self.data)
    __getitem__ = lambda self, index: 1 / 0
"""


def test_a_run_leaves_no_data_to_the_next_one(project, monkeypatch):
    """A few objects in a cycle hold large tensors: by itself, Python would free them only after dozens of runs."""
    monkeypatch.syspath_prepend(str(project))
    gc.disable()
    try:
        for run in Study("tiny.yaml", {"FedAvg": {}}, seeds=2).runs():
            do_if_free(run, 0.0)
    finally:
        gc.enable()
    assert not any(type(each) is sys.modules["tiny_data"].TinyData for each in gc.get_objects())


def test_a_trial_reads_no_test_data(project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    (project / "sealed.py").write_text(f"from tiny_data import TinyData\n\n\nclass Sealed(TinyData):{SEALED}")
    tuned = {"FedProx": {"mu": {"grid": [1.0]}}}
    study = Study(**{**TINY, "algorithms": tuned, "variants": {"all": {}}, "overrides": {"data": "sealed.Sealed"}})
    (method,) = study.methods
    states = [State(make("all", method, 0, method.first())) for make in (study.trial, study.run)]
    for state in states:
        do_if_free(state.run, 0.0)
        state.look(0.0)
    assert [state.status for state in states] == ["finished", "failed"]
    assert "ZeroDivisionError" in str(states[1].error)
    splits = {found.split for name in states[0].logged if (found := measured(name))}
    assert splits == {"val"}


def test_an_interval_is_searched_by_optuna_the_same_way_again(project):
    pytest.importorskip("optuna", reason="the extra 'optuna' is not installed")
    tuned = {"algorithm": "FedProx", "mu": {"low": 0.001, "high": 1.0, "log": True}}
    write(project, algorithms={"tuned": tuned}, variants={"all": {}}, seeds=1, tuning={"trials": 3, "max_rounds": 1})
    run_python([*COMPARE, "study.yaml"], project).check_returncode()
    assert run_cli("compare", "--config", "study.yaml", "--name", "again") == 0  # here, with another seed of hashes
    first, second = (pd.read_csv(project / f"studies/{name}/tuning.csv") for name in ("study", "again"))
    pd.testing.assert_frame_equal(first, second)
    assert len(first) == 3
    assert first["algorithm.mu"].between(0.001, 1.0).all()
    assert first["algorithm.mu"].nunique() == 3


def test_the_reported_round(project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    overrides = {"trainer.max_rounds": 12, "data.val_fraction": 0.25, "model.lr": 2.0}
    for report in ("best_on_validation", "best_on_test", "mean_of_last_tenth"):  # of the same runs
        given = {"algorithms": {"FedAvg": {}}, "variants": {"all": {}}, "overrides": overrides, "report": report}
        study = Study(**{**TINY, **given, "metrics": [ACCURACY, LOSS]})
        comparison = Comparison(study)
        assert comparison.run()
        for row in comparison.results.to_dict("records"):
            metrics = pd.read_csv(Path(row["folder"]) / "metrics.csv").set_index("round")[1:]
            if report == "mean_of_last_tenth":
                assert row["round"] == 12
                assert row[LOSS] == (metrics[LOSS][11] + metrics[LOSS][12]) / 2 != metrics[LOSS][12]
            else:
                column = ACCURACY if report == "best_on_test" else "accuracy/val_global"
                assert row["round"] == metrics[column].idxmax()
                assert row[ACCURACY] == metrics[ACCURACY][row["round"]]
        assert len(list((study.folder / "tensorboard").rglob("events.*"))) == 1  # of one method
        said = (study.folder / "table.md").read_text()
        assert ("best round on test data by" in said) == (report == "best_on_test")
        assert ("; mean of last tenth" in said) == (report == "mean_of_last_tenth")
    metrics.loc[11, LOSS] = None  # evaluated, and not a number: the mean is none either
    metrics.to_csv(Path(row["folder"]) / "metrics.csv")
    states = [State(replace(state.run), state.status) for state in comparison.states]  # records are read once
    assert list(read_results(study, states)[LOSS].isna()) == [False, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithms": {"FedAvgg": {}}}, "FedAvgg"),
        ({"base": "nothing.yaml"}, "no config file 'nothing.yaml'"),
        ({"overrides": {"trainer.max_round": 3}}, "did you mean"),
        ({"overrides": {"trainer.devices": 2}}, "one device"),
        ({"tuning": {"metric": ACCURACY}, "algorithms": {"FedProx": {"mu": {"grid": [1.0]}}}}, "on validation data"),
        ({"report": "best_on_test", "metrics": ["train/loss"]}, "first of metrics, is not measured on test data"),
        ({"algorithms": {"FedProx": {"mu": {"grid": [0.1, "abc"]}}}}, "E=1 / FedProx: "),
        ({"algorithms": {"FedAvg": {}}, "variants": {"a": {}, "b": {"algorithm.mu": 1}}}, "b / FedAvg: "),
        (
            {
                "algorithms": {"FedAvg": {}, "steps": {"algorithm": "FedAvg", "trainer.local_steps": 2}},
                "variants": {"a": {}, "b": {"trainer.local_epochs": 3}},
            },
            "b / steps: trainer.local_epochs and local_steps: give one",
        ),
        ({"algorithms": {"FedAvg": {}, "x": {"algorithm": "FedAvg", "data.val_fraction": 1.5}}}, "E=1 / x: data.val_"),
        ({"overrides": ["trainer.max_rounds"]}, "overrides: got"),
        ({"out": "tiny.yaml"}, "out: 'tiny.yaml' cannot be written"),
    ],
)
def test_mistakes_are_told_before_anything_starts(project, capfd, given, message):
    write(project, **given)
    assert run_cli("compare", "--config", "study.yaml") in (1, 2)
    said = capfd.readouterr().err
    assert message in said, said
    assert said.count("\n") == 1
    assert not (project / "studies").exists()


def test_a_mean_over_rounds_is_of_those_evaluated():
    table = pd.DataFrame({"round": range(31), ACCURACY: [n / 100 if n % 2 == 0 else None for n in range(31)]})
    reported = reported_rows(table, "mean_of_last_tenth", ACCURACY, is_lower_better=False)
    assert list(reported["round"]) == [28, 30]


def write_run(run, sampled, hash="0123"):
    """What a finished run of one round leaves, without accuracies of the clients' own models."""
    folder = run.folder / "FedAvg-0"
    folder.mkdir(parents=True)
    (folder / "partition.json").write_text(f'{{"hash": "{hash}"}}')
    content = {"settings": {"algorithm": "Own"}, "samples": {"0": hash}}
    content["code"] = {"the class Own": run.method, "the class Net": hash, "the layers of the model": run.method}
    (folder / "run.json").write_text(json.dumps(content))
    (folder / "metrics.csv").write_text(f"round,{ACCURACY}\n0,0.1\n1,0.5\n")
    (folder / "clients.csv").write_text("round,client\n" + "".join(f"1,{client}\n" for client in sampled))


def test_runs_that_do_not_share_what_they_should(tmp_path):
    study = Study("x.yaml", {"a": {}, "b": {}, "c": {}}, seeds=1, out=str(tmp_path))
    runs = [study.run("all", method, seed=0) for method in study.methods]
    for run, sampled, hash in zip(runs, ([0, 1], [1, 0], [2, 1]), ("0", "0", "1"), strict=True):
        write_run(run, sampled, hash)
    assert check_pairs(runs[:2]) == []
    assert check_pairs(runs) == [
        f"all, seed 0: the algorithms do not share the {what}: a, b, c"
        for what in ("partition of the data", "samples of the clients", "code of the user's classes", "sampled clients")
    ]
    found = read_results(study, [State(run, "finished") for run in runs])
    assert found[ACCURACY].tolist() == [0.5] * 3
    assert found["accuracy/local"].isna().all(), "a metric that a run lacks is empty"


def test_runs_of_other_code_data_or_versions_are_told_or_refused(project, monkeypatch):
    """Runs and trials that a study has done before are taken in silence only if nothing has changed."""
    monkeypatch.syspath_prepend(str(project))
    given = {**TINY, "variants": {"all": {}}, "algorithms": {"FedProx": {"mu": {"grid": [1]}}}}
    study, file = Study(**given), project / "tiny_data.py"
    trial, text = study.trial("all", study.methods[0], 0, study.methods[0].first()), file.read_text()
    for run in (trial, *study.runs()):
        do_if_free(run, 0.0)
    check_runs(Study(**given, strict=True))
    other = study.run("all", study.methods[0], 7)
    sys.modules.pop("tiny_data")
    file.write_text(text.replace("2 * ", "3 * "))
    do_if_free(other, 0.0)  # while the data were other ones, which are put back
    sys.modules.pop("tiny_data")
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=f"'{other.folder}': code: the class TinyData .*; data: train data"):
        check_runs(Study(**given | {"seeds": [0, 1, 7]}, strict=True))
    torch, said = VERSIONS["torch"], f"'{trial.folder}' and 2 more: "
    for factor, version, expected in (
        ("2.0", torch, "code: the class TinyData changed after .* begun. To do that again, remove the folder, or "),
        ("3", torch, "code: the class TinyData changed .*; data: train data of client 0 and 7 more changed"),
        ("2", "0", "torch was .* and is 0 now"),
    ):
        file.write_text(text.replace("2 * ", f"{factor} * "))
        sys.modules.pop("tiny_data")
        monkeypatch.setitem(VERSIONS, "torch", version)
        with pytest.warns(UserWarning, match=said + expected):
            check_runs(study)
        with pytest.raises(ConfigurationError, match=said + expected):
            check_runs(Study(**given, strict=True))


def test_another_process_does_a_part(project, monkeypatch):
    """A run is waited for while another process has it, taken over when that dies, and not tried again if it failed."""
    monkeypatch.syspath_prepend(str(project))
    study = Study(**{**TINY, "seeds": 1, "variants": {"all": {}}})
    taken, failed, own = (study.run("all", method, 0) for method in study.methods)
    locks = {run.method: RunLock() for run in (taken, failed)}
    for run in (taken, failed):
        run.folder.mkdir(parents=True)
        assert locks[run.method].owner_after_trying(run.folder) is None

    def other(*lines, **_):
        """What the other process does, as soon as a worker of this one has done its own run."""
        if is_finished(own) and locks:
            note_end(failed, error="out of memory over there")
            while locks:
                locks.popitem()[1].close()

    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr("fedbc_lightning.studies.study_progress.SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(console, "print", other)
    comparison = Comparison(study, console)
    assert not comparison.run()
    states = {state.run.method: state for state in comparison.states}
    assert {name: state.status for name, state in states.items()} == {
        taken.method: "finished", failed.method: "failed", own.method: "finished"
    }  # fmt: skip
    assert states[failed.method].error == "out of memory over there"
    assert not list(failed.folder.glob("log.txt"))
    assert Comparison(study, Console(file=io.StringIO())).run(), "a later command tries it again"


def test_a_run_whose_process_dies_twice_in_a_round_has_failed(tmp_path):
    """It is begun again where its processes have come further in between."""
    study = Study(**{**TINY, "out": str(tmp_path)})
    run = study.run("E=1", study.methods[0], 0)
    for rounds, is_begun in ((0, True), (0, True), (5, True), (5, True), (5, False)):
        folder = run.folder / "FedAvg-0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.csv").write_text("round\n" + "".join(f"{k}\n" for k in range(rounds + 1)))
        assert note_beginning(run, since=1.0) == is_begun
    state = State(run)
    state.look(since=1.0)
    assert (state.status, state.error) == ("failed", LOST)
    state = State(run)
    state.look(since=time.time() + 1)
    assert state.status == "waiting", "the next command tries it again"


def test_ctrl_c_leaves_a_study_that_goes_on(project):
    write(project, overrides={"trainer.max_rounds": 5000}, seeds=1, variants={"all": {}})
    with forked([*COMPARE, "study.yaml"], project) as program:
        wait_until(lambda: checkpoints(project / "studies"), program)
        program.send_signal(signal.SIGINT)
        done = program.finish()
    assert done.returncode == 130, done.stderr
    assert "stopped; the same command goes on" in done.stderr
    assert "Traceback" not in done.stderr
