"""Clients elsewhere are evaluated there: the tables of a run are those of one process."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.bad_messages import NO_VALUE, of_another_kind
from helpers.boring import BoringData, BoringModel, Linear, make_model, make_trainer, read_csv, without_times
from helpers.messages_only import MessagesOnly, RowsStay
from helpers.modules_with_more import Bank, BestSoFar, Teacher
from lightning.pytorch import Callback
from torch import nn

from fedbc_lightning import FedAvg, FedBC, Privacy
from fedbc_lightning.algorithms import APFL, SCAFFOLD, Ditto, FedBABU, FedExP, FedRep, PerFedAvg
from fedbc_lightning.distributed.backend import Lost
from fedbc_lightning.federation.expected import check_answer
from fedbc_lightning.federation.kept_rows import TAKEN
from fedbc_lightning.federation.messages import Measured, MessageError, decode, encode
from fedbc_lightning.federation.participation import Stragglers
from fedbc_lightning.state import client_rows

LONG = "x" * 300 + "\t%"


class Drawing(BoringModel):
    """Logs under any name; its step for evaluation draws, logs NaN at some clients, and shows a batch to the logger."""

    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.net = nn.Sequential(self.net, nn.Linear(3, 3))

    def training_step(self, batch, batch_idx):
        self.log(LONG, batch[0].mean())
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        super().test_step((batch[0] + torch.rand_like(batch[0]), batch[1]), batch_idx)
        self.log(LONG, float("nan") if len(batch[1]) < 10 else batch[0].mean())
        if self.logger is not None:
            self.logger.experiment.add_text("batch", str(len(batch[1])))

    validation_step = test_step


class InStages(Teacher):
    """Training writes a teacher, and from round 2 on another frozen parameter; a hook changes an attribute then."""

    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.early, self.scale = nn.Parameter(torch.full((3,), 1.1), requires_grad=False), 1.0

    def on_round_start(self):
        if self.trainer.current_round == 2:
            self.scale = 0.5

    def training_step(self, batch, batch_idx):
        if self.trainer.current_round > 1:
            self.early.add_(0.1)
        return super().training_step(batch, batch_idx) * self.scale * self.early.mean()


class Warmed(BoringModel):
    """Its temperature, which is frozen, is written by a hook before round 2; its steps count themselves."""

    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.temperature = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def on_round_start(self):
        if self.trainer.current_round == 2:
            self.temperature.add_(0.5)

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step((batch[0] + self.count, batch[1]), batch_idx) / self.temperature


class Telling(FedAvg):
    """Its clients tell who takes part, as True and False and by numbers below 0."""

    def declare_state(self, state):
        super().declare_state(state)
        state.client_message("is_last", "column")
        state.client_message("missing", "column")

    def client_update(self, engine, cohort, server):
        super().client_update(engine, cohort, server)
        cohort.record("is_last", torch.tensor([server.ids[-1:] == [client] for client in cohort.ids]))
        cohort.record("missing", torch.full((len(cohort),), len(server.ids) - len(server.sampled)))


class Swaps(Callback):
    """Puts other weights in for an evaluation, as a moving average does."""

    def on_validation_start(self, trainer, pl_module):
        self.kept = copy.deepcopy(pl_module.state_dict())
        for value in pl_module.state_dict().values():
            value.copy_(value * 2)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)


class Collects(Callback):
    """Logs at the end of an evaluation what it has collected from its batches."""

    def on_validation_epoch_start(self, trainer, pl_module):
        self.found = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.found.append(float(batch[0].sum()))

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("sum", sum(self.found))


CASES = {
    "drawn": (Drawing, FedAvg, {}),
    "own buffers": (Drawing, SCAFFOLD, {"buffers": "local", "client_dtype": "bfloat16"}),
    "fine-tuned": (Linear, PerFedAvg, {}),
    "fine-tuned teacher": (partial(Teacher, begins_at=0), PerFedAvg, {}),
    "bfloat16": (BoringModel, lambda: FedBC(dual_lr=0.1, init_from="local"), {"client_dtype": "bfloat16"}),
    "in a file": (BoringModel, SCAFFOLD, {}),
    "in a file, own": (BoringModel, Ditto, {"eval_clients": 4}),
    "other z": (BoringModel, FedExP, {}),
    "kept head": (BoringModel, FedRep, {"local_parameters": ["net.3.*"]}),
    "held out": (BoringModel, FedAvg, {"heldout_finetune_steps": 2}),
    "best": (BestSoFar, FedAvg, {}),
    "swapped": (BoringModel, APFL, {"callbacks": [Swaps()]}),
    "collected": (Drawing, FedAvg, {"callbacks": [Collects()]}),
    "vectorized": (Linear, FedAvg, {"engine": "vectorized"}),
    "by a hook": (Warmed, FedAvg, {}),
    "fine-tuned count": (Warmed, FedBABU, {"local_parameters": ["net.3.*"]}),
    "in stages": (InStages, FedAvg, {}),
    "in stages, own": (InStages, Ditto, {"buffers": "local", "client_dtype": "bfloat16"}),
    "told": (Drawing, Telling, {"stragglers": Stragglers(dropout=0.4)}),
    "told in private": (
        Linear,
        lambda: Telling("uniform"),
        {"privacy": Privacy(0.5, noise_multiplier=0.7, delta=1e-3)},
    ),
    "bank": (Bank, FedAvg, {"buffers": "local", "clients_per_round": 6}),
}
STAY = {"own buffers", "kept head", "in stages, own", "in a file, own"}
"""Cases in which vectors stay with the clients."""


def tables(root, name, backend):
    """Elsewhere, the workers have trained for another run before, and the run is resumed."""
    model, method, options = CASES[name]
    data = BoringData(500, heldout_clients=0.34 * (name == "held out"), val_fraction=0.25 * (model is Drawing))
    for folder, rounds in (("other", 2), ("run", 2), ("run", 3))[2 * (backend is None) :]:
        given = {"max_rounds": rounds, "logger": True, "backend": backend}
        trainer = make_trainer(root / folder, **given, **copy.deepcopy(options))
        trainer.fit(make_model(model), data, method(), "last" if rounds == 3 and backend else None)
    found = {table: read_csv(f"{trainer.log_dir}/{table}.csv") for table in ("metrics", "clients", "evaluation")}
    own = ("hash_down", "hash_up", TAKEN)
    return {k: without_times([{n: row[n] for n in row if n not in own} for row in v]) for k, v in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_one_process(tmp_path, monkeypatch, name):
    if "in a file" in name:
        monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    backend = RowsStay() if name in STAY else MessagesOnly(outlive_runs=True)
    here, there = (tables(tmp_path / str(k), name, k) for k in (None, backend))
    if name == "vectorized":  # their cohorts have other sizes
        pairs = zip(here["evaluation"], there["evaluation"], strict=True)
        assert all(float(a[k]) == pytest.approx(float(b[k]), rel=1e-4) for a, b in pairs for k in a)
    else:
        assert there == here
    assert len(here["metrics"]) == 4


def cannot_be(found, client):
    """Yield what cannot be an answer of a client to an evaluation."""
    others = [{"test": {(which, client): values}} for which, values in (("local", {"x" * 1001: 1.0}), ("evil", {}))]
    bests = [{f"test evil {client}": [[0.5]]}, {key: [[0.5] * 2] for key in found.best_metrics}]
    for field, named in (("results", others), ("best_metrics", bests)):
        value = getattr(found, field)
        yield from (replace(found, **{field: other}) for other in [*NO_VALUE, *of_another_kind(value), *named])


class Losing(MessagesOnly):
    """The answers of clients 2 and 3 to evaluations are lost or cannot be; it keeps the last one of client 5."""

    def work(self, start, asks):
        for index, answer in super().work(start, asks):
            (client,) = asks[index].clients if b"Measured" in answer[:1000] else [0]
            if client == 5:
                self.kept = answer
            answer = encode(replace(decode(answer, Measured), results={"evil": {}})) if client == 3 else answer
            yield index, Lost("its machine was lost") if client == 2 else answer


def test_a_client_whose_answer_is_lost_or_cannot_be_is_left_out(tmp_path, caplog):
    trainer = make_trainer(tmp_path, backend=(backend := Losing()), max_rounds=1)
    trainer.fit(make_model(BestSoFar), BoringData(), FedAvg())
    lines = [line for line in caplog.messages if "sent nothing that can be used" in line]
    assert [line[:17] for line in lines] == [f"round {round}: client {k}"[:17] for round in (0, 1) for k in (2, 3)]
    assert {row["client"] for row in read_csv(f"{trainer.log_dir}/evaluation.csv")} == {"0", "1", "4", "5"}
    found = decode(backend.kept, Measured)
    asked = found.answers, [5], trainer.federation
    check_answer(found, *asked)
    for other in cannot_be(found, 5):
        with pytest.raises(MessageError, match=r"its (results|best_metrics) cannot be"):
            check_answer(other, *asked)
