"""The vectorized engine with the modules and data of users: the sequential engine's numbers, or a refusal by name."""

import itertools
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import ArraysDataModule
from fedbc_lightning.models import CIFARCNN
from helpers import steps
from helpers.boring import BoringData, BoringModel, Hidden, read_csv
from helpers.steps import Branching, Centering, Dropping, Listed, LogsTheMost, Measuring, Recurrent, Smooth
from lightning.pytorch import Callback
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import TensorDataset, default_collate

from fedbc_lightning import SCAFFOLD, ConfigurationError, FedAvg, FedBC
from fedbc_lightning.algorithms import APFL, ComposedAlgorithm, Ditto, PerFedAvg, PerFedBC, PFedMe
from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.errors import NotVectorizableError
from fedbc_lightning.data import ArrayDataset
from fedbc_lightning.engines.stacked import stacked_bench
from fedbc_lightning.federation.participation import Stragglers
from fedbc_lightning.local import Armijo, ModelAgnostic, ProximalTerm, Solver
from fedbc_lightning.run.processes import _error_of
from fedbc_lightning.server import DualAscent, WeightedAverage


class ItemData(BoringData):
    def client_train_dataset(self, client):
        return Hidden(super().client_train_dataset(client))


class MixedData(BoringData):
    """Odd clients' data are transformed, and of another type in memory."""

    def client_train_dataset(self, client):
        inputs, targets = super().client_train_dataset(client).tensors
        if client % 2:
            return ArrayDataset((inputs.float(), targets), transform=lambda batch: batch.double() / 2)
        return ArrayDataset((inputs.double(), targets))


class Unequal(BoringData):
    """Some clients with a last batch that is not full, some without."""

    def client_train_dataset(self, client):
        inputs, targets = super().client_train_dataset(client).tensors
        size = 16 if client % 2 else 21
        return TensorDataset(inputs.repeat(2, 1)[:size], targets.repeat(2)[:size])


class LogsTheTail(Smooth):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) < 16:
            self.log("train_tail", loss.detach())
        return loss


def fit(root, engine, algorithm=FedAvg, model=Smooth, *arguments, **options):
    own = {"engine": engine, "name": engine, "precision": "64-true", "clients_per_round": 5} | options
    return steps.fit(root, model, algorithm, *arguments, **own)


def compare(root, tolerance=1e-12, **options):
    """The weights and the tables of both engines, which round differently."""
    stacked, single = (fit(root, engine, **options) for engine in ("vectorized", "sequential"))
    difference = (stacked.server.z - single.server.z).abs().max() / single.server.z.abs().max()
    assert difference <= tolerance
    for table in ("clients.csv", "metrics.csv"):
        for ours, theirs in zip(*(read_csv(Path(t.log_dir, table)) for t in (stacked, single)), strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                if name == "status" or "" in (ours[name], theirs[name]):
                    assert ours[name] == theirs[name]
                elif not name.startswith("time/"):
                    expected = pytest.approx(float(theirs[name]), rel=max(tolerance * 100, 1e-6), nan_ok=True)
                    assert float(ours[name]) == expected, name
    return stacked


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": Smooth, "algorithm": lambda: FedBC(dual_lr=0.1), "gradient_clip_val": 0.3},
        {"model": lambda: Smooth("adam"), "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"model": lambda: Smooth("groups"), "algorithm": SCAFFOLD},
        {"model": lambda: Smooth("adagrad")},
        {"model": lambda: Smooth("maximize")},
        {"model": lambda: Smooth("sgd"), "local_epochs": None, "local_steps": 7},
        {"data": lambda: BoringData(drop_last=True)},
        {"data": ItemData},
        {"stragglers": Stragglers(0.5, 0.0)},
        {"model": BoringModel, "algorithm": lambda: FedBC(dual_lr=0.1)},
        {"model": BoringModel, "buffers": "local", "clients_per_round": 4},
        {"model": Recurrent, "eval_every_n_rounds": 1},
        {"data": MixedData},
        {"model": LogsTheTail, "data": Unequal, "clients_per_round": 6},
    ],
)
def test_the_sequential_engines_numbers(tmp_path, options):
    trainer = compare(tmp_path, **options)
    if "buffers" in options:
        engines = (trainer, fit(tmp_path, "sequential", **options))
        for name, client in itertools.product(("local_buffers", "local_counters"), range(6)):
            ours, theirs = (each.federation.clients.vector(name, client) for each in engines)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_cohort_is_split_by_what_a_step_holds(tmp_path, monkeypatch, size):
    """Rows of 115 numbers, and 3.8 kB that a step on 16 samples holds: inputs, tanh, logarithms and the like."""
    bytes_of_client = stacked_bench.NUM_MATRICES * 115 * 8 + stacked_bench.TIMES_HELD * 4_000
    monkeypatch.setattr(stacked_bench, "BYTES_OF_COHORT", size * bytes_of_client)
    assert compare(tmp_path, algorithm=lambda: FedBC(dual_lr=0.1)).federation.engine.cohort_size == size


def test_mixed_precision_and_its_rounding(tmp_path):
    compare(tmp_path, 0.02, precision="bf16-mixed", algorithm=lambda: FedBC(dual_lr=0.1))


SEVEN = {"local_epochs": None, "local_steps": 7}


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": lambda: PerFedAvg(0.1, 0.1, variant="hessian_free"), "model": Smooth} | SEVEN,
        {"algorithm": lambda: PerFedBC(0.1, 0.1, 0.1, num_inner_steps=2, dual_init=0.1)} | SEVEN,
        {"algorithm": lambda: PFedMe(penalty=2.0, personal_lr=0.1), "model": Smooth} | SEVEN,
        {"algorithm": lambda: APFL(adaptive=True), "model": lambda: Smooth("groups"), "data": ItemData} | SEVEN,
        {"algorithm": lambda: APFL(adaptive=True), "stragglers": Stragglers(0.5, 0.0)},
        {"algorithm": lambda: composed(Armijo()), "model": BoringModel} | SEVEN,
        {"algorithm": lambda: composed(ModelAgnostic(0.1, 0.1), [ProximalTerm("dual", 2.0)])} | SEVEN,
    ],
)
def test_the_sequential_engines_numbers_in_steps_of_a_methods_own(tmp_path, options):
    compare(tmp_path, **{"clients_per_round": 1.0} | options)


def composed(solver, terms=()):
    return ComposedAlgorithm([DualAscent(0.1, dual_init=0.1), WeightedAverage(by="dual")], list(terms), solver=solver)


def test_a_solvers_clients_are_trained_with_those_of_as_many_steps(tmp_path):
    engine = fit(tmp_path, "vectorized", PFedMe, max_rounds=1).federation.engine
    assert engine.group([0, 1, 2, 3, 4], [4, 6, 4, 6, 2], {3}) == [[1], [0, 2], [4], [3]]


def test_a_method_with_a_solver_must_ask_the_engine(tmp_path):
    class Silent(ComposedAlgorithm):
        def check(self, engine):
            pass

    with pytest.raises(ConfigurationError, match=r"Armijo takes 2 to 18 steps .*; call engine\.check_solver"):
        fit(tmp_path, "vectorized", lambda: Silent([WeightedAverage()], solver=Armijo()), clients_per_round=1.0)


def test_a_solver_must_say_how_many_batches_it_draws(tmp_path):
    class Greedy(Solver):
        def step(self, client):
            for _ in range(2):
                client.w = client.w - 0.1 * client.gradient(client.w, client.next_batch())

    with pytest.raises(ConfigurationError, match="Greedy draws more batches in a step than its batches_per_step, 1"):
        fit(tmp_path, "vectorized", lambda: composed(Greedy()), **SEVEN)
    Greedy.batches_per_step = 2
    compare(tmp_path, algorithm=lambda: composed(Greedy()), **SEVEN)


def test_float32_and_images(tmp_path):
    """uint8 images of one pool, dealt out and transformed in batches; a network that is not smooth."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (200, 3, 16, 16), dtype=np.uint8), rng.integers(0, 4, 200)
    owners = rng.choice(4, 200, p=[0.4, 0.3, 0.2, 0.1])
    compare(
        tmp_path, 1e-5, precision="32-true", clients_per_round=4, max_rounds=2,
        data=lambda: ArraysDataModule(images, labels, owners, batch_size=16, seed=0),
        model=lambda: CIFARCNN(num_classes=4, image_size=16, lr=0.01),
    )  # fmt: skip


def test_a_client_that_overflows_leaves_alone(tmp_path):
    class Poisoned(BoringData):
        def __init__(self):
            super().__init__()
            self.arrays[2][0][:] = torch.inf

    trainer = compare(tmp_path, data=Poisoned, clients_per_round=1.0)
    rows = read_csv(Path(trainer.log_dir, "clients.csv"))
    assert {row["client"] for row in rows if row["status"] == "nonfinite"} == {"2"}


@pytest.mark.parametrize(
    "algorithm", [lambda: FedBC(dual_lr=0.1, tolerance_lr=0.1), lambda: PerFedBC(0.1, dual_init=0.1)]
)
def test_resume_is_bitwise(tmp_path, algorithm):
    whole = fit(tmp_path, "vectorized", algorithm, max_rounds=3, name="whole", **SEVEN)
    fit(tmp_path, "vectorized", algorithm, max_rounds=2, name="parts", **SEVEN)
    trainer = fit(tmp_path, "vectorized", algorithm, max_rounds=3, name="parts", ckpt_path="last", **SEVEN)
    steps.assert_same_run(trainer, whole)


def test_differences_of_gradients_see_one_dropout_mask(tmp_path):
    """Two masks would make the Hessian-free step about 1 / 2ε = 500 times as long."""

    def length(variant):
        algorithm = PerFedAvg(0.1, 0.01, variant=variant)
        z = fit(tmp_path, "vectorized", lambda: algorithm, Dropping, max_rounds=1, name=variant, **SEVEN).server.z
        torch.manual_seed(0)
        return (z - torch.cat([p.detach().reshape(-1) for p in Dropping().parameters()])).norm()

    assert length("hessian_free") < 3 * length("first_order")


def test_dropout_differs_between_clients_and_is_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        first, second = (fit(tmp_path, "vectorized", model=Dropping, name=name) for name in "ab")
    said = "vectorized draws what training_step draws, such as dropout, for a whole cohort at once"
    assert caplog.text.count(said) == 2  # once a run
    assert torch.equal(first.server.z, second.server.z)
    rows = read_csv(Path(first.log_dir, "clients.csv"))
    assert len({row["train_loss"] for row in rows}) == len(rows)


# methods of a user's own


class Pull:
    """A term of a user's own, with a strength for each client."""

    is_zero = False

    def __init__(self, strengths):
        self.strengths = strengths[:, None]

    def add_gradient(self, grad, w):
        grad += self.strengths * w

    def value(self, w):
        return (self.strengths * w.square() / 2).sum(dim=1)

    def part(self, clients):
        return Pull(self.strengths[clients, 0])


class Shrink:
    def __init__(self, factors):
        self.factors = factors[:, None]

    def apply(self, w, step_size):
        w *= self.factors

    def part(self, clients):
        return Shrink(self.factors[clients, 0])


class Mine(FederatedAlgorithm):
    def client_update(self, engine, cohort, server):
        strengths = torch.tensor([0.1 * (client + 1) for client in cohort.ids], dtype=torch.float64)
        engine.solve(cohort, server.model, terms=[Pull(strengths)], after_step=Shrink(1 - strengths / 100))

    def server_callbacks(self, engine):
        return [WeightedAverage()]


@pytest.mark.parametrize("algorithm", [Mine, lambda: FedBC(dual_lr=0.1)])
def test_terms_of_a_cohort_are_taken_apart(tmp_path, monkeypatch, algorithm):
    together = fit(tmp_path, "sequential", algorithm)
    assert together.federation.engine.cohort_size > 1
    vectorized = fit(tmp_path, "vectorized", algorithm)
    monkeypatch.setattr("fedbc_lightning.engines.sequential.MAX_COHORT", 1)
    alone = fit(tmp_path, "sequential", algorithm)
    assert torch.equal(together.server.z, alone.server.z)
    torch.testing.assert_close(vectorized.server.z, alone.server.z, rtol=1e-12, atol=1e-14)


def test_personal_epochs_beside_local_steps(tmp_path):
    options = {"local_epochs": None, "local_steps": 4, "clients_per_round": 6}
    ours, theirs = (
        fit(tmp_path, engine, lambda: Ditto(0.1, personal_epochs=1), **options).clients
        for engine in ("vectorized", "sequential")
    )
    for client in range(6):
        vectors = (clients.vector("local_model", client) for clients in (ours, theirs))
        torch.testing.assert_close(*vectors, rtol=1e-12, atol=1e-13)


# refusals


class Watcher(Callback):
    def on_train_batch_end(self, *args):
        pass


class Scheduled(Smooth):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Lbfgs(Smooth):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Asking(Smooth):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1 / self.trainer.max_epochs)


class Unused(Smooth):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(2, 2)


class Silent(Smooth):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class Stepping(Smooth):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        optimizer.step(closure)


class ClampedGradients(Smooth):
    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.15, 0.15))


class ClampedLate(Smooth):
    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.15, 0.15))


class Projected(Smooth):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in self.parameters()])
        return optimizer


class CountsTheTail(Smooth):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + batch_idx) if len(batch[0]) < 16 else loss


def as_dict(items):
    return dict(zip("xy", default_collate(items), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [Watcher()]}, "the hook on_train_batch_end"),
        ({"model": Scheduled}, "learning-rate schedulers"),
        ({"model": Lbfgs}, "the optimizer LBFGS"),
        ({"model": Asking}, "reads self.trainer"),
        ({"model": Stepping}, "own optimizer_step"),
        ({"model": Measuring}, "torchmetrics Metric"),
        ({"model": Centering}, "it makes the buffer 'center'"),
        ({"model": lambda: Centering(is_placed=True)}, "it makes the buffer 'center'"),
        ({"model": LogsTheMost}, "self.log\\('train_most'\\)"),
        ({"model": Unused}, "'left.(weight|bias)' has no gradient"),
        ({"model": Branching}, "cannot map Branching.training_step over clients"),
        ({"model": Silent}, "training_step returns no loss"),
        ({"model": ClampedGradients}, "hooks on its layers or parameters"),
        ({"model": ClampedLate}, "hooks on its layers or parameters"),
        ({"model": Projected}, "hooks on the steps of its optimizer"),
        ({"model": CountsTheTail}, "another batch_idx"),
        ({"model": Listed}, "has other gradients"),
        ({"precision": "bf16-true"}, "precision other than"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"data": lambda: BoringData(collate_fn=as_dict)}, "stacks the tensors of batches"),
    ],
)
def test_refusals_name_the_sequential_engine(tmp_path, options, message):
    with pytest.raises(ConfigurationError, match=rf"trainer\.engine: vectorized .*{message}.*use engine: sequential"):
        fit(tmp_path, "vectorized", **options)


def test_a_refusal_carries_its_reason_to_another_process(tmp_path):
    with pytest.raises(NotVectorizableError) as refused:
        fit(tmp_path, "vectorized", model=Scheduled)
    copy = pickle.loads(pickle.dumps(refused.value))
    assert copy.reason == refused.value.reason == "cannot train with learning-rate schedulers inside clients"
    assert str(copy) == f"trainer.engine: vectorized {copy.reason}; use engine: sequential."
    text = "".join(traceback.format_exception(refused.value))  # what torch tells of a process that it has spawned
    error = _error_of(ProcessRaisedException(text, 0, 1), world_size=1, resume="")
    assert isinstance(error, ConfigurationError)
    assert str(error) == str(refused.value)
