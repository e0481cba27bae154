"""The hooks of a wrapped data module that have to do with checkpoints, faults and predictions are called."""

import pytest
import torch
from helpers.boring import BoringModel, make_model, make_trainer
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from fedbc_lightning import FedAvg, FederatedDataModule, PartitionedDataModule
from fedbc_lightning.partition import IID
from fedbc_lightning.state import checkpoint


def make_dataset(size):
    inputs = torch.randn(size, 10, generator=torch.Generator().manual_seed(size))
    return TensorDataset(inputs, torch.arange(size) % 3)


class Hooked(LightningDataModule):
    """Writes down which of its hooks are called, and keeps how many rounds it has seen."""

    def __init__(self):
        super().__init__()
        self.calls, self.rounds = [], 0

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def train_dataloader(self):
        self.calls.append("train_dataloader")
        return DataLoader(make_dataset(24), batch_size=8)

    def predict_dataloader(self):
        self.calls.append("predict_dataloader")
        return [DataLoader(make_dataset(5), batch_size=5)]

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state_dict):
        self.calls.append(f"load_state_dict {state_dict}")
        self.rounds = state_dict["rounds"]

    def on_exception(self, exception):
        self.calls.append(f"on_exception {exception}")


class HookedClients(Hooked, FederatedDataModule):
    """The same as data of clients from the start."""

    num_clients = 2

    def client_train_dataset(self, client):
        return make_dataset(12)

    def client_test_dataset(self, client):
        return None


class Fails(BoringModel):
    """Counts in the data module, and fails in round 2 if it is told to."""

    fails = True

    def on_round_start(self):
        self.trainer.datamodule.users_module.rounds += 1
        if self.fails and self.trainer.current_round == 2:
            raise OSError("stop here")

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_state_faults_and_predictions(tmp_path, is_wrapped):
    def make():
        own = Hooked() if is_wrapped else HookedClients()
        return own, PartitionedDataModule(own, IID(2)) if is_wrapped else own

    trainer = make_trainer(tmp_path, max_rounds=2, clients_per_round=2)
    own, data = make()
    with pytest.raises(OSError, match="stop here"):
        trainer.fit(make_model(Fails), data, FedAvg())
    assert own.calls[-1] == "on_exception stop here"
    path = f"{trainer.log_dir}/checkpoints/last.ckpt"
    assert checkpoint.load(path)[type(own).__qualname__] == {"rounds": 1}  # that of the last finished round

    own, data = make()
    model = make_model(Fails)
    model.fails = False
    trainer.fit(model, data, FedAvg(), ckpt_path=path)
    made = ["train_dataloader"] if is_wrapped else []
    assert own.calls == ["setup fit", "load_state_dict {'rounds': 1}", *made]
    assert own.rounds == 2
    del own.calls[:]
    (predicted,) = trainer.predict(model, data, FedAvg(), ckpt_path=path)
    assert len(predicted) == 5
    assert own.calls[-2:] == ["setup predict", "predict_dataloader"] or not is_wrapped
    assert "load_state_dict {'rounds': 2}" in own.calls
