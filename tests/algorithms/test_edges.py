"""Faults that were found and mended: one sharp test for each, so that it cannot come back."""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.boring import read_csv
from helpers.edge_modules import AlteredModule, DropoutClassifier, NoisyData, OptimizedModule, clients_with_nan
from helpers.marks import of_each
from helpers.quadratics import QuadraticData, QuadraticModule, Recorder, RecordingSampler, sample_quadratics
from helpers.reference import Local as LocalTraining
from helpers.reference import full_batches
from helpers.user_modules import UserData
from lightning.pytorch import Callback

from algorithms.registry import BY_NAME, METHODS
from algorithms.running import QUIET, fit, start_point
from fedbc_lightning import ConfigurationError, FederatedTrainer
from fedbc_lightning.algorithms import (
    APFL,
    L2GD,
    L2SGD,
    ComposedAlgorithm,
    Ditto,
    FedAvg,
    FedLiLS,
    FedPD,
    PerFedAvg,
    PFedMe,
    QFedAvg,
)
from fedbc_lightning.federation.participation import ClientSampler, Stragglers
from fedbc_lightning.local import Armijo, Norm, ProximalTerm
from fedbc_lightning.server import (
    AugmentedMean,
    ControlVariates,
    DualAscent,
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
    trainer.fit(module, datamodule=data or QuadraticData(), algorithm=algorithm)
    return trainer


def rows(trainer: Any, name: str = "clients.csv") -> list[dict[str, str]]:
    return read_csv(Path(trainer.log_dir) / name)


def statuses(trainer: Any) -> dict[tuple[int, int], str]:
    return {(int(row["round"]), int(row["client"])): row["status"] for row in rows(trainer)}


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


# q-FedAvg


@pytest.mark.parametrize("method", [FedLiLS, QFedAvg])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_client_whose_loss_is_no_number_has_no_part(tmp_path, caplog, method, value):
    """A constant that is not finite leaves its gradients and weights finite."""
    module = AlteredModule(lambda m, loss, _: loss + value if m.trainer.current_client == 3 else loss)
    trainer = train(tmp_path, module, method())
    assert {client for (_, client), status in statuses(trainer).items() if status == "nonfinite"} == {3}
    assert "buffers, state or loss of client 3 became NaN" in caplog.text


def test_qfedavg_refuses_negative_losses_by_name(tmp_path):
    """It takes powers of them; with q = 0 they play no part."""
    with pytest.raises(ConfigurationError, match=r"(?s)algorithm\.q.*client [0-4] .*never negative"):
        train(tmp_path, AlteredModule(lambda module, loss, _: loss - 1e3), QFedAvg(0.5))
    train(tmp_path, AlteredModule(lambda module, loss, _: loss - 1e3), QFedAvg(0.0))


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
    data = QuadraticData(batch_size=1)
    trainer = train(tmp_path, module, Ditto(personal_epochs=personal_epochs), data, **options)
    num_late = 0
    for row in rows(trainer):
        done, size = int(row["num_steps"]), int(row["num_samples"])
        personal = module.num_steps[int(row["round"]), int(row["client"])] - done
        share = done / (epochs * size)
        assert personal == max(1, int(share * personal_epochs * size + 1e-9)) <= personal_epochs * size
        num_late += share < 1
    assert num_late == 3 * 4


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
    data = QuadraticData(batch_size=1)
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
        trainer.fit(module, datamodule=QuadraticData(), algorithm=build())
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
        pytest.param(NoMean, r"NoMean.*no part that forms z", id="a method without a mean"),
        pytest.param(composed(MEAN(), FairStep(1.0, 1.0)), "FairStep.*'loss_at_z'", id="FairStep"),
        pytest.param(composed(MEAN(), MeanMessage("news")), "MeanMessage.*'news'", id="MeanMessage"),
        pytest.param(
            composed(MEAN(), AugmentedMean(0.1), init_from="local"), "AugmentedMean.*'multiplier'", id="no multiplier"
        ),
        pytest.param(composed(AugmentedMean(0.1), MEAN()), "AugmentedMean.*after", id="AugmentedMean first"),
        pytest.param(composed(ServerSGD(), MEAN()), "ServerSGD.*after", id="ServerSGD first"),
        pytest.param(composed(MEAN("dual"), DualAscent(0.1)), "DualAscent.*before", id="DualAscent last"),
        pytest.param(composed(MEAN(), ServerMomentum(), ServerAdaptive()), "'momentum'", id="two momenta"),
        pytest.param(composed(ControlVariates(False), MEAN()), "plain SGD", id="step sizes of momentum"),
        pytest.param(
            composed(MEAN(), solver=Armijo(), terms=[ProximalTerm(0.1)]), "Armijo.*terms", id="Armijo with terms"
        ),
        pytest.param(composed(SmoothedAverage(Norm(1.0), "all")), "SmoothedAverage.*'local_model'", id="no x_i"),
        pytest.param(composed(MEAN(rule=Krum(1))), "Krum needs .* 5 clients", id="too few for Krum"),
    ],
)
def test_parts_that_cannot_work_together_are_refused_before_training(tmp_path, build, said):
    """One ConfigurationError that names the part, no round begun."""
    recorder = Recorder()
    with pytest.raises(ConfigurationError, match=f"(?s)^algorithm.*{said}") as caught:
        fit(tmp_path, build(), QuadraticData(), recorder, momentum=0.5, clients_per_round=4)
    assert caught.value.__cause__ is None
    assert not recorder.sampled


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
    ("make", "said"),
    [
        (partial(torch.optim.SGD, momentum=0.9), "SGD (momentum 0.9) it uses learning rate and weight decay."),
        (torch.optim.SGD, None),
    ],
)
def test_what_a_solver_drops_of_the_users_optimizer_is_said(tmp_path, caplog, make, said):
    with caplog.at_level(logging.INFO):
        train(tmp_path, OptimizedModule(lambda module: make(module.parameters(), lr=0.1, weight_decay=0.03)), PFedMe())
    found = [record.getMessage() for record in caplog.records if "takes plain SGD steps" in record.getMessage()]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


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


def test_a_loss_that_is_asked_for_after_training_leaves_the_result(tmp_path):
    """A cohort of one may hold the row of the workbench, into which the model to evaluate is loaded."""

    class AsksAfterwards(FedAvg):
        def client_update(self, engine, cohort, server):
            super().client_update(engine, cohort, server)
            cohort.record("before", engine.train_loss(cohort, server.model))

    found = []
    for k, algorithm in enumerate((FedAvg(), AsksAfterwards())):
        module = QuadraticModule()
        train(tmp_path / str(k), module, algorithm, max_rounds=2, clients_per_round=1)
        found.append(module.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


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


def test_rounds_without_anybody_are_counted_and_said_once(tmp_path, caplog):
    options = {"max_rounds": 3, "stragglers": Stragglers(fraction=0.6, dropout=0.4)}
    trainer = train(tmp_path, QuadraticModule(), FedAvg(), **options)
    assert float(trainer.callback_metrics["num_clients/straggler"]) == 3
    assert float(trainer.callback_metrics["num_clients/absent"]) == 2
    said = [record.getMessage() for record in caplog.records if ", so z stays as it is" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("round 1: none of the 5 clients")
    metrics = rows(trainer, "metrics.csv")
    assert [row["num_clients/absent"] for row in metrics if row["round"] != "0"] == ["2.0"] * 3


# clients that are not finite


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


@of_each(CASES)
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
