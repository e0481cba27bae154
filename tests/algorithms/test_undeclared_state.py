"""State of a method that is kept in attributes is lost on resume: one line says so, and none for the methods here."""

import logging
from typing import Any

import pytest
import torch
from helpers.quadratics import QuadraticData, QuadraticModule

from algorithms.running import QUIET
from fedbc_lightning import FederatedAlgorithm, FederatedTrainer
from fedbc_lightning.server import ServerCallback, WeightedAverage

LINE = "is not declared"


class Heavy(ServerCallback):
    """Server momentum whose vector is a plain attribute."""

    follows_aggregation = True

    def __init__(self) -> None:
        self.velocity: Any = None

    def on_aggregate(self, server: Any, clients: Any, sums: Any) -> None:
        step = server.staged("z") - server.z
        self.velocity = step if self.velocity is None else 0.9 * self.velocity + step
        server.stage("z", server.z + self.velocity)


class Declared(ServerCallback):
    """The same momentum, declared; what is computed once, a flag, and what is gone at the end are no state."""

    follows_aggregation = True
    size: int | None = None
    direction: Any = None
    has_begun = False

    def declare_state(self, state: Any) -> None:
        state.server_vector("velocity")

    def on_aggregate(self, server: Any, clients: Any, sums: Any) -> None:
        self.size = server.z.numel()
        self.has_begun = server.round > 2
        self.direction = server.staged("z") - server.z

    def on_round_end(self, server: Any, clients: Any) -> None:
        velocity, self.direction = 0.9 * server["velocity"] + self.direction, None
        server.stage("velocity", velocity)
        server.stage("z", server.z + velocity)


class Method(FederatedAlgorithm):
    """FedAvg with a part after the mean; with ``counts`` it also counts its calls."""

    def __init__(self, part: ServerCallback, *, counts: bool = False) -> None:
        self.part, self.counts, self.num_calls = part, counts, 0

    def client_update(self, engine: Any, cohort: Any, server: Any) -> None:
        self.num_calls += self.counts
        engine.solve(cohort, start=server.model)

    def server_callbacks(self, engine: Any) -> list[ServerCallback]:
        return [WeightedAverage(by="samples"), self.part]


def fit(root: Any, algorithm: Any, rounds: int, ckpt_path: str | None = None, **options: Any) -> torch.Tensor:
    settings = {"max_rounds": rounds, "default_root_dir": root, "seed": 3}
    trainer, module = FederatedTrainer(**QUIET | settings | options), QuadraticModule()
    trainer.fit(module, QuadraticData(batch_size=2), algorithm, ckpt_path)
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def test_a_plain_attribute_that_changes_is_named_once_with_what_to_write(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        fit(tmp_path, Method(Heavy(), counts=True), 4)
    (line,) = [message for message in caplog.messages if LINE in message]
    assert line.startswith("algorithm: Heavy.velocity, Method.num_calls changed from one round to the next")
    assert "state.server_vector('velocity')" in line


@pytest.mark.parametrize("part", [Heavy, Declared])
def test_the_line_tells_the_truth_about_resuming(tmp_path, caplog, part):
    whole = fit(tmp_path / "whole", Method(part()), 4)
    options = {"enable_checkpointing": True}
    fit(tmp_path / "halves", Method(part()), 2, **options)
    with caplog.at_level(logging.INFO):
        halves = fit(tmp_path / "halves", Method(part()), 4, "last", **options)
    is_declared = part is Declared
    assert torch.equal(whole, halves) == is_declared
    assert (LINE not in caplog.text) == is_declared
