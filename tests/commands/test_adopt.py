"""``fedbc-cli adopt``: configs of LightningCLI become ours, and no key is dropped in silence."""

import re
from pathlib import Path

import pytest
import yaml
from helpers.boring import read_csv
from helpers.command_line import run_cli
from helpers.folders import only_run
from helpers.scripts import ROOT
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from fedbc_lightning.commands.adopt import IMPLIED, Adoption, command_parser
from fedbc_lightning.core.errors import ConfigurationError, UsageError
from fedbc_lightning.core.lightning_arguments import LIGHTNING_ARGUMENTS

PROJECT = """\
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch.utils.data import DataLoader, TensorDataset


class Images(LightningDataModule):
    def __init__(self, size: int = 40):
        super().__init__()
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
        self.points = TensorDataset(x, (x[:, 0] > 0).long())

    def train_dataloader(self):
        return DataLoader(self.points, 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.points, 8)


class Net(LightningModule):
    def __init__(self, width: int = 3, optimizer: OptimizerCallable = torch.optim.SGD):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return self.optimizer(self.parameters())
"""
(BY_CLASS,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/howto/lightning_cli.md").read_text(encoding="utf-8"), re.S)
OF_ONE_MODEL = """\
trainer: {max_epochs: 2, accelerator: cpu, logger: false, enable_progress_bar: false, limit_train_batches: 2}
model: {width: 4}
data: {size: 50}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1, momentum: 0.9}}
lr_scheduler: {class_path: lightning.pytorch.cli.ReduceLROnPlateau, init_args: {monitor: val_loss}}
"""
WITH_MORE = """\
fit:
  seed_everything: true
  trainer:
    accelerator: cpu
    devices: 1
    precision: 64
    max_epochs: -1
    max_steps: 20
    max_time: "00:01:00:00"
    sync_batchnorm: true
    enable_model_summary: true
    enable_progress_bar: false
    own_flag: 3
    logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
    callbacks:
      - {class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {monitor: val_loss, save_top_k: 3}}
      - {class_path: EarlyStopping, init_args: {monitor: val_loss, check_on_train_epoch_end: true}}
      - {class_path: LearningRateMonitor}
  model: {class_path: my_project.Net}
  data: my_project.Images
  ckpt_path: old.ckpt
  own_section: {a: 3}
test: {ckpt_path: best}
"""
KINDS = {
    "class": (BY_CLASS, ()),
    "plain": (OF_ONE_MODEL, ("--model", "my_project.Net", "--data", "my_project.Images", "--num_clients", 3)),
    "more": (WITH_MORE, ()),
}


@pytest.fixture
def my_project(project):
    Path("my_project.py").write_text(PROJECT)


PARSER = command_parser()


def adopted(text, *words):
    return Adoption(yaml.safe_load(text), "lightning.yaml", PARSER.parse_args(["lightning.yaml", *words]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_lightning_trains_for_two_rounds(my_project, kind, capsys):
    text, words = KINDS[kind]
    Path("lightning.yaml").write_text(text)
    assert run_cli("adopt", "lightning.yaml", "--output", "ours.yaml", *words) == 0
    said = capsys.readouterr().out
    assert "fedbc-cli fit --config ours.yaml" in said
    given = yaml.safe_load(text)
    given = given.get("fit", given)
    for key in {*given, *given["trainer"]} - yaml.safe_load(Path("ours.yaml").read_text()).keys() - {"accelerator"}:
        assert key in said or key in Path("ours.yaml").read_text()
    assert run_cli("fit", "--config", "ours.yaml", "--trainer.max_rounds", 2) == 0
    rows = read_csv(only_run("runs/default") / "metrics.csv")
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert all(row["loss/global"] for row in rows)


def test_what_becomes_of_each_part(my_project):
    config = adopted(WITH_MORE).config
    assert config["trainer"] | {"callbacks": []} == {
        "max_rounds": 2, "local_steps": 10, "local_schedules": "continue", "accelerator": "cpu", "devices": 1,
        "precision": "64-true", "enable_progress_bar": False, "callbacks": [],
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}},
    }  # fmt: skip
    names = [callback["class_path"].rpartition(".")[2] for callback in config["trainer"]["callbacks"]]
    assert names == ["RoundCheckpoint", "EarlyStopping", "Timer", "ModelSummary"]
    assert config["trainer"]["callbacks"][0]["init_args"] == {"monitor": "val_loss", "mode": "min"}
    assert config["data"]["init_args"]["data"] == "my_project.Images"
    plain = adopted(OF_ONE_MODEL, *map(str, KINDS["plain"][1])).config
    assert plain["model"] == {"class_path": "my_project.Net", "init_args": {"width": 4}}
    assert plain["optimizer"]["init_args"] == {"lr": 0.1, "momentum": 0.9}
    assert plain["trainer"]["local_steps"] == 2


@pytest.mark.parametrize("value", [3, "3", "abc", None, {"class_path": "lightning.pytorch.callbacks.ModelPruning"}])
def test_no_argument_of_the_trainer_is_dropped_in_silence(value):
    """Whatever its value is, it is kept, named in the list, or refused by its name."""
    for name in LIGHTNING_ARGUMENTS:
        given = {"trainer": {"limit_train_batches": 10, name: value}}
        try:
            adoption = adopted(yaml.safe_dump(given | dict.fromkeys(("model", "data"), "torch.nn.Module")))
            named, kept = [what for what, _ in adoption.changes], str(adoption.config["trainer"].get(name))
        except (ConfigurationError, UsageError) as error:
            named, kept = [str(error)], None
        is_told = any(f"trainer.{name}" in what for what in named)
        assert value is None or is_told or kept in (str(value), str([value])), name


def test_defaults_are_named_in_one_line(my_project, monkeypatch, capsys):
    """A config that LightningCLI has saved holds every argument."""
    monkeypatch.setattr("sys.argv", ["main.py"])
    monkeypatch.syspath_prepend(".")
    words = ["fit", "--model=my_project.Net", "--data=my_project.Images", "--trainer.max_epochs=2", "--print_config"]
    with pytest.raises(SystemExit):
        LightningCLI(args=words)
    adoption = adopted(capsys.readouterr().out)
    assert len(adoption.changes) == 6
    assert "log_every_n_steps" in adoption.changes[-1][1]
    plain = Trainer(accelerator="cpu", logger=False)
    config = {"trainer": {"max_epochs": 2, **IMPLIED}, "model": "my_project.Net", "data": "my_project.Images"}
    assert adopted(yaml.safe_dump(config, sort_keys=False)).changes[-1][1].endswith(f": {', '.join(IMPLIED)}.")
    assert {name: getattr(plain, name) for name in IMPLIED} == IMPLIED


MISTAKES = {
    "model: {class_path: my_project.Nett}\ndata: my_project.Images": "cannot import it: module",
    "model: {width: 3}\ndata: my_project.Images": "model does not say its class; add --model my_module.MyClass",
    "model: my_project.Net": "data does not say its class; add --data my_module.MyClass",
    "base: digits.yaml": "is no config of LightningCLI: it has no section trainer, model or data",
    "algorithm: FedBC": "has a section algorithm, so it is one of ours",
    "trainer: [3]": "trainer is no section",
    "model: {class_path: my_project.Net, init_args: {widht: 3}}\ndata: my_project.Images": "mean --model.width?",
    "model: {class_path: 5}\ndata: my_project.Images": "model",
    "trainer: {max_steps: abc}": "trainer.max_steps: got 'abc'; give a whole number.",
}


@pytest.mark.parametrize(("text", "said"), MISTAKES.items(), ids=range(len(MISTAKES)))
def test_a_mistake_is_one_clear_line(my_project, text, said, capsys):
    Path("lightning.yaml").write_text(text)
    assert run_cli("adopt", "lightning.yaml") in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedbc-cli: error:")]
    assert said in line
