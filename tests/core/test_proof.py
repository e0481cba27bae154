"""Only steps that are functions of weights, batch and compared values are proven; the proof itself changes nothing."""

import copy

import pytest
import torch
from helpers import stateful_steps
from helpers.boring import BoringData, make_trainer
from helpers.stateful_steps import WAYS, Plain

from fedbc_lightning import ConfigurationError, FedAvg
from fedbc_lightning.engines import step_recorder
from fedbc_lightning.engines.proof import prove
from fedbc_lightning.engines.recording import NotRecordableError
from fedbc_lightning.shim import ModuleTrainer

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


@pytest.mark.parametrize("name", WAYS)
def test_neither_engine_records_or_maps_it(tmp_path, monkeypatch, name):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    monkeypatch.setenv("FEDBC_STEPS", "0")
    options = {"eval_every_n_rounds": 0, "clients_per_round": 2, "max_rounds": 1}
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, name="one after another", **options)
    trainer.fit(Plain(WAYS[name]()), BoringData(), FedAvg())
    recorder = trainer.federation.engine.recorder
    assert recorder.reason is not None
    assert not recorder._found
    with pytest.raises(ConfigurationError, match=r"trainer\.engine: vectorized .*; use engine: sequential"):
        make_trainer(tmp_path, name="together", engine="vectorized", **options).fit(
            Plain(WAYS[name]()), BoringData(), FedAvg()
        )
