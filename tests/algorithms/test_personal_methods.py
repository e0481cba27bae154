"""The personalised methods (ALGORITHMS section 3): what the common battery does not reach.

Fixed points and degenerate equalities, the L2GD family against its plain iteration, which model is evaluated as the
local one, optimizers with momentum, schedules and groups, and the bytes of a round.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.quadratics import QuadraticData, QuadraticModule, Recorder, RecordingSampler, sample_quadratics
from helpers.reference import Local as LocalTraining
from helpers.reference import full_batches
from helpers.reference_personal import L2Problem
from torch.utils.data import Dataset, TensorDataset

from algorithms.running import QUIET, fit, shuffled_steps, start_point
from algorithms.settings_personal import SETTINGS_PERSONAL
from algorithms.test_conformance import compare
from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import APFL, L2SGD, L2SGD2, L2SGDPlus, PerFedAvg

BY_NAME = {setting.name: setting for setting in SETTINGS_PERSONAL}
TOLERANCE = 1e-9


# beyond the battery: epochs of mini-batches, schedules, momentum, groups, accumulation


# Local, Per-FedAvg, pFedMe, Ditto, APFL


# the L2GD family


def curvatures(clients: reference.Clients) -> tuple[float, float]:
    """(mu, L~): of the f_i the least, of the single samples the largest curvature."""
    mu = min(np.linalg.eigvalsh(matrices.mean(0)).min() for matrices, _ in clients)
    return float(mu), float(max(np.linalg.eigvalsh(matrices).max() for matrices, _ in clients))


@pytest.mark.parametrize("build", [L2SGDPlus, L2SGD, L2SGD2])
def test_l2sgd_plus_converges_linearly_and_its_relatives_stall(tmp_path, build):
    """Section 3: with the steps of the theory L2SGD+ ends at the exact minimiser; 'both [others] stall'."""
    clients, penalty, recorder = sample_quadratics(), 1.0, Recorder(vectors=("local_model",))
    mu, smoothness = curvatures(clients)
    most = max(len(centres) for _, centres in clients)
    probability = (4 * penalty + mu) / (4 * penalty + 4 * smoothness + (most + 1) * mu)
    lr = 5 * min((1 - probability) / (4 * smoothness + mu * most), probability / (4 * penalty + mu))
    algorithm = build(penalty=penalty, probability=probability, lr=lr)
    fit(tmp_path, algorithm, QuadraticData(clients, batch_size=1), recorder, max_rounds=60, seed=0)
    found, goal = recorder.arrays(), L2Problem(clients, penalty, probability, lr).minimiser()
    error = np.abs(found["local_model"] - goal).max(axis=(1, 2))
    np.testing.assert_allclose(found["z"], found["local_model"].mean(1), rtol=0, atol=1e-12)
    if build is L2SGDPlus:
        assert error[-1] < 1e-7
        assert error[39:].max() < 1e-2 * error[19:].max() < 1e-3 * error.max()
    else:
        assert error[20:].min() > 1e-2 * error.max()


@pytest.mark.parametrize("name", ["l2sgd_plus", "l2sgd_plus_plus"])
def test_gradient_tables(tmp_path, name):
    """Section 3: J_ij is the gradient of f_ij at the x_i before its step, one row per component; never picked: zero."""
    data, setting = QuadraticData(batch_size=2), BY_NAME[name]
    local = LocalTraining(steps=shuffled_steps(data, 2, seed=3, epochs=1))
    trainer = compare(tmp_path, setting, local, data, max_rounds=4, seed=3)
    expected = setting.reference(data.clients, [[0, 1, 2, 3, 4]] * 4, start_point(), local)["gradient_tables"][-1]
    rows = [np.asarray(trainer.clients.vector("gradient_table", i)).reshape(-1, 4) for i in range(5)]
    assert [len(table) for table in rows] == [2, 3, 1, 4, 2]
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=0, atol=TOLERANCE)


# Fed+


# which model is the local one


class Measured(QuadraticModule):
    """Logs its own w in test_step: what ``w/local<k>`` says of a client is the model that was evaluated."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        for k, value in enumerate(torch.cat([self.head, self.tail])):
            self.log(f"test_w{k}", value, batch_size=len(batch[1]))


class DataWithTests(QuadraticData):
    """Every client has test samples of another quadratic."""

    def __init__(self, sizes: tuple[int, ...], test_sizes: tuple[int, ...], batch_size: int | None = None) -> None:
        super().__init__(sample_quadratics(sizes), batch_size)
        self.tests = sample_quadratics(test_sizes, seed=1)

    def client_test_dataset(self, client: int) -> Dataset:
        matrices, centres = self.tests[client]
        return TensorDataset(torch.as_tensor(matrices), torch.as_tensor(centres))


def evaluated(trainer: FederatedTrainer, which: str = "local") -> np.ndarray:
    """The models (N, d) that the last round's evaluation saw."""
    found = [trainer.evaluation.clients[f"w{k}/{which}"] for k in range(4)]
    return np.array([[values[client] for values in found] for client in found[0]])


def measure(
    root: Path, algorithm: Any, data: QuadraticData, recorder: Recorder, weight_decay: float = 0.0, **options: Any
) -> FederatedTrainer:
    settings: dict[str, Any] = {"max_rounds": 3, "clients_per_round": 2, "local_epochs": 2, "seed": 2}
    settings |= {"sampler": RecordingSampler(), "callbacks": [recorder], "default_root_dir": str(root)} | options
    trainer = FederatedTrainer(**QUIET | settings)
    trainer.fit(Measured(weight_decay=weight_decay), datamodule=data, algorithm=algorithm)
    return trainer


SIZES, TEST_SIZES = (6, 4, 5), (3, 1, 2)


@pytest.mark.parametrize(
    "name",
    ["local", "pfedme-penalty", "ditto", "l2gd", "l2sgd_plus", "fedavg_plus", "fedgeomed_plus-all", "fedcomed_plus"],
)
def test_the_local_model_is_the_personal_one(tmp_path, name):
    """Section 3: x_i of Local, L2GD and Fed+, the last theta_i of pFedMe, v_i of Ditto; also of absent clients."""
    setting, recorder = BY_NAME[name], Recorder(vectors=("local_model",))
    data = DataWithTests(SIZES, TEST_SIZES)
    trainer = measure(tmp_path, setting.build(), data, recorder, **{"max_rounds": 2} | setting.options)
    rounds = [trainer.sampler.rounds[number] for number in (1, 2)]
    local = LocalTraining(steps=full_batches(2, seed=2))
    expected = setting.reference(data.clients, rounds, start_point(), local)
    np.testing.assert_allclose(evaluated(trainer), expected["local_model"][-1], rtol=0, atol=1e-8)
    np.testing.assert_allclose(evaluated(trainer), recorder.arrays()["local_model"][-1], rtol=0, atol=1e-8)
    np.testing.assert_allclose(evaluated(trainer, "global"), [expected["z"][-1]] * 3, rtol=0, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"mixture": 0.2}, {"adaptive": True}])
def test_apfl_evaluates_the_mixture_with_the_current_z(tmp_path, options):
    """Section 3: 'Evaluation: v-bar with the current z in place of w', each client with its own alpha."""
    recorder = Recorder(("mixture",), ("local_model",))
    trainer = measure(tmp_path, APFL(**options), DataWithTests(SIZES, TEST_SIZES), recorder)
    found = {name: value[-1] for name, value in recorder.arrays().items()}
    alpha = found["mixture"][:, None]
    expected = alpha * found["local_model"] + (1.0 - alpha) * found["z"]
    np.testing.assert_allclose(evaluated(trainer), expected, rtol=0, atol=1e-8)
    if "adaptive" in options:
        assert len(np.unique(found["mixture"])) == 3


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("size", [20, 4])
def test_perfedavg_evaluates_one_step_from_z(tmp_path, split, size, weight_decay):
    """Section 3: 'one step of alpha from z', on the first ``finetune_batch_size`` samples, unshuffled, of the split.

    It is the inner step of training, in which SGD's weight decay is part of the gradient.
    """
    data, alpha, recorder = DataWithTests((26, 5, 31), (3, 23, 40), batch_size=7), 0.3, Recorder()
    options = {"finetune_split": split} | ({} if size == 20 else {"finetune_batch_size": size})
    trainer = measure(tmp_path, PerFedAvg(inner_lr=alpha, outer_lr=0.1, **options), data, recorder, weight_decay)
    z, clients = recorder.arrays()["z"][-1], data.clients if split == "train" else data.tests
    rows = [np.arange(min(size, len(clients[i][1]))) for i in range(3)]
    expected = [z - alpha * (reference.gradient(clients, i, z, rows[i]) + weight_decay * z) for i in range(3)]
    np.testing.assert_allclose(evaluated(trainer), expected, rtol=0, atol=1e-8)
    np.testing.assert_allclose(evaluated(trainer, "global"), [z] * 3, rtol=0, atol=1e-8)
    assert not [name for name in trainer.callback_metrics if "test_objective" in name]


# what a round sends
