"""Large frozen parameters are hashes in ``last.ckpt``; runs that go on and exports have them whole, or are refused."""

from pathlib import Path

import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_trainer

from fedbc_lightning import ConfigurationError, FedBC
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.state import checkpoint


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


def test_last_ckpt_holds_hashes_and_resumes_exactly(tmp_path):
    whole, half = fit(tmp_path / "whole")[0], fit(tmp_path / "half", rounds=1)[0]
    resumed = fit(tmp_path / "half", ckpt_path=last(half))[0]
    content = checkpoint.load(last(whole))
    assert not [name for name in content["state_dict"] if name in ("wide.weight", "same.weight")]
    assert sorted(content[checkpoint.KEY]["frozen"]) == ["narrow.weight", "wide.weight"]
    assert_equal_trees(content, checkpoint.load(last(resumed)))


@pytest.mark.parametrize("verb", ["fit", "export"])
def test_other_frozen_weights_are_refused(tmp_path, verb):
    path = last(fit(tmp_path, rounds=1)[0])
    torch.manual_seed(5)
    other = Backbone(), BoringData(), FedBC(dual_lr=0.1)
    with pytest.raises(
        ConfigurationError,
        match=r"last\.ckpt' was trained beside other frozen weights: 'wide\.weight' and 1 more.*seed",
    ) as told:
        getattr(make_trainer(tmp_path), verb)(*other, ckpt_path=path)
    assert "\n" not in str(told.value)


def test_a_checkpoint_with_all_tensors_still_resumes_whatever_the_new_module_has(tmp_path):
    run = fit(tmp_path / "a", rounds=1)
    path = last(run[0])
    content = checkpoint.load(path)
    del content[checkpoint.KEY]["frozen"]
    content["state_dict"] = {name: value.clone() for name, value in run[1].state_dict().items()}
    torch.save(content, path)
    resumed = fit(tmp_path / "a", seed=5, ckpt_path=path, rounds=3)
    whole = fit(tmp_path / "whole")
    assert_equal_trees(resumed[1].state_dict(), whole[1].state_dict())


def test_exported_and_best_models_are_whole(tmp_path):
    run = fit(tmp_path, callbacks=[RoundCheckpoint("loss/global", "min")])
    exported = run[0].export(*run[1:], client=2)
    for path in (exported, Path(run[0].log_dir, "checkpoints", "best.ckpt")):
        loaded = Backbone.load_from_checkpoint(path)
        assert torch.equal(loaded.same.weight, run[1].wide.weight)
    torch.manual_seed(4)
    again = run[0].export(Backbone(), *run[2:], ckpt_path=last(run[0]), client=2, out=tmp_path / "again.ckpt")
    assert_equal_trees(*(torch.load(path, weights_only=True)["state_dict"] for path in (exported, again)))


def test_what_is_written_through_data_is_refused_at_the_next_checkpoint(tmp_path):
    class Writes(Backbone):
        def training_step(self, batch, batch_idx):
            if self.trainer.current_round == 2:
                self.wide.weight.data[0, 0] += 1
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match=r"'wide\.weight' has requires_grad=False and was written"):
        fit(tmp_path, model_class=Writes, checkpoint_every_n_rounds=1)
