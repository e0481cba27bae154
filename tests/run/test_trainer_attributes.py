"""What users and callbacks read of the trainer, before, in and after its runs."""

from pathlib import Path

import pytest
from helpers.boring import BoringData, make_model, make_trainer, read_csv
from lightning.pytorch import Callback

from fedbc_lightning import FedAvg

OF_A_RUN = ("server", "clients", "federation", "layout", "datamodule", "evaluator", "recorder", "seed")


def test_before_a_run_the_trainer_has_no_state(tmp_path):
    trainer = make_trainer(tmp_path)
    assert [name for name in OF_A_RUN if hasattr(trainer, name)] == []
    assert (trainer.current_round, trainer.finished_round, trainer.should_stop) == (0, 0, False)
    assert (trainer.callback_metrics, trainer.evaluation.metrics, trainer.loggers) == ({}, {}, [])
    assert (trainer.log_dir, trainer.logger) == (None, None)
    with pytest.raises(AttributeError, match="object has no 'server' in this process: there is none before a run"):
        trainer.server  # noqa: B018


def test_a_run_shows_its_state_and_reads_settings_that_callbacks_change(tmp_path):
    class Changes(Callback):
        seen: tuple = ()

        def on_round_start(self, trainer, pl_module):
            trainer.eval_every_n_rounds = 0
            self.seen = tuple(name for name in OF_A_RUN if hasattr(trainer, name))

    callback = Changes()
    trainer = make_trainer(tmp_path, callbacks=callback)
    trainer.fit(make_model(), BoringData(), FedAvg())
    assert callback.seen == OF_A_RUN
    assert trainer.server is trainer.federation.server
    assert trainer.clients is trainer.federation.clients
    evaluated = [row["loss/global"] != "" for row in read_csv(Path(trainer.log_dir) / "metrics.csv")]
    assert evaluated == [True, False, False, False]


def test_a_plan_leaves_the_trainer_as_it_is(tmp_path):
    worlds = []

    class Watches(Callback):
        def setup(self, trainer, pl_module, stage):
            worlds.append((trainer.world_size, trainer.num_nodes, trainer.log_dir))

    trainer = make_trainer(tmp_path, callbacks=Watches())
    model = make_model()
    trainer.fit(model, BoringData(), FedAvg())
    before = (trainer.server, trainer.clients, trainer.progress, trainer.settings, trainer.log_dir, trainer.recorder)
    worlds.clear()
    trainer.plan(make_model(), BoringData(), FedAvg())
    pair = make_trainer(tmp_path, callbacks=Watches(), devices=2, strategy="ddp_fork")
    pair.plan(make_model(), BoringData(), FedAvg())
    after = (trainer.server, trainer.clients, trainer.progress, trainer.settings, trainer.log_dir, trainer.recorder)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert worlds == [(1, 1, None)] * 2
    assert trainer.finished_round == 3


def test_an_evaluation_still_shows_where_the_run_before_wrote(tmp_path):
    trainer, model = make_trainer(tmp_path, logger=None), make_model()
    trainer.fit(model, BoringData(), FedAvg())
    folder, logger = trainer.log_dir, trainer.logger
    metrics = trainer.test(model, BoringData(), FedAvg())
    assert (trainer.log_dir, trainer.logger) == (folder, logger)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(metrics)
