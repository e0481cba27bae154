"""In a real kernel a run has one output, which is updated, and `fit` returns what it has recorded."""

import re

import pytest
from helpers.notebooks import execute_code

MODULE = """
import torch
from lightning.pytorch import LightningModule
from fedbc_lightning import FedBC, FederatedTrainer
from fedbc_lightning.datamodules import DigitsDataModule
from fedbc_lightning.partition import PowerLaw

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def test_step(self, batch, batch_idx):
        self.log("test_accuracy", (self.layer(batch[0]).argmax(1) == batch[1]).float().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def make_trainer(**settings):
    return FederatedTrainer(max_rounds=3, clients_per_round=5, logger=False, accelerator="cpu", **settings)

data, method = DigitsDataModule(PowerLaw(10)), FedBC(dual_lr=0.001)
"""
INTERRUPTED = """
from lightning.pytorch import Callback
class Interrupts(Callback):
    def on_round_start(self, trainer, pl_module):
        if trainer.current_round == 2:
            raise KeyboardInterrupt
trainer = make_trainer(callbacks=Interrupts())
try:
    trainer.fit(Net(), data, method)
except KeyboardInterrupt:
    print(len(trainer.result.history))
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_has_one_output_and_a_result(tmp_path, monkeypatch):
    fit = "make_trainer(devices={}).fit(Net(), data, method)".format
    cells = execute_code([MODULE, fit(1), fit(2), INTERRUPTED], tmp_path, monkeypatch)
    for cell, processes in ((cells[1], ""), (cells[2], " on 2 processes")):
        shown, result = (out for out in cell.outputs if out.output_type != "stream")
        first, last = shown.data["text/plain"].splitlines()
        assert first == f"FedBC · Net (650 parameters) · 32-true on cpu · 10 clients, 5 per round · 3 rounds{processes}"
        assert re.match(r"3 rounds in .* · run folder runs/default/FedBC-\d.* · .*accuracy/global 0\.\d{4}  ", last)
        assert "<progress" not in shown.data["text/html"]
        assert result.output_type == "execute_result"
        assert result.data["text/plain"].startswith("FedBC: 3 rounds in ")
    shown, printed = cells[3].outputs
    assert "KeyboardInterrupt after round 1/3 in " in shown.data["text/plain"]
    assert printed.text == "2\n"
