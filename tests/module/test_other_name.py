"""``import pytorch_lightning``: classes of Lightning's other package are taken as those of ``lightning.pytorch``."""

from pathlib import Path

import pytest
import yaml
from helpers.boring import read_csv
from helpers.user_modules import UserData
from lightning.pytorch import Callback

from fedbc_lightning import FedAvg, FederatedTrainer, PartitionedDataModule
from fedbc_lightning.commands.main import main
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import AnyCallback, both
from fedbc_lightning.partition import IID

from .test_parity import QUIET, assert_same, federated, fresh

SETTINGS = {"accelerator": "cpu", "enable_progress_bar": False, "local_epochs": 2, "max_rounds": 2}


@pytest.fixture
def other():
    return pytest.importorskip("helpers.other_name", reason="pytorch_lightning is not installed")


def test_its_module_trains_as_under_plain_lightning(tmp_path, other):
    """Parity, with hooks, a scheduler, hyper-parameters and self.log, all of the other package."""
    import pytorch_lightning as pl

    left, right = fresh(other.OtherClassifier), fresh(other.OtherClassifier)
    data = UserData()
    data.setup("fit")
    trainer = pl.Trainer(max_epochs=3, enable_model_summary=False, default_root_dir=tmp_path, **QUIET)
    trainer.fit(left, train_dataloaders=data.client_train_dataloader(client=0, seed=0))
    federated(tmp_path, right, UserData())
    assert (right.ends, left.ends) == (3, 3)
    assert_same(right, left)


def test_its_data_callbacks_and_loggers_work(tmp_path, other):
    """Transfer hooks of its data module, hooks of its callback, its logger, and load_from_checkpoint of its module."""
    callback, logger = other.OtherCallback(), other.OtherLogger(tmp_path / "csv")
    trainer = FederatedTrainer(callbacks=callback, logger=logger, default_root_dir=tmp_path, **SETTINGS)
    data = PartitionedDataModule(other.OtherData(), IID(4), test="split")
    module = fresh(other.OtherClassifier)
    trainer.fit(module, data, FedAvg())
    assert (callback.rounds, callback.steps) == (2, 2 * 2 * 4)
    assert len(read_csv(f"{trainer.log_dir}/metrics.csv")) == 3
    assert (Path(logger.log_dir) / "metrics.csv").is_file()
    loaded = other.OtherClassifier.load_from_checkpoint(Path(trainer.log_dir) / "checkpoints" / "last.ckpt")
    assert_same(loaded, module)
    assert float(data.client_train_dataset(0)[0][0].abs().max()) > 0
    assert trainer.callback_metrics["loss/global"] > 0


def test_its_refused_callbacks_are_refused_alike(other):
    """By the same line as those of lightning.pytorch."""
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint.*RoundCheckpoint"):
        FederatedTrainer(callbacks=[ModelCheckpoint()])
    with pytest.raises(ConfigurationError, match=r"check_on_train_epoch_end"):
        FederatedTrainer(callbacks=EarlyStopping("train_loss", check_on_train_epoch_end=True))
    assert len(FederatedTrainer(callbacks=EarlyStopping("train_loss"), enable_progress_bar=False).callbacks) == 1


def test_the_command_line_takes_its_class_paths(tmp_path, other):
    """Model, data, callback and logger by class_path, and the config that is saved runs again."""
    config = {
        "trainer": {
            **SETTINGS, "default_root_dir": str(tmp_path),
            "callbacks": [{"class_path": "helpers.other_name.OtherCallback"}],
            "logger": {"class_path": "helpers.other_name.OtherLogger", "init_args": {"save_dir": str(tmp_path)}},
        },
        "algorithm": "FedAvg",
        "model": {"class_path": "helpers.other_name.OtherClassifier", "init_args": {"lr": 0.2}},
        "data": {
            "class_path": "PartitionedDataModule",
            "init_args": {
                "data": {"class_path": "helpers.other_name.OtherData", "init_args": {"size": 20}},
                "partitioner": {"class_path": "IID", "init_args": {"num_clients": 2}},
            },
        },
    }  # fmt: skip
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(tmp_path / "other.yaml")]) == 0
    saved = next(tmp_path.glob("default/*-0/config.yaml"))
    assert main(["fit", "--config", str(saved), "--trainer.max_rounds", "1"]) == 0
    names = (saved.parent.name, f"{saved.parent.name}-1")
    first, again = ((saved.parents[1] / name / "clients.csv").read_text().splitlines() for name in names)
    assert len(first) == 5
    assert again == first[:3]


def test_both_names_stand_for_one_class(other):
    """What isinstance and issubclass say."""
    import pytorch_lightning as pl

    assert both(Callback) == (Callback, pl.Callback)
    assert issubclass(pl.Callback, AnyCallback)
    assert isinstance(Callback(), AnyCallback)
    assert not isinstance(pl.LightningDataModule(), AnyCallback)
