"""What every algorithm owes besides its trajectory: lost clients, permutations, buffers, repeated runs, warnings."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.boring import read_csv
from helpers.marks import of_each
from helpers.quadratics import QuadraticData, Recorder
from helpers.user_modules import BatchNormClassifier, UserData
from lightning.pytorch import Callback

from algorithms.registry import METHODS
from algorithms.running import QUIET, fit, start_point
from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import FedAvg, FedBC


@of_each(METHODS)
def test_the_same_run_twice_and_the_same_algorithm_object_twice(tmp_path, setting, caplog):
    """House style 6: algorithms and modules keep no state outside what is declared: a second fit repeats the first."""
    caplog.set_level(logging.INFO)
    algorithm, data = setting.build(), QuadraticData(batch_size=2)
    options = {"max_rounds": 3, "clients_per_round": 2, "seed": 4} | dict(setting.options)
    _, first = fit(tmp_path, algorithm, data, Recorder(), **options)
    _, second = fit(tmp_path, algorithm, data, Recorder(), **options)
    assert (first.vector() == second.vector()).all()
    assert "is not declared" not in caplog.text  # what would be said of a method that keeps state in attributes


class _Buffers(Callback):
    """The running statistics of every client at its start and its end, and z's after the round."""

    def __init__(self) -> None:
        self.start: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self.end: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self.server: dict[int, dict[str, torch.Tensor]] = {}
        self.dual: dict[int, torch.Tensor] = {}

    def on_client_start(self, trainer: Any, pl_module: Any, client: int) -> None:
        self.start[trainer.current_round, client] = copy.deepcopy(pl_module.state_dict())

    def on_client_end(self, trainer: Any, pl_module: Any, client: int) -> None:
        self.end[trainer.current_round, client] = copy.deepcopy(pl_module.state_dict())

    def on_round_end(self, trainer: Any, pl_module: Any) -> None:
        self.server[trainer.current_round] = copy.deepcopy(pl_module.state_dict())
        if "dual" in trainer.clients.scalar_names:
            self.dual[trainer.current_round] = trainer.clients.scalar("dual").clone()


def _batch_norm(tmp_path: Path, algorithm: Any, **options: Any) -> _Buffers:
    spy = _Buffers()
    torch.manual_seed(0)
    place = {"default_root_dir": str(tmp_path), "callbacks": [spy], "precision": "32-true", "local_epochs": 2}
    trainer = FederatedTrainer(**QUIET | place | {"max_rounds": 3} | options)
    trainer.fit(BatchNormClassifier(), datamodule=UserData((9, 17, 5)), algorithm=algorithm)
    return spy


@pytest.mark.parametrize("build", [FedAvg, lambda: FedAvg("uniform"), lambda: FedBC(dual_lr=0.5, tolerance=0.01)])
def test_buffers_are_averaged_with_the_weights_of_the_parameters(tmp_path, build):
    """Policy average: same weights as the parameters; integer buffers take the maximum."""
    spy = _batch_norm(tmp_path, build())
    for number in (1, 2, 3):
        weights = torch.tensor([9.0, 17.0, 5.0], dtype=torch.float64)
        if not isinstance(build(), FedAvg):
            weights = spy.dual[number].double()
            assert weights.min() > 0
        elif build().weighting == "uniform":
            weights = torch.ones(3, dtype=torch.float64)
        weights = weights / weights.sum()
        for name, value in spy.server[number].items():
            ends = torch.stack([spy.end[number, client][name] for client in range(3)])
            if value.is_floating_point():
                mean = torch.tensordot(weights, ends.double(), dims=1)
                torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-6, msg=name)
            else:
                assert value == ends.max()
        if number > 1:
            for client in range(3):
                for name, value in spy.start[number, client].items():
                    assert torch.equal(value, spy.server[number - 1][name]), name


def test_local_buffers_stay_with_their_clients(tmp_path):
    """Policy local: a client starts with the statistics that it ended its last round with."""
    spy = _batch_norm(tmp_path, FedAvg(), buffers="local")
    for number in (2, 3):
        for client in range(3):
            for name in ("net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"):
                assert torch.equal(spy.start[number, client][name], spy.end[number - 1, client][name]), name


def test_fedbc_starts_from_the_stored_model_with_its_buffers(tmp_path):
    """A stored model (x_i) is parameters and float buffers; init_from local starts from it."""
    spy = _batch_norm(tmp_path, FedBC(dual_lr=0.5, tolerance=0.01, init_from="local"))
    for number in (2, 3):
        for client in range(3):
            for name, value in spy.start[number, client].items():
                if value.is_floating_point():
                    assert torch.equal(value, spy.end[number - 1, client][name]), name


def test_fedbc_logs_its_duals(tmp_path):
    """Section 1: 'Log min, max and the effective number'; clients.csv has dual, tolerance, distance, weight."""
    recorder = Recorder(("dual", "tolerance"), ("local_model",))
    options = {"max_rounds": 3, "clients_per_round": 4, "local_epochs": 2}
    trainer, _ = fit(tmp_path, FedBC(dual_lr=0.2), QuadraticData(), recorder, **options)
    kept, z = recorder.arrays(), start_point()
    rows = read_csv(Path(trainer.log_dir) / "clients.csv")
    for number in (1, 2, 3):
        mine = [row for row in rows if int(row["round"]) == number]
        assert len(mine) == 4
        total = sum(kept["dual"][number - 1][int(row["client"])] for row in mine)
        for row in mine:
            client = int(row["client"])
            dual, x = kept["dual"][number - 1][client], kept["local_model"][number - 1][client]
            assert float(row["dual"]) == pytest.approx(dual, rel=1e-5)
            assert float(row["tolerance"]) == pytest.approx(kept["tolerance"][number - 1][client], rel=1e-5)
            assert float(row["distance"]) == pytest.approx(((x - z) ** 2).sum(), rel=1e-5)
            assert float(row["weight"]) == pytest.approx(dual / total, rel=1e-5)
        z = kept["z"][number - 1]
    duals = kept["dual"][-1][[int(row["client"]) for row in mine]]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "dual" in name}
    for value in (duals.min(), duals.max(), duals.sum() ** 2 / (duals**2).sum()):
        assert any(found == pytest.approx(value, rel=1e-5) for found in logged.values()), (value, logged)


@pytest.mark.parametrize("options", [{"dual_lr": 0.0}, {"dual_lr": 1.0, "tolerance": [1e9, 1e9, 1e9, 1e9, 0.0]}])
def test_fedbc_says_once_when_few_clients_carry_the_mean(tmp_path, options, caplog):
    """Section 1: 'warn once when it [the effective number] drops below 2 or all are 0'."""
    fit(tmp_path, FedBC(**options), QuadraticData(), Recorder(), max_rounds=4)
    assert len([record for record in caplog.records if "sampled clients are" in record.getMessage()]) == 1


def test_two_clients_in_a_round_are_no_alarm(tmp_path, caplog):
    options = {"max_rounds": 4, "clients_per_round": 2}
    fit(tmp_path, FedBC(dual_lr=0.2), QuadraticData(), Recorder(), **options)
    assert "sampled clients are" not in caplog.text


def test_integer_buffers_of_a_nonfinite_client_do_not_count(tmp_path):
    """Such a client has weight 0: its num_batches_tracked is not the maximum either."""

    class Poisoned(UserData):
        def client_train_dataset(self, client):
            dataset = super().client_train_dataset(client)
            if client == 1:
                dataset.tensors[0].fill_(float("nan"))
            return dataset

    torch.manual_seed(0)
    module, place = BatchNormClassifier(), {"default_root_dir": str(tmp_path), "precision": "32-true", "max_rounds": 1}
    FederatedTrainer(**QUIET | place).fit(module, datamodule=Poisoned((9, 40)), algorithm=FedAvg())
    assert module.net[1].num_batches_tracked == 2
