"""The study that a command line describes: its layers, its overrides, and what is refused."""

import pytest

from fedbc_lightning import ConfigurationError
from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.core.errors import UsageError
from fedbc_lightning.studies.study import Study

TABLE_1 = ["--config", "studies/fedbc_table1.yaml"]
UNTUNED = [*TABLE_1, "--tuning.skip", "true"]


def settings(study, algorithm):
    method = next(method for method in study.methods if method.name == algorithm)
    return study.run(next(iter(study.variants)), method, 0, method.first()).settings


def test_an_override_may_be_for_one_algorithm():
    words = ["--overrides", "{FedBC.dual_momentum_style: client, FedBC.model.lr: 0.5, data.alpha: 0.7}"]
    study = read_study("reproduce", [*TABLE_1, *words])
    ours = settings(study, "FedBC")
    assert ours["algorithm.dual_momentum_style"] == "client"
    assert ours["model.lr"] == 0.5  # it was tuned
    assert "algorithm.dual_lr" in study.methods[-1].tuned
    assert ours["data.alpha"] == settings(study, "FedAvg")["data.alpha"] == 0.7
    assert "algorithm.dual_momentum_style" not in settings(study, "FedAvg")
    assert not any(key.startswith("FedBC") for key in ours)


def test_an_override_is_for_the_algorithm_with_the_longest_name():
    algorithms = {"mu 1": {"algorithm": "FedProx"}, "mu 1.5": {"algorithm": "FedProx", "algorithm.mu": 9}}
    study = Study("x.yaml", algorithms, overrides={"mu 1.5.mu": 1.5, "mu 1.mu": 1})
    assert [settings(study, name)["algorithm.mu"] for name in algorithms] == [1, 1.5]
    assert study.given["overrides"] == {"mu 1.5.mu": 1.5, "mu 1.mu": 1}


def test_an_override_replaces_a_range_however_it_is_spelled():
    words = ["--config", "studies/methods.yaml", "--only", "[FedAvg]", "--overrides", "{model.init_args.lr: 0.1}"]
    study = read_study("compare", words)
    assert not study.methods[0].tuned
    assert settings(study, "FedAvg")["model.init_args.lr"] == 0.1


def test_several_overrides_of_a_command_line_are_merged():
    words = ["--overrides", "{data.alpha: 0.7}", "--overrides", "{data.beta: 1e-1}"]
    found = settings(read_study("compare", [*UNTUNED, *words]), "FedAvg")
    assert (found["data.alpha"], found["data.beta"]) == (0.7, 0.1)


def test_a_further_file_adds_an_algorithm_and_the_command_line_replaces_them_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.yaml").write_text("{base: synthetic.yaml, algorithms: {FedAvg: {}, FedProx: {mu: 1}}}")
    (tmp_path / "mine.yaml").write_text("algorithms: {FedAvg: {weighting: uniform}, Mine: {algorithm: FedAvgM}}")
    words = ["--config", "ours.yaml", "--config", "mine.yaml"]
    merged = {"FedAvg": {"weighting": "uniform"}, "FedProx": {"mu": 1}, "Mine": {"algorithm": "FedAvgM"}}
    assert read_study("compare", words).algorithms == merged
    alone = ["--algorithms", "{FedBC: {dual_lr: 1}}"]
    for typed in ([*words, *alone], [*words[:2], *alone, *words[2:]]):
        assert read_study("compare", typed).algorithms == {"FedBC": {"dual_lr": 1}}


def test_a_study_given_as_text_is_held_against_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "{base: synthetic.yaml, algorithms: {FedAvg: {}}, origins: {data.alpha: paper}, overrides: {data.beta: 0.1}}"
    assert read_study("compare", ["--config", text]).origins == {"data.alpha": "paper"}
    found = read_study("compare", ["--config", text, "--overrides", "{data.alpha: 0.7}"])
    assert found.origins == {"data.alpha": "paper (not checked)"}
    assert found.overrides == {"data.alpha": 0.7, "data.beta": 0.1}
    with pytest.raises(UsageError, match=r"--config is the config of one run \(model: \.\.\.\), not of a study"):
        read_study("compare", ["--config", "model: {lr: 0.1}"])


@pytest.mark.parametrize("key", ["overrides", "tuning"])
def test_null_is_refused(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"{{base: synthetic.yaml, algorithms: {{FedAvg: {{}}}}, {key}: null}}")
    with pytest.raises(UsageError, match=f"{key}: got null"):
        read_study("compare", ["--config", "mine.yaml"])


@pytest.mark.parametrize("words", ["--overrides {KEY: 2}", "--algorithms {FedAvg: {KEY: 3}}", "--variants {KEY: {}}"])
@pytest.mark.parametrize("key", ["1", "null"])
def test_a_key_that_is_no_text_is_refused(words, key):
    words = words.replace("KEY", key).split(" ", 1)
    with pytest.raises(ConfigurationError, match="give a mapping of quoted names"):
        read_study("compare", ["--base", "synthetic.yaml", "--algorithms", "{FedAvg: {}}", *words])


def test_what_a_file_gives_for_an_algorithm_that_is_left_out_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layer.yaml").write_text("overrides: {FedBC.dual_lr: 0.5}")
    words = [*TABLE_1, "--config", "layer.yaml"]
    assert "algorithm.dual_lr" not in settings(read_study("compare", [*words, "--only", "[FedAvg]"]), "FedAvg")
    assert settings(read_study("compare", words), "FedBC")["algorithm.dual_lr"] == 0.5


def test_options_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit, match="2"):
        read_study("compare", [*TABLE_1, "--ref", "FedAvg"])
    assert "unknown key 'ref'" in capsys.readouterr().err
