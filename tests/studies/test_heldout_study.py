"""A study of what clients that never trained get, as a person runs it."""

import json

import pandas as pd
import pytest
import yaml
from helpers.command_line import run_cli

from fedbc_lightning import report

STUDY = {
    "base": "tiny.yaml",
    "algorithms": {"FedAvg": {}, "FedBC": {"dual_lr": 0.01}},
    "overrides": {"data.heldout_clients": 2, "trainer.heldout_finetune_steps": 2},
    "seeds": 2,
    "workers": 1,
    "metrics": ["accuracy/heldout", "accuracy/heldout_finetuned", "loss/heldout_worst10"],
}


@pytest.mark.usefixtures("forked_workers")
def test_a_study_compares_what_new_clients_get(project, capfd):
    (project / "study.yaml").write_text(yaml.safe_dump(STUDY))
    assert run_cli("compare", "--config", "study.yaml") == 0, capfd.readouterr()
    results = pd.read_csv(project / "studies/study/results.csv")
    assert set(results["status"]) == {"finished"}
    held = {}
    for row in results.to_dict("records"):
        folder = project / row["folder"]
        metrics = pd.read_csv(folder / "metrics.csv").iloc[-1]
        assert all(row[name] == pytest.approx(metrics[name], rel=1e-12) for name in STUDY["metrics"])
        partition = json.loads((folder / "partition.json").read_text())
        held.setdefault(row["seed"], []).append(partition["heldout_clients"])
    assert all(first == second for first, second in held.values())  # the same for all methods of a seed
    differences = pd.read_csv(project / "studies/study/differences.csv")
    assert set(differences["metric"]) == set(STUDY["metrics"])
    (page,) = (path.read_text() for path in report(project / "studies/study"))
    assert "accuracy/heldout_finetuned" in page


@pytest.mark.parametrize(("words", "held"), [("0.5", 2), ("[3, 1]", [1, 3]), ("null", None)])
def test_the_command_line_takes_all_forms(project, capsys, words, held):
    assert run_cli("partition", "--config", "tiny.yaml", f"--data.heldout_clients={words}", "--out", "drawn") == 0
    found = json.loads((project / "drawn/partition.json").read_text()).get("heldout_clients")
    assert (len(found) if isinstance(held, int) else found) == held
    said = capsys.readouterr().out
    if held is None:
        assert "held out" not in said
    else:
        assert f"{len(found)} of the clients are held out and never train" in said
