"""FedLi's tables as a study: its methods run on its kinds of data."""

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers.text_formats import write_leaf

from fedbc_lightning.cli.command_arguments import shipped_configs
from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.studies.compare import Comparison

NAME = "studies/fedli_tables.yaml"
pytestmark = pytest.mark.usefixtures("forked_workers")
FEW = {"trainer.accelerator": "cpu", "trainer.clients_per_round": 2, "data.partitioner.num_clients": 4}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(place, variant, more, *words, only=()):
    """The study with one variant, made small."""
    content = yaml.safe_load(shipped_configs()[NAME].read_text(encoding="utf-8"))
    for given in (content["overrides"], *content["variants"].values()):
        given.update({key: value for key, value in FEW.items() if key in given or given is content["overrides"]})
    content["variants"][variant] |= more
    (place / "small.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return read_study("compare", ["--config", "small.yaml", "--only", str([variant, *only]), "--seeds", "1", *words])


def test_both_methods_run_on_writers(place):
    rng = np.random.default_rng(0)
    users = {f"writer{k}": (rng.random((25, 784)).round(2).tolist(), list(range(25))) for k in range(5)}
    write_leaf(place / "data" / "femnist" / "all_data_0.json", users)
    quick = ["--tuning.skip", "true", "--scale", "0.002", "--workers", "1"]
    study = read(place, "FEMNIST", {"model.hidden": 16}, *quick, only=["FedLi-LU", "FedLi-LS", "FedAvg"])
    assert Comparison(study).run()
    results = pd.read_csv(study.folder / "results.csv").set_index("algorithm")
    assert list(results.index) == ["FedLi-LU", "FedLi-LS", "FedAvg"]
    assert (results["rounds"] == 1).all()
    losses = results["train/loss"]
    assert losses.between(0.1, 20).all()
    assert losses["FedLi-LU"] == pytest.approx(losses["FedAvg"])  # one round: the same clients' steps from the same z
    steps = pd.read_csv(study.folder / "runs/FEMNIST/FedLi-LS/seed_0/FedLiLS-0/clients.csv")["last_step"]
    assert steps.between(1e-6, 10).all()
    table = (study.folder / "table.md").read_text()
    assert "84.79" in table
    assert "0.8649" in table
