"""How many vectors of d numbers there are at once where the model is large, whoever holds them."""

import gc

import pytest
import torch
from helpers.boring import BoringData, Plain, make_trainer
from torch import nn

from fedbc_lightning import SCAFFOLD, FedAvg, FedBC
from fedbc_lightning.server import Sums
from fedbc_lightning.state import ServerState, client_rows


def noting(peaks, function):
    def call(*args):
        function(*args)
        alive = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        storages = [each.untyped_storage() for each in alive]
        peaks.add(sum({each.data_ptr(): each.nbytes() for each in storages if each.nbytes() > 2**22}.values()))

    return call


@pytest.mark.parametrize(("algorithm", "most"), [(FedAvg(), 7), (FedBC(0.1, 0.1), 8), (SCAFFOLD(), 13)], ids=str)
def test_the_peak_in_sizes_of_the_model(tmp_path, monkeypatch, algorithm, most):
    """w, its gradient, z, float64 sums, an own model or c_i, and memory for SGD with weight decay."""
    model, peaks = Plain(), set()
    model.net = nn.Sequential(nn.Linear(10, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 3))
    for owner, name in ((Sums, "add_rows"), (ServerState, "stage")):
        monkeypatch.setattr(owner, name, noting(peaks, getattr(owner, name)))
    monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    gc.collect()
    gc.disable()  # what waits for Python's collector of circles counts
    make_trainer(tmp_path, keep_local_models=False).fit(model, BoringData(), algorithm)
    gc.enable()
    assert max(peaks) / 4 / 1_458_003 < most + 0.5
