"""Which clients are evaluated one by one, and what ``evaluation.csv`` says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.boring import BoringData, make_model, make_trainer
from lightning.pytorch.callbacks import EarlyStopping

from fedbc_lightning import FedBC
from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import is_of_clients
from fedbc_lightning.evaluation import measurement
from fedbc_lightning.module import collector

COUNTS = ["num_test_samples", "num_val_samples"]


def fit(root: Path, model=None, resume=None, **options):
    """Train three rounds; client 0 has test data but no validation data, for 16 samples are too few for 3 %."""
    trainer = make_trainer(root, **options)
    trainer.fit(model or make_model(), BoringData(val_fraction=0.03), FedBC(dual_lr=0.01), ckpt_path=resume)
    return trainer


def tables(trainer) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What ``metrics.csv`` and ``evaluation.csv`` hold."""
    metrics, clients = (pd.read_csv(Path(trainer.log_dir, f"{name}.csv")) for name in ("metrics", "evaluation"))
    return metrics.set_index("round"), clients


def named(name, place, split):
    return f"{name}/{'val_' if split == 'val' else ''}{place}"


@pytest.mark.parametrize("split", ["test", "val"])
def test_the_weighted_means_follow_from_evaluation_csv_alone(tmp_path, split):
    metrics, clients = tables(fit(tmp_path))
    for round, rows in clients.groupby("round"):
        for name in ("accuracy", "loss"):
            local = rows.dropna(subset=named(name, "local", split))
            mean = np.average(local[named(name, "local", split)], weights=local[f"num_{split}_samples"])
            assert metrics.loc[round, named(name, "local_weighted", split)] == pytest.approx(mean, rel=1e-12)
            pooled = np.average(local[named(name, "global", split)], weights=local[f"num_{split}_samples"])
            assert metrics.loc[round, named(name, "global", split)] == pytest.approx(pooled, rel=1e-5)
    assert list(clients.columns[:4]) == ["round", "client", *COUNTS]


def test_the_counts_are_those_of_the_data_and_no_curve_of_tensorboard(tmp_path):
    trainer = fit(tmp_path)
    last = tables(trainer)[1].groupby("round").get_group(3).set_index("client")
    for split in ("test", "val"):
        found = last[f"num_{split}_samples"].fillna(0).astype(int)
        assert found.tolist() == trainer.datamodule.num_samples(split).tolist()
    assert not any("num_" in name for name in trainer.evaluation.clients)


def test_without_evaluated_clients_the_global_model_is_evaluated_on_pooled_data(tmp_path):
    every, _ = tables(fit(tmp_path / "every"))
    trainer = fit(tmp_path / "none", eval_clients=0)
    metrics = pd.read_csv(Path(trainer.log_dir, "metrics.csv")).set_index("round")
    assert not Path(trainer.log_dir, "evaluation.csv").exists()
    assert not any(is_of_clients(name) for name in metrics)
    names = [name for name in metrics if not name.startswith("time/")]
    pd.testing.assert_frame_equal(metrics[names], every[names])
    tested = make_trainer(tmp_path / "none", eval_clients=0).test(
        make_model(), BoringData(val_fraction=0.03), FedBC(dual_lr=0.01), ckpt_path="last"
    )
    assert tested["loss/global"] == pytest.approx(metrics.loc[3, "loss/global"], rel=1e-6)


@pytest.mark.parametrize("monitor", ["loss/local", "accuracy/std"])
def test_a_callback_that_monitors_what_no_client_logs_is_refused(tmp_path, monitor):
    with pytest.raises(ConfigurationError, match=f"EarlyStopping monitors '{monitor}'.*eval_clients is 0.*set it to 1"):
        fit(tmp_path, eval_clients=0, callbacks=[EarlyStopping(monitor)])


def test_a_scheduler_that_monitors_what_no_client_logs_is_refused(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    plan = {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss/local"}}
    model.configure_optimizers = lambda: plan
    with pytest.raises(ConfigurationError, match=r"loss/local.*eval_clients is 0"):
        fit(tmp_path, model, eval_clients=0)


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
