"""Other ways of Lightning's users: compiled modules, predictions, Lightning's own callbacks, data of the module."""

from typing import Any

import lightning.pytorch.callbacks
import pytest
import torch
from helpers.user_modules import FEATURES, UserData, _Classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbc_lightning import FedAvg, FederatedTrainer
from fedbc_lightning.core.errors import ConfigurationError

from .test_parity import federated, fresh, plain
from .test_refusals import Guarded, _pairs

SETTINGS = {
    "max_rounds": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
}  # fmt: skip


class CompiledInside(_Classifier):
    """Compiles its network in __init__."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


@pytest.mark.parametrize("make", [lambda: torch.compile(fresh(_Classifier), backend="eager"), CompiledInside])
def test_compiled_modules_train_as_they_are(tmp_path, make):
    """The same weights as lightning.Trainer gives the module that is not compiled; it is evaluated by its own steps."""
    left = fresh(_Classifier)
    plain(tmp_path, left, UserData())
    with torch.random.fork_rng():
        torch.manual_seed(5)
        right = make()
    trainer = federated(tmp_path, right, UserData())
    found = {name.replace("_orig_mod.", ""): value for name, value in right.state_dict().items()}
    assert all(torch.equal(found[name], value) for name, value in left.state_dict().items())
    with pytest.raises(ConfigurationError, match="there is no test data"):
        trainer.test(right, UserData(), FedAvg())


CALLBACKS: dict[str, dict[str, Any]] = {
    "EarlyStopping": {"monitor": "train_loss"},
    "GradientAccumulationScheduler": {"scheduling": {0: 1}},
    "LambdaCallback": {},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "OnExceptionCheckpoint": {"dirpath": "."},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "ThroughputMonitor": {"batch_size_fn": len},
}
BASES = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar"}


@pytest.mark.parametrize("name", sorted(set(lightning.pytorch.callbacks.__all__) - BASES))
def test_a_callback_of_lightnings_works_or_is_refused_before_training(tmp_path, name, monkeypatch):
    """Never a traceback: LearningRateFinder, BatchSizeFinder and DeviceStatsMonitor came to one."""
    if name == "DeviceStatsMonitor":
        monkeypatch.setattr("lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE", True)
    callback = getattr(lightning.pytorch.callbacks, name)(**CALLBACKS.get(name, {}))
    try:
        trainer = FederatedTrainer(callbacks=[callback], default_root_dir=tmp_path, **SETTINGS)
        trainer.fit(fresh(_Classifier), UserData((9, 4)), FedAvg())
    except ConfigurationError as error:
        assert name in str(error) and "\n" not in str(error)  # noqa: PT017, PT018
    else:
        assert trainer.finished_round == 2


class OwnData(Guarded):
    """As in Lightning's older tutorials."""

    def train_dataloader(self):
        return DataLoader(_pairs(), batch_size=4)


def test_a_modules_own_train_dataloader_is_pointed_to_the_wrapper(tmp_path):
    """lightning.Trainer would use it; here somebody must say who the clients are."""
    trainer = FederatedTrainer(default_root_dir=tmp_path, **SETTINGS)
    with pytest.raises(ConfigurationError, match=r"train_dataloader of OwnData.*PartitionedDataModule"):
        trainer.fit(OwnData(), algorithm=FedAvg())


class Predicting(_Classifier):
    """Notes how it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Dropout(0.5))
        self.asked: list[Any] = []

    def predict_step(self, batch, batch_idx):
        self.asked.append((self.trainer.predicting, self.trainer.state.stage.value, self.training, batch_idx))
        return self(batch[0])

    def on_predict_model_eval(self):
        self.asked.append("model_eval")

    def on_predict_end(self):
        self.asked.append("end")


def test_predictions_of_the_global_model_and_of_a_clients_own(tmp_path):
    """They are those of the weights that export writes; without a loader the test data are taken."""
    data, module = UserData((9, 14), test_size=4), fresh(Predicting)
    settings = SETTINGS | {"enable_checkpointing": True}
    trainer = FederatedTrainer(default_root_dir=tmp_path, **settings)
    trainer.fit(module, data, FedAvg())
    loader = DataLoader(TensorDataset(torch.randn(7, FEATURES)), batch_size=3)
    batches = [batch for (batch,) in loader]
    for client in (None, 1):
        out = trainer.export(fresh(Predicting), data, FedAvg(), client=client, out=tmp_path / f"{client}.ckpt")
        exported = Predicting.load_from_checkpoint(out).eval()
        again = fresh(Predicting)
        found = trainer.predict(again, data, FedAvg(), "last", loader, client)
        assert [len(part) for part in found] == [3, 3, 1]
        assert all(torch.equal(a, exported(b)) for a, b in zip(found, batches, strict=True))
        assert again.asked == ["model_eval", *((True, "predict", False, index) for index in range(3)), "end"]
        of_tests = trainer.predict(again, data, FedAvg(), "last", client=client)
        assert sum(map(len, of_tests)) == (8 if client is None else 4)
    assert torch.equal(trainer.predict(module, data, FedAvg(), dataloaders=loader)[0], module.eval()(batches[0]))
    with pytest.raises(ConfigurationError, match="there is no client 7"):
        trainer.predict(module, data, FedAvg(), dataloaders=loader, client=7)
    with pytest.raises(ConfigurationError, match="several were given; give one DataLoader"):
        trainer.predict(module, data, FedAvg(), dataloaders=[loader, loader])
