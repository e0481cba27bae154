"""Callbacks find what they monitor under the name that the module logs; what can never come is refused early."""

from __future__ import annotations

import pytest
import torch
from helpers.user_modules import UserData, _Classifier
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.state import checkpoint

from .test_parity import fresh, read_rows
from .test_plateau_of_validation import Guarded, Plateau, Validated, run


class Validates(Plateau):
    configure_optimizers = _Classifier.configure_optimizers


class Untrained(Guarded):
    configure_optimizers = _Classifier.configure_optimizers

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


class WithTest(Validated):
    """With test data, too."""

    client_test_dataset = Validated.client_train_dataset


class Keeps(Callback):
    """Writes down what it finds, as a callback of the user's own does."""

    def __init__(self, monitor):
        self.monitor, self.found = monitor, []

    def on_validation_end(self, trainer, pl_module):
        self.found.append(trainer.callback_metrics[self.monitor].item())


@pytest.mark.parametrize("monitor", ["val_loss", "valid/loss", "test_loss"])
def test_a_callback_reads_the_metric_of_the_global_model_under_the_modules_name(tmp_path, monitor):
    stop, best, keeps = (
        EarlyStopping(monitor, min_delta=10.0, patience=2),
        RoundCheckpoint(monitor, "min"),
        Keeps(monitor),
    )
    trainer = run(tmp_path, fresh(Validates), WithTest(), callbacks=[stop, best, keeps], enable_checkpointing=True)
    rows = read_rows(trainer, "metrics.csv")
    logged = [float(row["loss/global" if monitor == "test_loss" else "loss/val_global"]) for row in rows]
    assert len(rows) == 3  # of 6: it stopped two evaluations after the first
    assert keeps.found == pytest.approx(logged, rel=1e-6)
    assert best.best == pytest.approx(min(logged), rel=1e-6)
    for name in ("best", "last"):  # the same metric is not kept under two names
        saved = checkpoint.load(f"{trainer.log_dir}/checkpoints/{name}.ckpt")[checkpoint.KEY]["callback_metrics"]
        assert monitor not in saved
        assert "loss/val_global" in saved
    assert monitor not in trainer.callback_metrics


def test_a_name_that_is_logged_as_it_is_monitored_is_meant_as_it_is(tmp_path):
    """A hook at the end of rounds logs it: it does not come with round 0, and need not be data's."""

    class Logs(Callback):
        def on_round_end(self, trainer, pl_module):
            pl_module.log("val_score", torch.tensor(float(trainer.current_round)))

    keeps = Keeps("val_score")
    run(tmp_path, fresh(Validates), UserData((9, 7)), callbacks=[Logs(), keeps], max_rounds=2)
    assert keeps.found == [1.0, 2.0]


@pytest.mark.parametrize(
    ("data", "monitor", "options", "said"),
    [
        (UserData, "val_loss", {}, r"monitors 'val_loss', which evaluation logs, but there is no validation data; set"),
        (UserData, "loss/val_global", {}, r"monitors 'loss/val_global', .* there is no validation data"),
        (Validated, "val_losses", {}, r"monitors 'val_losses', which nothing logs; there is: .*loss/val_global,"),
        (
            Validated,
            "val_loss",
            {"eval_every_n_rounds": 0},
            r"monitors 'val_loss', .* trainer.eval_every_n_rounds is 0",
        ),
        (Validated, "loss/val_local", {"keep_local_models": False}, r"monitors 'loss/val_local', which nothing logs"),
    ],
)
def test_what_can_never_come_is_refused_before_training(tmp_path, data, monitor, options, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        run(tmp_path, fresh(Untrained), data((9, 7)), callbacks=EarlyStopping(monitor), **options)
    assert "\n" not in str(caught.value)
