"""Running ``fedbc-cli`` in this process, and a tiny project for it."""

from pathlib import Path

from fedbc_lightning.commands.main import main

TINY = """\
trainer:
  max_rounds: 2
  clients_per_round: 2
  name: tiny
  accelerator: cpu
  devices: 1
  logger: false
  enable_progress_bar: false
algorithm:
  class_path: FedAvg
model:
  class_path: LogisticRegression
  init_args:
    num_features: 4
    num_classes: 3
    lr: 0.1
data:
  class_path: tiny_data.TinyData
"""
"""A config whose run takes a fraction of a second; its data are a user's own, in the working directory."""

TINY_DATA = """\
import torch
from torch.utils.data import TensorDataset

from fedbc_lightning.data import FederatedDataModule


class TinyData(FederatedDataModule):
    def __init__(self, num_clients: int = 4, batch_size: int = 5, val_fraction: float = 0.0, heldout_clients=None):
        super().__init__(batch_size, val_fraction=val_fraction, heldout_clients=heldout_clients)
        self._num_clients = num_clients

    @property
    def num_clients(self):
        return self._num_clients

    def client_train_dataset(self, client):
        return self._draw(client, 12)

    def client_test_dataset(self, client):
        return self._draw(client + 100, 6)

    def _draw(self, seed, num_samples):
        targets = torch.arange(num_samples) % 3
        noise = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(noise + 2 * torch.nn.functional.one_hot(targets, 4), targets)
"""


def write_project(folder: Path) -> Path:
    """Write the tiny project into ``folder``; returns the path of its config."""
    (folder / "tiny_data.py").write_text(TINY_DATA)
    config = folder / "tiny.yaml"
    config.write_text(TINY)
    return config


def run_cli(*words: str | Path) -> int:
    """Exit status of ``fedbc-cli`` with these words, in this process."""
    try:
        return main([str(word) for word in words])
    except SystemExit as stop:
        return int(stop.code or 0)
