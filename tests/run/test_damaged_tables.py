"""Tables and events that were edited or are gone: the file and line are named, and what is missing is said."""

import shutil

import numpy as np
import pytest
from helpers.boring import BoringData, BoringModel, make_model, make_trainer, read_csv

from fedbc_lightning import ConfigurationError, FedAvg


def fit(root, rounds, logger=True, model=None):
    trainer = make_trainer(root, max_rounds=rounds, logger=logger)
    trainer.fit(make_model() if model is None else model, BoringData(), FedAvg(), ckpt_path="last")
    return trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("finished")
    fit(root, 2)
    return root


@pytest.fixture
def run(finished, tmp_path):
    """A run of 2 rounds, to be changed."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "default" / "FedAvg-1"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("metrics.csv", ",", ";", r"line 1: it does not name columns between commas, .*: 'round;"),
        ("clients.csv", "round", "\ufeffround", r"line 1: it does not name columns .*: '\\ufeffround"),
        ("clients.csv", "\n2,", "\n2.0,", r"line 5: it is no row of \d+ cells with a whole number"),
        ("evaluation.csv", "\n1,", "\nfirst,", r"line 8: it is no row of \d+ cells"),
        ("metrics.csv", "\n1,", "\n\n1,1,", r"line 3: it is no row of \d+ cells"),
        ("metrics.csv", "train/loss", "round", r"line 1: it does not name columns"),
        ("metrics.csv", "train/loss", "\xff", r"line 1: it is not text in UTF-8"),
    ],
)
def test_an_edited_table_is_named_with_its_line(run, name, old, new, message):
    path = run / name
    changed = path.read_text().replace(old, new, -1 if old == "," else 1)
    path.write_bytes(changed.encode("latin-1" if "UTF-8" in message else "utf-8"))
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match=rf"{name}', {message}"):
        fit(run.parents[1], 3)
    assert path.read_bytes() == before


def test_a_row_in_the_place_of_another_is_said_though_the_number_of_rows_is_right(run, caplog):
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join([lines[0], lines[1], lines[3], lines[3]]))
    lines = (run / "clients.csv").read_text().splitlines(keepends=True)
    (run / "clients.csv").write_text("".join([*lines[:-2], lines[-1], lines[-1]]))
    fit(run.parents[1], 3)
    assert "metrics.csv' has 2 of the 3 rows that were there when the checkpoint was written" in caplog.text
    assert "clients.csv' has 5 of the 6 rows that were there when the checkpoint was written" in caplog.text


def test_rows_and_tables_that_are_gone_are_said(run, caplog):
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join([lines[0], lines[1], lines[3]]))
    (run / "clients.csv").unlink()
    trainer = fit(run.parents[1], 3)
    assert trainer.log_dir == str(run)
    assert "metrics.csv' has 2 of the 3 rows that were there when the checkpoint was written" in caplog.text
    assert "clients.csv' has 0 of the 6 rows that were there when the checkpoint was written; the" in caplog.text
    assert "evaluation.csv" not in caplog.text
    assert [row["round"] for row in read_csv(run / "metrics.csv")] == ["0", "2", "3"]
    assert {row["round"] for row in read_csv(run / "clients.csv")} == {"3"}
    caplog.clear()
    fit(run.parents[1], 4)
    assert "rows that were there" not in caplog.text
    for name in ("metrics.csv", "evaluation.csv"):
        (run / name).unlink()
    assert fit(run.parents[1], 5).log_dir == str(run)


@pytest.mark.parametrize("value", ["a word", np.ones(3)])
def test_what_is_no_number_is_not_logged(tmp_path, value):
    class Logs(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("said", value)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match=r"self\.log\('said'\): got .*; log a number, a tensor or a Metric"):
        fit(tmp_path, 1, logger=False, model=make_model(Logs))
