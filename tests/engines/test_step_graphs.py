"""Steps as CUDA graphs: what changes between steps, clients and rounds reaches them; shown on a stand-in for graphs."""

import pandas as pd
import pytest
import torch
from fedbc_lightning.models import CIFARCNN
from helpers import steps
from helpers.boring import BoringModel
from helpers.graphs import capture
from helpers.steps import OPTIMIZERS, Dropping, Images, LogsTheMost, Smooth
from torch.optim.lr_scheduler import StepLR

from fedbc_lightning import SCAFFOLD, FedAvg, FedBC, FedProx
from fedbc_lightning.algorithms import FedAvgPlus
from fedbc_lightning.engines.recorded import graphs, step_graphs, step_recorder


class Decaying(Smooth):
    """The server's schedule lowers the rate in each round."""

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.kind](list(self.parameters()))
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "round"}]


def use(monkeypatch, capture):
    for module in (graphs, step_graphs):
        monkeypatch.setattr(module, "capture", capture)


class Rebinding(Smooth):
    """Puts a new tensor in the place of its buffer, on which the loss depends."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(10))

    def training_step(self, batch, batch_idx):
        self.mean = 0.5 * self.mean + 0.5 * batch[0].mean(0).detach()
        return super().training_step([batch[0] - self.mean, batch[1]], batch_idx)


class OfEachClient(Smooth):
    """Its optimizer is made anew for each client."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05 * (1 + (self.trainer.current_client or 0) % 3), momentum=0.5)


@pytest.fixture
def taken(monkeypatch):
    """Numbers of steps that graphs took, one for each call, and of graphs."""
    numbers, take = [], step_graphs.StepGraph.take
    call = graphs.GradientGraph.__call__
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    monkeypatch.setattr(step_recorder, "RECORD_ON_GPU", {"single": 2, "mapped": 2})
    monkeypatch.setattr(step_recorder, "COMPARE_EVERY", 8)
    use(monkeypatch, capture)
    monkeypatch.setattr(
        step_graphs.StepGraph,
        "take",
        lambda graph, *given: numbers.append(len(given[0])) or take(graph, *given),
    )
    monkeypatch.setattr(
        graphs.GradientGraph, "__call__", lambda graph, *inputs: numbers.append(1) or call(graph, *inputs)
    )
    return numbers


def compare(root, monkeypatch, model, **options):
    """A run with graphs against one without: models and tables, but for the last bits."""
    options = {"algorithm": FedAvg, "max_rounds": 3, "local_epochs": 2, "record_steps": True} | options
    expected = steps.fit(root, model, name="one by one", **options)
    for module in (step_graphs, step_recorder):
        monkeypatch.setattr(module, "takes_graphs", lambda device: True)
    found = steps.fit(root, model, name="graphs", **options)
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    tables = [pd.read_csv(f"{trainer.log_dir}/clients.csv") for trainer in (found, expected)]
    pd.testing.assert_frame_equal(*tables, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Smooth, {}),
        (LogsTheMost, {"algorithm": lambda: FedBC(dual_lr=0.1), "gradient_clip_val": 0.3}),
        (Smooth, {"algorithm": lambda: FedProx(mu=0.3), "precision": "64-true"}),
        (Decaying, {"algorithm": lambda: FedBC(dual_lr=0.1)}),
        (BoringModel, {"buffers": "local"}),
        (Rebinding, {"buffers": "local"}),
        (Dropping, {}),
        (lambda: CIFARCNN(num_classes=3, image_size=16), {"data": Images, "engine": "vectorized"}),
        (Smooth, {"engine": "vectorized", "algorithm": lambda: FedBC(dual_lr=0.1)}),
    ],
)
def test_the_numbers_of_steps_operation_by_operation(tmp_path, monkeypatch, taken, model, options):
    compare(tmp_path, monkeypatch, model, **options)
    assert sum(taken) > 10


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        (OfEachClient, FedAvg),
        (lambda: Smooth("adam"), FedAvg),
        (Smooth, SCAFFOLD),
        (Smooth, lambda: FedAvgPlus(sigma=0.5, delta=1.0)),
    ],
)
def test_memory_that_is_new_for_each_client_is_in_no_graph(tmp_path, monkeypatch, taken, model, algorithm):
    compare(tmp_path, monkeypatch, model, algorithm=algorithm)
    assert not taken


def broken_off(work, device):
    work()
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def other_work(work, device):
    work()
    return lambda: None


@pytest.mark.parametrize(
    ("engine", "capture", "reason"),
    [
        ("sequential", broken_off, "not permitted when stream is capturing"),
        ("sequential", other_work, "gives other numbers"),
        ("vectorized", broken_off, "not permitted when stream is capturing"),
    ],
)
def test_what_cannot_be_captured_is_replayed_one_by_one(tmp_path, monkeypatch, taken, caplog, engine, capture, reason):
    use(monkeypatch, capture)
    with caplog.at_level("INFO"):
        compare(tmp_path, monkeypatch, Dropping, algorithm=lambda: FedBC(dual_lr=0.1), engine=engine)
    assert any(reason in record.message for record in caplog.records)


def test_numbers_drawn_on_the_cpu_are_in_no_graph():
    with graphs.NoDrawsOnCPU():
        torch.zeros(3).add_(1)
        with pytest.raises(ValueError, match="draws numbers on the CPU"):
            torch.rand(())
