"""Which clients are evaluated one by one, and what ``evaluation.csv`` says of them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.boring import BoringData, BoringModel, Linear, make_model, make_trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import TensorDataset
from torchmetrics.classification import BinaryAUROC

from fedbc_lightning import FedBC, recordable
from fedbc_lightning.algorithms import APFL, Ditto
from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import is_of_clients
from fedbc_lightning.evaluation import measurement
from fedbc_lightning.module import collector
from fedbc_lightning.state import client_rows


def fit(root: Path, model=None, resume=None, **options):
    """Train three rounds; client 0 has test data but no validation data, for 16 samples are too few for 3 %."""
    trainer = make_trainer(root, **options)
    trainer.fit(model or make_model(), BoringData(val_fraction=0.03), FedBC(dual_lr=0.01), ckpt_path=resume)
    return trainer


def tables(trainer) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What ``metrics.csv`` and ``evaluation.csv`` hold."""
    metrics, clients = (pd.read_csv(Path(trainer.log_dir, f"{name}.csv")) for name in ("metrics", "evaluation"))
    return metrics.set_index("round"), clients


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """A run in which all clients are evaluated."""
    return fit(tmp_path_factory.mktemp("every"))


@pytest.mark.parametrize(("split", "prefix"), [("test", ""), ("val", "val_")])
def test_the_weighted_means_follow_from_evaluation_csv_alone(every, split, prefix):
    metrics, clients = tables(every)
    assert list(clients.columns[:4]) == ["round", "client", "num_test_samples", "num_val_samples"]
    for round, rows in clients.groupby("round"):
        for name in ("accuracy", "loss"):
            mine, of_z, mean = (f"{name}/{prefix}{place}" for place in ("local", "global", "local_weighted"))
            for column, expected, rel in ((mine, mean, 1e-12), (of_z, of_z, 1e-5)):
                found = rows.dropna(subset=mine)
                average = np.average(found[column], weights=found[f"num_{split}_samples"])
                assert metrics.loc[round, expected] == pytest.approx(average, rel=rel)
    last = clients.groupby("round").get_group(3)[f"num_{split}_samples"].fillna(0).astype(int)
    assert last.tolist() == every.datamodule.num_samples(split).tolist()
    assert not any("num_" in name for name in every.evaluation.clients)  # no curves of TensorBoard


def test_without_evaluated_clients_the_global_model_is_evaluated_on_pooled_data(tmp_path, every):
    trainer = fit(tmp_path / "none", eval_clients=0)
    metrics = pd.read_csv(Path(trainer.log_dir, "metrics.csv")).set_index("round")
    assert not Path(trainer.log_dir, "evaluation.csv").exists()
    assert not any(is_of_clients(name) for name in metrics)
    names = [name for name in metrics if not name.startswith("time/")]
    pd.testing.assert_frame_equal(metrics[names], tables(every)[0][names])
    tested = make_trainer(tmp_path / "none", eval_clients=0).test(
        make_model(), BoringData(val_fraction=0.03), FedBC(dual_lr=0.01), ckpt_path="last"
    )
    assert tested["loss/global"] == pytest.approx(metrics.loc[3, "loss/global"], rel=1e-6)


@pytest.mark.parametrize("monitor", ["loss/local", "accuracy/std"])
def test_a_callback_that_monitors_what_no_client_logs_is_refused(tmp_path, monitor):
    with pytest.raises(ConfigurationError, match=f"EarlyStopping monitors '{monitor}'.*eval_clients is 0.*set it to 1"):
        fit(tmp_path, eval_clients=0, callbacks=[EarlyStopping(monitor)])


def test_the_numbers_of_all_clients_are_read_from_the_device_at_once(tmp_path, monkeypatch):
    reads = []

    def counted(values):
        values = list(values)
        reads.append(len(values))
        return read(values)

    for module in (measurement, collector):
        monkeypatch.setattr(module, "read", counted)
    trainer = make_trainer(tmp_path)
    found = trainer.validate(make_model(), BoringData(val_fraction=0.03), FedBC(dual_lr=0.01))
    num_clients = int((trainer.datamodule.num_samples("val") > 0).sum())
    assert [number for number in reads if number] == [2 * (1 + 2 * num_clients)]  # accuracy and loss; pooled, z, own
    assert all(type(value) is float for value in found.values())


class LogsForSome(BoringModel):
    """Logs a metric where a client has few samples, else not or NaN."""

    how = "missing"

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        if len(batch[1]) < 20 or self.how == "nan":
            self.log("test_rare", float(len(batch[1])) if len(batch[1]) < 20 else torch.nan)

    def validation_step(self, batch, batch_idx):
        if len(batch[1]) == 1:
            self.log("val_rare", 1.0)


@pytest.mark.parametrize(("heldout", "how"), [(0, "missing"), (0, "nan"), (3, "missing")])
def test_a_metric_of_some_clients_is_summarised_over_those_with_their_number(tmp_path, monkeypatch, heldout, how):
    monkeypatch.setattr(LogsForSome, "how", how)
    trainer = make_trainer(tmp_path, max_rounds=1)
    trainer.fit(make_model(LogsForSome), BoringData(val_fraction=0.05, heldout_clients=heldout), FedBC(dual_lr=0.01))
    metrics, clients = tables(trainer)
    last, rows = metrics.loc[1], clients[clients["round"] == 1].set_index("client")
    away = trainer.datamodule.heldout
    groups = {"": rows.drop(index=away), "heldout_": rows.loc[away]}
    assert last["num_clients/evaluated"] == len(groups[""])
    for prefix, group in groups.items():
        column = "rare/heldout" if prefix else "rare/global"
        found = group[column].dropna() if len(group) else []
        if 0 < len(found) < len(group):
            assert last[f"rare/{prefix}num_clients"] == len(found)
            assert last[f"rare/{prefix}worst10"] == found.min()
            assert last["rare/heldout" if prefix else "rare/local"] == found.mean()
        assert f"accuracy/{prefix}num_clients" not in last
    alone = rows["rare/val_global"].dropna() if "rare/val_global" in rows else []
    assert 0 < len(alone) < len(rows)
    assert last["rare/val_num_clients"] == len(groups[""]["rare/val_global"].dropna())
    if not heldout:
        assert (last["rare/num_clients"], last["rare/least_data"], last["rare/most_data"]) == (3, 4, 16)


class OneClass(BoringData):
    """Clients 1 and 4 have no positive among their test samples."""

    def client_test_dataset(self, client):
        inputs, targets = super().client_test_dataset(client).tensors
        return TensorDataset(inputs, targets * (client not in (1, 4)))


class RanksPositives(BoringModel):
    """Logs an AUROC as its users do: the Metric, or its value at the end."""

    def __init__(self, how):
        super().__init__()
        self.how, self.auroc = how, BinaryAUROC()

    def test_step(self, batch, batch_idx):
        scores, targets = self(batch[0])[:, 2], batch[1] == 2
        if self.how == "called":
            self.auroc(scores, targets.long())
        else:
            self.auroc.update(scores, targets.long())
        if self.how != "computed":
            self.log("test_auroc", self.auroc)

    def on_test_epoch_end(self):
        if self.how == "computed":
            self.log("test_auroc", self.auroc.compute())
            self.log("test_again", self.auroc.compute())


@pytest.mark.parametrize("how", ["updated", "called", "computed"])
def test_a_value_that_torchmetrics_warns_of_is_left_out_and_named(tmp_path, how):
    trainer, model = make_trainer(tmp_path, max_rounds=1), RanksPositives(how)
    with pytest.warns(UserWarning, match="torchmetrics warns: No positive samples in targets") as said:
        trainer.fit(model, OneClass(), FedBC(dual_lr=0.01))
    assert [str(one.message).partition(":")[0] for one in said] == ["client 1, test"]  # before round 1
    metrics, clients = tables(trainer)
    found = clients[clients["round"] == 1].set_index("client")["auroc/global"]
    assert found.index[found.isna()].tolist() == [1, 4]
    last = metrics.loc[1]
    assert (last["auroc/num_clients"], last["auroc/worst10"]) == (4, found.min())
    assert last["auroc/std"] == pytest.approx(found.std(ddof=0))
    assert "accuracy/num_clients" not in last
    if how == "computed":
        assert last["again/worst10"] == found.min()
    model.auroc.update(torch.rand(2), torch.zeros(2, dtype=torch.long))
    with pytest.warns(UserWarning, match="^No positive samples"):
        assert model.auroc.compute() == 0  # as it was made


class Counted(Linear):
    """Counts the evaluations by ``test_step``, which nobody promises to be a function of weights and batch."""

    num_steps, changes = 0, False

    def test_step(self, batch, batch_idx):
        type(self).num_steps += 1
        super().test_step(batch, batch_idx)
        if self.changes:
            self.log("test_count", float(self.num_steps))


class Promised(Counted):
    """The same step with the promise."""

    @recordable
    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("case", "model", "method", "options", "is_reused"),
    [
        ("in memory", Promised, FedBC(dual_lr=0.01), {}, True),
        ("in a file", Promised, FedBC(dual_lr=0.01), {}, True),
        ("every second round", Promised, Ditto(), {"eval_every_n_rounds": 2}, True),
        ("made of two vectors", Promised, APFL(), {}, False),
        ("a hook", Promised, FedBC(dual_lr=0.01), {"callbacks": [EarlyStopping("loss/local", patience=99)]}, False),
        ("a wrong promise", Promised, FedBC(dual_lr=0.01), {}, None),
    ],
)  # fmt: skip
def test_a_promised_step_is_not_repeated_for_clients_that_did_not_train(
    tmp_path, monkeypatch, recwarn, case, model, method, options, is_reused
):
    """One in 64 is repeated all the same, and compared; a step that gives other numbers is from then on."""
    monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0 if case == "in a file" else client_rows.IN_MEMORY_BELOW)
    monkeypatch.setattr(Counted, "changes", is_reused is None)
    found = []
    for kind in (Counted, model):
        kind.num_steps = 0
        trainer = make_trainer(tmp_path / kind.__name__, clients_per_round=2, max_rounds=6, **options)
        trainer.fit(make_model(kind), BoringData(), method)
        found.append((Path(trainer.log_dir, "evaluation.csv").read_text(), kind.num_steps))
    (expected, num_all), (table, num_steps) = found
    trained = pd.read_csv(Path(trainer.log_dir, "clients.csv")).groupby("round")["client"].agg(set)
    every = options.get("eval_every_n_rounds", 1)
    tested = {*np.flatnonzero(trainer.datamodule.num_samples("test")).tolist()}
    since = [range(t - every + 1, t + 1) for t in range(every, 7, every)]
    num_known = sum(len(tested.difference(*map(trained.get, rounds))) for rounds in since)
    if is_reused is None:
        assert "Promised.test_step is no function" in str(recwarn.pop(UserWarning).message)
        assert num_steps == num_all
        return
    assert table == expected
    assert num_steps == num_all - is_reused * (num_known - 1)
