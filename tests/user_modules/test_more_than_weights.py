"""What a module holds beside the weights that training moves: kept, reset or averaged, never lost without a word."""

from __future__ import annotations

import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_model, make_trainer, read_csv
from helpers.modules_with_more import CASES, Halving, Pretrained, state_of
from helpers.programs import TESTS, run_python
from lightning.pytorch import Callback

from fedbc_lightning import FedAvg, client_rows
from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.server import ServerCallback


@pytest.mark.distributed
def test_two_processes_end_with_what_one_ends_with(tmp_path):
    done = run_python(["-m", "helpers.modules_with_more", tmp_path], TESTS)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank {rank}.pt", weights_only=True) for rank in (0, 1)]
    assert_equal_trees(*ranks)
    for name, case in CASES.items():
        torch.testing.assert_close(ranks[0][name], case(tmp_path / "one" / name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows_in_file", [False, True])
def test_what_is_set_when_the_run_starts_is_the_initial_model(tmp_path, monkeypatch, rows_in_file):
    if rows_in_file:
        monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    ended = []
    for early in (True, False):
        trainer = make_trainer(tmp_path / str(early), max_rounds=2)
        trainer.fit(make_model(Pretrained, early=early), BoringData(), FedAvg())
        ended.append((state_of(trainer), read_csv(trainer.log_dir + "/evaluation.csv")))
    assert_equal_trees(*ended)


def test_what_round_hooks_write_becomes_z(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Halving()], max_rounds=2)
    model = make_model(lr=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.fit(model, BoringData(), FedAvg())
    assert torch.equal(model.net[0].weight, before["net.0.weight"] / 2)
    assert model.net[3].bias.tolist() == [7.0] * 3
    saved = torch.load(trainer.log_dir + "/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert saved["net.3.bias"].tolist() == [7.0] * 3


def test_a_round_that_fails_takes_its_hooks_weights_back(tmp_path):
    class Failing(Halving):
        def on_client_end(self, trainer, pl_module, client):
            if trainer.current_round == 2:
                raise RuntimeError("lost")

    trainer, model = make_trainer(tmp_path, callbacks=[Failing()]), make_model(lr=0.0)
    before = model.net[0].weight.clone()
    with pytest.raises(RuntimeError, match="lost"):
        trainer.fit(model, BoringData(), FedAvg())
    assert torch.equal(model.net[0].weight, before)
    saved = torch.load(trainer.log_dir + "/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["net.0.weight"], before)


def test_a_resumed_run_does_not_take_the_start_again(tmp_path, caplog):
    class Random(Pretrained):
        def fill(self) -> None:
            super().fill()
            torch.nn.init.normal_(self.net[0].weight)
            torch.nn.init.normal_(self.frozen)

    def fit(root, rounds, seed, path=None):
        trainer, model = make_trainer(root, callbacks=[Halving()], max_rounds=rounds), make_model(Random)
        torch.manual_seed(seed)
        trainer.fit(model, BoringData(), FedAvg(), path)
        return state_of(trainer)

    whole = fit(tmp_path / "whole", 3, seed=5)
    fit(tmp_path / "parts", 2, seed=5)
    with caplog.at_level("INFO"):
        assert_equal_trees(fit(tmp_path / "parts", 3, seed=6, path="last"), whole)
    assert "Resumed: the weights and buffers are those of the checkpoint" in caplog.text


def test_a_parameter_that_a_hook_replaces_is_refused(tmp_path):
    class Replacing(Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.net[3] = torch.nn.Linear(8, 3)

    with pytest.raises(ConfigurationError, match=r"parameter 'net\.3\.weight' was replaced by another one at the st"):
        make_trainer(tmp_path, callbacks=[Replacing()]).fit(make_model(), BoringData(), FedAvg())


def test_freezing_in_a_hook_is_refused_before_training(tmp_path):
    class Freezing(BoringModel):
        def on_fit_start(self):
            self.net[0].requires_grad_(False)

        def training_step(self, batch, batch_idx):
            pytest.fail("a step was taken")

    with pytest.raises(ConfigurationError, match=r"requires_grad of 'net\.0\.weight' was changed"):
        make_trainer(tmp_path).fit(make_model(Freezing), BoringData(), FedAvg())


class OnlyZ(ServerCallback):
    """A part of one's own that knows nothing of buffers."""

    forms_z = True

    def on_round_start(self, server, sums):
        sums.declare("models", server.z.numel())

    def on_cohort_end(self, cohort, server, sums):
        sums.add_rows("models", cohort.of_valid(cohort.w), cohort.of_valid(cohort.num_samples))

    def on_aggregate(self, server, clients, sums):
        total = sum(record["num_samples"] for record in server.valid_records)
        server.stage("z", sums["models"] / total)


class OwnPart(FedAvg):
    def server_callbacks(self, engine):
        return [OnlyZ()]


@pytest.mark.parametrize("buffers", ["average", "local", "global"])
def test_a_part_of_ones_own_that_stages_z_alone_gets_averaged_buffers(tmp_path, buffers):
    ended = []
    for algorithm in (FedAvg(), OwnPart()):
        trainer = make_trainer(tmp_path / str(algorithm), buffers=buffers)
        trainer.fit(make_model(), BoringData(), algorithm)
        ended.append(state_of(trainer))
    torch.testing.assert_close(*ended, rtol=1e-6, atol=1e-7)
    has_moved = ended[1]["z net.1.running_mean"].abs().max() > 0
    assert has_moved == (buffers != "global")
