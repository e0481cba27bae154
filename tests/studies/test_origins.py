"""Where the settings of a study come from, what is marked as changed, and which overrides reach its runs."""

import warnings
from types import SimpleNamespace

import pytest
import yaml

from fedbc_lightning import ConfigurationError
from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.studies.origins import origin_rows
from fedbc_lightning.studies.parsed_runs import checked_config
from fedbc_lightning.studies.study import Study

TABLE_1 = ["--config", "studies/fedbc_table1.yaml", "--only", "[FedAvg, FedBC]"]


def rows(origins, **given):
    """Names and values of the origins, from the configs that the runs would write."""
    study = Study(
        **{"base": "digits.yaml", "algorithms": {"FedAvg": {}, "FedBC": {"dual_lr": 0.5}}} | given, origins=origins
    )
    configs = {
        (variant, method.name, 0): checked_config(study.run(variant, method, 0, method.first())).as_dict()
        for variant in study.variants for method in study.methods
    }  # fmt: skip
    records = {place: SimpleNamespace(config=config) for place, config in configs.items()}
    return [row[:2] for row in origin_rows(study, records)[1:]]


def origins_of(*words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some overrides do not reach all runs
        return read_study("compare", [*TABLE_1, *words]).origins


def test_a_setting_is_shown_with_the_value_that_the_runs_have():
    variants = {"a": {"trainer.local_epochs": 3}, "b": {"model.init_args.lr": 0.5}}
    names = ["FedBC.dual_lr", "model.lr", "trainer.local_epochs", "seeds", "algorithm", "data.partitioner"]
    found = dict(rows(dict.fromkeys(names, "paper"), variants=variants, seeds=4))
    assert found["FedBC.dual_lr"] == "0.5"
    assert found["trainer.local_epochs"].split(", ")[0] == "3", "the values of all variants"
    assert found["model.lr"].split(", ")[1] == "0.5"
    assert found["algorithm"].endswith("FedBC"), "and of all algorithms"
    assert found["seeds"] == "4"
    assert "." in found["data.partitioner"], "a class has its name as value"


def test_a_tuned_setting_is_shown_as_its_range_and_that_of_an_algorithm_left_out_not_at_all():
    algorithms = {"FedAvg": {"model.lr": {"grid": [0.1, 1.0]}}, "FedBC": {"dual_lr": 0.5}}
    found = rows({"model.lr": "p", "FedBC.dual_lr": "p"}, algorithms=algorithms, only=["FedAvg"])
    assert found == [["model.lr", "tuned over [0.1, 1.0]"]]


@pytest.mark.parametrize(
    "words",
    [
        ["--overrides", "{FedBC.dual_momentum: 0.1}"],
        ["--scale", "0.5"],
        ["--config", "layer.yaml"],
        ["--base", "digits.yaml"],
    ],
)
def test_origins_of_a_study_that_is_changed_are_not_checked(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layer.yaml").write_text("overrides: {trainer.max_rounds: 10}")
    for given, is_changed in (([], False), (words, True)):
        found = origins_of(*given)
        assert [origin.endswith("(not checked)") for origin in found.values()] == [is_changed] * len(found)


def test_origins_that_the_user_gives_are_the_users():
    assert origins_of("--origins", "{model.lr: mine}", "--overrides", "{trainer.max_rounds: 1}") == {"model.lr": "mine"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--overrides", "{model.lr: 0.5}"], r"model.lr: no run takes it.*\{FedAvg.model.lr: 0.5, FedBC.model.lr"),
        (["--overrides", "{trainer.local_epochs: 3}"], "trainer.local_epochs: no run takes it, since each"),
        (["--only", "[FedAvg]", "--overrides", "{FedBC.dual_lr: 3}"], "FedBC.dual_lr: FedBC is left out here"),
        (["--config", "layer.yaml"], "model.lr: no run takes it"),
        (["--overrides", "{model.lr: {grid: [1, 2]}}"], "model.lr: no run takes it"),
        (["--overrides", "{FedBC: {dual_lr: 1}}"], r"overrides.FedBC: give full keys, e.g. FedBC.dual_lr"),
        (["--overrides", "{FedBCC.dual_lr: 1}"], "the study has no 'FedBCC'; did you mean 'FedBC'"),
    ],
)
def test_an_override_that_reaches_no_run_is_refused(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layer.yaml").write_text(yaml.safe_dump({"overrides": {"model.lr": 0.5}}))
    with pytest.raises(ConfigurationError, match=message):
        read_study("compare", [*TABLE_1, *words])


def test_who_keeps_an_own_value_is_told():
    with pytest.warns(UserWarning, match=r"overrides: algorithm.dual_momentum: FedBC: own value kept"):
        read_study("compare", [*TABLE_1, "--overrides", "{algorithm.dual_momentum: 0.1}"])
