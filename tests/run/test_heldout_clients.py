"""Clients that are held out: nothing of a run depends on them, and z is measured on them, as it is and fine-tuned."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, BoringModel, Linear, make_model, make_trainer, read_csv, without_times
from helpers.refusals import refused
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional

from fedbc_lightning import PartitionedDataModule
from fedbc_lightning.algorithms import SCAFFOLD, Centralized, FedAvg, FedBC, L2SGDPlusPlus
from fedbc_lightning.core.seeding import generator

LR, MOMENTUM, BATCH = 0.1, 0.5, 16


class Fewer(BoringData):
    """The first four clients alone."""

    num_clients = 4


class Poisoned(BoringData):
    """The last two clients have other samples, which are enormous."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.arrays[4:] = [(1e6 * inputs, targets.flip(0)) for inputs, targets in self.arrays[4:]]


class Decaying(BoringModel):
    """Its learning rate is halved after each round."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "round"}}


def fit(root, data, method=None, model=None, resume=None, **options):
    trainer = make_trainer(root, **options)
    trainer.fit(model or make_model(), data, method or FedBC(dual_lr=0.01), ckpt_path=resume)
    return trainer


def tables(trainer):
    """The three tables, without times."""
    found = {name: read_csv(Path(trainer.log_dir, f"{name}.csv")) for name in ("metrics", "clients", "evaluation")}
    return {**found, "metrics": without_times(found["metrics"])}


def of_others(rows):
    """Rows of a table without what is measured on held-out clients."""
    kept = [{name: value for name, value in row.items() if "heldout" not in name} for row in rows]
    return [row for row in kept if row.get("client") not in ("4", "5")]


@pytest.mark.parametrize(
    ("method", "engine", "share"),
    [
        (FedAvg, "vectorized", 0.5),
        (lambda: FedBC(dual_lr=0.01), "sequential", 0.5),
        (SCAFFOLD, "vectorized", 0.5),
        (lambda: L2SGDPlusPlus(penalty=0.1, probability=0.3, lr=0.1, num_sampled=2), "sequential", 1.0),
        (Centralized, "sequential", 0.5),
    ],
)
def test_a_run_is_that_of_the_other_clients_alone(tmp_path, method, engine, share):
    """Bit for bit, also where a method divides by N or draws clients itself; the held-out clients' data are poison."""
    options = {"engine": engine, "clients_per_round": share, "max_rounds": 2}
    poisoned = Poisoned(heldout_clients=[5, 4])
    held = fit(tmp_path / "held", poisoned, method(), make_model(Linear), heldout_finetune_steps=2, **options)
    alone = fit(tmp_path / "alone", Fewer(), method(), make_model(Linear), **options)
    assert torch.equal(held.server.z, alone.server.z)
    for table, rows in tables(alone).items():
        assert of_others(tables(held)[table]) == rows, table


def test_fine_tuning_does_not_change_the_run(tmp_path):
    """With BatchNorm, momentum and a scheduler's rates, whose state must not be left behind."""
    with_steps, without = (
        fit(tmp_path / str(steps), BoringData(heldout_clients=2), heldout_finetune_steps=steps) for steps in (3, 0)
    )
    assert torch.equal(with_steps.server.model, without.server.model)
    for row, expected in zip(*(tables(trainer)["metrics"] for trainer in (with_steps, without)), strict=True):
        assert {name: cell for name, cell in row.items() if "finetuned" not in name} == expected


def tuned_by_hand(state, data, client, round, num_steps, clip, lr):
    """z after some steps of momentum SGD, in the documented order of batches; written without the package's loop."""
    model = make_model()
    model.load_state_dict(state)
    model.train()
    inputs, targets = data.client_train_dataset(client).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=MOMENTUM)
    taken = epoch = 0
    while taken < num_steps:
        order = torch.randperm(len(inputs), generator=generator(1, "shuffle", round, client, epoch))
        for chosen in order.split(BATCH)[: num_steps - taken]:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            taken += 1
        epoch += 1
    return model


def measured_by_hand(model, data, client):
    model.eval()
    inputs, targets = data.client_test_dataset(client).tensors
    with torch.no_grad():
        outputs = model(inputs)
    accuracy = (outputs.argmax(1) == targets).float().mean()
    return {"loss": float(functional.cross_entropy(outputs, targets)), "accuracy": float(accuracy)}


@pytest.mark.parametrize(("clip", "kind", "lr"), [(None, BoringModel, LR), (0.3, Decaying, LR / 4)])
def test_the_metrics_are_those_of_a_loop_by_hand(tmp_path, clip, kind, lr):
    data, num_steps, held = BoringData(heldout_clients=[0, 3, 5]), 5, (0, 3, 5)
    model = make_model(kind)
    trainer = fit(tmp_path, data, FedAvg(), model, heldout_finetune_steps=num_steps, gradient_clip_val=clip)
    logged = tables(trainer)["metrics"][-1]
    rows = {int(row["client"]): row for row in tables(trainer)["evaluation"] if row["round"] == "3"}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for place, steps in (("heldout", 0), ("heldout_finetuned", num_steps)):
        found = {i: measured_by_hand(tuned_by_hand(state, data, i, 3, steps, clip, lr), data, i) for i in held}
        for name in ("loss", "accuracy"):
            values = np.array([found[i][name] for i in held])
            for i in held:
                assert float(rows[i][f"{name}/{place}"]) == pytest.approx(found[i][name], rel=1e-5)
            assert float(logged[f"{name}/{place}"]) == pytest.approx(values.mean(), rel=1e-5)
            assert float(logged[f"{name}/{place}_std"]) == pytest.approx(values.std(), rel=1e-4, abs=1e-7)
            worst = values.max() if name == "loss" else values.min()
            assert float(logged[f"{name}/{place}_worst10"]) == pytest.approx(worst, rel=1e-5)
    assert not any(rows[i]["loss/global"] or rows[i]["loss/local"] for i in held)
    assert all(rows[i]["loss/heldout"] == "" for i in (1, 2, 4))


def test_pooled_data_and_means_are_those_of_the_clients_that_train(tmp_path):
    data = BoringData(heldout_clients=[1, 2])
    trainer = fit(tmp_path, data)
    rows = [row for row in tables(trainer)["evaluation"] if row["round"] == "3" and row["client"] not in ("1", "2")]
    assert len(rows) == 4
    sizes = [float(row["num_test_samples"]) for row in rows]
    logged = tables(trainer)["metrics"][-1]
    pooled = np.average([float(row["loss/global"]) for row in rows], weights=sizes)
    assert float(logged["loss/global"]) == pytest.approx(pooled, rel=1e-5)
    assert float(logged["loss/local"]) == pytest.approx(np.mean([float(row["loss/local"]) for row in rows]), rel=1e-9)
    assert float(logged["num_clients/evaluated"]) == 4
    assert {row["client"] for row in tables(trainer)["clients"]} <= {"0", "3", "4", "5"}


def test_the_engines_agree(tmp_path):
    settings = {"heldout_finetune_steps": 4, "max_rounds": 2, "clients_per_round": 2}
    one, many = (
        fit(tmp_path, BoringData(heldout_clients=4), None, make_model(Linear), engine=engine, **settings)
        for engine in ("sequential", "vectorized")
    )
    one, many = one.callback_metrics, many.callback_metrics
    names = [name for name in one if "heldout" in name]
    assert len(names) == 12
    for name in names:
        assert float(many[name]) == pytest.approx(float(one[name]), rel=1e-4, abs=1e-6), name


def test_a_resumed_run_is_the_whole_one(tmp_path):
    options = {"heldout_finetune_steps": 3, "checkpoint_every_n_rounds": 1}
    whole = fit(tmp_path / "whole", BoringData(heldout_clients=0.3), **options)
    fit(tmp_path / "parts", BoringData(heldout_clients=0.3), max_rounds=1, **options)
    parts = fit(tmp_path / "parts", BoringData(heldout_clients=0.3), resume="last", **options)
    assert tables(parts) == tables(whole)
    tested = make_trainer(tmp_path, **options).test(
        make_model(), BoringData(heldout_clients=0.3), FedBC(dual_lr=0.01), parts.result.checkpoint
    )
    assert tested["loss/heldout_finetuned"] == float(tables(whole)["metrics"][-1]["loss/heldout_finetuned"])
    with refused("sha256 of the indices"):
        fit(tmp_path / "parts", BoringData(heldout_clients=[0]), resume=parts.result.checkpoint, max_rounds=4)
    held = BoringData(heldout_clients=0.3)
    with refused(f"client {held.heldout[0]} is held out"):
        make_trainer(tmp_path, **options).export(
            make_model(), held, FedBC(dual_lr=0.01), parts.result.checkpoint, client=int(held.heldout[0])
        )


@pytest.mark.distributed
def test_two_processes_measure_what_one_measures(tmp_path):
    options = {"heldout_finetune_steps": 3, "strategy": "ddp_fork"}
    one, two = (fit(tmp_path / str(n), BoringData(heldout_clients=3), FedAvg(), devices=n, **options) for n in (1, 2))
    rows, others = tables(one)["evaluation"], tables(two)["evaluation"]
    for row, other in zip(rows, others, strict=True):
        for name, cell in row.items():
            assert (cell == other[name]) or float(cell) == pytest.approx(float(other[name]), rel=1e-5), name
    assert any(row["loss/heldout_finetuned"] for row in rows)


def test_a_sample_of_them_is_evaluated_by_the_rule_for_all_clients(tmp_path):
    data = BoringData(heldout_clients=4)
    trainer = fit(tmp_path, data, clients_per_round=1, eval_clients=0.5, heldout_finetune_steps=1)
    assert (len(trainer.evaluator.client_ids), len(trainer.evaluator.heldout_ids)) == (1, 2)
    assert set(trainer.evaluator.heldout_ids) < set(data.heldout.tolist())
    none = fit(tmp_path / "none", BoringData(heldout_clients=4), clients_per_round=1, eval_clients=0)
    assert not any("heldout" in name for name in none.callback_metrics)
    most = fit(tmp_path / "most", BoringData(heldout_clients=1), eval_clients=3)
    assert most.evaluator.heldout_ids == most.datamodule.heldout.tolist()


def test_who_is_held_out_depends_on_the_seed_of_the_data_alone(tmp_path):
    drawn = {seed: BoringData(heldout_clients=0.5, seed=seed).heldout.tolist() for seed in range(8)}
    assert drawn == {seed: BoringData(heldout_clients=3, seed=seed).heldout.tolist() for seed in range(8)}
    assert len({tuple(clients) for clients in drawn.values()}) > 3
    trainer = fit(tmp_path, BoringData(heldout_clients=0.5, seed=3), SCAFFOLD())
    assert json.loads(Path(trainer.log_dir, "partition.json").read_text())["heldout_clients"] == drawn[3]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (6, r"data.heldout_clients: got 6; .* from 1 to 5 \(the data has 6 clients\)"),
        (1.0, r"got 1.0; give a fraction in \(0, 1\)"),
        ("client", r"got 'client'; give"),
        (["Rome"], r"there is no client 'Rome'; give names, or numbers from 0 to 5"),
        (list(range(6)), r"all 6 clients are held out"),
    ],
)
def test_a_bad_value_is_one_clear_error(tmp_path, value, message):
    with refused(message):
        fit(tmp_path, BoringData(heldout_clients=value))


def test_settings_that_ask_for_what_is_not_there_are_refused(tmp_path):
    with refused(r"heldout_finetune_steps: got 2, but no client is held out; set data"):
        fit(tmp_path, BoringData(), heldout_finetune_steps=2)
    with refused("monitors 'loss/heldout', which nothing logs; there is: "):
        fit(tmp_path, BoringData(), callbacks=[EarlyStopping("loss/heldout")])


def test_names_natural_clients_and_a_wrapped_data_set(tmp_path):
    inputs, targets = torch.randn(60, 10), torch.arange(60) % 3
    roles = [["Lear", "Kent", "Fool", "Edgar"][k % 4] for k in range(60)]
    data = PartitionedDataModule(
        torch.utils.data.TensorDataset(inputs, targets), clients=roles, heldout_clients=["Fool"], seed=0
    )
    trainer = fit(tmp_path, data, FedAvg(), heldout_finetune_steps=1, clients_per_round=1.0)
    names = data.client_names
    assert [names[client] for client in data.heldout] == ["Fool"]
    assert {names[int(row["client"])] for row in tables(trainer)["clients"]} == {"Lear", "Kent", "Edgar"}
    pooled = data.indices_of_training_clients("train")
    assert not {roles[index] for index in pooled} & {"Fool"}
    assert len(data.pooled_dataset("train")) == len(pooled)
    assert math.isfinite(trainer.callback_metrics["loss/heldout_finetuned"])
