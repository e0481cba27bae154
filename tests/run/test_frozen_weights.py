"""Large frozen parameters are hashes in ``last.ckpt``; runs that go on and exports have them whole, or are refused."""

from pathlib import Path

import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_trainer
from helpers.refusals import refused

from fedbc_lightning import FedBC
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.state import checkpoint

FROZEN = ("wide.weight", "wide.bias", "narrow.weight", "narrow.bias", "same.weight", "same.bias")


class Backbone(BoringModel):
    """Adds to the logits those of a frozen layer, which the module has under two names."""

    def __init__(self, lr: float = 0.1, size: int = 7000) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.wide = torch.nn.Linear(10, size).requires_grad_(False)
        self.narrow = torch.nn.Linear(size, 10).requires_grad_(False)
        self.same = self.wide

    def forward(self, inputs):
        return super().forward(inputs + self.narrow(self.wide(inputs).tanh()))


def fit(root, rounds=3, seed=4, ckpt_path=None, model_class=Backbone, **settings):
    torch.manual_seed(seed)
    run = make_trainer(root, max_rounds=rounds, **settings), model_class(), BoringData(), FedBC(dual_lr=0.1)
    run[0].fit(*run[1:], ckpt_path=ckpt_path)
    return run


def last(trainer):
    return Path(trainer.log_dir, "checkpoints", "last.ckpt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole"), callbacks=[RoundCheckpoint("loss/global", "min")])


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The checkpoint of a run of one round."""
    return last(fit(tmp_path_factory.mktemp("half"), rounds=1)[0])


def test_last_ckpt_holds_hashes_and_resumes_exactly(tmp_path, whole, half):
    content = checkpoint.load(last(whole[0]))
    assert not [name for name in content["state_dict"] if name in ("wide.weight", "same.weight")]
    assert sorted(content[checkpoint.KEY]["frozen"]) == ["narrow.weight", "wide.weight"]
    resumed = checkpoint.load(last(fit(tmp_path, ckpt_path=half)[0]))
    for key in ("state_dict", checkpoint.KEY):
        assert_equal_trees(content[key], resumed[key])


@pytest.mark.parametrize("verb", ["fit", "export"])
def test_other_frozen_weights_are_refused(tmp_path, half, verb):
    torch.manual_seed(5)
    other = Backbone(), BoringData(), FedBC(dual_lr=0.1)
    with refused(r"last\.ckpt' was trained beside other frozen weights: 'wide\.weight' and 1 more.*seed"):
        getattr(make_trainer(tmp_path), verb)(*other, ckpt_path=half)


def test_a_checkpoint_with_all_tensors_still_resumes_whatever_the_new_module_has(tmp_path, whole, half):
    content = checkpoint.load(half)
    del content[checkpoint.KEY]["frozen"]
    content["state_dict"] |= {name: whole[1].state_dict()[name].clone() for name in FROZEN}
    torch.save(content, tmp_path / "last.ckpt")
    resumed = fit(tmp_path, seed=5, ckpt_path=tmp_path / "last.ckpt")
    assert_equal_trees(resumed[1].state_dict(), whole[1].state_dict())


def test_exported_and_best_models_are_whole(tmp_path, whole):
    exported = whole[0].export(*whole[1:], client=2)
    for path in (exported, Path(whole[0].log_dir, "checkpoints", "best.ckpt")):
        assert torch.equal(Backbone.load_from_checkpoint(path).same.weight, whole[1].wide.weight)
    torch.manual_seed(4)
    again = whole[0].export(Backbone(), *whole[2:], ckpt_path=last(whole[0]), client=2, out=tmp_path / "again.ckpt")
    assert_equal_trees(*(torch.load(path, weights_only=True)["state_dict"] for path in (exported, again)))


def test_what_is_written_through_data_is_refused_at_the_next_checkpoint(tmp_path):
    class Writes(Backbone):
        def training_step(self, batch, batch_idx):
            if self.trainer.current_round == 2:
                self.wide.weight.data[0, 0] += 1
            return super().training_step(batch, batch_idx)

    with refused(r"'wide\.weight' has requires_grad=False and was written"):
        fit(tmp_path, model_class=Writes, checkpoint_every_n_rounds=1)
