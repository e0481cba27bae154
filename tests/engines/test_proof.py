"""Only steps that are functions of weights, batch and compared values are proven; the proof itself changes nothing."""

import copy
import os

import pytest
import torch
from helpers import stateful_steps
from helpers.boring import BoringData, make_trainer
from helpers.model_cases import CASES
from helpers.stateful_steps import WAYS, Plain
from torch import nn
from torch.nn import functional

from fedbc_lightning import ConfigurationError, FedAvg, recordable
from fedbc_lightning.engines.recorded import step_recorder
from fedbc_lightning.engines.recorded.proof import prove
from fedbc_lightning.engines.recorded.recording import NotRecordableError
from fedbc_lightning.module.trainer_proxy import ModuleTrainer

BATCH = [torch.linspace(-1, 1, 40).view(4, 10), torch.tensor([0, 1, 2, 0])]


class Listener:
    def log(self, name, value, **options):
        pass


def proof_of(module, batch=BATCH):
    module._trainer = ModuleTrainer(max_rounds=3, current_round=1)
    module.log = Listener().log
    return prove(module, "training_step", batch, takes_index=True, log=Listener.log)


def visible_state():
    """What the ways of ``stateful_steps`` change, as far as it can be compared."""
    found = vars(stateful_steps)
    return copy.deepcopy((
        found["STEP"], found["COUNTS"], vars(found["METER"]), found["Meter"].total, found["LOSS"].calls,
        found["function_attribute"].count, found["default_argument"].__defaults__, found["Counted"].calls,
        found["RNG"].bit_generator.state, vars(found["LOCAL"]), found["VARIABLE"].get(), torch.get_rng_state().tolist(),
    ))  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_step_with_state_is_not_proven_and_not_disturbed(name):
    module = Plain(WAYS[name]())
    fields, weights = dict(vars(module)), copy.deepcopy(module.state_dict())
    before = visible_state()
    with pytest.raises(NotRecordableError):
        proof_of(module)
    assert visible_state() == before
    assert {k: v for k, v in vars(module).items() if k not in ("_trainer", "log")} == {
        k: v for k, v in fields.items() if k not in ("_trainer", "log")
    }
    for key, value in module.state_dict().items():
        assert torch.equal(value, weights[key])


ERRORS_AS_WRITTEN = {"log by function", "freezing"}
"""Both are refused by name while the step runs as written."""


@pytest.mark.parametrize("name", [name for name in WAYS if name not in ERRORS_AS_WRITTEN])
def test_neither_engine_records_or_maps_it(tmp_path, monkeypatch, name):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    monkeypatch.setenv("FEDBC_STEPS", "0")
    options = {"eval_every_n_rounds": 0, "clients_per_round": 2, "max_rounds": 1}
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, name="one after another", **options)
    trainer.fit(Plain(WAYS[name]()), BoringData(), FedAvg())
    recorder = trainer.federation.bench.recorder
    assert recorder.reason is not None
    assert not recorder._found
    with pytest.raises(ConfigurationError, match=r"trainer\.engine: vectorized .*; use engine: sequential"):
        make_trainer(tmp_path, name="together", engine="vectorized", **options).fit(
            Plain(WAYS[name]()), BoringData(), FedAvg()
        )


class Ordinary(Plain):
    """What ordinary modules are made of: hyper-parameters, containers, dropout, penalties, logged dicts."""

    def __init__(self, width=8, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.extra = nn.ModuleDict({"norm": nn.LayerNorm(10), "drop": nn.Dropout(0.5)})
        self.settings = {"scale": 2.0, "names": ["weight"]}
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def features(self, inputs, *, scale=1.0, **others):
        for number, layer in enumerate(self.layers):
            inputs = functional.relu(layer(inputs), inplace=True) + number
        return self.extra["drop"](self.extra["norm"](inputs)) * scale

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        if (found := self.settings.get("scale")) is None or not self.training:
            raise ValueError(f"no scale in {len(self.settings)} settings")
        outputs = self(self.features(inputs, scale=found, **{"unused": 1}))
        penalty = sum(p.pow(2).sum() for name, p in self.named_parameters() if name.split(".")[-1] == "weight")
        loss = self.criterion(outputs, targets) + self.hparams.rate * penalty
        self.log_dict(
            {"train_accuracy": (outputs.argmax(1) == targets).float().mean(), "train_width": self.hparams.width}
        )
        with torch.no_grad():
            self.log("train_norm", self.net[0].weight.norm())
        return {"loss": loss, "parts": [part * 1 for part in (loss, penalty)]}


class Attentive(Plain):
    """A recurrent layer on top of self-attention."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(10, 2, 16, batch_first=True)
        self.attention = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(10, 10, batch_first=True)

    def forward(self, inputs):
        return self.net(self.recurrent(self.attention(inputs[:, None]))[0][:, -1])


@pytest.mark.parametrize("module", [Plain, Ordinary, Attentive])
def test_ordinary_steps_are_proven(module):
    module = module()
    assert proof_of(module).holds()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_steps_of_the_models_here_are_proven(case):
    inputs, targets = case.data(4).tensors
    assert proof_of(case.model(), [inputs, targets]).holds()


CHANGES = {
    "a hyper-parameter": lambda module: module.hparams.update(rate=0.2),
    "an item": lambda module: module.settings.update(scale=3.0),
    "a layer": lambda module: module.layers.__setitem__(0, nn.Linear(10, 10)),
    "one more layer": lambda module: module.layers.append(nn.Linear(10, 10)),
    "a setting of a layer": lambda module: setattr(module.extra["drop"], "p", 0.1),
    "a frozen weight": lambda module: module.net[0].weight.requires_grad_(False),
    "a hook": lambda module: module.net[0].register_forward_hook(lambda *args: None),
    "a method": lambda module: setattr(module, "features", lambda inputs, **options: inputs),
    "a forward": lambda module: setattr(module.net[0], "forward", lambda inputs: inputs),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_proof_ends_with_what_it_rests_on(name):
    module = Ordinary()
    proof = proof_of(module)
    module.unused = 1
    assert proof.holds()
    CHANGES[name](module)
    assert not proof.holds()


def test_a_value_that_is_given_anew_is_the_same():
    module = Ordinary()
    proof = proof_of(module)
    module.hparams["rate"] = float("0.1")
    assert proof.holds()


def test_the_user_vouches_for_a_function():
    @recordable
    def known_to_be_harmless(module):
        os.stat(__file__)
        return 1.0

    assert proof_of(Plain(known_to_be_harmless)).holds()
    with pytest.raises(NotRecordableError, match="stat"):
        proof_of(Plain(lambda module: float(bool(os.stat(__file__)))))
