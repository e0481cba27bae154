"""A mistake in a method of one's own is one line that says what, where, and how to mend it."""

import pytest
import torch
from helpers.boring import BoringData, BoringModel, make_trainer

from fedbc_lightning.algorithms import FedAvg, FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError, notes_of
from fedbc_lightning.server import WeightedAverage

HERE = r"\(test_mistakes_in_methods.py, line \d+\)"


class Own(FederatedAlgorithm):
    def declare_state(self, state):
        state.client_scalar("rate")

    def client_update(self, engine, cohort, server):
        engine.solve(cohort, server.model)
        self.after(cohort, server)

    def after(self, cohort, server):
        """A mistake stands here."""

    def server_callbacks(self, engine):
        return [WeightedAverage()]


class Part(WeightedAverage):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def on_aggregate(self, server, clients, sums):
        self.act(server)


def fit(tmp_path, algorithm):
    make_trainer(tmp_path, local_epochs=1, max_rounds=1).fit(BoringModel(), BoringData(), algorithm)


def own(**methods):
    return type("Mine", (Own,), methods)()


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"client_update": lambda *_: None}, rf"Mine.client_update {HERE} trained nobody; call engine.solve"),
        ({"after": lambda self, c, s: c.stage("rat", c.w)}, r"cohort\['rat'\] is no declared .*; did you mean 'rate'"),
        (
            {"after": lambda self, c, s: c.stage("rate", c.w[:, :2])},
            r"a row for each client, was given the shape \(\d, 2\); give a tensor of the shape \(\d,\)",
        ),
        ({"after": lambda self, c, s: c.stage("rate", 3.0)}, r"was given 3.0; give a tensor"),
        ({"after": lambda self, c, s: s["zz"]}, r"server\['zz'\] is no declared state; did you mean 'z'"),
        ({"after": lambda self, c, s: s.staged("epsilon")}, r"\['epsilon'\] is no .*; declare it in declare_state"),
        (
            {"declare_state": lambda _, s: s.server_vector("m", for_clients=False), "after": lambda _, c, s: s["m"]},
            r"clients read server\['m'\], which is declared with for_clients=False",
        ),
        ({"client_update": lambda self, e, c, s: e.solve(c, s.z[:5])}, r"solve was given a start of shape \(5,\)"),
        ({"server_callbacks": lambda *_: None}, rf"Mine.server_callbacks {HERE} returned None; is a 'return' missing"),
        ({"server_callbacks": lambda *_: WeightedAverage()}, "WeightedAverage object at .*; return a list of parts"),
        ({"server_callbacks": lambda *_: [WeightedAverage]}, r"returned \[<class .*WeightedAverage'>\]; return a list"),
        ({"server_callbacks": lambda *_: [FedAvg()]}, r"returned \[<.*FedAvg object at .*>\]; return a list"),
        ({"num_exchanges": lambda *_: None}, rf"Mine.num_exchanges {HERE} returned None; .* Return a whole number"),
        ({"num_exchanges": lambda *_: 0.5}, "num_exchanges .* returned 0.5; return a whole number"),
        ({"global_model": lambda *_: None}, r"Mine.global_model .* returned None; .* Return a model, a vector"),
        (
            {"has_local_model": True, "local_model": lambda *_: torch.zeros(3)},
            r"local_model .* a tensor of shape \(3,\) of torch.float32; return a model",
        ),
    ],
)
def test_a_mistake_in_a_method_is_one_line(tmp_path, methods, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        fit(tmp_path, own(**methods))
    assert str(caught.value).startswith("algorithm: ")


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda server: server.stage("zz", server.z), r"server\['zz'\] is no declared state"),
        (lambda server: server.stage("z", server.z[:5]), r"the shape \(5,\); give a tensor of the shape \(1\d\d,\)"),
        (lambda server: server.stage("z", None), "was given None; give a tensor"),
        (lambda server: server.stage_model(server.z[:5]), r"stage_model\(...\) was given the shape \(5,\); give"),
    ],
    ids=["undeclared", "shape", "None", "model"],
)
def test_a_mistake_in_a_server_part_is_one_line_and_says_where(tmp_path, act, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        fit(tmp_path, own(server_callbacks=lambda self, engine: [Part(act)]))
    assert notes_of(caught.value) == ["round 1, Part.on_aggregate"]


def test_an_exception_in_a_method_says_where(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, own(after=lambda self, cohort, server: 1 / 0))
    assert notes_of(caught.value)[0].endswith(", round 1")
    assert notes_of(caught.value)[0].startswith("client")


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (FederatedAlgorithm(), r"algorithm: FederatedAlgorithm has no server_callbacks; define server_callbacks"),
        (FedAvg, r"algorithm: got the class FedAvg, not an object such as FedAvg\(...\)"),
        (BoringModel(), r"algorithm: got BoringModel.*The order is \(model, datamodule, algorithm\)"),
    ],
    ids=["nothing", "class", "order"],
)
def test_what_is_no_method_is_refused_before_any_work(tmp_path, algorithm, says):
    with pytest.raises(ConfigurationError, match=f"(?s){says}"):
        fit(tmp_path, algorithm)
