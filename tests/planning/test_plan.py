"""``plan`` says beforehand what a run then does, and leaves nothing behind."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers.boring import BoringData, BoringModel, Linear, assert_equal_trees, make_model, make_trainer, read_csv
from helpers.command_line import run_cli

from fedbc_lightning import Codecs, FedAvg, FedBC
from fedbc_lightning.algorithms import L2GD, SCAFFOLD, Centralized, L2SGDPlus
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.federation.participation import Stragglers
from fedbc_lightning.planning import timing, totals
from fedbc_lightning.server import BFloat16, TopK
from fedbc_lightning.state import client_rows
from fedbc_lightning.studies import study_plan
from fedbc_lightning.studies.methods import Tuning
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_plan import plan_run, plan_study, total_seconds
from fedbc_lightning.studies.study_run import note_beginning, note_end

CASES = {
    "fedbc": (lambda: FedBC(dual_lr=0.1), {"local_epochs": 2, "max_rounds": 12}),
    "scaffold, buffers stay": (SCAFFOLD, {"buffers": "local"}),
    "l2gd": (lambda: L2GD(0.1, 0.4, 0.1), {"clients_per_round": 1.0, "max_rounds": 12}),
    "l2sgd+, tables": (lambda: L2SGDPlus(0.1, 0.4, 0.1), {"clients_per_round": 1.0}),
    "centralized": (Centralized, {"eval_every_n_rounds": 2}),
    "stragglers dropped": (FedAvg, {"stragglers": Stragglers(fraction=0.4, partial_work="dropped"),
                                    "clients_per_round": 5}),
    "coded": (FedAvg, {"codec": Codecs(TopK(0.1), BFloat16())}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_timings(monkeypatch):
    """What is tested here are counts and sizes; each timing once is enough."""
    monkeypatch.setattr(timing, "NUM_TIMINGS", 1)
    monkeypatch.setattr(timing, "MAX_ROUNDS", 2)


def files(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def total(rows, name):
    return sum(int(row[name]) for row in rows)


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_is_what_the_run_does(tmp_path, case):
    make, options = CASES[case]
    found = make_trainer(tmp_path, **options).plan(make_model(lr=0.05), BoringData(), make())
    assert not list(tmp_path.iterdir())
    trainer = make_trainer(tmp_path, **options)
    trainer.fit(make_model(lr=0.05), BoringData(), make())
    rows = read_csv(Path(trainer.log_dir, "clients.csv"))
    assert (found.bytes_up, found.bytes_down) == (total(rows, "bytes_up"), total(rows, "bytes_down"))
    assert found.num_steps == total(rows, "num_steps")
    assert found.is_counted
    metrics = read_csv(Path(trainer.log_dir, "metrics.csv"))
    assert found.num_evaluations == sum(row["loss/global"] != "" for row in metrics)
    size = Path(trainer.log_dir, "checkpoints", "last.ckpt").stat().st_size
    assert found.disk["last.ckpt"] == pytest.approx(size, rel=0.05)
    assert (found.num_parameters, found.num_clients, found.max_rounds) == (131, 6, trainer.max_rounds)
    assert found.engine == "sequential"
    assert found.seconds == found.start_seconds + found.training_seconds
    assert min(found.start_seconds, found.training_seconds) > 0
    assert min(found.round_seconds, found.evaluation_seconds) > 0
    assert found.memory["now, at its peak"] > 0


@pytest.mark.parametrize("case", ["scaffold, buffers stay", "l2sgd+, tables"])
def test_a_run_after_it_is_the_same(tmp_path, case):
    make, options = CASES[case]
    states = []
    for is_planned in (False, True):
        torch.manual_seed(5)
        trainer, model, data, algorithm = make_trainer(tmp_path, **options), BoringModel(), BoringData(), make()
        before = torch.get_rng_state()
        if is_planned:
            initial = {name: value.clone() for name, value in model.state_dict().items()}
            trainer.plan(model, data, algorithm)
            assert_equal_trees(initial, dict(model.state_dict()))
            assert torch.equal(before, torch.get_rng_state())
        trainer.fit(model, data, algorithm)
        states.append({**model.state_dict(), "z": trainer.server.z})
    assert_equal_trees(*states)


def test_the_engine_of_the_run_is_timed(tmp_path):
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, engine="vectorized", clients_per_round=5)
    found = trainer.plan(Linear(), BoringData(), FedBC(dual_lr=0.1))
    assert found.round_seconds > 0
    assert found.engine == "vectorized"


def test_rows_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    options = {"max_rounds": 4, "checkpoint_every_n_rounds": 1}
    found = make_trainer(tmp_path, **options).plan(make_model(), BoringData(), FedBC(dual_lr=0.1))
    assert not list(tmp_path.iterdir())
    trainer = make_trainer(tmp_path, **options)
    trainer.fit(make_model(), BoringData(), FedBC(dual_lr=0.1))
    rows = read_csv(Path(trainer.log_dir, "clients.csv"))
    times = [sum(row["client"] == str(client) for row in rows) for client in range(6)]
    model_bytes = 4 * (131 + 16)
    assert found.disk["clients.bin, at most"] == sum(min(count, 3) for count in times) * model_bytes
    size = Path(trainer.log_dir, "checkpoints", "last.ckpt").stat().st_size
    assert found.disk["last.ckpt"] == pytest.approx(size, rel=0.05)


def test_rounds_that_are_not_drawn_count_like_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(totals, "MAX_DRAW_SECONDS", 0.0)
    found = make_trainer(tmp_path, max_rounds=1000).plan(make_model(), BoringData(), FedAvg())
    assert not found.is_counted
    per_client = 4 * (131 + 16)
    assert (found.bytes_down, found.bytes_up) == (3000 * per_client, 3000 * (per_client + 4))
    everyone = 6 * 4 * (131 + 16)
    assert found.memory["clients' rows, and their copy for the checkpoint"] == 2 * everyone


def test_fine_tuning_on_held_out_clients_is_part_of_an_evaluation(tmp_path, monkeypatch):
    def fine_tune_slowly(evaluator, clients, wanted, fine_tune=Evaluator.fine_tune):
        time.sleep(0.2 * len(clients))
        return fine_tune(evaluator, clients, wanted)

    monkeypatch.setattr(Evaluator, "fine_tune", fine_tune_slowly)
    monkeypatch.setattr(timing, "MAX_EVALUATION_SECONDS", 0.1)  # one client stands for the three
    trainer = make_trainer(tmp_path, clients_per_round=3, heldout_finetune_steps=2)
    found = trainer.plan(make_model(), BoringData(heldout_clients=3), FedAvg())
    assert found.evaluation_seconds > 0.6


def test_several_processes_share_the_clients(tmp_path):
    one = make_trainer(tmp_path).plan(make_model(), BoringData(), FedAvg())
    trainer = make_trainer(tmp_path, devices=2, strategy="ddp_fork")
    two = trainer.plan(make_model(), BoringData(), FedAvg())
    assert (one.num_processes, two.num_processes) == (1, 2)
    assert (one.num_steps, one.bytes_up) == (two.num_steps, two.bytes_up)
    assert trainer.world_size == 2


# the command


def test_the_command_prints_and_writes_nothing(project, capsys):
    before = files(project)
    assert run_cli("plan", "--config", "tiny.yaml", "--trainer.max_rounds", "7") == 0
    said = capsys.readouterr().out
    for words in ("FedAvg, LogisticRegression with d = 15", "2 of 4 per round, 7 rounds", "42 in all", "8 times",
                  "last.ckpt", "per round", "sequential", "Times are rough"):  # fmt: skip
        assert words in said, said
    assert [path for path in files(project) if "__pycache__" not in path.parts] == before
    assert run_cli("fit", "--config", "tiny.yaml") == 0
    config = "runs/tiny/FedAvg-0/config.yaml"
    assert run_cli("plan", "--config", config, "--trainer.logger", "lightning.pytorch.loggers.CSVLogger",
                   "--trainer.logger.save_dir", "logs") == 0  # fmt: skip
    assert not Path("logs").exists()


STUDY = {
    "base": "tiny.yaml",
    "algorithms": {"FedAvg": {}, "FedProx": {"mu": {"grid": [0.1, 1.0, 10.0]}}},
    "variants": {"E=1": {"trainer.local_epochs": 1}, "E=3": {"trainer.local_epochs": 3}},
    "seeds": 4, "workers": 2, "tuning": {"seeds": [0, 1], "max_rounds": 1},
}  # fmt: skip


@pytest.fixture
def study(project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    Path("study.yaml").write_text(yaml.safe_dump(STUDY))
    return Study(**{**STUDY, "tuning": Tuning(**STUDY["tuning"]), "name": "study"})


def test_a_study_is_the_sum_of_its_runs(study, capsys, monkeypatch):
    planned = []

    def record(study):
        planned.append(plan_study(study))
        return planned[0]

    monkeypatch.setattr("fedbc_lightning.commands.studies.plan_study", record)
    assert run_cli("plan", "--config", "study.yaml") == 0
    said = capsys.readouterr().out
    assert "on 2 workers" in said
    assert said.count("FedProx") == 2
    rows = planned[0]
    assert rows[["variant", "algorithm"]].to_numpy().tolist() == [
        [variant, method] for variant in ("E=1", "E=3") for method in ("FedAvg", "FedProx")
    ]
    assert rows[["runs", "trials", "rounds"]].to_numpy().tolist() == 2 * [[4, 0, 8], [4, 6, 14]]
    plan = plan_run(study.run("E=1", study.methods[0], 0))
    assert rows["bytes_up"][0] == 4 * plan.bytes_up
    assert rows["bytes_up"][1] == 7 * plan.bytes_up  # a trial has half of the rounds
    assert (rows["disk"] > 0).all()
    assert (rows["seconds"] > 0).all()
    assert total_seconds(rows, 2) == pytest.approx(rows.attrs["once"] + rows["seconds"].sum() / 2)
    assert rows.attrs["once"] > 2.0, "the command and a process start, and import torch"
    assert not any(Path(folder).exists() for folder in ("studies", "runs"))


def test_what_a_study_takes_beside_the_steps_of_its_runs(study, monkeypatch):
    """By two short runs: of one round in a process that is new, and of all rounds."""
    monkeypatch.setattr(study_plan, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    plan = plan_run(study.run("E=1", study.methods[0], 0))
    plan = replace(plan, round_seconds=0.5, evaluation_seconds=0.0, start_seconds=0.25, max_rounds=2)
    monkeypatch.setattr(study_plan, "_times", lambda *_: [time.time(), time.time() + 9, time.time() + 12])
    assert study_plan.beside_steps(study, plan) == pytest.approx((6.5, 1.75), abs=0.2)
    monkeypatch.setattr(study_plan, "_times", lambda runs, _: [time.time()] if not runs else 1 / 0)
    assert study_plan.beside_steps(study, replace(plan, round_seconds=60.0))[1] == 0.0


def test_finished_runs_of_a_study_count_for_nothing(study):
    method, tuned = study.methods
    trials = [study.trial("E=3", tuned, 0, {"algorithm.mu": mu}) for mu in (0.1, 1.0)]
    runs = [study.run("E=1", method, seed) for seed in (0, 1, 3)]
    for run in (*runs, *trials):
        table = run.folder / "FedAvg-0/metrics.csv"
        table.parent.mkdir(parents=True)
        table.touch()
        note_end(run)
        if run in (runs[-1], trials[-1]):  # whose tables were removed
            table.unlink()
    begun = study.run("E=1", method, 2)
    begun.folder.mkdir(parents=True)
    note_beginning(begun, since=0.0)
    rows = plan_study(study)
    assert rows[["done", "rounds"]].to_numpy().tolist() == [[2, 4], [0, 14], [0, 8], [1, 13]]
