"""``trainer.deterministic``: torch is set so inside a run, for every step of it, and as before afterwards."""

import os
from typing import Any

import pytest
import torch
from helpers.boring import BoringData, BoringModel, make_model, make_trainer
from torch import Tensor

from fedbc_lightning import FedAvg
from fedbc_lightning.core.devices import tf32_used


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


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch below 2.9 does not tell")
def test_tf32_is_said_of_float32_on_gpus():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    found = [tf32_used(torch.device(*of), torch.float32) for of in (("cuda", 0), ("cpu",))]
    torch.set_float32_matmul_precision(before)
    assert found == [" (TF32 in matmuls and convolutions)", ""]
