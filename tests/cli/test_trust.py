"""What SECURITY.md promises: foreign configs, files that unpack to more than they may, names that a terminal obeys."""

import json
import shutil
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from fedbc_lightning.datamodules import ArraysDataModule
from helpers.command_line import run_cli, write_project

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.text import cell, printable
from fedbc_lightning.partition import Explicit

HOSTILE = '=HYPERLINK("x")\x1b[31m\x9b2J<script>alert(1)</script>[red]](javascript:0)\u202e|$\\frac{'


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A run of shipped classes as somebody else sends it, and a module that shows that it was imported."""
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    (tmp_path / "evil.py").write_text("open('imported', 'w').close()")
    assert run_cli("fit", "--config", "tiny.yaml", "--data", "tiny_data.TinyData") == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))  # another user's key
    return tmp_path / "runs" / "tiny" / "FedAvg-0"


HIDING = {
    "test": {"model": "file://FOLDER/section.yaml"},
    "validate": {"data": '{"class_path": "ev\\u0069l.Data"}'},
    "fit": {"trainer": {"callbacks": [{"class_path": "LambdaCallback", "init_args": {"on_fit_start": "os.system"}}]}},
    "export": {"algorithm": "section.yaml"},
    "predict": {"data": "x class_path='evil.Data'"},
    "verify": {"data": "evil.Data"},
    "plan": {"optimizer": {"class_path": "fedbc_lightning.core.files.os.system"}},
}
# No regular expression has these characters in its words, and Python has them in its names.
STRANGE = {"data": "evil.\u2118"}, {"data": "ev\u0301il.Data"}, {"model": {"class_path": "\u2118torch.nn.Linear"}}


@pytest.mark.parametrize(("command", "hidden"), [*HIDING.items(), *(("test", hidden) for hidden in STRANGE)])
def test_a_foreign_config_runs_no_code_unless_it_is_named(foreign, capsys, command, hidden):
    config = foreign / "config.yaml"
    content = yaml.safe_load(config.read_text()) | {"data": "DigitsDataModule"} | hidden
    config.write_text(yaml.safe_dump(content).replace("FOLDER", str(foreign)))
    (foreign / "section.yaml").write_text("class_path: evil.Model")
    for name in ("ev\u0301il", "\u2118torch"):
        shutil.copy("evil.py", f"{name}.py")
    assert run_cli(command, "--ckpt_path", foreign) == 2
    assert f"name it: --config {config}" in capsys.readouterr().err
    assert not (foreign.parents[2] / "imported").exists()


def test_ones_own_config_runs_and_a_named_one(foreign, capsys, monkeypatch):
    assert run_cli("test", "--ckpt_path", foreign) == 2
    assert "tiny_data.TinyData, which" in capsys.readouterr().err
    assert run_cli("test", "--ckpt_path", foreign, "--config", foreign / "config.yaml") == 0
    monkeypatch.undo()
    monkeypatch.chdir(foreign)
    assert run_cli("test", "--ckpt_path", foreign) == 0


def bomb(path, name="archive/data.pkl", megabytes=1):
    """A zip file of a few bytes for a part that claims to be large."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, bytes(2**20 * megabytes))
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02") + 24  # the directory's entry: size of the part
    content[at : at + 4] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(content)


class Touching:
    def __reduce__(self):
        return open, ("imported", "w")


@pytest.mark.parametrize("command", ["test", "fit"])
def test_a_checkpoint_runs_no_code(foreign, capsys, command):
    torch.save({"state_dict": Touching()}, foreign / "checkpoints" / "last.ckpt")
    assert run_cli(command, "--ckpt_path", foreign, "--config", "tiny.yaml") == 1
    assert "cannot be read (it holds an object of" in capsys.readouterr().err
    assert not (foreign.parents[2] / "imported").exists()


def test_a_checkpoint_that_unpacks_to_more_is_refused(foreign, capsys):
    bomb(foreign / "checkpoints" / "last.ckpt")
    assert run_cli("test", "--ckpt_path", foreign, "--config", "tiny.yaml") == 1
    assert "cannot be read (it unpacks to 4 GiB, more than the" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "file"), [("partitioner.path", "x.npz"), ("inputs", "x.npz"), ("inputs", "x.pt")], ids=str
)
def test_arrays_that_unpack_to_more_are_refused(tmp_path, monkeypatch, data, file):
    monkeypatch.setattr("os.sysconf", lambda name: 2**15)  # a machine with a GiB of memory
    bomb(tmp_path / file, "indices.npy")
    with pytest.raises(ConfigurationError, match=f"{data}='.*{file}': cannot be read .it unpacks to 4 GiB, more"):
        Explicit(tmp_path / file) if "path" in data else ArraysDataModule(tmp_path / file, np.zeros(3)).setup("fit")


def check_files(folder):
    """No file holds what a terminal, a spreadsheet or a browser would obey."""
    for path in (p for p in folder.rglob("*") if p.suffix in {".csv", ".md", ".tex", ".html", ".yaml", ".log"}):
        text = path.read_text()
        assert path.suffix != ".md" or "](" not in text, path
        assert "<script>alert" not in text or path.suffix in {".csv", ".tex", ".yaml"}, path
        assert printable(text) == text or path.suffix == ".html", path
        if path.suffix == ".csv":
            cells = [*pd.read_csv(path, dtype=str), *pd.read_csv(path, dtype=str).fillna("").to_numpy().flat]
            assert all(cell(one) == one for one in cells), path


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_name_from_a_file_of_data_is_only_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.json").write_text(json.dumps({HOSTILE: [*range(20)], HOSTILE + "2": [*range(20, 40)]}))
    data = {"class_path": "DigitsDataModule", "init_args": {"partitioner": {"class_path": "Explicit"}}}
    data["init_args"]["partitioner"]["init_args"] = {"path": "names.json"}
    model = {"class_path": "LogisticRegression", "init_args": {"num_features": 64, "num_classes": 10}}
    config = {"trainer": {"max_rounds": 1, "name": "x"}, "algorithm": "Ditto", "model": model, "data": data}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    study = {"base": "x.yaml", "algorithms": {HOSTILE[:30]: {"algorithm": "FedAvg"}, "FedAvg": {}}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study | {"seeds": 1}))
    words = ["--config", "x.yaml"]
    run = "runs/x/Ditto-0"
    for line in (
        ["partition", *words], ["plan", *words], ["fit", *words], ["test", "--ckpt_path", run], ["report", run],
        ["export", "--ckpt_path", run, "--client", HOSTILE, "--out", "m.ckpt"],
        ["compare", "--config", "study.yaml", "--out", "."], ["export", "--ckpt_path", run, "--client", HOSTILE + "3"],
        ["report", "study"],
    ):  # fmt: skip
        status = run_cli(*line)
        said = "".join(capfd.readouterr())
        assert status == (1 if line[-1] == HOSTILE + "3" else 0), said
        assert printable(said) == said
    check_files(tmp_path)
