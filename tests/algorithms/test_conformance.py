"""Every algorithm equals an independent NumPy loop on quadratics (ALGORITHMS section 4, items 1 to 3)."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.marks import of_each
from helpers.quadratics import QuadraticData, Recorder, RecordingSampler, sample_quadratics
from helpers.reference import Local, full_batches

from algorithms.registry import BY_NAME, METHODS, SETTINGS, Setting
from algorithms.running import fit, shuffled_steps, start_point
from fedbc_lightning import algorithms
from fedbc_lightning.algorithms import SCAFFOLD, FedAvg, FedBC, FedProx
from fedbc_lightning.core.errors import ConfigurationError


def compare(tmp_path: Any, setting: Setting, local: Local, data: QuadraticData | None = None, **options: Any) -> Any:
    """Fit and replay the sampled clients in NumPy; every named state must agree after every round; the trainer."""
    data = data or QuadraticData()
    recorder = Recorder(setting.scalars, setting.vectors, setting.server)
    sampler = RecordingSampler()
    options = {"clients_per_round": 3, "seed": 0, "sampler": sampler} | options | dict(setting.options)
    trainer, module = fit(tmp_path, setting.build(), data, recorder, **options)
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
    return trainer


@of_each(SETTINGS)
def test_closed_form_with_partial_participation(tmp_path, setting):
    """Section 4.1: 20 rounds of each method with 3 of 5 clients, 3 epochs of full batches; 8 of its other settings."""
    max_rounds = 20 if setting in METHODS else 8
    compare(tmp_path, setting, Local(lr=0.1, steps=full_batches(3)), local_epochs=3, max_rounds=max_rounds)


@of_each(METHODS)
def test_closed_form_with_local_steps(tmp_path, setting):
    """The same over 8 rounds of mini-batches with ``local_steps``: they run on through the epochs and stop at K."""
    data = QuadraticData(batch_size=2)
    options = {"max_rounds": 8, "clients_per_round": 0.4, "local_steps": 3, "seed": 7}
    compare(tmp_path, setting, Local(lr=0.1, steps=shuffled_steps(data, 2, seed=7, num_steps=3)), data, **options)


SINGLES, PAIRS = (QuadraticData(batch_size=size) for size in (1, 2))
ACCUMULATED = {"local_epochs": 2, "accumulate_grad_batches": 2}
FORMS: dict[str, tuple[str, QuadraticData | None, Local, dict[str, Any]]] = {
    # Unequal numbers of steps: K_i is each client's own count, and the last batch of an epoch is short
    "minibatches": (
        "fedavg-samples fedbc-fixed scaffold-auto scaffold-gradient_mean fednova-samples local perfedavg-inner_lr "
        "perfedavg-hessian_free pfedme-penalty ditto ditto-personal_epochs apfl-adaptive l2sgd_plus l2sgd_plus_plus "
        "fedgeomed_plus-all fedplus-layerwise",
        PAIRS, Local(lr=0.1, steps=shuffled_steps(PAIRS, 2, seed=5, epochs=3)), {"local_epochs": 3, "seed": 5},
    ),
    # The coefficients of a client's gradients grow with momentum, and no optimizer state survives a round
    "minibatches with momentum": (
        "fednova-samples", PAIRS, Local(lr=0.05, momentum=0.5, steps=shuffled_steps(PAIRS, 2, epochs=2)),
        {"local_epochs": 2, "lr": 0.05, "momentum": 0.5},
    ),
    "momentum": (
        "fedprox-uniform fedbc-learned scaffold-gradient_mean local ditto ditto-personal_epochs fedplus-layerwise "
        "fedavg_plus-all",
        None, Local(lr=0.05, momentum=0.5, steps=full_batches(3)), {"local_epochs": 3, "lr": 0.05, "momentum": 0.5},
    ),
    # Terms are added once per optimizer step, after accumulation and before clipping; Fed+ mixes after the step
    "accumulated": (
        "fedbc-fixed-list-local scaffold-step_size-server_lr", SINGLES,
        Local(lr=0.1, divisor=2, steps=shuffled_steps(SINGLES, 1, accumulate=2, epochs=2)), ACCUMULATED,
    ),
    "accumulated and clipped": (
        "fedprox-samples fedbc-learned scaffold-gradient_mean local ditto-penalty fedplus-norm moon", SINGLES,
        Local(lr=0.1, clip=0.8, divisor=2, steps=shuffled_steps(SINGLES, 1, accumulate=2, epochs=2)),
        ACCUMULATED | {"gradient_clip_val": 0.8},
    ),
    # The vector is ordered by group: eta and kappa are by slice, patterns still find their parameters
    "two groups": (
        "fedprox-samples fedbc-fixed-list-local scaffold-auto local ditto pfedme-penalty apfl fedcomed_plus "
        "fedplus-layerwise-all",
        None, Local(lr=np.array([0.05, 0.2, 0.2, 0.2]), steps=full_batches(2)),
        {"lr": 0.05, "tail_lr": 0.2, "local_epochs": 2},
    ),
    # eta is the mean of the actual step sizes (SCAFFOLD), or the current one; the scheduler starts anew each round
    "scheduler": (
        "fedavg-uniform fedbc-fixed scaffold-auto local pfedme-penalty ditto ditto-personal_epochs apfl-adaptive "
        "fedplus-norm",
        None, Local(lr=0.2, decay=0.7, steps=full_batches(4)), {"lr": 0.2, "decay": 0.7, "local_epochs": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form, (names, *_) in FORMS.items() for name in names.split()]
)
def test_closed_form_however_clients_train(tmp_path, form, name):
    _, data, local, options = FORMS[form]
    compare(tmp_path, BY_NAME[name], local, data, max_rounds=6, **options)


@pytest.mark.parametrize(
    ("name", "down", "up", "scalars"),
    [("fedavg-samples", 1, 1, 1), ("fedavg-uniform", 1, 1, 0), ("fedbc-learned", 1, 1, 1), ("scaffold-auto", 2, 2, 0),
     ("qfedavg-default", 1, 1, 1), ("qfedavg-public", 1, 1, 2), ("fedlils-max", 1, 1, 2), ("feddyn-default", 1, 1, 0),
     ("fedadmm-default", 1, 1, 0), ("fednova-samples", 1, 1, 2), ("local", 0, 0, 0), ("l2gd", 1, 1, 0),
     ("l2sgd_plus", 2, 2, 0), ("fedavg_plus", 1, 1, 0), ("centralized", 0, 0, 0)],
)  # fmt: skip
def test_bytes_are_those_of_the_vectors_and_numbers_sent(tmp_path, name, down, up, scalars):
    """Elements times element size for each sampled client (here 4 x 8), scalars 4 bytes."""
    options = {"max_rounds": 2, "clients_per_round": 5} | dict(BY_NAME[name].options)
    trainer, _ = fit(tmp_path, BY_NAME[name].build(), QuadraticData(), Recorder(), **options)
    assert float(trainer.callback_metrics["comm/bytes_down"]) == 5 * 32 * down
    assert float(trainer.callback_metrics["comm/bytes_up"]) == 5 * (32 * up + 4 * scalars)


@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"gradient_clip_val": 0.5}])
def test_scaffold_refuses_the_step_size_control_where_it_is_not_exact(tmp_path, options):
    """Section 2: (z - w)/(K eta) is the mean gradient under plain SGD only; elsewhere it is refused by name."""
    with pytest.raises(ConfigurationError, match=r"control.*step_size.*gradient_mean"):
        fit(tmp_path, SCAFFOLD(control="step_size"), QuadraticData(), Recorder(), **options)


def test_scaffold_gradient_mean_counts_steps_not_closure_calls(tmp_path):
    """Section 2: c_i is the mean of raw gradients; an optimizer that calls its closure often must not inflate it."""
    recorder, data, start = Recorder(vectors=("control",)), QuadraticData(), start_point()
    fit(tmp_path, SCAFFOLD(control="gradient_mean"), data, recorder, max_rounds=1, lbfgs=True)
    for client, control in enumerate(recorder.arrays()["control"][0]):
        # Along a descent path of a quadratic no mean of gradients is longer than the condition number times the first.
        assert 0 < np.linalg.norm(control) < 1.5 * np.linalg.norm(reference.gradient(data.clients, client, start))


def trajectories(tmp_path: Any, algorithm: Any) -> dict[str, np.ndarray]:
    """z (and flat state) of one run with the common settings of the degenerate equalities."""
    recorder = Recorder(vectors=("local_model",))
    data = QuadraticData(batch_size=2)
    fit(tmp_path, algorithm, data, recorder, max_rounds=20, clients_per_round=3, local_epochs=3, keep_local_models=True)
    return recorder.arrays()


@pytest.mark.parametrize(
    ("degenerate", "plain"),
    [
        (partial(FedBC, dual_lr=0.1, dual_max=0.0), partial(FedAvg, "uniform")),
        (partial(FedBC, dual_lr=0.0, dual_init=0.15), partial(FedProx, 0.3, weighting="uniform")),
        (partial(FedBC, dual_lr=0.1, tolerance=1e12), partial(FedAvg, "uniform")),
        (partial(FedProx, 0.0), FedAvg),
    ],
    ids=["dual clipped to 0", "dual frozen at mu over 2", "huge tolerance", "mu of 0"],
)
def test_degenerate_equalities(tmp_path, degenerate, plain):
    """Section 1, degenerate cases, on mini-batches with partial participation: z and every x_i, to 1e-12."""
    left, right = (trajectories(tmp_path / str(k), build()) for k, build in enumerate((degenerate, plain)))
    for name in right:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("control", ["step_size", "gradient_mean"])
def test_scaffold_ends_at_the_minimiser_of_the_mean_loss(tmp_path, control):
    """Section 4.2: SCAFFOLD -> argmin of the mean loss, with partial participation (FedAvg does not)."""
    data = QuadraticData()
    options = {"max_rounds": 80, "clients_per_round": 2, "local_epochs": 3, "lr": 0.2}
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


def test_every_exported_algorithm_is_in_the_registry_under_names_of_its_own():
    exported = {getattr(algorithms, name) for name in algorithms.__all__} - {algorithms.FederatedAlgorithm}
    assert {type(setting.build()) for setting in SETTINGS} >= exported
    assert len(BY_NAME) == len(SETTINGS)
