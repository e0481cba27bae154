"""Partial sharing: some parameters stay with their client, and the method sees the others alone."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import boring
from helpers.marks import each_engine, of_each
from helpers.quadratics import QuadraticData, QuadraticModule, Recorder, RecordingSampler, sample_quadratics
from helpers.reference import Local
from helpers.reference_partial import partial_sharing
from helpers.refusals import refused
from torch import nn

from algorithms.registry import BY_NAME, METHODS
from algorithms.running import QUIET, shuffled_steps, start_point
from algorithms.test_resume_equality import assert_resumes
from algorithms.test_vectorized import assert_close
from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import FedAvg, FedBABU, FedBC, FedRep
from fedbc_lightning.federation.checkpoint_content import module_state_of, state_of

HEAD = np.array([True, False, False, False])
REFUSED = ("apfl", "centralized", "ditto", "fedlils", "l2", "perfed", "pfedme")
"""Beginnings of the names of settings whose methods cannot leave a part of the model with each client."""
FORMS = [BY_NAME[name] for name in ("fedbc-learned", "scaffold-auto", "fedadam-default", "fedrep-samples", "fedbabu",
                                    "fedadmm-default", "fednova-samples", "fedbuff")]  # fmt: skip
"""One setting for each form of state beside the kept parameters."""


def fit(root: Path, algorithm: Any, engine: str = "sequential", **options: Any) -> tuple[Any, Recorder, Any]:
    """Eight rounds of quadratics with mini-batches; options of the module's go to the module."""
    own = {key: options.pop(key) for key in ("tail_lr", "momentum") if key in options}
    recorder, sampler = Recorder(vectors=()), RecordingSampler()
    settings: dict[str, Any] = QUIET | {"max_rounds": 8, "clients_per_round": 3, "local_epochs": 2, "seed": 7}
    settings |= {"sampler": sampler, "engine": engine, "default_root_dir": root, "callbacks": [recorder]} | options
    trainer = FederatedTrainer(**settings)
    trainer.fit(QuadraticModule(lr=0.1, **own), QuadraticData(batch_size=2), algorithm)
    return trainer, recorder, sampler


@pytest.mark.parametrize(
    ("method", "pattern", "form", "engine"),
    [("fedavg", "head", "one group", "sequential"), ("fedbc", "tail", "one group", "vectorized"),
     ("fedavg", "tail", "two groups", "vectorized"), ("fedbc", "head", "two groups", "sequential"),
     ("fedavg", "head", "momentum", "vectorized"), ("fedbc", "tail", "momentum", "sequential")],
)  # fmt: skip
def test_closed_form(tmp_path, method, pattern, form, engine):
    """z, the kept parameters and λ equal a NumPy loop that holds clients' parts apart; each two of these together."""
    form_of_module = {"one group": {}, "two groups": {"tail_lr": 0.05}, "momentum": {"momentum": 0.5}}[form]
    lr: Any = np.array([0.1, 0.05, 0.05, 0.05]) if form == "two groups" else 0.1
    is_kept = HEAD if pattern == "head" else ~HEAD
    options = {"dual_lr": 0.05, "dual_init": 0.2, "tolerance": 0.5}
    algorithm = FedAvg() if method == "fedavg" else FedBC(**options)
    trainer, recorder, sampler = fit(tmp_path, algorithm, engine, local_parameters=[pattern], **form_of_module)
    steps = shuffled_steps(QuadraticData(), 2, seed=7, epochs=2)
    local = Local(lr=lr, momentum=form_of_module.get("momentum", 0.0), steps=steps)
    own = {} if method == "fedavg" else {"weighting": "dual", **options}
    rounds = [clients for _, clients in sorted(sampler.rounds.items())]
    expected = partial_sharing(sample_quadratics(), rounds, start_point(), local, is_kept, **own)
    np.testing.assert_allclose(np.stack(recorder.trajectory["z"]), expected["z"], rtol=0, atol=1e-9)
    for client in range(5):
        kept = trainer.clients.vector("local_parameters", client).numpy()
        np.testing.assert_allclose(kept, expected["kept"][-1][client][is_kept], rtol=0, atol=1e-9)
    if method == "fedbc":
        np.testing.assert_allclose(trainer.clients.scalar("dual").numpy(), expected["dual"][-1], rtol=0, atol=1e-9)


def test_only_the_shared_part_is_counted_as_sent(tmp_path):
    trainer, _, _ = fit(tmp_path, FedAvg(), local_parameters=["tail"])
    first = boring.read_csv(Path(trainer.log_dir) / "metrics.csv")[1]
    assert float(first["comm/bytes_up"]) == 3 * (8 + 4)
    assert float(first["comm/bytes_down"]) == 3 * 8


@of_each(FORMS)
def test_resumed_run_equals_unbroken_run(tmp_path, setting):
    options = {**setting.options, "local_parameters": ["tail"], "client_dtype": None}
    whole, _ = assert_resumes(tmp_path, setting.build, 2, 5, **options)
    kinds = {tuple(whole.clients.vector("local_parameters", client).tolist()) for client in range(5)}
    assert len(kinds) > 1 or setting.name == "fedbabu"


@of_each(FORMS)
def test_engines_agree(tmp_path, setting):
    found = []
    for engine in ("sequential", "vectorized"):
        options = {**setting.options, "local_parameters": ["tail"], "name": engine}
        trainer, _, _ = fit(tmp_path, setting.build(), engine, **options)
        found.append(state_of(trainer.federation) | module_state_of(trainer.federation))
        found[-1].pop("fingerprint")
    assert_close(*found)


@of_each([s for s in METHODS if s.name.startswith(REFUSED)])
def test_other_methods_are_refused_by_name(tmp_path, setting):
    options = {**setting.options, "local_parameters": ["tail"], "local_steps": 2, "local_epochs": None}
    with refused(r"trainer\.local_parameters: .* cannot leave a part of the model"):
        fit(tmp_path, setting.build(), **options)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["hed"], r"'hed' fits no trainable parameter; did you mean 'head'\?"),
        (["classifier.*"], r"'classifier\.\*' fits no trainable parameter; .*The parameters: head, tail\."),
        (["head", "t*"], r"head, t\* fits all 2 parameters, so nothing would be shared"),
        (["batch_norm"], "'batch_norm' fits no trainable parameter"),
        ("head", r"got 'head'; give a list"),
    ],
)
def test_wrong_patterns_are_one_line(tmp_path, patterns, message):
    with refused(message):
        fit(tmp_path, FedAvg(), local_parameters=patterns)


def test_a_parameter_outside_of_the_optimizer_is_refused(tmp_path):
    class Part(QuadraticModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.head], 0.1)

    trainer = FederatedTrainer(**QUIET, default_root_dir=tmp_path, max_rounds=1, local_parameters=["head"])
    with refused("'tail' stands in no group of the optimizer"):
        trainer.fit(Part(), QuadraticData(), FedAvg())


class Plain(boring.BoringModel):
    """Two layers without BatchNorm, so that both engines train it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


@each_engine
@pytest.mark.parametrize("algorithm", [FedAvg(), FedBC(dual_lr=0.01)], ids=str)
def test_clients_are_evaluated_with_their_own_part(tmp_path, algorithm, engine):
    """accuracy/local is that of the method's own model or z, with the client's part; there is no accuracy/global."""
    trainer = boring.make_trainer(tmp_path, engine=engine, local_parameters=["net.2.*"], clients_per_round=2)
    model, data = boring.make_model(Plain), boring.BoringData()
    trainer.fit(model, data, algorithm)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert "accuracy/global" not in metrics
    by_hand = []
    for client in range(6):
        own = trainer.federation.models().local(client)
        shared = trainer.clients.vector("local_model", client) if algorithm.has_local_model else trainer.server.z
        assert torch.equal(own.model, shared)
        state = trainer.layout.named_slices(torch.cat([own.model, own.kept]))
        model.load_state_dict(state)
        inputs, targets = data.client_test_dataset(client).tensors
        by_hand.append(float((model(inputs).argmax(1) == targets).float().mean()))
    assert metrics["accuracy/local"] == pytest.approx(np.mean(by_hand), abs=1e-6)
    assert metrics["accuracy/std"] == pytest.approx(np.std(by_hand), abs=1e-6)
    trained = {int(row["client"]) for row in boring.read_csv(Path(trainer.log_dir) / "clients.csv")}
    initial = torch.cat([tensor.reshape(-1) for tensor in boring.make_model(Plain).net[2].parameters()]).detach()
    for client in range(6):
        kept = trainer.clients.vector("local_parameters", client)
        assert torch.equal(kept, initial) == (client not in trained)


def test_a_clients_model_is_exported_whole(tmp_path):
    trainer = boring.make_trainer(tmp_path, local_parameters=["net.2.*"])
    trainer.fit(boring.make_model(Plain), boring.BoringData(), FedAvg())
    client = int(boring.read_csv(Path(trainer.log_dir) / "clients.csv")[-1]["client"])
    own = trainer.federation.models().local(client)
    other = boring.make_trainer(tmp_path, local_parameters=["net.2.*"])
    path = other.export(boring.make_model(Plain), boring.BoringData(), FedAvg(), client=client)
    exported = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(exported["net.0.weight"].flatten(), own.model[:80])
    assert torch.equal(torch.cat([exported["net.2.weight"].flatten(), exported["net.2.bias"]]), own.kept)


def test_rows_in_a_file_are_the_rows_in_memory(tmp_path, monkeypatch):
    found = []
    for name, below in (("memory", 2**26), ("file", 0)):
        monkeypatch.setattr("fedbc_lightning.state.client_rows.IN_MEMORY_BELOW", below)
        trainer = boring.make_trainer(tmp_path, name=name, local_parameters=["net.2.*"])
        trainer.fit(boring.make_model(Plain), boring.BoringData(), FedBC(dual_lr=0.01))
        assert (trainer.clients.file_rows is None) == (name == "memory")
        kept = [trainer.clients.vector("local_parameters", client) for client in range(6)]
        found.append((kept, boring.without_times(boring.read_csv(Path(trainer.log_dir) / "metrics.csv"))))
    boring.assert_equal_trees(*found)


def test_batch_norm_stays_with_the_client(tmp_path):
    """FedBN: weights and statistics of BatchNorm are each client's own, everything else is shared."""
    trainer = boring.make_trainer(tmp_path, local_parameters=["batch_norm"], buffers="local", clients_per_round=6)
    trainer.fit(boring.make_model(), boring.BoringData(), FedAvg())
    assert [entry.name for entry in trainer.layout.kept_entries] == ["net.1.weight", "net.1.bias"]
    assert trainer.layout.num_kept == 16
    own = [trainer.federation.models().local(client) for client in (0, 1)]
    assert torch.equal(own[0].model[:115], own[1].model[:115])
    assert not torch.equal(own[0].model[115:], own[1].model[115:])
    assert not torch.equal(own[0].kept, own[1].kept)
    first = boring.read_csv(Path(trainer.log_dir) / "metrics.csv")[1]
    assert float(first["comm/bytes_up"]) == 6 * (115 * 4 + 4)


def test_batch_norm_without_its_statistics_is_refused(tmp_path):
    trainer = boring.make_trainer(tmp_path, local_parameters=["batch_norm"])
    with refused(re.escape("set trainer.buffers: local (it is average)")):
        trainer.fit(boring.make_model(), boring.BoringData(), FedAvg())


def test_another_choice_is_refused_on_resume(tmp_path):
    trainer = boring.make_trainer(tmp_path, max_rounds=1, local_parameters=["net.2.*"])
    last = trainer.fit(boring.make_model(Plain), boring.BoringData(), FedAvg()).checkpoint
    for other in (None, ["net.2.bias"]):
        with refused(r"local_parameters is net\.2\.weight, net\.2\.bias there"):
            boring.make_trainer(tmp_path, local_parameters=other).fit(
                boring.make_model(Plain), boring.BoringData(), FedAvg(), last
            )


@pytest.mark.parametrize("algorithm", [FedRep(2), FedBABU()], ids=str)
@pytest.mark.parametrize("form", ["decay", "adam", "per tensor"])
@each_engine
def test_the_other_part_stays_whatever_the_optimizer_does(tmp_path, algorithm, form, engine):
    """Weight decay moves parameters without a gradient; a frozen head stays where it was, bit for bit."""

    class Decaying(Plain):
        def configure_optimizers(self) -> Any:
            if form == "decay":
                return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5, weight_decay=0.1)
            return torch.optim.AdamW(self.parameters(), 0.01)

    class Stepping(Decaying):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad()

    if form == "per tensor" and engine == "vectorized":
        pytest.skip("the vectorized engine refuses such an optimizer")
    options = {"local_parameters": ["net.2.*"], "engine": engine, "gradient_clip_val": 1.0}
    trainer = boring.make_trainer(tmp_path, max_rounds=1, clients_per_round=4, **options)
    model = boring.make_model(Stepping if form == "per tensor" else Decaying)
    head = torch.cat([tensor.detach().reshape(-1) for tensor in model.net[2].parameters()])
    body = torch.cat([tensor.detach().reshape(-1) for tensor in model.net[0].parameters()])
    trainer.fit(model, boring.BoringData(), algorithm)
    moved = [not torch.equal(trainer.clients.vector("local_parameters", client), head) for client in range(6)]
    assert sum(moved) == (4 if isinstance(algorithm, FedRep) else 0)
    assert not torch.equal(trainer.server.z, body)


def test_fedbabu_is_fine_tuned_for_its_evaluation(tmp_path):
    trainer = boring.make_trainer(tmp_path, local_parameters=["net.2.*"], clients_per_round=6)
    model, data = boring.make_model(Plain), boring.BoringData()
    trainer.fit(model, data, FedBABU(finetune_lr=0.2, finetune_steps=3))
    models = trainer.federation.models()
    own = models.local(2)
    model.load_state_dict(trainer.layout.named_slices(torch.cat([own.model, own.kept])))
    inputs, targets = data.client_train_dataset(2).tensors
    for _ in range(3):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.2 * parameter.grad
    by_hand = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    tuned = trainer.evaluator.local_model(models, 2, 3)
    torch.testing.assert_close(torch.cat([tuned.model, tuned.kept]), by_hand)


@pytest.mark.parametrize("algorithm", [FedRep(), FedBABU()], ids=str)
def test_a_head_must_be_named(tmp_path, algorithm):
    with refused(rf"local_parameters: {algorithm} needs the names of the head"):
        fit(tmp_path, algorithm)


def test_held_out_clients_have_no_part_of_their_own_and_no_column(tmp_path):
    with refused("heldout_finetune_steps: clients that are held out have no part"):
        boring.make_trainer(tmp_path, local_parameters=["net.2.*"], heldout_finetune_steps=2)
    trainer = boring.make_trainer(tmp_path, local_parameters=["net.2.*"])
    trainer.fit(boring.make_model(Plain), boring.BoringData(heldout_clients=1), FedAvg())
    columns = boring.read_csv(Path(trainer.log_dir) / "metrics.csv")[1]
    assert "accuracy/local" in columns
    assert not any("heldout" in name or "global" in name for name in columns)
