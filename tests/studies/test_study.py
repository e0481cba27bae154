"""What a study's config may say, and the runs that it stands for."""

import pytest
import yaml

from fedbc_lightning import ConfigurationError
from fedbc_lightning.studies.methods import Method, Tuning
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import as_word
from fedbc_lightning.studies.tables import cut_short

ALGORITHMS = {"FedAvg": {}, "FedProx": {"mu": 0.1}}
FACTORS = [{"C = 1": {"data.c": 1}, "C = 2": {"data.c": 2}}, {"e = 1.1": {"data.e": 1.1}, "e = 1.2": {"data.e": 1.2}}]


def make(**given):
    return Study(**{"base": "digits.yaml", "algorithms": ALGORITHMS, **given})


def test_the_words_of_a_run():
    study = make(
        algorithms={"mine": {"algorithm": "FedBC", "dual_lr": 1e-5, "model.lr": 0.5}},
        overrides={"trainer.max_rounds": 7, "data.val_fraction": 0.1},
        variants={"E = 5": {"trainer.local_epochs": 5, "trainer.max_rounds": 9}},
        out="there",
        name="s",
    )
    run = study.run("E = 5", study.methods[0], seed=3)
    words = run.words()
    assert words[0] == "fit"
    assert words[words.index("--algorithm") + 1] == "FedBC"
    assert words[words.index("--seed_everything") + 1] == "3"
    values = dict(word[2:].split("=", 1) for word in words if "=" in word)
    assert {key: yaml.safe_load(value) for key, value in values.items()} == {
        "trainer.max_rounds": 9,  # the variant is stronger than the overrides of all
        "data.val_fraction": 0.1,
        "trainer.local_epochs": 5,
        "algorithm.dual_lr": 1e-5,
        "model.lr": 0.5,
        "trainer.default_root_dir": "there/s/runs/E_=_5/mine",
        "trainer.name": "seed_3",
        "trainer.enable_progress_bar": False,
    }


def test_a_trial_has_validation_data_and_rounds_of_its_own():
    study = make(algorithms={"FedProx": {"mu": {"grid": [0.1, 1.0]}}}, overrides={"data.val_fraction": 0.5})
    study.tuning.max_rounds = 4
    method = study.methods[0]
    tried = list(method.grid())
    assert tried == [{"algorithm.mu": 0.1}, {"algorithm.mu": 1.0}]
    trial = study.trial("all", method, 0, tried[1])
    own = {"data.val_fraction": 0.2, "trainer.eval_test": False, "trainer.max_rounds": 4}
    assert trial.settings == {"algorithm.mu": 1.0, **own}
    final = study.run("all", method, 0, tried[1])
    assert final.settings == {"data.val_fraction": 0.5, "algorithm.mu": 1.0}
    assert trial.folder != final.folder
    assert "mu=1" in trial.title


def test_a_grid_of_two_settings_is_their_product():
    method = Method.read("x", {"a": {"grid": [1, 2]}, "trainer.local_epochs": {"grid": [3, 4]}, "b": 5})
    assert len(list(method.grid())) == 4
    assert method.settings == {"algorithm.b": 5}
    assert list(method.tuned) == ["algorithm.a", "trainer.local_epochs"]
    part = {"class_path": "GeometricMedian"}  # a setting, and no range
    assert Method.read("x", {"robust_rule": part}).settings == {"algorithm.robust_rule": part}


@pytest.mark.parametrize(
    "value", [1e-5, 5e-324, 0.1, 3, None, True, "a: b", [1, 2.5], {"a": None}, float("inf"), "1e-5"]
)
def test_a_value_survives_the_command_line(value):
    assert yaml.safe_load(as_word(value)) == value


def test_the_same_run_wherever_its_folder_lies(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("trainer: {max_rounds: 2}\n")
    first, second = (make(base=str(config), out=str(out)) for out in ("a", "b"))
    identities = [study.run("all", study.methods[0], 0).identity() for study in (first, second)]
    assert identities[0] == identities[1]
    config.write_text("trainer: {max_rounds: 3}\n")
    assert second.run("all", second.methods[0], 0).identity() != identities[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": []}, "metrics: give different names"),
        ({"variants": {}}, "variants: one has no levels"),
        ({"variants": {"x" * 251: {}}}, "'xxx.*' is too long for the name of a folder"),
        ({"name": "a/../../b"}, "name: 'a/../../b' is no name of a folder"),
        ({"seeds": [1, 1]}, r"seeds: got \[1, 1\]"),
        ({"reference": "FedBC"}, "reference: the study has no 'FedBC'; there is: FedAvg, FedProx"),
        ({"overrides": {"seed_everything": 3}}, "overrides: the study itself gives seed_everything"),
        ({"variants": {"a b": {}, "a?b": {}}}, "variants: 'a b' and 'a.b' would share a folder"),
        ({"factors": FACTORS, "variants": {"a": {}}}, "variants: given beside factors"),
        ({"factors": [*FACTORS, {"n = 3": {"data.e": 3}}]}, "factors: two levels of 'C = 1, .*n = 3' set data.e"),
        (
            {"factors": FACTORS, "only": ["C = 1", "C = 2, e = 1.1"]},
            "only: C = 1, C = 2, e = 1.1: leaves nothing of the study",
        ),
        ({"tuning": Tuning(max_rounds=[25, 5, None])}, "tuning.max_rounds: got .25, 5, None.; give T"),
        ({"overrides": {"trainer": {"max_rounds": 3}}}, "overrides.trainer: give full keys"),
        ({"algorithms": {"FedProx": {"mu": {"grid": [1, 1.0]}}}}, "mu: a value is there twice"),
        ({"overrides": {"data.init_args.c": {"grid": [1, 2]}}, "factors": FACTORS}, "a range, of which variants have"),
        ({"algorithms": {"FedProx": {"mu": {"low": 1, "high": 0}}}}, "algorithms.FedProx.mu: got"),
        ({"algorithms": {"FedProx": {"mu": {"low": 0, "high": 1, "log": True}}}}, "low: 0 has no logarithm"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**given)


def test_what_is_better_may_be_said():
    study = make(metrics=["accuracy/global", "regret/global"], better={"regret/global": "lower"})
    assert study.is_lower_better("regret/global")
    assert study.is_lower_better("regret/val_global")  # what tunes
    assert study.is_lower_better("MeanSquaredError/global")
    assert not study.is_lower_better("accuracy/global")


def test_only_what_is_named_is_left():
    study = make(factors=FACTORS, only=["FedProx", "C = 2"])
    assert [method.name for method in study.methods] == ["FedProx"]
    assert list(study.variants) == list(study.levels) == ["C = 2, e = 1.1", "C = 2, e = 1.2"]
    assert study.reference_name == "FedProx"
    assert study.blocks() == {"": {"e = 1.1": "C = 2, e = 1.1", "e = 1.2": "C = 2, e = 1.2"}}
    study.narrow(["e = 1.2"])
    assert study.run("C = 2, e = 1.2", study.methods[0], 0).settings["data.e"] == 1.2
    assert list(make(factors=FACTORS, only=["C = 1", "C = 2", "C = 2, e = 1.1"]).variants) == ["C = 2, e = 1.1"]
    assert list(make(variants={"E = 1": {}, "E = 5": {}}, only=["E = 5"]).variants) == ["E = 5"]
    given = {"E = 1": {}, "E = 5": {}}
    make(variants=given, only=["E = 5"])
    assert list(given) == ["E = 1", "E = 5"]


def test_a_range_for_all_is_tuned_where_an_algorithm_has_no_value_of_its_own():
    lr = {"grid": [0.1, 1.0]}
    study = make(
        algorithms={"FedAvg": {}, "FedProx": {"mu": {"grid": [1, 2]}}, "FedBC": {"model.init_args.lr": 0.5}},
        overrides={"model.lr": lr, "data.c": 1, "trainer.codec.up": {"class_path": "TopK"}},
    )
    assert [list(method.tuned) for method in study.methods] == [["model.lr"], ["model.lr", "algorithm.mu"], []]
    assert study.run("all", study.methods[2], 0).settings == {
        "model.init_args.lr": 0.5, "data.c": 1, "trainer.codec.up": {"class_path": "TopK"},
    }  # fmt: skip
    named = make(overrides={"model.lr": lr, "FedProx.model.lr": 0.3})
    assert [list(method.tuned) for method in named.methods] == [["model.lr"], []]


def test_ranges_may_be_left_out_and_the_study_says_so():
    lr = {"grid": [0.1, 1.0], "untuned": 0.5}
    tuned = {"FedProx": {"mu": {"grid": [0.1, 1.0]}, "model.lr": lr, "trainer.max_rounds": 3}}
    study = make(algorithms=tuned, tuning=Tuning(skip=True), name="s")
    assert study.run("all", study.methods[0], 0).settings == {
        "trainer.max_rounds": 3, "model.lr": 0.5,
    }  # fmt: skip
    assert (study.name, study.is_untuned) == ("s_untuned", True)
    assert not make(tuning=Tuning(skip=True)).is_untuned
    assert "NOT TUNED" in cut_short(study)


def test_a_trial_fine_tunes_on_no_test_data():
    study = make(algorithms={"PerFedAvg": {"finetune_split": "test", "inner_lr": {"grid": [0.1]}}})
    (method,) = study.methods
    (tried,) = method.grid()
    assert study.trial("all", method, 0, tried).settings["algorithm.finetune_split"] == "train"
    assert study.run("all", method, 0, tried).settings["algorithm.finetune_split"] == "test"
