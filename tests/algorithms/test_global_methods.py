"""Global methods, robust rules: degenerate equalities, fixed points, attacks, evaluation, bytes (ALGORITHMS 1, 2)."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reference, reference_global
from helpers.quadratics import QuadraticData, QuadraticModule, Recorder, RecordingSampler, sample_quadratics
from torch.utils.data import Dataset, TensorDataset

from algorithms.running import QUIET, fit, start_point
from fedbc_lightning import FederatedTrainer, algorithms
from fedbc_lightning.algorithms import (
    RFA,
    SCAFFOLD,
    FedADMM,
    FedAvg,
    FedAvgM,
    FedBC,
    FedBCFineTune,
    FedDyn,
    FedExP,
    FedLiLS,
    FedLiLU,
    FedPD,
    FedProx,
    FedYogi,
    PerFedBC,
    QFedAvg,
)
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.server.robust import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormBound,
    TrimmedMean,
)

# Degenerate equalities


def trajectories(
    tmp_path: Path, algorithm: Any, vectors: tuple[str, ...] = ("local_model",), **options: Any
) -> dict[str, Any]:
    """z and the named vectors of one run with the common settings of the degenerate equalities."""
    recorder = Recorder(vectors=vectors)
    settings = {"max_rounds": 20, "clients_per_round": 3, "local_epochs": 3, "keep_local_models": True} | options
    batch_size = settings.pop("batch_size", 2)
    fit(tmp_path, algorithm, QuadraticData(sample_quadratics(), batch_size), recorder, **settings)
    return recorder.arrays()


@pytest.mark.parametrize("build", [partial(FedDyn, alpha=0.5), partial(FedADMM, rho=0.5), partial(FedPD, rho=0.5)])
def test_the_first_round_of_all_clients_goes_twice_as_far_as_fedprox(tmp_path, build):
    """Section 2: with h_i = y_i = 0 the term is rho (w - z), and z = mean(w_i + (w_i - z))."""
    options = {"clients_per_round": 5, "max_rounds": 1}
    found = trajectories(tmp_path / "found", build(), **options)
    plain = trajectories(tmp_path / "plain", FedProx(0.5, "uniform"), **options)
    np.testing.assert_allclose(found["local_model"], plain["local_model"], rtol=0, atol=1e-13)
    np.testing.assert_allclose(found["z"] - start_point(), 2 * (plain["z"] - start_point()), rtol=0, atol=1e-13)


def test_feddyn_is_fedadmm_where_clients_solve_exactly_and_all_take_part(tmp_path):
    """Section 2: h_i = -y_i, h = mean(h_i): the two differ in the start of local training alone."""
    options = {"clients_per_round": 5, "max_rounds": 5, "local_epochs": 60, "batch_size": None, "lr": 0.4}
    left = trajectories(tmp_path / "dyn", FedDyn(alpha=0.8), ("correction",), **options)
    right = trajectories(tmp_path / "admm", FedADMM(rho=0.8), ("multiplier",), **options)
    np.testing.assert_allclose(left["z"], right["z"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(left["correction"], -right["multiplier"], rtol=0, atol=1e-12)


# Fixed points


@pytest.mark.parametrize(("sampled", "rounds"), [(5, 35), (2, 110)])
@pytest.mark.parametrize("build", [partial(FedADMM, rho=1.0), partial(FedDyn, alpha=1.0)], ids=["FedADMM", "FedDyn"])
def test_ends_at_the_minimiser_of_the_mean_loss(tmp_path, build, sampled, rounds):
    """Section 4.2: FedADMM, FedDyn -> argmin of the mean loss, with full and partial participation."""
    data = QuadraticData(sample_quadratics())
    options = {"max_rounds": rounds, "clients_per_round": sampled, "local_epochs": 3, "lr": 0.2}
    _, module = fit(tmp_path, build(), data, Recorder(), **options)
    np.testing.assert_allclose(module.vector(), reference.minimiser(data.clients), rtol=0, atol=1e-6)


def test_fedpd_ends_at_the_minimiser_only_without_skips(tmp_path):
    """Section 2: 'Exact argmin only for p = 0'."""
    data, recorders = QuadraticData(sample_quadratics()), (Recorder(), Recorder())
    goal, errors = reference.minimiser(data.clients), []
    for k, recorder in enumerate(recorders):
        options = {"max_rounds": 40, "clients_per_round": 5, "local_epochs": 3, "lr": 0.2}
        fit(tmp_path / str(k), FedPD(rho=1.0, skip_probability=0.5 * k), data, recorder, **options)
        errors.append(np.abs(recorder.arrays()["z"][-1] - goal).max())
    assert errors[0] < 1e-7
    assert errors[1] > 1e-4


def test_fedpd_leaves_z_where_a_round_is_skipped(tmp_path):
    """Section 2: with probability p every client goes on from its own z_i; nothing is sent in either direction."""
    recorder, seed = Recorder(vectors=("center",)), 3
    options = {"max_rounds": 12, "clients_per_round": 5, "seed": seed}
    trainer, _ = fit(
        tmp_path, FedPD(rho=0.5, skip_probability=0.5), QuadraticData(sample_quadratics()), recorder, **options
    )
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


# Robust rules


class _Server(dict):
    """What a rule sees of the server: its own declared vector."""

    def stage(self, name: str, value: torch.Tensor) -> None:
        self[name] = value


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (CoordinateMedian, [1.0, 30.0]),
        (partial(TrimmedMean, trim=0.2), [2.0 / 3, 30.0]),
        (partial(Krum, num_byzantine=1), "chosen"),
        (partial(MultiKrum, num_byzantine=1), "mean of chosen"),
        (partial(NormBound, bound=0.1), [0.6, 41.0]),
        (partial(CenteredClipping, radius=0.1), [0.6, 41.0]),
    ],
)
def test_buffers_under_a_rule(make, expected):
    """Contract: coordinate rules treat buffers like parameters, choosing rules weigh them alike, others average."""
    updates = torch.tensor([[0.0], [0.1], [0.2], [0.35], [50.0]], dtype=torch.float64)
    buffers = torch.tensor([[1.0, 20.0], [0.0, 15.0], [2.0, 30.0], [1.0, 40.0], [-1.0, 100.0]], dtype=torch.float64)
    server = _Server(clipping_center=torch.zeros(1, dtype=torch.float64))
    found, averaged = make().aggregate(updates, torch.ones(5, dtype=torch.float64), buffers, server)
    if expected == "chosen":
        (index,) = torch.nonzero(updates[:, 0] == found[0])[0].tolist()
        expected = buffers[index].tolist()
        assert index in (1, 2)
    elif expected == "mean of chosen":
        expected = buffers[:4].mean(0).tolist()
    assert averaged.tolist() == pytest.approx(expected)


def test_the_default_geometric_median_is_converged():
    """Section 2: 100 sweeps, stop at relative 1e-6 (the public 4 sweeps are far off): the unit pulls cancel."""
    rng = np.random.default_rng(5)
    updates, weights = rng.standard_normal((9, 4)), rng.integers(1, 6, 9).astype(float)
    arguments = (torch.as_tensor(value) for value in (updates, weights, np.zeros((9, 0))))
    found = GeometricMedian().aggregate(*arguments, _Server())[0].numpy()
    pull = (updates - found) / np.linalg.norm(updates - found, axis=1)[:, None]
    assert np.linalg.norm(weights @ pull) / weights.sum() < 1e-4
    exact = reference_global.geometric_median(max_iter=5000, rtol=0.0)(updates, weights)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4)


def test_fedpd_needs_all_clients(tmp_path):
    """Section 2: 'with all clients in every round'."""
    with pytest.raises(ConfigurationError, match="clients_per_round"):
        fit(tmp_path, FedPD(), QuadraticData(sample_quadratics()), Recorder(), clients_per_round=4, max_rounds=1)


# What optimizers leave alone, and what is kept in less precision


def test_steps_of_size_0_tell_scaffold_nothing(tmp_path):
    """Section 2: c_i⁺ is formed from (z − w_i)/(K_i η)."""

    class Module(QuadraticModule):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: float(done != 3))  # not in round 4
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "round"}}

    recorder = Recorder(vectors=("control",), server=("control",))
    settings = {"max_rounds": 5, "clients_per_round": 2, "local_steps": 3, "callbacks": [recorder]}
    trainer = FederatedTrainer(**QUIET | settings, default_root_dir=str(tmp_path))
    trainer.fit(Module(), QuadraticData(sample_quadratics()), SCAFFOLD(control="step_size"))
    for name, values in recorder.arrays().items():
        np.testing.assert_array_equal(values[3], values[2], err_msg=name)
        assert (values[4] != values[3]).any()


def test_fedlilu_decays_only_what_is_optimized(tmp_path):
    class Module(QuadraticModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.tail], lr=self.lr)

    module = Module()
    trainer = FederatedTrainer(**QUIET, max_rounds=3, default_root_dir=str(tmp_path))
    trainer.fit(module, QuadraticData(sample_quadratics()), FedLiLU(server_lr=1.0, weight_decay=0.5))
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
    fit(tmp_path, build(), QuadraticData(sample_quadratics(), batch_size=2), recorder, **options)
    found = {key: values[-1] for key, values in recorder.arrays().items()}
    rows = found[vectors[0]] + (found["multiplier"] / 0.5 if name == "FedADMM" else 0)
    np.testing.assert_allclose(found[f"server_{server}"], rows.mean(0), rtol=0, atol=1e-12)


# A client that fails


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
    with (Path(trainer.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


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

VECTORS = {
    "FedAvg": (FedAvg, 1, 1),
    "FedProx": (FedProx, 1, 1),
    "SCAFFOLD": (SCAFFOLD, 2, 2),  # down z and c, up w_i and the change of c_i
    "FedBC": (partial(FedBC, dual_lr=0.1), 1, 1),
    "FedBCFineTune": (partial(FedBCFineTune, dual_lr=0.1), 1, 1),
    "PerFedBC": (partial(PerFedBC, dual_lr=0.1), 1, 1),
    "FedAvgM": (FedAvgM, 1, 1),
    "FedAdagrad": (algorithms.FedAdagrad, 1, 1),
    "FedAdam": (algorithms.FedAdam, 1, 1),
    "FedYogi": (FedYogi, 1, 1),
    "QFedAvg": (QFedAvg, 1, 1),
    "FedDyn": (FedDyn, 1, 1),  # h_i stays at the client, h at the server
    "FedADMM": (FedADMM, 1, 1),  # up the change of u_i; x_i and y_i stay
    "FedPD": (FedPD, 1, 1),
    "FedExP": (FedExP, 1, 1),
    "FedLiLS": (FedLiLS, 1, 1),
    "FedLiLU": (FedLiLU, 1, 1),
    "RFA": (RFA, 1, 1),
    "SCAFFOLD-median": (lambda: SCAFFOLD(robust_rule=CoordinateMedian()), 2, 2),
    "FedAvg-median": (lambda: FedAvg(robust_rule=CoordinateMedian()), 1, 1),
}
NEEDS_A_NUMBER = {"FedAvg", "FedBC", "FedBCFineTune", "PerFedBC", "QFedAvg", "FedLiLS", "FedLiLU"}
"""A sample count, a dual, a loss or a step size goes up beside the vectors."""


@pytest.mark.parametrize("name", list(VECTORS))
def test_bytes_are_those_of_the_vectors_and_numbers_sent(tmp_path, name):
    """DESIGN 9: elements times element size per sampled client (here 4 x 8), scalars 4 bytes."""
    build, down, up = VECTORS[name]
    num_sampled = 5 if name == "FedPD" else 3
    options = {"max_rounds": 3, "clients_per_round": num_sampled}
    trainer, _ = fit(tmp_path, build(), QuadraticData(sample_quadratics()), Recorder(), **options)
    for row in metrics(trainer)[1:]:
        assert float(row["comm/bytes_down"]) == num_sampled * 32 * down
        numbers = (float(row["comm/bytes_up"]) / num_sampled - 32 * up) / 4
        assert numbers in (0, 1, 2, 3)
        assert numbers > 0 or name not in NEEDS_A_NUMBER
