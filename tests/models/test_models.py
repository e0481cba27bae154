"""Every ready model under plain lightning.Trainer."""

import copy

import pytest
import torch
from helpers.model_cases import CASES, plain_trainer

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# One epoch of ResNet-18 takes as long as all tests of another model.
SMALL = pytest.mark.parametrize("case", [case for case in CASES if case.name != "resnet"], ids=lambda case: case.name)


@EVERY
def test_trains_and_evaluates_under_plain_lightning(case, tmp_path):
    model = case.model(lr=0.1, momentum=0.5)
    before = [parameter.clone() for parameter in model.parameters()]
    trainer = plain_trainer(tmp_path)
    trainer.fit(model, case.loader(), case.loader())
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss", f"val_{case.metric}"}
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    metrics = trainer.test(model, case.loader(), verbose=False)[0]
    assert set(metrics) == {"test_loss", f"test_{case.metric}"}
    assert metrics == pytest.approx(by_hand(model, case), rel=1e-5)


def by_hand(model, case):
    """What test logs, over all samples at once."""
    inputs, targets = case.data().tensors
    with torch.no_grad():
        outputs = model.eval()(inputs)
    if case.metric == "rmse":
        squares = (outputs.double() - targets.reshape(-1)) ** 2
        return {"test_loss": squares.mean().item(), "test_rmse": squares.mean().sqrt().item()}
    if outputs.ndim == 3 and targets.ndim == 1:
        outputs = outputs[:, -1]
    chances = outputs.softmax(-1).reshape(-1, outputs.shape[-1])
    targets = targets.reshape(-1)
    chosen = chances[torch.arange(len(targets)), targets]
    accuracy = (chances.argmax(-1) == targets).double().mean()
    return {"test_loss": -chosen.log().mean().item(), "test_accuracy": accuracy.item()}


@SMALL
def test_the_loss_falls(case, tmp_path):
    model = case.model(lr=0.02, momentum=0.9)
    trainer = plain_trainer(tmp_path, max_epochs=30)
    before = trainer.test(model, case.loader(), verbose=False)[0]["test_loss"]
    trainer.fit(model, case.loader(), case.loader())
    assert trainer.test(model, case.loader(), verbose=False)[0]["test_loss"] < 0.98 * before


@SMALL
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_other_precisions_come_near(case, precision, tmp_path):
    results = []
    for used in ("32-true", precision):
        model = case.model(lr=0.1)
        trainer = plain_trainer(tmp_path, precision=used, max_epochs=1)
        trainer.fit(model, case.loader(), case.loader())
        results.append(trainer.test(model, case.loader(), verbose=False)[0])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    expected, found = ({name: value for name, value in r.items() if "accuracy" not in name} for r in results)
    assert found == pytest.approx(expected, rel=1e-4 if precision == "64-true" else 0.1)


@EVERY
def test_evaluation_mode_gives_gradients_too(case):
    model = case.model().eval()
    model._trainer = None
    model.log = lambda *args, **kwargs: None
    model.training_step(next(iter(case.loader())), 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@EVERY
def test_the_hyper_parameters_reach_the_optimizer_and_are_saved(case):
    model = case.model(lr=0.2, momentum=0.5, weight_decay=0.01)
    optimizer = model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.2, 0.5)
    assert optimizer.defaults["weight_decay"] == 0.01
    assert model.configure_optimizers() is not optimizer
    assert dict(model.hparams).items() >= {**case.arguments, "lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}.items()
    own = set(type(model).__init__.__annotations__) - {"return", "kwargs"}
    assert set(model.hparams) == own | {"lr", "momentum", "weight_decay"}


@EVERY
def test_a_copy_is_independent(case):
    model = case.model()
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).fill_(1.0)
    assert not torch.equal(next(model.parameters()), next(other.parameters()))
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]  # no metric, no statistics
