"""Faults that were found and mended: one sharp test for each, so that it cannot come back."""

from __future__ import annotations

import csv
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reference, reference_global
from helpers.edge_modules import AlteredModule, DropoutClassifier, NoisyData, OptimizedModule, clients_with_nan
from helpers.quadratics import QuadraticData, QuadraticModule, Recorder, RecordingSampler, sample_quadratics
from helpers.reference import Local as LocalTraining
from helpers.reference import full_batches
from helpers.user_modules import TiedGenerator, UserData
from lightning.pytorch import Callback

from algorithms.registry import BY_NAME, METHODS
from algorithms.running import QUIET, fit, start_point
from fedbc_lightning import ConfigurationError, FederatedTrainer
from fedbc_lightning.algorithms import (
    APFL,
    L2GD,
    L2SGD,
    SCAFFOLD,
    ComposedAlgorithm,
    Ditto,
    FedAvg,
    FedBC,
    FedCoMedPlus,
    FedExP,
    FedGeoMedPlus,
    FedLiLS,
    FedPD,
    FedPlus,
    PerFedAvg,
    PFedMe,
    QFedAvg,
)
from fedbc_lightning.federation.participation import ClientSampler, Stragglers
from fedbc_lightning.local import AbsoluteNorm, Armijo, Layerwise, LinearTerm, Norm, ProximalTerm
from fedbc_lightning.module.client_optimizers import LocalOptimizer
from fedbc_lightning.server import (
    AugmentedMean,
    ControlVariates,
    DualAscent,
    DynamicRegularization,
    FairStep,
    Krum,
    MeanMessage,
    ServerAdaptive,
    ServerMomentum,
    ServerSGD,
    SmoothedAverage,
    WeightedAverage,
)


def train(root: Path, module: Any, algorithm: Any, data: Any = None, **options: Any) -> FederatedTrainer:
    """Fit any module; on the five quadratics unless there is other data."""
    settings = {"default_root_dir": str(root), "max_rounds": 1} | options
    trainer = FederatedTrainer(**QUIET | settings)
    trainer.fit(module, datamodule=data or QuadraticData(sample_quadratics()), algorithm=algorithm)
    return trainer


def rows(trainer: Any, name: str = "clients.csv") -> list[dict[str, str]]:
    with (Path(trainer.log_dir) / name).open() as file:
        return list(csv.DictReader(file))


def statuses(trainer: Any) -> dict[tuple[int, int], str]:
    return {(int(row["round"]), int(row["client"])): row["status"] for row in rows(trainer)}


class Calls(Callback):
    """How often the hooks of clients are called, by round and client."""

    def __init__(self) -> None:
        self.starts: Counter[tuple[int, int]] = Counter()
        self.ends: Counter[tuple[int, int]] = Counter()

    def on_client_start(self, trainer: Any, pl_module: Any, client: int) -> None:
        self.starts[trainer.current_round, client] += 1

    def on_client_end(self, trainer: Any, pl_module: Any, client: int) -> None:
        self.ends[trainer.current_round, client] += 1


# Per-FedAvg


def test_the_hessian_free_part_of_perfedavg_holds_no_dropout_masks(tmp_path):
    """Both gradients on b3 see the same draws; with other ones their difference over 2 epsilon is 500 times noise."""
    found, start = {}, None
    for variant in ("first_order", "hessian_free"):
        torch.manual_seed(0)
        module = DropoutClassifier(has_norm=False)
        start = torch.nn.utils.parameters_to_vector(module.parameters()).detach().double()
        algorithm = PerFedAvg(inner_lr=0.1, outer_lr=0.1, variant=variant)
        train(tmp_path / variant, module, algorithm, UserData((20,), batch_size=5), local_steps=1)
        found[variant] = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    added = (found["hessian_free"] - found["first_order"]).norm()
    assert 0 < added < 0.3 * (found["first_order"] - start).norm()


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_hessian_free_perfedavg_refuses_half_precision_by_name(tmp_path, precision):
    with pytest.raises(ConfigurationError, match="hessian_free"):
        train(tmp_path, DropoutClassifier(), PerFedAvg(variant="hessian_free"), UserData(), precision=precision)
    train(tmp_path, DropoutClassifier(), PerFedAvg(), UserData(), precision=precision)


# FedLi-LS


def test_a_client_without_a_line_search_does_not_set_the_servers_step(tmp_path):
    """Client 0 sits at its optimum: its eta of 1 was never tried; the others cannot pass 0.5."""
    clients, recorder = sample_quadratics(), Recorder(("last_step",))
    clients[0][1][:] = start_point()
    trainer, _ = fit(tmp_path, FedLiLS(max_step=0.5), QuadraticData(clients), recorder, max_rounds=1)
    step = float(trainer.callback_metrics["server/lr"])
    assert step == pytest.approx(recorder.arrays()["last_step"][0, 1:].max())
    assert step <= 0.5


def test_where_nobody_searched_the_servers_step_is_one(tmp_path):
    """Not the last eta of an earlier round: in round 2 all gradients are 0."""
    module = AlteredModule(lambda module, loss, _: loss * float(module.trainer.current_round == 1))
    recorder = Recorder(("last_step",))
    trainer = train(tmp_path, module, FedLiLS(max_step=0.5), max_rounds=2, callbacks=[recorder])
    found = recorder.arrays()
    assert found["last_step"].max() <= 0.5
    assert float(trainer.callback_metrics["server/lr"]) == 1.0
    np.testing.assert_allclose(found["z"][1], found["z"][0], rtol=1e-15)  # a mean of equal models may round


def test_steps_of_line_searches_do_not_collapse_near_an_optimum_in_float32(tmp_path):
    """There the decrease that is asked for is finer than the loss is known, as in a cross entropy near 0."""
    ((matrices, centres),) = sample_quadratics(sizes=(6,))
    centres[:] = centres[0]

    class Coarse(QuadraticModule):
        """A loss in multiples of 1.2e-7."""

        def training_step(self, batch, batch_idx):
            return (super().training_step([part.float() for part in batch], batch_idx) + 1) - 1

    recorder = Recorder(("last_step",))
    options = {"max_rounds": 25, "local_steps": 4, "precision": "32-true", "callbacks": [recorder]}
    train(tmp_path, Coarse().float(), FedLiLS(), QuadraticData([(matrices, centres)]), **options)
    found = recorder.arrays()
    np.testing.assert_allclose(found["z"][-1], centres[0], rtol=0, atol=1e-2)
    assert found["last_step"].min() > 1e-6


# q-FedAvg


def test_qfedavg_refuses_negative_losses_by_name(tmp_path):
    """It takes powers of them; with q = 0 they play no part."""
    with pytest.raises(ConfigurationError, match=r"(?s)algorithm\.q.*client [0-4] .*never negative"):
        train(tmp_path, AlteredModule(lambda module, loss, _: loss - 1e3), QFedAvg(0.5))
    train(tmp_path, AlteredModule(lambda module, loss, _: loss - 1e3), QFedAvg(0.0))


def test_qfedavg_with_two_groups_needs_only_lipschitz(tmp_path):
    rates, recorder, data = np.array([0.05, 0.2, 0.2, 0.2]), Recorder(), QuadraticData(sample_quadratics())
    with pytest.raises(ConfigurationError, match=r"algorithm\.lipschitz"):
        fit(tmp_path, QFedAvg(2.0), data, Recorder(), lr=0.05, tail_lr=0.2, max_rounds=1)
    fit(tmp_path, QFedAvg(2.0, lipschitz=3.0), data, recorder, lr=0.05, tail_lr=0.2, max_rounds=4)
    local = LocalTraining(rates, steps=full_batches(1))
    setting = BY_NAME["qfedavg-two-lipschitz"]
    expected = setting.reference(data.clients, [[0, 1, 2, 3, 4]] * 4, start_point(), local)
    np.testing.assert_allclose(recorder.arrays()["z"], expected["z"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("lipschitz", [None, 4.0])
def test_qfedavg_leaves_ungrouped_parameters_alone(tmp_path, lipschitz):
    """An optimizer of the head only: 1 / eta is that of its group, the tail has no step size."""
    lr, q, clients = 0.1, 1.5, sample_quadratics()
    module = OptimizedModule(lambda module: torch.optim.SGD([module.head], lr=lr))
    train(tmp_path, module, QFedAvg(q, lipschitz), QuadraticData(clients))
    z, constant = start_point(), lipschitz or 1 / lr
    update, total = 0.0, 0.0
    for i in range(5):
        value, move = reference.loss(clients, i, z) + 1e-10, constant * lr * reference.gradient(clients, i, z)[0]
        update += value**q * move
        total += q * value ** (q - 1) * move**2 + constant * value**q
    np.testing.assert_allclose(module.vector(), [z[0] - update / total, *z[1:]], rtol=0, atol=1e-12)


def test_a_client_whose_loss_at_z_is_nan_only_in_evaluation_mode_is_nonfinite(tmp_path):
    """Its training is finite, but q-FedAvg cannot weigh it. Client 1 is the one with 5 samples."""

    class Module(QuadraticModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if self.training or len(batch[1]) != 5 else loss * float("nan")

    module = Module()
    trainer = train(tmp_path, module, QFedAvg(1.0), max_rounds=2)
    expected = BY_NAME["qfedavg-default"].reference(
        sample_quadratics(), [[0, 2, 3, 4]] * 2, start_point(), LocalTraining(steps=full_batches(1))
    )
    assert [key for key, status in statuses(trainer).items() if status == "nonfinite"] == [(1, 1), (2, 1)]
    np.testing.assert_allclose(module.vector(), expected["z"][-1], rtol=0, atol=1e-9)


# Ditto


def test_z_of_ditto_is_fedavgs_bit_for_bit_with_batchnorm_and_dropout(tmp_path):
    """The training of v_i leaves neither random draws nor counters to that of w_i."""
    found = []
    for k, algorithm in enumerate((FedAvg(), Ditto(penalty=0.3, personal_epochs=3))):
        torch.manual_seed(0)
        module = DropoutClassifier()
        train(tmp_path / str(k), module, algorithm, UserData((9, 17, 5)), max_rounds=3, local_epochs=2)
        found.append(module.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize(("epochs", "personal_epochs"), [(4, 1), (4, 2), (2, 6)])
def test_a_straggler_of_ditto_does_its_share_of_the_personal_epochs(tmp_path, epochs, personal_epochs):
    """Of E_p epochs, never more than E_p; the others do all of them."""
    module = AlteredModule(lambda module, loss, _: loss)
    options = {"max_rounds": 4, "local_epochs": epochs, "stragglers": Stragglers(fraction=0.6)}
    data = QuadraticData(sample_quadratics(), batch_size=1)
    trainer = train(tmp_path, module, Ditto(personal_epochs=personal_epochs), data, **options)
    num_late = 0
    for row in rows(trainer):
        done, size = int(row["num_steps"]), int(row["num_samples"])
        personal = module.num_steps[int(row["round"]), int(row["client"])] - done
        share = done / (epochs * size)
        assert personal == max(1, int(share * personal_epochs * size + 1e-9)) <= personal_epochs * size
        num_late += share < 1
    assert num_late == 3 * 4


# APFL


def test_apfl_leaves_out_a_client_of_which_only_v_is_nan(tmp_path):
    """Loss and w are finite: the gradient is NaN at the mixture alone, which is z in round 1 and elsewhere after."""

    def alter(module, loss, _):
        if module.trainer.current_client != 1 or torch.equal(module.point(), module.start):
            return loss
        return loss + (module.head - module.head.detach()).square().sum().sqrt()  # 0, of gradient NaN

    module, recorder = AlteredModule(alter), Recorder(("mixture",), ("local_model",))
    algorithm = APFL(adaptive=True)
    trainer = train(tmp_path, module, algorithm, max_rounds=3, callbacks=[recorder])
    found = recorder.arrays()
    assert [key for key, status in statuses(trainer).items() if status == "nonfinite"] == [(2, 1), (3, 1)]
    assert all(np.isfinite(value).all() for value in found.values())
    for name in ("local_model", "mixture"):
        np.testing.assert_array_equal(found[name][1:, 1], [found[name][0, 1]] * 2)
        assert (found[name][0, [0, 2, 3, 4]] != found[name][1, [0, 2, 3, 4]]).any()


# steps without a loss


@pytest.mark.parametrize("build", [FedAvg, PerFedAvg, PFedMe, APFL, FedLiLS, lambda: L2GD(0.5, 0.3, 0.2),
                                   lambda: L2SGD(0.5, 0.3, 0.2)])  # fmt: skip
def test_a_training_step_that_always_returns_none_is_refused(tmp_path, build):
    """By the same error for steps of the user's optimizer and for a solver's."""
    with pytest.raises(ConfigurationError, match="training_step returned no loss in any step of any client"):
        train(tmp_path, AlteredModule(lambda *_: None), build())


@pytest.mark.parametrize("build", [FedAvg, PerFedAvg, lambda: L2SGD(0.5, 0.1, 0.2)])
def test_a_step_without_a_loss_does_not_count_as_a_loss_of_zero(tmp_path, build):
    """Every other batch has none; the others all have the loss 5."""
    module = AlteredModule(lambda module, loss, k: 0 * loss + 5 if k % 2 else None)
    data = QuadraticData(sample_quadratics(), batch_size=1)
    trainer = train(tmp_path, module, build(), data, local_epochs=2)
    assert set(module.num_steps.values()) - {1}
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(5, abs=1e-12)


# methods that need every client


@pytest.mark.parametrize("build", [lambda: L2GD(0.5, 0.3, 0.2), lambda: FedPD(0.5)])
def test_a_nonfinite_client_stops_a_method_that_needs_all(tmp_path, build):
    """With an error that names it; what was kept is the state of the round before."""

    def alter(module, loss, _):
        return loss * (float("nan") if (module.trainer.current_round, module.trainer.current_client) == (3, 2) else 1)

    module, recorder = AlteredModule(alter), Recorder(vectors=("local_model",))
    trainer = FederatedTrainer(**QUIET | {"callbacks": [recorder], "default_root_dir": str(tmp_path), "max_rounds": 5})
    with pytest.raises(ConfigurationError, match=r"(?s)round 3.*client 2 .*state of the round before"):
        trainer.fit(module, datamodule=QuadraticData(sample_quadratics()), algorithm=build())
    found = recorder.arrays()
    assert trainer.finished_round == len(found["z"]) == 2
    np.testing.assert_array_equal(trainer.server.z.numpy(), found["flat_z"][-1])
    kept = np.stack([trainer.clients.vector("local_model", i).numpy() for i in range(5)])
    np.testing.assert_array_equal(kept, found["local_model"][-1])


@pytest.mark.parametrize("build", [lambda: L2GD(0.5, 0.3, 0.2), lambda: FedPD(0.5)])
def test_a_sampler_that_leaves_clients_out_is_refused_where_all_are_needed(tmp_path, build):
    class Fewer(ClientSampler):
        def __call__(self, num_clients, num_sampled, seed, round):
            return list(range(num_sampled - (round == 2)))

    with pytest.raises(ConfigurationError, match=r"trainer\.sampler: Fewer returned .* round 2; .* takes 5 or more"):
        train(tmp_path, QuadraticModule(), build(), sampler=Fewer(), max_rounds=3)
    train(tmp_path, QuadraticModule(), FedAvg(), sampler=Fewer(), max_rounds=3)


# algorithms from parts


def composed(*parts: Any, **options: Any) -> Callable[[], ComposedAlgorithm]:
    return lambda: ComposedAlgorithm(list(parts), **options)


class NoMean(FedAvg):
    """Its server only steps."""

    def server_callbacks(self, engine):
        return [ServerSGD(0.5)]


MEAN = WeightedAverage


@pytest.mark.parametrize(
    ("build", "said"),
    [
        pytest.param(composed(), "0 parts that form z", id="nothing"),
        pytest.param(composed(ServerSGD()), "0 parts that form z", id="no mean"),
        pytest.param(composed(MEAN(), MEAN()), "2 parts that form z", id="two means"),
        pytest.param(composed(MEAN(), SmoothedAverage(Norm(1.0))), "2 parts that form z", id="two kinds of mean"),
        pytest.param(NoMean, r"NoMean.*no part that forms z", id="a method without a mean"),
        pytest.param(composed(MEAN(), FairStep(1.0, 1.0)), "FairStep.*'loss_at_z'", id="FairStep"),
        pytest.param(composed(MEAN(), MeanMessage("news")), "MeanMessage.*'news'", id="MeanMessage"),
        pytest.param(composed(MEAN(), AugmentedMean(0.1)), "AugmentedMean.*'local_model'", id="no local_model"),
        pytest.param(
            composed(MEAN(), AugmentedMean(0.1), init_from="local"), "AugmentedMean.*'multiplier'", id="no multiplier"
        ),
        pytest.param(composed(AugmentedMean(0.1), MEAN()), "AugmentedMean.*after", id="AugmentedMean first"),
        pytest.param(composed(DynamicRegularization(0.1), MEAN()), "DynamicRegularization.*after", id="FedDyn first"),
        pytest.param(composed(ServerSGD(), MEAN()), "ServerSGD.*after", id="ServerSGD first"),
        pytest.param(composed(ServerAdaptive(), MEAN()), "ServerAdaptive.*after", id="ServerAdaptive first"),
        pytest.param(composed(MEAN("dual"), DualAscent(0.1)), "DualAscent.*before", id="DualAscent last"),
        pytest.param(composed(MEAN(), ServerMomentum(), ServerAdaptive()), "'momentum'", id="two momenta"),
        pytest.param(composed(ControlVariates(False), MEAN()), "plain SGD", id="step sizes of momentum"),
        pytest.param(
            composed(MEAN(), solver=Armijo(), terms=[ProximalTerm(0.1)]), "Armijo.*terms", id="Armijo with terms"
        ),
        pytest.param(composed(MEAN(), terms=[ProximalTerm("dual")]), "ProximalTerm.*'dual'", id="no dual"),
        pytest.param(composed(MEAN("dual")), "WeightedAverage.*'dual'", id="no weights"),
        pytest.param(composed(SmoothedAverage(Norm(1.0), "all")), "SmoothedAverage.*'local_model'", id="no x_i"),
        pytest.param(composed(MEAN(rule=Krum(1))), "Krum needs .* 5 clients", id="too few for Krum"),
    ],
)
def test_parts_that_cannot_work_together_are_refused_before_training(tmp_path, build, said):
    """One ConfigurationError that names the part, no round begun."""
    recorder = Recorder()
    with pytest.raises(ConfigurationError, match=f"(?s)^algorithm.*{said}") as caught:
        fit(tmp_path, build(), QuadraticData(sample_quadratics()), recorder, momentum=0.5, clients_per_round=4)
    assert caught.value.__cause__ is None
    assert not recorder.sampled


def test_composed_control_variates_of_mean_gradients_are_scaffold_bit_for_bit(tmp_path):
    """Under momentum, with the bytes of two vectors each way."""
    terms = [LinearTerm(server={"control": 1.0}, client={"control": -1.0})]
    parts = [ControlVariates(gradient_mean=True), WeightedAverage("uniform"), ServerSGD(0.7)]
    found = []
    for k, algorithm in enumerate((ComposedAlgorithm(parts, terms), SCAFFOLD(0.7, control="gradient_mean"))):
        recorder = Recorder(vectors=("control",), server=("control",))
        options = {"max_rounds": 5, "clients_per_round": 3, "local_epochs": 2, "momentum": 0.5}
        data = QuadraticData(sample_quadratics(), batch_size=2)
        trainer, _ = fit(tmp_path / str(k), algorithm, data, recorder, **options)
        vector = 3 * 4 * 8
        assert float(trainer.callback_metrics["comm/bytes_down"]) == 2 * vector
        assert 0 <= float(trainer.callback_metrics["comm/bytes_up"]) - 2 * vector <= 3 * 4
        found.append(recorder.arrays())
    assert (found[0]["control"] != 0).any()
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name], err_msg=name)


def test_a_composed_smoothed_average_knows_the_layers(tmp_path):
    """Patterns are bound to the parameters by the part itself: Fed+ of sigma 0 that starts at z."""
    found = []
    for k in (0, 1):
        penalty, recorder = Layerwise({"head": AbsoluteNorm(0.3)}, default=Norm(0.4)), Recorder()
        algorithm = FedPlus(0.0, penalty, mixing=1.0) if k else ComposedAlgorithm([SmoothedAverage(penalty)])
        options = {"max_rounds": 4, "clients_per_round": 3, "local_epochs": 2}
        fit(tmp_path / str(k), algorithm, QuadraticData(sample_quadratics()), recorder, **options)
        found.append(recorder.arrays()["z"])
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-12)
    algorithm = ComposedAlgorithm([SmoothedAverage(Layerwise({"body.*": Norm(0.3)}, default=Norm(0.4)))])
    with pytest.raises(ConfigurationError, match=r"body\.\*"):
        train(tmp_path, QuadraticModule(), algorithm)


# hooks


def test_a_training_that_begins_anew_for_a_missing_gradient_starts_its_client_once(tmp_path, monkeypatch):
    """The first step of the first client shows that a parameter has no gradient: another kind of optimizer, again."""
    switches = []
    use_per_tensor = LocalOptimizer.use_per_tensor
    monkeypatch.setattr(LocalOptimizer, "use_per_tensor", lambda self: switches.append(1) or use_per_tensor(self))
    calls = Calls()
    data = UserData((9, 17), batch_size=5)
    train(tmp_path, TiedGenerator(), FedAvg(), data, max_rounds=2, callbacks=[calls])
    assert switches == [1]
    assert calls.starts == calls.ends == dict.fromkeys(itertools.product((1, 2), range(2)), 1)


def test_fine_tuning_for_evaluation_calls_no_hooks_of_training(tmp_path):
    """Backward hooks count the gradients of training alone, whether a round is evaluated or not."""
    counts, sizes = [], (9, 17)
    for k, every in enumerate((1, 0)):
        module = DropoutClassifier()
        data = UserData(sizes, batch_size=5, test_size=6)
        trainer = train(tmp_path / str(k), module, PerFedAvg(), data, max_rounds=2, eval_every_n_rounds=every)
        counts.append(module.backward_calls)
    assert not trainer.evaluation.clients
    assert counts[0] == counts[1] > 0


# resuming, random transfers


def test_random_transfers_are_drawn_afresh_and_resumed_bit_for_bit(tmp_path):
    """L2SGD keeps its components as the loader gives them, not with the noise of their first use."""

    def run(where: str, rounds: int, ckpt_path: str | None = None) -> tuple[Any, Any]:
        module = QuadraticModule()
        options = {"default_root_dir": str(tmp_path / where), "max_rounds": rounds, "enable_checkpointing": True}
        trainer = FederatedTrainer(**QUIET | options)
        data = NoisyData(sample_quadratics(), batch_size=2)
        trainer.fit(module, datamodule=data, algorithm=L2SGD(0.5, 0.3, 0.5), ckpt_path=ckpt_path)
        return trainer, module

    whole, module = run("whole", 6)
    first, _ = run("parts", 3)
    resumed, other = run("parts", 6, str(Path(first.log_dir) / "checkpoints" / "last.ckpt"))
    np.testing.assert_array_equal(module.vector(), other.vector())
    for client in range(5):
        found, expected = (t.clients.vector("local_model", client) for t in (resumed, whole))
        assert torch.equal(found, expected), client


# the user's optimizer under a solver


@pytest.mark.parametrize("build", [PFedMe, PerFedAvg, lambda: L2GD(0.5, 0.3, 0.2)])
def test_an_optimizer_that_maximizes_is_refused_under_a_solver(tmp_path, build):
    module = OptimizedModule(lambda module: torch.optim.SGD(module.parameters(), lr=0.1, maximize=True))
    with pytest.raises(ConfigurationError, match="maximizes"):
        train(tmp_path, module, build())


@pytest.mark.parametrize(
    ("make", "algorithm", "said"),
    [
        (
            lambda module: torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.03),
            PFedMe,
            "the model's AdamW (weight_decay 0.03) it uses learning rate.",
        ),
        (
            lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.03),
            PFedMe,
            "the model's SGD (momentum 0.9) it uses learning rate and weight decay.",
        ),
        (lambda module: torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.03), PFedMe, None),
        (lambda module: torch.optim.AdamW(module.parameters(), lr=0.1), PerFedAvg, "it uses nothing."),
    ],
)
def test_what_a_solver_drops_of_the_users_optimizer_is_said(tmp_path, caplog, make, algorithm, said):
    with caplog.at_level(logging.INFO):
        train(tmp_path, OptimizedModule(make), algorithm())
    found = [record.getMessage() for record in caplog.records if "takes plain SGD steps" in record.getMessage()]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_weight_decay_of_sgd_is_an_l2_term_of_the_loss(tmp_path):
    """Of every gradient that pFedMe takes."""
    found = []
    for k, (decay, l2) in enumerate(((0.4, 0.0), (0.0, 0.4), (0.0, 0.0))):

        def make(module, decay=decay):
            return torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=decay)

        recorder = Recorder(vectors=("local_model",))
        options = {"max_rounds": 3, "local_epochs": 2, "callbacks": [recorder]}
        data = QuadraticData(sample_quadratics(), batch_size=2)
        train(tmp_path / str(k), OptimizedModule(make, l2), PFedMe(2.0, 0.1, 3), data, **options)
        found.append(recorder.arrays())
    for name in ("z", "local_model"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=0, atol=1e-12)
        assert np.abs(found[0][name] - found[2][name]).max() > 1e-3


# Fed+


@pytest.mark.parametrize("delta", [0.01, 0.2, 1.0, 30.0])
@pytest.mark.parametrize("build", [FedCoMedPlus, FedGeoMedPlus])
def test_z_of_fedplus_is_a_minimiser_for_an_even_number_of_clients(tmp_path, caplog, build, delta):
    """The derivative of the sum of Huber functions of w_i - z is 0, also where minimisers are an interval."""
    recorder, sampler = Recorder(vectors=("local_model",)), RecordingSampler()
    options = {"max_rounds": 3, "clients_per_round": 4, "local_epochs": 2, "sampler": sampler}
    fit(tmp_path, build(0.5, delta=delta), QuadraticData(sample_quadratics()), recorder, **options)
    found = recorder.arrays()
    for number in (1, 2, 3):
        away = found["local_model"][number - 1][sampler.rounds[number]] - found["z"][number - 1]
        if build is FedCoMedPlus:
            pull = away.clip(-delta, delta)
        else:
            pull = away * np.minimum(1, delta / np.linalg.norm(away, axis=1, keepdims=True))
        np.testing.assert_allclose(pull.sum(0), 0, rtol=0, atol=1e-6)
    assert "still moves" not in caplog.text


# methods of the user's own


def test_what_was_staged_after_a_first_training_is_not_the_seconds(tmp_path):
    """``cohort.model`` of a training that is not the last is no view of the workbench."""

    class Twice(FedAvg):
        def declare_state(self, state):
            state.client_model("first")

        def client_update(self, engine, cohort, server):
            engine.solve(cohort, start=server.model, epochs=1, purpose="first", is_last=False)
            cohort.stage("first", cohort.model)
            engine.solve(cohort, start=server.model, epochs=3)

    recorder, clients = Recorder(vectors=("first",)), sample_quadratics()
    fit(tmp_path, Twice("uniform"), QuadraticData(clients), recorder, max_rounds=1)
    found, z, ends = recorder.arrays(), start_point(), []
    for i in range(5):
        w = [z]
        for _ in range(3):
            w.append(w[-1] - 0.1 * reference.gradient(clients, i, w[-1]))
        np.testing.assert_allclose(found["first"][0, i], w[1], rtol=0, atol=1e-12)
        ends.append(w[3])
    np.testing.assert_allclose(found["z"][0], np.mean(ends, axis=0), rtol=0, atol=1e-12)


class Declares(FedAvg):
    """FedAvg that declares what it is told to."""

    def __init__(self, declare):
        super().__init__()
        self.declare_state = declare


@pytest.mark.parametrize("name", ["weight", "status"])
@pytest.mark.parametrize("kind", ["client_scalar", "client_vector"])
def test_client_state_with_the_name_of_a_column_is_refused(tmp_path, kind, name):
    """It would stand in the place of the other in clients.csv."""
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        train(tmp_path, QuadraticModule(), Declares(lambda state: getattr(state, kind)(name)))


@pytest.mark.parametrize("kind", ["client_scalar", "client_vector", "client_model", "server_vector", "server_scalar"])
def test_two_parts_that_keep_the_same_name_are_refused(tmp_path, kind):
    def declare(state):
        getattr(state, kind)("mine")
        getattr(state, kind)("mine")

    with pytest.raises(ConfigurationError, match=r"'mine' .* stands for something already"):
        train(tmp_path, QuadraticModule(), Declares(declare))


def test_a_scalar_and_a_vector_of_one_name_are_refused(tmp_path):
    def declare(state):
        state.client_scalar("mine")
        state.client_vector("mine")

    with pytest.raises(ConfigurationError, match=r"'mine' .* stands for something already"):
        train(tmp_path, QuadraticModule(), Declares(declare))


def test_after_an_error_the_module_holds_the_last_finished_round(tmp_path):
    class Failing(Callback):
        def on_client_end(self, trainer, pl_module, client):
            if trainer.current_round == 3:
                raise RuntimeError("power cut")

    module, recorder = QuadraticModule(), Recorder()
    with pytest.raises(RuntimeError, match="power cut"):
        train(tmp_path, module, FedAvg(), callbacks=[recorder, Failing()], max_rounds=4)
    np.testing.assert_array_equal(module.vector(), recorder.arrays()["z"][-1])


# buffers


def test_with_local_buffers_a_client_is_evaluated_with_its_own_statistics(tmp_path):
    """Per-FedAvg's local model is made of z; the running statistics are the client's own."""

    class Ends(Callback):
        def __init__(self):
            self.found = {}

        def on_client_end(self, trainer, pl_module, client):
            norm = pl_module.net[1]
            self.found[client] = [norm.running_mean.double().sum().item(), norm.running_var.double().sum().item()]

    ends, options = Ends(), {"max_rounds": 2, "buffers": "local", "local_epochs": 2}
    data = UserData((9, 17, 5), test_size=6)
    algorithm = PerFedAvg(inner_lr=0.1, outer_lr=0.1)
    trainer = train(tmp_path, DropoutClassifier(), algorithm, data, callbacks=[ends], **options)
    for k in (0, 1):
        found = [*trainer.evaluation.clients[f"statistics{k}/local"].values()]
        assert len(set(found)) == 3
        np.testing.assert_allclose(found, [ends.found[i][k] for i in range(3)], rtol=1e-6)


# numbers of clients


@pytest.mark.parametrize("build", [FedAvg, SCAFFOLD, Ditto])
def test_too_few_clients_for_krum_are_refused(tmp_path, build):
    algorithm = build(robust_rule=Krum(1))
    with pytest.raises(ConfigurationError, match=r"Krum needs .*clients_per_round"):
        train(tmp_path, QuadraticModule(), algorithm, clients_per_round=4)


def test_rounds_without_anybody_are_counted_and_said_once(tmp_path, caplog):
    options = {"max_rounds": 3, "stragglers": Stragglers(fraction=0.6, dropout=0.4)}
    trainer = train(tmp_path, QuadraticModule(), FedAvg(), **options)
    assert float(trainer.callback_metrics["num_clients/straggler"]) == 3
    assert float(trainer.callback_metrics["num_clients/absent"]) == 2
    said = [record.getMessage() for record in caplog.records if "every sampled client" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("round 1:")
    metrics = rows(trainer, "metrics.csv")
    assert [row["num_clients/absent"] for row in metrics if row["round"] != "0"] == ["2.0"] * 3


# clients that are not finite


def test_dual_numbers_are_those_of_the_clients_that_count(tmp_path):
    """The multiplier of a non-finite client stays, and is in no logged number."""
    recorder = Recorder(("dual",))
    algorithm = FedBC(dual_lr=1e-3, dual_init=5.0, tolerance=0.5)
    data = QuadraticData(clients_with_nan(3))
    trainer, _ = fit(tmp_path, algorithm, data, recorder, max_rounds=2, lr=0.01)
    dual = recorder.arrays()["dual"][-1]
    assert dual[3] == 5.0
    others = np.delete(dual, 3)
    metrics = trainer.callback_metrics
    assert float(metrics["dual/effective_number"]) == pytest.approx(others.sum() ** 2 / (others**2).sum(), rel=1e-6)
    assert float(metrics["dual/effective_number"]) <= 4
    assert float(metrics["dual/min"]) == pytest.approx(others.min(), rel=1e-6)
    assert float(metrics["dual/max"]) == pytest.approx(others.max(), rel=1e-6)


def test_the_epsilon_of_fedexps_public_style_counts_the_clients_that_count(tmp_path):
    """S epsilon with the S of the mean, in rounds in which it decides the step."""
    clients, options = clients_with_nan(3), {"epsilon": 0.01, "style": "public"}
    recorder = Recorder()
    trainer, _ = fit(tmp_path, FedExP(**options), QuadraticData(clients), recorder, max_rounds=8, local_epochs=3)
    local = LocalTraining(steps=full_batches(3))
    expected = reference_global.fedexp(clients, [[0, 1, 2, 4]] * 8, start_point(), local, **options)
    np.testing.assert_allclose(recorder.arrays()["z"], expected["z"], rtol=0, atol=1e-9)
    assert max(float(row["server/lr"] or 0) for row in rows(trainer, "metrics.csv")) > 1.1


def _why_not(setting: Any) -> str | None:
    """Why a setting cannot lose a client as if it had not been sampled."""
    algorithm = setting.build()
    if algorithm.needs_all_clients:
        return "stops with an error: every client takes part"
    if algorithm.trains_pooled:
        return "there are no clients"
    ascent = getattr(algorithm, "dual_ascent", None)
    if ascent is not None and ascent.momentum and ascent.style == "public":
        return "a non-finite client counts as a turn of the public code's loop"
    if isinstance(getattr(algorithm, "robust_rule", None), Krum):
        return "Krum needs five clients in every round, and there are five"
    return None


CASES = [*METHODS, BY_NAME["fedexp-public"], BY_NAME["fedexp-public-epsilon"]]


@pytest.mark.parametrize("setting", CASES, ids=lambda setting: setting.name)
def test_a_nonfinite_client(tmp_path, setting):
    """As if it had not been sampled, in every method: the server, the other clients, and its own state."""
    reason = _why_not(setting)
    if reason is not None:
        pytest.skip(reason)
    clients = clients_with_nan(3)
    recorder, sampler = Recorder(setting.scalars, setting.vectors, setting.server), RecordingSampler()
    options = {"max_rounds": 6, "clients_per_round": 3, "local_epochs": 2} | dict(setting.options)
    trainer, _ = fit(tmp_path, setting.build(), QuadraticData(clients), recorder, **options | {"sampler": sampler})
    rounds = [[client for client in sampler.rounds[number] if client != 3] for number in sorted(sampler.rounds)]
    assert sum(map(len, rounds)) < sum(map(len, sampler.rounds.values()))
    expected = setting.reference(clients, rounds, start_point(), LocalTraining(steps=full_batches(2)))
    for key, found in recorder.arrays().items():
        if key != "flat_z":
            np.testing.assert_allclose(found, expected[key], rtol=0, atol=setting.tolerance, err_msg=key)
    for (_, client), status in statuses(trainer).items():
        assert (status == "nonfinite") == (client == 3)
