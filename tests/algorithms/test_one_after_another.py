"""The sequential engine's cohorts: clients that the server's parts get together, trained one after another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.boring import read_csv
from helpers.marks import of_each
from helpers.quadratics import QuadraticData, QuadraticModule, sample_quadratics
from lightning.pytorch import Callback

from algorithms.registry import BY_NAME, METHODS
from algorithms.running import QUIET
from algorithms.test_vectorized import assert_tables_alike
from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import Ditto, FedAvg, FedBC, QFedAvg
from fedbc_lightning.callbacks import ByzantineClients
from fedbc_lightning.engines.local_step import Training
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.federation.participation import Stragglers
from fedbc_lightning.server import CoordinateMedian
from fedbc_lightning.state.cohort import Cohort

PUBLIC = [BY_NAME["fedbc-momentum-public"], BY_NAME["fedbc-momentum-public-learned"]]
SETTINGS = [*METHODS, *PUBLIC]
COHORT = 3
NAMED = ["fedbc-learned-local", "scaffold-gradient_mean", "fedbc-momentum-public-learned"]


class OnlyIfPositive(QuadraticModule):
    """Its clients whose first batch has a positive sum of centres give no loss in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 and batch[1].sum() > 0 else super().training_step(batch, batch_idx)


@pytest.fixture
def sizes(monkeypatch):
    """The sizes of the cohorts that clients trained in."""
    found: list[int] = []
    real = SequentialEngine.train

    def train(self: SequentialEngine, cohort: Cohort, asked: Training) -> None:
        found.append(len(cohort))
        real(self, cohort, asked)

    monkeypatch.setattr(SequentialEngine, "train", train)
    return found


def run(root: Path, algorithm: Any, size: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> FederatedTrainer:
    """Rounds of 4 of 5 clients, in cohorts of at most ``size``."""
    monkeypatch.setattr("fedbc_lightning.engines.sequential.MAX_COHORT", size)
    clients, ckpt_path = options.pop("clients", sample_quadratics()), options.pop("ckpt_path", None)
    module = options.pop("module", QuadraticModule)
    usual = {
        "max_rounds": 1,
        "clients_per_round": 4,
        "local_epochs": 2,
        "seed": 3,
        "default_root_dir": str(root / str(size)),
    }
    trainer = FederatedTrainer(**QUIET | usual | options)
    trainer.fit(module(), QuadraticData(clients, batch_size=2), algorithm, ckpt_path)
    return trainer


def state_of(trainer: FederatedTrainer) -> dict[str, torch.Tensor]:
    """z, and all declared state of clients and server."""
    store, server, state = trainer.clients, trainer.server, {}
    for name in trainer.federation.declaration.client_scalars:
        state[name] = store.scalar(name)
    for name in trainer.federation.declaration.client_vectors:
        for client in range(store.num_clients):
            state[f"{name} {client}"] = store.vector(name, client)
    return state | {f"server {name}": server[name] for name in server.values}


def assert_alike(one: FederatedTrainer, other: FederatedTrainer, bound: float = 1e-13) -> None:
    """Rows, scalars and tables bit for bit; what the server makes of sums to ``bound``."""
    left, right = state_of(one), state_of(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        if not name.startswith(("server", "center")):
            assert torch.equal(value, right[name]), name
        else:
            scale = max(float(value.abs().max()) if value.numel() else 0.0, 1e-3)
            torch.testing.assert_close(
                value, right[name], rtol=0, atol=bound * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert_tables_alike(one, other, bits=("clients",), bound=1e-6)


@of_each(SETTINGS)
def test_the_numbers_of_one_at_a_time(tmp_path, setting, monkeypatch, sizes):
    """After a round rows, scalars and tables are those of cohorts of one, bit for bit."""
    together = run(tmp_path, setting.build(), COHORT, monkeypatch, **setting.options)
    engine, algorithm = together.federation.engine, together.federation.algorithm
    takes_one = engine.cohort_size == 1 or engine.has_solver or algorithm.trains_pooled
    if algorithm.buffer_size is None:  # else as few clients train together as start in a round
        assert set(sizes) == ({1} if takes_one else {1, COHORT} if max(sizes) > 1 and 1 in sizes else {COHORT, 2})
    assert_alike(together, run(tmp_path, setting.build(), 1, monkeypatch, **setting.options))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("options", [
    {"stragglers": Stragglers(fraction=0.4, dropout=0.2, partial_work="used")}, {"module": OnlyIfPositive},
    {"precision": "32-true"}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1},
    {"local_epochs": None, "local_steps": 3},
    {"module": lambda: QuadraticModule(tail_lr=0.05, decay=0.9)}, {"module": lambda: QuadraticModule(lbfgs=True)},
], ids=["stragglers", "no loss", "float32", "accumulated", "clipped", "steps", "groups", "lbfgs"])  # fmt: skip
def test_however_clients_train(tmp_path, name, options, monkeypatch, sizes):
    together = run(tmp_path, BY_NAME[name].build(), 5, monkeypatch, clients_per_round=5, **options)
    assert max(sizes) > 1
    singly = run(tmp_path, BY_NAME[name].build(), 1, monkeypatch, clients_per_round=5, **options)
    assert_alike(together, singly, bound=1e-6 if options.get("precision") else 1e-13)


@pytest.mark.parametrize("build", [
    lambda: FedBC(0.05), lambda: FedBC(0.05, robust_rule=CoordinateMedian()), lambda: FedAvg("uniform"), QFedAvg,
    BY_NAME["scaffold-gradient_mean"].build, BY_NAME["fedbc-momentum-public"].build,
])  # fmt: skip
def test_a_client_that_is_not_finite(tmp_path, build, monkeypatch):
    clients = sample_quadratics()
    clients[2][1][0, 0] = float("inf")
    pair = [run(tmp_path, build(), size, monkeypatch, clients=clients, clients_per_round=5) for size in (5, 1)]
    assert_alike(*pair)
    statuses = {row["client"]: row["status"] for row in read_csv(Path(pair[0].log_dir) / "clients.csv")}
    assert {client for client, status in statuses.items() if status == "nonfinite"} == {"2"}


class Turns(Callback):
    """The order in which clients start and end."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_client_start(self, trainer, pl_module, client):
        self.seen.append(("start", client))

    def on_client_end(self, trainer, pl_module, client):
        self.seen.append(("end", client))


@pytest.mark.parametrize("callback", [Turns, lambda: ByzantineClients(0.4, "sign_flip")])
def test_who_listens_to_clients_sees_one_at_a_time(tmp_path, callback, monkeypatch, sizes):
    """Also of a method that trains twice: a client ends before the next starts."""
    listener = callback()
    run(tmp_path, Ditto(0.1), 5, monkeypatch, callbacks=[listener])
    assert set(sizes) == {1}
    turns = getattr(listener, "seen", [])
    assert all(a == ("start", b[1]) and b[0] == "end" for a, b in zip(turns[::2], turns[1::2], strict=True))


def test_large_models_are_trained_alone(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr("fedbc_lightning.engines.sequential.BYTES_OF_ROWS", 8 * 4 * 8 * 2)
    run(tmp_path, FedAvg(), 64, monkeypatch)
    assert sizes == [2, 2]
    monkeypatch.setattr("fedbc_lightning.engines.sequential.BYTES_OF_ROWS", 8 * 4 * 8 * 2 - 1)
    run(tmp_path, FedAvg(), 64, monkeypatch, name="more")
    assert sizes[2:] == [1, 1, 1, 1]
