"""What a config's data section means once another class of data is named after it."""

from __future__ import annotations

import logging

import yaml
from fedbc_lightning.datamodules import DigitsDataModule, SyntheticDataModule
from helpers.command_line import run_cli

from fedbc_lightning.cli.other_data import other_data

DIGITS = """
data:
  class_path: DigitsDataModule
  init_args:
    partitioner: {class_path: IID, init_args: {num_clients: 4}}
    test_fraction: 0.3
    batch_size: 7
    val_fraction: 0.0
    eval_batch_size: 512
"""


def printed(capsys, caplog, *words: str) -> tuple[dict, str]:
    """The section ``data`` that a command line ends up with, and what was said of it."""
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        assert run_cli("partition", *words, "--print_config") == 0
    said = [line for line in caplog.messages if "takes the place" in line]
    return yaml.safe_load(capsys.readouterr().out)["data"], "\n".join(said)


def test_what_a_user_chose_is_kept_and_what_is_of_the_old_data_is_not(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(DIGITS)
    section, said = printed(capsys, caplog, "--config", "mine.yaml", "--data", "MNISTDataModule", "--data.seed", "5")
    init_args = section["init_args"]
    assert section["class_path"].endswith("MNISTDataModule")
    assert init_args["partitioner"]["init_args"] == {"num_clients": 4}
    assert (init_args["batch_size"], init_args["seed"]) == (7, 5)
    assert init_args["test_fraction"] == 0.2  # the new class's own
    assert said.count("\n") == 0
    assert "Kept: partitioner=IID, batch_size=7; dropped: test_fraction=0.3" in said


def test_the_same_class_keeps_all_and_nothing_is_said(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(DIGITS)
    for name in ("DigitsDataModule", "fedbc_lightning.datamodules.DigitsDataModule"):
        section, said = printed(capsys, caplog, "--config", "mine.yaml", "--data", name)
        assert section["init_args"]["test_fraction"] == 0.3
        assert not said


def test_a_default_of_the_old_class_is_none_of_the_new_one():
    """SyntheticRegressionDataModule has 100 clients unless told; a config that says so says nothing of other data."""
    words = ["fit", "--config", "data: {class_path: SyntheticRegressionDataModule, init_args: {test_fraction: 0.5}}"]
    (other,) = other_data([*words, "--data.class_path=SyntheticDataModule"]).values()
    path = f"{SyntheticDataModule.__module__}.SyntheticDataModule"
    assert other.section == {"class_path": path, "init_args": {}}


def test_a_later_config_counts_as_an_option_does(tmp_path):
    later = tmp_path / "later.yaml"
    later.write_text("data: {class_path: DigitsDataModule, init_args: {batch_size: 9}}")
    first = "data: {class_path: SyntheticDataModule, init_args: {batch_size: 3, alpha: 2.0}}"
    (other,) = other_data(["fit", "--config", first, "--config", str(later)]).values()
    assert other.section["init_args"] == {"batch_size": 3}
    assert other.section["class_path"] == f"{DigitsDataModule.__module__}.DigitsDataModule"
    assert "dropped: alpha=2.0" in other.line


def test_a_class_that_does_not_exist_is_left_to_the_parser():
    assert other_data(["fit", "--config", "data: {class_path: Gone}", "--data", "AlsoGone"]) == {}
    assert other_data(["fit", "--config", "trainer: {max_rounds: 1}", "--data", "DigitsDataModule"]) == {}
