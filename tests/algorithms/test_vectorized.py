"""Every algorithm on the vectorized engine, with buffers: the sequential engine's numbers, or a refusal by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.boring import read_csv
from helpers.marks import of_each
from helpers.quadratics import QuadraticData, QuadraticModule

from algorithms.registry import METHODS
from algorithms.running import QUIET, Setting
from fedbc_lightning import ConfigurationError, FederatedTrainer
from fedbc_lightning.algorithms import APFL, L2GD, MOON, FedLiLS, PerFedAvg, PerFedBC, PFedMe
from fedbc_lightning.federation.checkpoint_content import module_state_of, state_of


class Averaging(QuadraticModule):
    """Its buffers, which are moved in place and assigned anew, have a part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.ones(4, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.center.mul_(0.9).add_(batch[1].mean(0), alpha=0.1)
            self.count = self.count + 1
        return loss + 0.1 * (torch.cat(list(self.parameters())) - self.center).square().sum()


OWN_STEPS = (APFL, FedLiLS, PerFedAvg, PerFedBC, PFedMe)
REFUSED = [setting for setting in METHODS if isinstance(setting.build(), (L2GD, MOON))]
EQUAL = [setting for setting in METHODS if setting not in REFUSED]


def run(root: Path, setting: Setting, engine: str, rounds: int) -> FederatedTrainer:
    """Rounds of 4 clients in cohorts of 3, with batches of several shapes."""
    options = {"max_rounds": rounds, "clients_per_round": 4, "local_epochs": 2, "seed": 3, "name": engine}
    if isinstance(setting.build(), OWN_STEPS):
        options |= {"local_epochs": None, "local_steps": 5}  # as many for each client: full cohorts
    trainer = FederatedTrainer(**QUIET | options | setting.options | {"default_root_dir": str(root), "engine": engine})
    data = QuadraticData(batch_size=2)
    trainer.fit(Averaging(), datamodule=data, algorithm=setting.build())
    return trainer


def assert_close(left: Any, right: Any, path: str = "") -> None:
    if isinstance(left, torch.Tensor) and left.is_floating_point():
        scale = max(float(right.abs().max()) if right.numel() else 0.0, 1e-3)
        torch.testing.assert_close(
            left, right, rtol=0, atol=1e-10 * scale, equal_nan=True, msg=lambda m: f"{path}: {m}"
        )
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_close(left[key], right[key], f"{path}/{key}")


def assert_tables_alike(one: Any, other: Any, bits: tuple[str, ...] = (), bound: float = 1e-7) -> None:
    """Rows of clients and metrics, but for times: to ``bound``, those in ``bits`` exactly."""
    for name in ("clients", "metrics"):
        tables = [read_csv(Path(trainer.log_dir) / f"{name}.csv") for trainer in (one, other)]
        for row, expected in zip(*tables, strict=True):
            assert row.keys() == expected.keys()
            for key in row.keys() - {"time/round_seconds", "time/eval_seconds"}:
                if "." in expected[key] and name not in bits:
                    assert float(row[key]) == pytest.approx(float(expected[key]), rel=bound, abs=1e-9), key
                else:
                    assert row[key] == expected[key], key


@pytest.fixture(autouse=True)
def small_cohorts(monkeypatch):
    monkeypatch.setattr("fedbc_lightning.engines.stacked.vectorized.MAX_COHORT", 3)


@of_each(REFUSED)
def test_components_and_features_are_refused(tmp_path, setting):
    reason = "compares features by three models" if isinstance(setting.build(), MOON) else "components of its own"
    message = rf"trainer\.engine: vectorized .* {reason}.*use engine: sequential"
    with pytest.raises(ConfigurationError, match=message):
        run(tmp_path, setting, "vectorized", rounds=1)


@of_each(EQUAL)
def test_the_sequential_engines_numbers(tmp_path, setting):
    stacked, single = (run(tmp_path, setting, engine, rounds=6) for engine in ("vectorized", "sequential"))
    states = [state_of(trainer.federation) | module_state_of(trainer.federation) for trainer in (stacked, single)]
    for state in states:
        state.pop("fingerprint")
    assert_close(*states)
    assert_tables_alike(stacked, single)
