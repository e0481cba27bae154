"""What a recorded or mapped step cannot do may come in any round: then it runs as written, or is refused by name.

What is registered × the round × the way in which steps are taken; what is called, how often and the weights are those
of steps as written. ``ALL_CASES=1`` runs all cases, else every seventh one is run.
"""

import itertools
import os

import pytest
import torch
from helpers import steps
from helpers.boring import BoringData
from helpers.steps import Smooth
from lightning.pytorch import Callback
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedbc_lightning import ConfigurationError
from fedbc_lightning.engines import choice
from fedbc_lightning.engines.recorded import step_recorder

ROUNDS = 3


def on_node(module, call):
    """A hook on the node that accumulates a gradient; it lives as long as somebody keeps the node."""
    node = get_gradient_edge(module.net[0].weight).node
    return node, node.register_hook(call)


# What is registered -> how
KINDS = {
    "step pre-hook": lambda module, call: module.optimizers().register_step_pre_hook(call),
    "step post-hook": lambda module, call: module.optimizers().register_step_post_hook(call),
    "hook of all optimizers": lambda module, call: register_optimizer_step_post_hook(call),
    "parameter": lambda module, call: module.net[0].weight.register_hook(call),
    "accumulated": lambda module, call: module.net[0].weight.register_post_accumulate_grad_hook(call),
    "node": on_node,
    "forward": lambda module, call: module.net[0].register_forward_hook(call),
    "forward before": lambda module, call: module.net[0].register_forward_pre_hook(call),
    "backward": lambda module, call: module.net[2].register_full_backward_hook(call),
}
CASES = list(itertools.product(KINDS, (1, ROUNDS), ("recorded", "vectorized", "auto")))
ONE_IN = 1 if os.environ.get("ALL_CASES") else 7


class Registering(Callback):
    """Registers something at the start of a round, and counts how often it is called."""

    def __init__(self, kind, first):
        self.kind, self.first, self.calls = kind, first, 0

    def on_round_start(self, trainer, pl_module):
        if trainer.current_round == self.first:
            self.held = KINDS[self.kind](pl_module, self.count)

    def count(self, *args):
        self.calls += 1

    def teardown(self, trainer, pl_module, stage):
        if self.kind == "hook of all optimizers":
            self.held.remove()


def run(root, kind, first, engine):
    options = {"engine": "sequential" if engine in ("written", "recorded") else engine}
    callback = Registering(kind, first)
    options |= {"record_steps": engine != "written", "callbacks": [callback], "max_rounds": ROUNDS}
    trainer = steps.fit(root, Smooth, data=lambda: BoringData(500), **options)
    return callback.calls, trainer.federation.server.z


@pytest.fixture
def early(monkeypatch):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    monkeypatch.setitem(choice.PAYS, "cpu", (2, 2_000))


@pytest.mark.parametrize(("kind", "first", "engine"), CASES[::ONE_IN])
def test_what_is_registered_in_any_round_is_called_or_refused(tmp_path, early, kind, first, engine):
    if engine == "vectorized":
        with pytest.raises(ConfigurationError, match=r"vectorized cannot train with hooks on .*; use engine: sequ"):
            run(tmp_path, kind, first, engine)
        return
    expected, found = run(tmp_path / "written", kind, first, "written"), run(tmp_path / "found", kind, first, engine)
    assert found[0] == expected[0] > 0
    tolerance = 0.0 if engine == "recorded" else 1e-6
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)


class Tempered(Smooth):
    """Learns a temperature that is no parameter, from a round on."""

    def __init__(self, first=1):
        super().__init__()
        self.held, self.first = {"temperature": torch.ones(())}, first

    def training_step(self, batch, batch_idx):
        temperature = self.held["temperature"]
        if temperature.grad is not None:
            temperature.data -= 0.01 * temperature.grad
            temperature.grad = None
        if self.trainer.current_round == self.first:
            temperature.requires_grad_()
        return super().training_step(batch, batch_idx) * temperature


@pytest.mark.parametrize("first", [1, ROUNDS])
def test_a_learned_tensor_that_is_no_parameter_gets_its_gradients(tmp_path, early, first):
    ended = []
    for record in (False, True):
        trainer = steps.fit(tmp_path / str(record), lambda: Tempered(first), max_rounds=ROUNDS, record_steps=record)
        model = trainer.federation.user.module
        ended.append([model.held["temperature"].detach(), *model.parameters()])
    torch.testing.assert_close(*ended, rtol=0.0, atol=0.0)
    assert ended[0][0] != 1
    with pytest.raises(ConfigurationError, match="a gradient for a tensor that is no parameter of the module"):
        steps.fit(tmp_path, lambda: Tempered(first), max_rounds=ROUNDS, engine="vectorized")
