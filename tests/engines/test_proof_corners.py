"""Corners of Python and of torch that a proof must not overlook: unseen code, deciding values, other paths, changes."""

from contextlib import suppress

import pytest
import torch
from helpers.changing_steps import CHANGES, FORMS, MODULES, VALUES
from helpers.corner_steps import UNSEEN, happens, traces
from helpers.iterator_steps import ITERATORS
from helpers.path_steps import WITH_TRACE, WITHOUT_TRACE
from helpers.stateful_steps import Plain
from test_proof import BATCH, proof_of
from torch import nn
from torch.nn import functional

from fedbc_lightning.engines.recorded.recording import NotRecordableError


def refused(module):
    """Whether the step is refused without a trace; an accepted one must hold and leave none either."""
    before, weights = traces(), {key: value.clone() for key, value in module.state_dict().items()}
    try:
        assert proof_of(module).holds()
        found = False
    except NotRecordableError:
        found = True
    assert traces() == before
    for key, value in module.state_dict().items():
        assert torch.equal(value, weights[key])
    return found


def leaves_traces(module):
    before = traces()
    module.training_step([part.clone() for part in BATCH], 0)
    return traces() != before


@pytest.mark.parametrize("name", UNSEEN)
def test_code_that_would_run_unseen_is_refused(name):
    module = Plain(UNSEEN[name]())
    assert refused(module)
    assert leaves_traces(module)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_does_more_than_its_step_shows_is_refused(module):
    assert refused(module())


@pytest.mark.parametrize("name", VALUES)
def test_a_way_to_look_at_values_is_refused(name):
    assert refused(Plain(VALUES[name]))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_may_be_looked_at(name):
    module = Plain(FORMS[name])
    proof = proof_of(module)
    before = module.way(module)
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(0.37)
    assert proof.holds()
    assert module.way(module) == before


@pytest.mark.parametrize("way", [*WITH_TRACE, *ITERATORS])
def test_a_step_whose_real_path_leaves_a_trace_is_refused(way):
    module = Plain(way)
    assert refused(module)
    assert leaves_traces(module)


@pytest.mark.parametrize("way", WITHOUT_TRACE)
def test_the_path_that_is_evaluated_is_the_real_one(way):
    module = Plain(way)
    assert not refused(module)
    assert not leaves_traces(module)


@pytest.fixture
def default_device():
    yield
    torch.set_default_device(None)
    with suppress(AttributeError):  # torch 2.8 cannot tell the default device once it was reset in this way
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("name", CHANGES)
def test_a_proof_ends_when_the_step_gives_something_else(name):
    way, change = CHANGES[name]()
    proof = proof_of(Plain(way))
    assert proof.holds()
    before = way(None)
    change()
    assert not proof.holds()
    assert way(None) != before


class Convolving(Plain):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, inputs):
        return self.net(self.layer(inputs[:, None])[:, 0])


REPLACEABLE = [(functional, "linear"), (nn.Module, "__call__"), (nn.Conv1d, "_conv_forward")]


@pytest.mark.parametrize(("owner", "name"), REPLACEABLE)
def test_a_replaced_function_of_torch_is_noticed(monkeypatch, owner, name):
    module, original = Convolving(), getattr(owner, name)
    proof = proof_of(module)

    def replacement(*args, **options):
        return happens(original(*args, **options))

    assert proof.holds_for_torch()
    monkeypatch.setattr(owner, name, replacement)
    assert not (proof.holds() and proof.holds_for_torch())
    assert refused(module)
    assert leaves_traces(module)
