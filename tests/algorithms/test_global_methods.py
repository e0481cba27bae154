"""Methods with one global model: fixed points, what optimizers leave alone, evaluation, refusals (ALGORITHMS 1, 2)."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reference, reference_global
from helpers.boring import BoringData, make_trainer, read_csv
from helpers.quadratics import QuadraticData, QuadraticModule, Recorder, RecordingSampler, sample_quadratics
from lightning.pytorch import LightningModule
from torch.utils.data import Dataset, TensorDataset

from algorithms.running import QUIET, fit, start_point
from fedbc_lightning import FederatedTrainer, algorithms
from fedbc_lightning.algorithms import SCAFFOLD, FedADMM, FedBCFineTune, FedDyn, FedExP, FedLiLU, FedPD, PerFedBC
from fedbc_lightning.core.errors import ConfigurationError

# Degenerate equalities


# Fixed points


@pytest.mark.parametrize("build", [partial(FedADMM, rho=1.0), partial(FedDyn, alpha=1.0)], ids=["FedADMM", "FedDyn"])
def test_ends_at_the_minimiser_of_the_mean_loss(tmp_path, build):
    """Section 4.2: FedADMM, FedDyn -> argmin of the mean loss, with partial participation."""
    data = QuadraticData()
    options = {"max_rounds": 110, "clients_per_round": 2, "local_epochs": 3, "lr": 0.2}
    _, module = fit(tmp_path, build(), data, Recorder(), **options)
    np.testing.assert_allclose(module.vector(), reference.minimiser(data.clients), rtol=0, atol=1e-6)


def test_fedpd_leaves_z_where_a_round_is_skipped(tmp_path):
    """Section 2: with probability p every client goes on from its own z_i; nothing is sent in either direction."""
    recorder, seed = Recorder(vectors=("center",)), 3
    options = {"max_rounds": 12, "clients_per_round": 5, "seed": seed}
    trainer, _ = fit(tmp_path, FedPD(rho=0.5, skip_probability=0.5), QuadraticData(), recorder, **options)
    found, last = recorder.arrays(), start_point()
    skipped = [reference_global.is_skipped(seed, number, 0.5) for number in range(1, 13)]
    assert 3 < sum(skipped) < 10
    for is_skipped, z, centers, row in zip(skipped, found["z"], found["center"], metrics(trainer)[1:], strict=True):
        apart = np.abs(centers - z).max()
        if is_skipped:
            np.testing.assert_array_equal(z, last)
            assert apart > 1e-3
            assert float(row["comm/bytes_up"]) == float(row["comm/bytes_down"]) == 0.0
        else:
            assert np.abs(z - last).max() > 1e-6
            assert apart < 1e-12
            assert float(row["comm/bytes_up"]) >= 5 * 4 * 8
            assert float(row["comm/bytes_down"]) >= 5 * 4 * 8
        last = z


# What optimizers leave alone, and what is kept in less precision


def test_fedlilu_decays_only_what_is_optimized(tmp_path):
    class Module(QuadraticModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.tail], lr=self.lr)

    module = Module()
    trainer = FederatedTrainer(**QUIET, max_rounds=3, default_root_dir=str(tmp_path))
    trainer.fit(module, QuadraticData(), FedLiLU(server_lr=1.0, weight_decay=0.5))
    (still, *moved) = module.vector() != start_point()
    assert not still
    assert all(moved)


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDyn", "FedADMM"])
def test_the_servers_mean_is_that_of_the_rows_as_they_are_kept(tmp_path, name):
    """In bfloat16, too, whose rounding must not pile up: section 2, c, h and the mean of the u_i."""
    vectors, server = {
        "SCAFFOLD": (("control",), "control"),
        "FedDyn": (("correction",), "correction"),
        "FedADMM": (("local_model", "multiplier"), "augmented_mean"),
    }[name]
    build = {"SCAFFOLD": SCAFFOLD, "FedDyn": partial(FedDyn, alpha=1.0), "FedADMM": partial(FedADMM, rho=0.5)}[name]
    recorder = Recorder(vectors=vectors, server=(server,))
    options = {"max_rounds": 40, "clients_per_round": 2, "local_epochs": 2, "client_dtype": "bfloat16"}
    fit(tmp_path, build(), QuadraticData(batch_size=2), recorder, **options)
    found = {key: values[-1] for key, values in recorder.arrays().items()}
    rows = found[vectors[0]] + (found["multiplier"] / 0.5 if name == "FedADMM" else 0)
    np.testing.assert_allclose(found[f"server_{server}"], rows.mean(0), rtol=0, atol=1e-12)


# Evaluation


class EvaluatedModule(QuadraticModule):
    """Logs the objective on test data."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        matrices, centres = batch
        offset = torch.cat([self.head, self.tail]) - centres
        self.log("test_objective", 0.5 * torch.einsum("bi,bij,bj->b", offset, matrices, offset).mean())


class EvaluatedData(QuadraticData):
    """Clients with test data of their own."""

    def __init__(self, clients: reference.Clients, test: reference.Clients, batch_size: int | None = None) -> None:
        super().__init__(clients, batch_size)
        self.test = test

    def client_test_dataset(self, client: int) -> Dataset:
        return TensorDataset(*map(torch.as_tensor, self.test[client]))


def metrics(trainer: FederatedTrainer) -> list[dict[str, str]]:
    """metrics.csv of a run, row 0 first."""
    return read_csv(Path(trainer.log_dir) / "metrics.csv")


def evaluated(
    tmp_path: Path, algorithm: Any, vectors: tuple[str, ...] = ("local_model",)
) -> tuple[EvaluatedData, dict[str, Any], list[dict[str, str]]]:
    """The data, the trajectories and metrics.csv of one run with test data."""
    data = EvaluatedData(sample_quadratics(), sample_quadratics((4, 2, 6, 3, 5), seed=1), batch_size=2)
    recorder = Recorder(vectors=vectors)
    settings = {"callbacks": [recorder], "default_root_dir": str(tmp_path), "sampler": RecordingSampler()}
    settings |= {"max_rounds": 4, "clients_per_round": 3, "keep_local_models": True}
    trainer = FederatedTrainer(**QUIET | settings)
    trainer.fit(EvaluatedModule(), datamodule=data, algorithm=algorithm)
    return data, recorder.arrays(), metrics(trainer)


def pooled(data: EvaluatedData, z: np.ndarray) -> float:
    """The mean over all test samples."""
    sizes = [len(centres) for _, centres in data.test]
    return float(np.average([reference.loss(data.test, client, z) for client in range(5)], weights=sizes))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("batch_size", [2, 20])
@pytest.mark.parametrize("name", ["FedBCFineTune", "PerFedBC"])
def test_finetuning_is_one_sgd_step_on_the_first_unshuffled_batch(tmp_path, name, batch_size, split):
    """Section 1: FedBC-FineTune steps from x_i, Per-FedBC from z; global values are of z; training is untouched."""
    settings = {"dual_lr": 0.1, "finetune_batch_size": batch_size, "finetune_split": split}
    if name == "FedBCFineTune":
        algorithm, vectors = FedBCFineTune(finetune_lr=0.3, **settings), ("local_model",)
    else:
        algorithm, vectors = PerFedBC(inner_lr=0.3, outer_lr=0.1, **settings), ()
    data, found, rows = evaluated(tmp_path, algorithm, vectors)
    source = data.clients if split == "train" else data.test
    initial = np.tile(start_point(), (5, 1))
    for number, row in enumerate(rows):
        z = found["z"][number - 1] if number else initial[0]
        start = np.tile(z, (5, 1))
        if name == "FedBCFineTune":
            start = found["local_model"][number - 1] if number else initial
        losses = []
        for client in range(5):
            batch = np.arange(min(batch_size, len(source[client][1])))
            tuned = start[client] - 0.3 * reference.gradient(source, client, start[client], batch)
            losses.append(reference.loss(data.test, client, tuned))
        assert float(row["objective/local"]) == pytest.approx(np.mean(losses), rel=1e-6), number
        assert float(row["objective/global"]) == pytest.approx(pooled(data, z), rel=1e-6), number


@pytest.mark.parametrize("style", ["paper", "public"])
def test_fedexp_averages_the_last_two_z_for_evaluation_only(tmp_path, style):
    """Section 2: 'The mean of the last two z is for *evaluation only*': the trajectory is the same without it."""
    data, with_mean, rows = evaluated(tmp_path / "mean", FedExP(style=style))
    _, without, plain_rows = evaluated(tmp_path / "plain", FedExP(style=style, average_last_two=False))
    np.testing.assert_array_equal(with_mean["z"], without["z"])
    np.testing.assert_array_equal(with_mean["local_model"], without["local_model"])
    for number in range(1, 5):
        z = without["z"][number - 1]
        assert float(plain_rows[number]["objective/global"]) == pytest.approx(pooled(data, z), rel=1e-6)
        if number > 1:
            mean = (z + without["z"][number - 2]) / 2
            assert float(rows[number]["objective/global"]) == pytest.approx(pooled(data, mean), rel=1e-6)


# Communication


@pytest.mark.parametrize("options", [{"decay": 0.9}, {"gradient_clip_val": 0.5}, {"lbfgs": True}])
def test_fednova_refuses_steps_whose_weights_are_unknown(tmp_path, options):
    with pytest.raises(ConfigurationError, match="FedNova divides by the weight of a client's gradients"):
        fit(tmp_path, algorithms.FedNova(), QuadraticData(), Recorder(), **options)


class Idle(LightningModule):
    """A linear model that finds no loss in the batches of client 2."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(10, 3)

    def training_step(self, batch, batch_idx):
        if self.trainer.current_client == 2:
            return None
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


class Few(BoringData):
    num_clients = 2


class More(BoringData):
    num_clients = 3


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_client_without_a_step_has_no_part(tmp_path, weighting):
    found = []
    for data in (Few, More):
        trainer = make_trainer(
            tmp_path / data.__name__, max_rounds=3, clients_per_round=1.0, precision="64-true", eval_every_n_rounds=0
        )
        trainer.fit(Idle(), data(), algorithms.FedNova(weighting))
        found.append(trainer.server.z)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
