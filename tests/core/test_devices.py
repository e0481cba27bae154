"""``trainer.deterministic``: torch is set so inside a run, for every step of it, and as before afterwards."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers.boring import BoringData, BoringModel, make_model, make_trainer
from torch import Tensor

from fedbc_lightning import ConfigurationError, FedAvg


def settings() -> tuple[bool, bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
    )  # fmt: skip


class Telling(BoringModel):
    """Writes down how torch is set in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, ...]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.add(settings())
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.add(settings())
        super().test_step(batch, batch_idx)


class PutsInOrderOfArrival(BoringModel):
    """Does what torch has no deterministic algorithm for, on any device."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([0.0, 0.0])).sum()


@pytest.mark.parametrize("before", [(False, False, False, True), (True, True, True, False)])
@pytest.mark.parametrize(
    ("asked", "inside"),
    [
        (None, (..., ..., True, False)),
        (False, (..., ..., ..., ...)),
        (True, (True, False, True, False)),
        ("warn", (True, True, True, False)),
    ],
)
def test_how_torch_is_set(tmp_path, monkeypatch, before, asked, inside):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    enabled, warns, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    model = make_model(Telling)
    make_trainer(tmp_path, deterministic=asked).fit(model, BoringData(), FedAvg())
    assert model.seen == {tuple(was if now is ... else now for was, now in zip(before, inside, strict=True))}
    assert settings() == before
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == bool(asked)


def test_an_operation_that_has_no_such_algorithm(tmp_path):
    model, said = make_model(PutsInOrderOfArrival), "put_ does not have a deterministic implementation"
    with pytest.raises(RuntimeError, match=said):
        make_trainer(tmp_path, deterministic=True, max_rounds=1).fit(model, BoringData(), FedAvg())
    with pytest.warns(UserWarning, match=said):
        make_trainer(tmp_path, deterministic="warn", max_rounds=1).fit(model, BoringData(), FedAvg())


@pytest.mark.parametrize("word", ["always", 0, 1])
def test_another_word(tmp_path, word):
    said = rf"trainer\.deterministic: got {word!r}; give true, false, warn or null"
    with pytest.raises(ConfigurationError, match=said):
        make_trainer(tmp_path, deterministic=word)
