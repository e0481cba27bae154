"""The settings of a study, and where each comes from."""

import pytest

from fedbc_lightning import ConfigurationError
from fedbc_lightning.studies.origins import CHANGED, changed_origins, origin_rows
from fedbc_lightning.studies.study import Study

ALGORITHMS = {
    "FedAvg": {"model.lr": {"grid": [0.01, 0.1]}},
    "mine": {"algorithm": "FedBC", "dual_lr": 0.5, "model.lr": {"low": 0.1, "high": 1.0}},
}
CONFIG = {
    "trainer": {"max_rounds": 20},
    "algorithm": {"class_path": "FedBC", "init_args": {"dual_lr": 0.5, "tolerance": "learned"}},
    "data": {"class_path": "D", "init_args": {"partitioner": {"class_path": "P", "init_args": {"style": "public"}}}},
}


def rows(origins, **given):
    study = Study("x.yaml", ALGORITHMS, variants={"E = 1": {"trainer.local_epochs": 1}}, origins=origins, **given)
    asked = []
    found = origin_rows(study, lambda run: asked.append(run) or CONFIG)
    return found[1:], asked


def test_a_setting_is_shown_with_the_value_that_the_runs_have():
    found, asked = rows({
        "trainer.max_rounds": "paper", "data.partitioner.style": "public code", "trainer.local_epochs": "paper",
        "mine.dual_lr": "public code", "mine.tolerance": "paper", "mine.model.lr": "ours", "FedAvg.model.lr": "paper",
    })  # fmt: skip
    assert found == [
        ["trainer.max_rounds", "20", "paper"],
        ["data.partitioner.style", "public", "public code"],
        ["trainer.local_epochs", "by variant", "paper"],
        ["mine.dual_lr", "0.5", "public code"],
        ["mine.tolerance", "learned", "paper"],
        ["mine.model.lr", "tuned over [0.1, 1.0]", "ours"],
        ["FedAvg.model.lr", "tuned over [0.01, 0.1]", "paper"],
    ]
    assert [run.method for run in asked] == ["FedAvg", "mine"]  # one config per algorithm is read


def test_settings_of_an_algorithm_that_is_left_out_are_left_out():
    assert rows({"mine.dual_lr": "ours", "trainer.max_rounds": "paper"}, only=["FedAvg"])[0] == [
        ["trainer.max_rounds", "20", "paper"]
    ]


def test_what_overrides_change_is_not_said_to_be_the_papers():
    """Settings of an algorithm's own line go before overrides; a range is free where it is not tuned."""
    names = ["trainer.max_rounds", "FedAvg.model.lr", "FedBC.dual_lr", "FedBC.tolerance", "FedBC.q", "data.batch_size"]
    algorithms = {"FedAvg": {"model.lr": {"grid": [0.1]}}, "FedBC": {"dual_lr": 0.5, "q": {"grid": [1], "untuned": 1}}}
    changed = ["model.lr", "algorithm.dual_lr", "algorithm.tolerance", "algorithm.q", "data.batch_size"]
    found = changed_origins(dict.fromkeys(names, "paper"), algorithms, changed, tunes=False)
    assert [name for name in names if found[name] == CHANGED] == [
        "FedAvg.model.lr", "FedBC.tolerance", "data.batch_size"
    ]  # fmt: skip
    found = changed_origins(dict.fromkeys(names, "paper"), algorithms, changed, tunes=True)
    assert found["FedAvg.model.lr"] == "paper"


@pytest.mark.parametrize("name", ["trainer.rounds", "mine.dual_rate", "data.partitioner.style.x", "style"])
def test_a_setting_that_does_not_exist_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"origins: the runs of this study have no setting '{name}'"):
        rows({name: "paper"})
