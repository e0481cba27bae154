"""Every algorithm equals an independent NumPy loop on quadratics (ALGORITHMS section 4, items 1 to 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.quadratics import QuadraticData, Recorder, RecordingSampler, sample_quadratics
from helpers.reference import Local, full_batches

from algorithms.registry import BY_NAME, METHODS, SETTINGS, Setting
from algorithms.running import fit, shuffled_steps, start_point
from fedbc_lightning.algorithms import SCAFFOLD, FedAvg, FedBC, FedProx
from fedbc_lightning.core.errors import ConfigurationError

ROUNDS = 20


def compare(tmp_path: Any, setting: Setting, local: Local, data: QuadraticData | None = None, **options: Any) -> None:
    """Fit and replay the sampled clients in NumPy; every named state must agree after every round."""
    data = data or QuadraticData(sample_quadratics())
    recorder = Recorder(setting.scalars, setting.vectors, setting.server)
    sampler = RecordingSampler()
    options = (
        {"max_rounds": ROUNDS, "clients_per_round": 3, "seed": 0, "sampler": sampler} | options | dict(setting.options)
    )
    _, module = fit(tmp_path, setting.build(), data, recorder, **options)
    found = recorder.arrays()
    pooled = {number: [-1] for number in recorder.sampled} if setting.build().trains_pooled else {}
    rounds = [clients for _, clients in sorted((sampler.rounds or pooled).items())]
    expected = setting.reference(data.clients, rounds, start_point(), local)
    assert len(rounds) == len(recorder.rounds()) == options["max_rounds"] == len(found["z"])
    assert [sorted(sampled) for sampled in recorder.rounds()] == [sorted(sampled) for sampled in rounds]
    assert np.isfinite(expected["z"]).all()
    for name in found:
        if name != "flat_z":
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=setting.tolerance, err_msg=name)
    np.testing.assert_array_equal(module.vector(), found["z"][-1])
    if "local_parameters" not in options:
        np.testing.assert_array_equal([module.from_layout(row) for row in found["flat_z"]], found["z"])


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_closed_form_with_partial_participation(tmp_path, setting):
    """Section 4.1: z, x_i and all state over 20 rounds with 3 of 5 clients, 3 epochs of full batches."""
    compare(tmp_path, setting, Local(lr=0.1, steps=full_batches(3)), local_epochs=3)


@pytest.mark.parametrize("setting", METHODS, ids=lambda setting: setting.name)
def test_closed_form_with_local_steps(tmp_path, setting):
    """The same over 8 rounds of mini-batches with ``local_steps``: they run on through the epochs and stop at K."""
    data = QuadraticData(sample_quadratics(), batch_size=2)
    options = {"max_rounds": 8, "clients_per_round": 0.4, "local_steps": 3, "seed": 7}
    compare(tmp_path, setting, Local(lr=0.1, steps=shuffled_steps(data, 2, seed=7, num_steps=3)), data, **options)


MINIBATCHES = ["fedavg-samples", "fedbc-fixed", "scaffold-auto", "scaffold-gradient_mean", "fednova-samples"]


@pytest.mark.parametrize("name", MINIBATCHES)
def test_closed_form_with_minibatches(tmp_path, name):
    """Unequal numbers of steps: K_i is each client's own count, the last batch of an epoch is short."""
    data = QuadraticData(sample_quadratics(), batch_size=2)
    local = Local(lr=0.1, steps=shuffled_steps(data, 2, epochs=2))
    compare(tmp_path, BY_NAME[name], local, data, local_epochs=2, clients_per_round=4)


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("fedprox-samples", 0.8),
        ("fedbc-learned", 0.8),
        ("fedbc-fixed-list-local", None),
        ("scaffold-step_size-server_lr", None),
        ("scaffold-gradient_mean", 0.8),
    ],
)
def test_terms_are_added_once_per_step_after_accumulation_and_before_clipping(tmp_path, name, clip):
    """Notation: 'added once per optimizer step, after accumulation and AMP unscaling, before clipping'."""
    data = QuadraticData(sample_quadratics(), batch_size=1)
    local = Local(lr=0.1, clip=clip, divisor=2, steps=shuffled_steps(data, 1, accumulate=2, epochs=2))
    options = {"local_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": clip}
    compare(tmp_path, BY_NAME[name], local, data, **options)


@pytest.mark.parametrize("name", ["fedprox-samples", "fedbc-fixed-list-local", "scaffold-auto"])
def test_two_optimizer_groups_with_their_own_step_sizes(tmp_path, name):
    """Section 2, SCAFFOLD: 'with several groups eta is by slice'; terms and stored rows survive the reordering."""
    rates = np.array([0.05, 0.2, 0.2, 0.2])
    compare(tmp_path, BY_NAME[name], Local(lr=rates, steps=full_batches(2)), lr=0.05, tail_lr=0.2, local_epochs=2)


@pytest.mark.parametrize("name", ["fedavg-uniform", "fedbc-fixed", "scaffold-auto"])
def test_scheduler_inside_the_client(tmp_path, name):
    """Section 2, SCAFFOLD: with a scheduler eta is the mean of the actual step sizes; it starts anew each round."""
    compare(tmp_path, BY_NAME[name], Local(lr=0.2, decay=0.7, steps=full_batches(4)), lr=0.2, decay=0.7, local_epochs=4)


def test_momentum_starts_anew_each_round(tmp_path):
    """Notation: no optimizer state survives a round."""
    for name in ("fedprox-uniform", "fedbc-learned", "fednova-samples"):
        compare(
            tmp_path / name,
            BY_NAME[name],
            Local(lr=0.05, momentum=0.5, steps=full_batches(3)),
            lr=0.05,
            momentum=0.5,
            local_epochs=3,
        )


def test_scaffold_auto_takes_the_gradient_mean_with_momentum(tmp_path):
    """Section 2: 'with any other optimizer c_i = mean over the K_i steps of the raw g_i'."""
    setting = Setting(
        "scaffold-auto-momentum",
        SCAFFOLD,
        lambda *args: reference.scaffold(*args, control="gradient_mean"),
        vectors=("control",),
        server=("control",),
    )
    local = Local(lr=0.05, momentum=0.5, steps=full_batches(3))
    compare(tmp_path, setting, local, lr=0.05, momentum=0.5, local_epochs=3)


@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"gradient_clip_val": 0.5}])
def test_scaffold_refuses_the_step_size_control_where_it_is_not_exact(tmp_path, options):
    """Section 2: (z - w)/(K eta) is the mean gradient under plain SGD only; elsewhere it is refused by name."""
    with pytest.raises(ConfigurationError, match=r"control.*step_size.*gradient_mean"):
        fit(tmp_path, SCAFFOLD(control="step_size"), QuadraticData(sample_quadratics()), Recorder(), **options)


def test_scaffold_gradient_mean_counts_steps_not_closure_calls(tmp_path):
    """Section 2: c_i is the mean of raw gradients; an optimizer that calls its closure often must not inflate it."""
    recorder = Recorder(vectors=("control", "local_model"))
    data, start = QuadraticData(sample_quadratics()), start_point()
    options = {"max_rounds": 1, "lbfgs": True, "keep_local_models": True}
    fit(tmp_path, SCAFFOLD(control="gradient_mean"), data, recorder, **options)
    controls = recorder.arrays()["control"][0]
    for client in range(5):
        # Along a descent path of a quadratic no mean of gradients is longer than the condition number times the first.
        first = np.linalg.norm(reference.gradient(data.clients, client, start))
        assert 0 < np.linalg.norm(controls[client]) < 1.5 * first


@pytest.mark.parametrize("name", ["fedavg-samples", "fedprox-uniform", "scaffold-auto"])
def test_last_iterates_are_kept_as_local_models_where_asked(tmp_path, name):
    """DESIGN 9: methods without a personal model keep x_i = last w_i; all x_i start at z of round 0 (Notation)."""
    setting = BY_NAME[name]
    with_local = Setting(setting.name, setting.build, setting.reference, vectors=("local_model",))
    compare(tmp_path, with_local, Local(steps=full_batches(2)), local_epochs=2, keep_local_models=True, max_rounds=6)


def trajectories(tmp_path: Any, algorithm: Any, **options: Any) -> dict[str, np.ndarray]:
    """z (and flat state) of one run with the common settings of the degenerate equalities."""
    recorder = Recorder(vectors=("local_model",))
    settings = {"max_rounds": 20, "clients_per_round": 3, "local_epochs": 3, "keep_local_models": True} | options
    fit(tmp_path, algorithm, QuadraticData(sample_quadratics(), batch_size=2), recorder, **settings)
    return recorder.arrays()


@pytest.mark.parametrize(
    ("degenerate", "plain"),
    [
        pytest.param(lambda: FedBC(dual_lr=0.0), lambda: FedAvg("uniform"), id="dual frozen at 0 is FedAvg uniform"),
        pytest.param(
            lambda: FedBC(dual_lr=0.1, dual_max=0.0),
            lambda: FedAvg("uniform"),
            id="dual clipped to 0 is FedAvg uniform",
        ),
        pytest.param(
            lambda: FedBC(dual_lr=0.0, dual_init=0.15),
            lambda: FedProx(0.3, "uniform"),
            id="dual frozen at mu over 2 is FedProx uniform",
        ),
        pytest.param(
            lambda: FedBC(dual_lr=0.2, dual_init=0.15, dual_min=0.15, dual_max=0.15),
            lambda: FedProx(0.3, "uniform"),
            id="dual clipped to mu over 2 is FedProx uniform",
        ),
        pytest.param(
            lambda: FedBC(dual_lr=0.1, tolerance=1e12),
            lambda: FedAvg("uniform"),
            id="huge tolerance leaves local training untouched",
        ),
        pytest.param(lambda: FedProx(0.0), lambda: FedAvg(), id="FedProx of mu 0 is FedAvg"),
    ],
)
def test_degenerate_equalities(tmp_path, degenerate, plain):
    """Section 1, degenerate cases, on mini-batches with partial participation: z and every x_i, to 1e-12."""
    left, right = (trajectories(tmp_path / str(k), build()) for k, build in enumerate((degenerate, plain)))
    for name in right:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=1e-12, err_msg=name)


def test_scaffold_first_round_is_uniform_fedavg(tmp_path):
    """Section 2: with c_i = c = 0 the first round has no correction and the uniform mean."""
    left = trajectories(tmp_path / "scaffold", SCAFFOLD(), max_rounds=1)
    right = trajectories(tmp_path / "fedavg", FedAvg("uniform"), max_rounds=1)
    np.testing.assert_allclose(left["z"], right["z"], rtol=0, atol=1e-14)


@pytest.mark.parametrize("control", ["step_size", "gradient_mean"])
@pytest.mark.parametrize(("sampled", "rounds"), [(5, 25), (2, 80)])
def test_scaffold_ends_at_the_minimiser_of_the_mean_loss(tmp_path, control, sampled, rounds):
    """Section 4.2: SCAFFOLD -> argmin of the mean loss, with full and partial participation (FedAvg does not)."""
    data = QuadraticData(sample_quadratics())
    options = {"max_rounds": rounds, "clients_per_round": sampled, "local_epochs": 3, "lr": 0.2}
    _, module = fit(tmp_path / "scaffold", SCAFFOLD(control=control), data, Recorder(), **options)
    goal = reference.minimiser(data.clients)
    np.testing.assert_allclose(module.vector(), goal, rtol=0, atol=1e-6)
    _, drifted = fit(tmp_path / "fedavg", FedAvg("uniform"), data, Recorder(), **options | {"max_rounds": 30})
    assert np.abs(drifted.vector() - goal).max() > 1e-3


def test_fedbc_ends_at_a_kkt_point(tmp_path):
    """Section 4.2: fixed tolerance, all clients, init_from local: the KKT conditions of each client and of z."""
    data, tolerance = QuadraticData(sample_quadratics(spread=0.5)), np.array([0.3, 0.5, 5.0, 1.0, 0.3])
    recorder = Recorder(("dual",), ("local_model",))
    algorithm = FedBC(dual_lr=0.5, tolerance=tolerance.tolist(), init_from="local")
    fit(tmp_path, algorithm, data, recorder, max_rounds=120, local_epochs=2)
    dual, x, z = (recorder.arrays()[name][-1] for name in ("dual", "local_model", "z"))
    gradients = np.stack([reference.gradient(data.clients, client, x[client]) for client in range(5)])
    distance = ((x - z) ** 2).sum(1)
    pull = dual[:, None] * (x - z)
    assert (dual > 0.1).sum() == 3
    assert (dual == 0.0).sum() == 2
    np.testing.assert_allclose(gradients + 2.0 * pull, 0.0, atol=1e-7)
    np.testing.assert_allclose(pull.sum(0), 0.0, atol=1e-7)
    assert (distance <= tolerance + 1e-7).all()
    np.testing.assert_allclose(dual * (distance - tolerance), 0.0, atol=1e-7)
