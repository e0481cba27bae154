"""The personalised methods (ALGORITHMS section 3): what the common battery does not reach.

Fixed points and degenerate equalities, the L2GD family against its plain iteration, which model is evaluated as the
local one, optimizers with momentum, schedules and groups, and the bytes of a round.
"""

from __future__ import annotations

import warnings
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reference, reference_personal
from helpers.quadratics import QuadraticData, QuadraticModule, Recorder, RecordingSampler, sample_quadratics
from helpers.reference import Local as LocalTraining
from helpers.reference import full_batches
from helpers.reference_personal import L2Problem, L2State, coins, l2_direction, l2_iterate
from torch.utils.data import Dataset, TensorDataset

import fedbc_lightning.server.smoothed_center as center_module
from algorithms.running import QUIET, fit, shuffled_steps, start_point
from algorithms.setting import Setting
from algorithms.settings_personal import SETTINGS_PERSONAL
from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import (
    APFL,
    L2GD,
    L2SGD,
    L2SGD2,
    Ditto,
    FedAvgPlus,
    FedCoMedPlus,
    FedGeoMedPlus,
    FedPlus,
    L2SGDPlus,
    L2SGDPlusPlus,
    Local,
    PerFedAvg,
    PFedMe,
)
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import AbsoluteNorm, Layerwise, Norm, SquaredNorm
from fedbc_lightning.server.smoothed_center import smoothed_center

BY_NAME = {setting.name: setting for setting in SETTINGS_PERSONAL}
TOLERANCE = 1e-9


def agree(tmp_path: Path, setting: Setting, local: Any, data: QuadraticData | None = None, **options: Any) -> Any:
    """Fit, replay the sampled clients in NumPy, compare every named state after every round; the trainer."""
    data = data or QuadraticData(sample_quadratics())
    recorder, sampler = Recorder(setting.scalars, setting.vectors, setting.server), RecordingSampler()
    options = {"max_rounds": 12, "clients_per_round": 3, "seed": 0, "sampler": sampler} | options | setting.options
    trainer, _ = fit(tmp_path, setting.build(), data, recorder, **options)
    rounds = [sampler.rounds[number] for number in sorted(sampler.rounds)]
    expected, found = setting.reference(data.clients, rounds, start_point(), local), recorder.arrays()
    assert len(found["z"]) == options["max_rounds"]
    for name in found.keys() - {"flat_z"}:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=setting.tolerance, err_msg=name)
    return trainer


# beyond the battery: epochs of mini-batches, schedules, momentum, groups, accumulation


@pytest.mark.parametrize(
    "name",
    [
        "local",
        "perfedavg-inner_lr",
        "perfedavg-hessian_free",
        "pfedme-penalty",
        "ditto",
        "ditto-personal_epochs",
        "apfl-adaptive",
        "l2sgd_plus",
        "l2sgd_plus_plus",
        "fedgeomed_plus-all",
        "fedplus-layerwise",
    ],
)
def test_closed_form_over_epochs_of_minibatches(tmp_path, name):
    """Section 4.1 with three epochs of unequally many batches, the last of each short (Per-FedAvg's stream runs on)."""
    data = QuadraticData(sample_quadratics(), batch_size=2)
    steps = shuffled_steps(data, 2, seed=5, epochs=3)
    agree(tmp_path, BY_NAME[name], LocalTraining(lr=0.1, steps=steps), data, local_epochs=3, seed=5)


@pytest.mark.parametrize(
    "name", ["local", "pfedme-penalty", "ditto", "ditto-personal_epochs", "apfl-adaptive", "fedplus-norm"]
)
def test_the_step_size_is_the_current_one(tmp_path, name):
    """Section 3: eta is the user's lr as his scheduler has it (pFedMe's w, APFL, kappa); it starts anew each round."""
    local = LocalTraining(lr=0.2, decay=0.7, steps=full_batches(4))
    agree(tmp_path, BY_NAME[name], local, lr=0.2, decay=0.7, local_epochs=4)


@pytest.mark.parametrize("name", ["local", "ditto", "ditto-personal_epochs", "fedplus-layerwise", "fedavg_plus-all"])
def test_the_users_optimizer_takes_the_steps(tmp_path, name):
    """Notation: default local training with momentum; Fed+ mixes after the optimizer's step; all fresh each round."""
    local = LocalTraining(lr=0.05, momentum=0.5, steps=full_batches(3))
    agree(tmp_path, BY_NAME[name], local, lr=0.05, momentum=0.5, local_epochs=3)


@pytest.mark.parametrize("name", ["local", "ditto", "pfedme-penalty", "apfl", "fedcomed_plus", "fedplus-layerwise-all"])
def test_two_optimizer_groups_with_their_own_step_sizes(tmp_path, name):
    """DESIGN 2: the vector is ordered by group; eta and kappa by slice, patterns still find their parameters."""
    rates = np.array([0.05, 0.2, 0.2, 0.2])
    agree(tmp_path, BY_NAME[name], LocalTraining(rates, steps=full_batches(2)), lr=0.05, tail_lr=0.2, local_epochs=2)


@pytest.mark.parametrize("name", ["local", "ditto-penalty", "fedplus-norm"])
def test_accumulation_and_clipping(tmp_path, name):
    """Notation: terms (Ditto's) once per step, before clipping; Fed+ mixes once per optimizer step, after it."""
    data = QuadraticData(sample_quadratics(), batch_size=1)
    local = LocalTraining(clip=0.8, divisor=2, steps=shuffled_steps(data, 1, accumulate=2, epochs=2))
    options = {"local_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.8}
    agree(tmp_path, BY_NAME[name], local, data, **options)


# Local, Per-FedAvg, pFedMe, Ditto, APFL


def test_hessian_free_perfedavg_is_the_exact_meta_gradient_on_a_quadratic(tmp_path):
    """Section 3: v - alpha H v with v = g(w - alpha g(w)); the central difference is exact where f is quadratic."""
    clients, alpha, beta = sample_quadratics(sizes=(4,)), 0.2, 0.1
    recorder = Recorder()
    algorithm = PerFedAvg(inner_lr=alpha, outer_lr=beta, variant="hessian_free")
    fit(tmp_path, algorithm, QuadraticData(clients), recorder, max_rounds=3, local_steps=1)
    w, hessian = start_point(), clients[0][0].mean(0)
    for found in recorder.arrays()["z"]:
        v = reference.gradient(clients, 0, w - alpha * reference.gradient(clients, 0, w))
        w = w - beta * (v - alpha * hessian @ v)
        np.testing.assert_allclose(found, w, rtol=0, atol=1e-10)


def test_pfedme_inner_loop_ends_at_the_prox(tmp_path):
    """Section 3: theta -> argmin f_i + lambda/2 |theta - w|^2, and w moves by eta times the envelope's gradient."""
    penalty, eta, recorder = 2.0, 0.1, Recorder(vectors=("local_model",))
    data = QuadraticData(sample_quadratics())
    algorithm = PFedMe(penalty=penalty, personal_lr=0.25, num_inner_steps=120)
    fit(tmp_path, algorithm, data, recorder, max_rounds=1, local_steps=1, lr=eta)
    found, z = recorder.arrays(), start_point()
    ends = []
    for i, (matrices, centres) in enumerate(data.clients):
        linear = np.einsum("nij,nj->i", matrices, centres) / len(centres)
        prox = np.linalg.solve(matrices.mean(0) + penalty * np.eye(4), linear + penalty * z)
        np.testing.assert_allclose(found["local_model"][0, i], prox, rtol=0, atol=1e-9)
        ends.append(z - eta * penalty * (z - prox))
    np.testing.assert_allclose(found["z"][0], np.mean(ends, axis=0), rtol=0, atol=1e-9)


def test_ditto_ends_at_the_minimiser_of_each_personal_objective(tmp_path):
    """Section 3: v_i -> argmin f_i(v) + lambda/2 |v - z|^2 once z stands still."""
    penalty, recorder = 0.5, Recorder(vectors=("local_model",))
    data = QuadraticData(sample_quadratics())
    fit(tmp_path, Ditto(penalty, personal_epochs=4), data, recorder, max_rounds=50, local_epochs=3, lr=0.3)
    found = recorder.arrays()
    v, z = found["local_model"][-1], found["z"][-1]
    np.testing.assert_allclose(z, found["z"][-2], rtol=0, atol=1e-8)
    for i in range(5):
        residual = reference.gradient(data.clients, i, v[i]) + penalty * (v[i] - z)
        np.testing.assert_allclose(residual, 0.0, rtol=0, atol=1e-7)


# the L2GD family


def curvatures(clients: reference.Clients) -> tuple[float, float]:
    """(mu, L~): of the f_i the least, of the single samples the largest curvature."""
    mu = min(np.linalg.eigvalsh(matrices.mean(0)).min() for matrices, _ in clients)
    return float(mu), float(max(np.linalg.eigvalsh(matrices).max() for matrices, _ in clients))


def test_l2gd_is_the_plain_iteration(tmp_path):
    """Section 3, L2GD: one string of coins, full gradients, nothing else; x_i is seen at every 0 -> 1 switch."""
    penalty, probability, lr, seed = 0.7, 0.4, 0.4, 11
    data, recorder = QuadraticData(sample_quadratics(), batch_size=2), Recorder(vectors=("local_model",))
    fit(tmp_path, L2GD(penalty, probability, lr), data, recorder, max_rounds=20, seed=seed)
    string = [
        k for t in range(1, 21) for k in [0] * coins(seed, probability, t)[0] + [1] * coins(seed, probability, t)[1]
    ]
    x, switches = np.tile(start_point(), (5, 1)), []
    for k, coin in enumerate(string):
        if coin == 1:
            if string[k - 1] == 0:
                switches.append(x)
            x = x - lr * penalty / (5 * probability) * (x - x.mean(0))
        else:
            own = np.stack([reference.gradient(data.clients, i, x[i]) for i in range(5)])
            x = x - lr / (5 * (1 - probability)) * own
    found = recorder.arrays()
    np.testing.assert_allclose(found["local_model"], switches, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found["z"], np.mean(switches, axis=1), rtol=0, atol=TOLERANCE)


def test_runs_of_coins_are_those_of_independent_coins():
    """Section 3: coin 1 has probability p; runs of 0 and of 1 are geometric, at least one long."""
    pairs = np.array([coins(0, 0.3, t) for t in range(1, 4001)])
    assert pairs.min() == 1
    assert pairs[:, 1].sum() / pairs.sum() == pytest.approx(0.3, abs=0.01)
    assert (pairs[:, 0] == 1).mean() == pytest.approx(0.3, abs=0.03)
    assert (pairs[:, 1] == 1).mean() == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize("method", ["l2gd", "l2sgd", "l2sgd2", "l2sgd+", "l2sgd++"])
def test_the_estimators_are_unbiased(method):
    """Section 3, L2SGD+: 'unbiased (a test by enumeration)': over both coins, all components and all samplings.

    On the reference, which the package equals draw by draw; the state is any state, no zero sums assumed.
    """
    clients, rng = sample_quadratics(sizes=(3, 5, 2), dim=3), np.random.default_rng(0)
    problem = L2Problem(clients, 0.8, 0.3, 0.1, method, batch_size=2, num_sampled=2)
    tables = [rng.standard_normal((len(problem.components(i)), 3)) for i in range(3)]
    state = L2State(rng.standard_normal((3, 3)), rng.standard_normal((3, 3)), tables)
    samplings = list(combinations(range(3), 2)) if method == "l2sgd++" else [(0, 1, 2)]
    local = []
    for sampled in samplings:
        choices = [range(len(tables[i])) if i in sampled else [None] for i in range(3)]
        local.append(np.mean([l2_direction(problem, state, 0, list(picks)) for picks in product(*choices)], axis=0))
    expected = 0.7 * np.mean(local, axis=0) + 0.3 * l2_direction(problem, state, 1, [])
    np.testing.assert_allclose(expected, problem.full_gradient(state.x), rtol=0, atol=1e-12)


def test_variance_reduction_has_the_minimiser_as_its_fixed_point():
    """Section 3: at the minimiser, with full tables, every draw of L2SGD+ and ++ moves nothing (the others do)."""
    clients = sample_quadratics()
    for method in ("l2sgd+", "l2sgd++", "l2sgd2"):
        problem = L2Problem(clients, 0.8, 0.3, 0.1, method, batch_size=1, num_sampled=2)
        x = problem.minimiser()
        np.testing.assert_allclose(problem.full_gradient(x), 0.0, rtol=0, atol=1e-12)
        tables = [
            np.stack([problem.component_gradient(i, j, x[i]) for j in range(len(problem.components(i)))])
            for i in range(5)
        ]
        state = L2State(x, 0.8 * (x - x.mean(0)), tables)
        moved = max(
            np.abs(l2_iterate(problem, state, coin, picks).x - x).max()
            for coin, picks in ((1, []), (0, [0] * 5), (0, [1, None, 1, None, 0] if method == "l2sgd++" else [1] * 5))
        )
        assert (moved < 1e-12) == (method != "l2sgd2")


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
    data, setting = QuadraticData(sample_quadratics(), batch_size=2), BY_NAME[name]
    local = LocalTraining(steps=shuffled_steps(data, 2, seed=3, epochs=1))
    trainer = agree(tmp_path, setting, local, data, max_rounds=4, seed=3)
    expected = setting.reference(data.clients, [[0, 1, 2, 3, 4]] * 4, start_point(), local)["gradient_tables"][-1]
    rows = [np.asarray(trainer.clients.vector("gradient_table", i)).reshape(-1, 4) for i in range(5)]
    assert [len(table) for table in rows] == [2, 3, 1, 4, 2]
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["l2gd", "l2sgd", "l2sgd2", "l2sgd_plus", "l2sgd_plus_plus"])
def test_l2gd_family_wants_all_clients(tmp_path, name):
    """Section 3: every x_i moves in every iteration, so a sampled round is refused by name."""
    with pytest.raises(ConfigurationError, match="clients_per_round"):
        fit(tmp_path, BY_NAME[name].build(), QuadraticData(sample_quadratics()), Recorder(), clients_per_round=3)


def test_l2gd_without_penalty_never_couples_the_clients(tmp_path):
    """Section 3: lambda = 0 leaves local gradient steps of size alpha/(N(1-p)); each x_i -> argmin f_i."""
    data, recorder = QuadraticData(sample_quadratics()), Recorder(vectors=("local_model",))
    fit(tmp_path, L2GD(penalty=0.0, probability=0.2, lr=1.5), data, recorder, max_rounds=20)
    for i, x in enumerate(recorder.arrays()["local_model"][-1]):
        np.testing.assert_allclose(reference.gradient(data.clients, i, x), 0.0, rtol=0, atol=1e-6)


# Fed+


def huber_location(values: np.ndarray, delta: float) -> float:
    """Root of the mean of clip(values - z, -delta, delta), by bisection."""
    low, high = values.min(), values.max()
    for _ in range(200):
        middle = 0.5 * (low + high)
        if np.clip(values - middle, -delta, delta).mean() > 0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def smoothed_geometric_median(w: np.ndarray, delta: float) -> np.ndarray:
    """argmin of the sum of Huber(|w_i - z|), by reweighted means."""
    z = np.median(w, axis=0)
    for _ in range(5000):
        weights = np.minimum(1.0, delta / np.maximum(np.linalg.norm(w - z, axis=1), 1e-300))
        z = weights @ w / weights.sum()
    return z


def with_outliers(number: int = 7, dim: int = 5) -> np.ndarray:
    w = np.random.default_rng(2).standard_normal((number, dim))
    w[-2:] += 8.0
    return w


@pytest.mark.parametrize("delta", [0.3, 1.0, 50.0])
def test_sweeps_end_at_the_smoothed_coordinate_median(delta):
    """Section 3: FedCoMed+ may be solved exactly per coordinate: the Huber location."""
    w = with_outliers()
    found = smoothed_center(torch.tensor(w), AbsoluteNorm(delta)).numpy()
    expected = [huber_location(column, delta) for column in w.T]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(reference_personal.smoothed_center(w, reference_personal.absolute_norm(delta))[0],
                               expected, rtol=0, atol=1e-6)  # fmt: skip
    if delta == 50.0:
        np.testing.assert_allclose(found, w.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("delta", [0.3, 1.0, 50.0])
def test_sweeps_end_at_the_smoothed_geometric_median(delta):
    """Section 3: FedGeoMed+'s server rule is the median smoothed by delta; a huge delta is the mean."""
    w = with_outliers()
    expected = smoothed_geometric_median(w, delta)
    found = smoothed_center(torch.tensor(w), Norm(delta)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(reference_personal.smoothed_center(w, reference_personal.norm(delta))[0],
                               expected, rtol=0, atol=1e-5)  # fmt: skip
    outlying = np.linalg.norm(w.mean(0) - w[:-2].mean(0))
    assert np.linalg.norm(found - w[:-2].mean(0)) < 0.6 * outlying or delta == 50.0


def test_the_squared_norm_needs_one_sweep():
    """Section 3: FedAvg+'s server rule is the mean, whatever delta."""
    w = with_outliers()
    for delta in (1e-3, 1.0, 1e3):
        found = smoothed_center(torch.tensor(w), SquaredNorm(delta)).numpy()
        np.testing.assert_allclose(found, w.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("over", ["sampled", "all"])
def test_z_is_the_smoothed_median_of_the_local_models(tmp_path, over):
    """Section 3: over S_t, or over all N with their stored x_i; each layer by its own penalty."""
    recorder, sampler = Recorder(vectors=("local_model",)), RecordingSampler()
    algorithm = FedPlus(0.5, Layerwise({"head": AbsoluteNorm(0.6)}, default=Norm(0.8)), mixing=0.2, over=over)
    data = QuadraticData(sample_quadratics())
    options = {"max_rounds": 6, "clients_per_round": 3, "local_epochs": 2, "sampler": sampler}
    fit(tmp_path, algorithm, data, recorder, **options)
    found = recorder.arrays()
    for number, (z, x) in enumerate(zip(found["z"], found["local_model"], strict=True), start=1):
        w = x[sampler.rounds[number]] if over == "sampled" else x
        assert np.clip(w[:, 0] - z[0], -0.6, 0.6).mean() == pytest.approx(0.0, abs=1e-7)
        np.testing.assert_allclose(z[1:], smoothed_geometric_median(w[:, 1:], 0.8), rtol=0, atol=1e-6)


def test_fedplus_says_once_that_the_sweeps_did_not_end(tmp_path, caplog, monkeypatch):
    """Section 3: 'or 1,000 sweeps (warn)'; once in a run, whether by the log or by a warning."""
    monkeypatch.setattr(center_module, "MAX_SWEEPS", 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = QuadraticData(sample_quadratics())
        fit(tmp_path, FedGeoMedPlus(sigma=0.5, delta=1e-3, over="all"), data, Recorder(), max_rounds=3, local_epochs=2)
    messages = [str(warning.message) for warning in caught] + [record.getMessage() for record in caplog.records]
    assert len([message for message in messages if "sweep" in message]) == 1, messages


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    """Contract of Layerwise: named together with the parameters that there are."""
    algorithm = FedPlus(0.5, Layerwise({"body.*": Norm(0.1)}, default=SquaredNorm(0.1)))
    with pytest.raises(ConfigurationError, match=r"(?s)body\.\*.*head"):
        fit(tmp_path, algorithm, QuadraticData(sample_quadratics()), Recorder(), max_rounds=1)


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


def test_perfedavg_trains_the_same_whether_evaluated_or_not(tmp_path):
    """DESIGN 5: evaluation, fine-tuning included, leaves training alone."""
    found = []
    for k, every in enumerate((1, 100)):
        data, recorder = DataWithTests(SIZES, TEST_SIZES, batch_size=2), Recorder()
        algorithm = PerFedAvg(inner_lr=0.2, outer_lr=0.1, finetune_split="test")
        measure(tmp_path / str(k), algorithm, data, recorder, eval_every_n_rounds=every, max_rounds=4)
        found.append(recorder.arrays()["z"])
    np.testing.assert_array_equal(found[0], found[1])


# what a round sends


@pytest.mark.parametrize(
    ("build", "down", "up"),
    [
        pytest.param(Local, 0, 0, id="Local"),
        pytest.param(PerFedAvg, 1, 1, id="PerFedAvg"),
        pytest.param(PFedMe, 1, 1, id="PFedMe"),
        pytest.param(Ditto, 1, 1, id="Ditto"),
        pytest.param(APFL, 1, 1, id="APFL"),
        *[
            pytest.param(partial(build, penalty=0.5, probability=0.3, lr=0.2), vectors, vectors, id=build.__name__)
            for build, vectors in ((L2GD, 1), (L2SGD, 1), (L2SGD2, 1), (L2SGDPlus, 2))
        ],
        pytest.param(lambda: L2SGDPlusPlus(0.5, 0.3, 0.2, num_sampled=2), 2, 2, id="L2SGDPlusPlus"),
        pytest.param(lambda: FedAvgPlus(0.5), 1, 1, id="FedAvgPlus"),
        pytest.param(lambda: FedGeoMedPlus(0.5, 1.0), 1, 1, id="FedGeoMedPlus"),
        pytest.param(lambda: FedCoMedPlus(0.5, over="all"), 1, 1, id="FedCoMedPlus"),
    ],
)
def test_bytes_of_a_round(tmp_path, build, down, up):
    """DESIGN 9: elements times their size, d = 4 in float64, plus at most two 4-byte numbers per client upwards."""
    trainer, _ = fit(tmp_path, build(), QuadraticData(sample_quadratics()), Recorder(), max_rounds=2)
    vector, metrics = 5 * 4 * 8, trainer.callback_metrics
    assert float(metrics["comm/bytes_down"]) == down * vector
    scalars = float(metrics["comm/bytes_up"]) - up * vector
    assert scalars == 0 if up == 0 else 0 <= scalars <= 5 * 2 * 4
