"""A tiny GPT-2 whose adapters alone are trained: what is exchanged, what it learns, and what peft loads from it."""

import math

import pytest
import torch
from fedbc_lightning.models import LoRAGPT2
from helpers.boring import make_trainer
from lightning.pytorch import seed_everything
from torch.utils.data import TensorDataset

from fedbc_lightning import ConfigurationError, FedBC, FederatedDataModule

peft = pytest.importorskip("peft", reason="the extra llm is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated"),  # peft 0.21, loading an adapter
]

TINY = {"vocabulary_size": 11, "sequence_length": 8, "embedding_dim": 8, "num_layers": 1, "rank": 2}


def make(**options):
    seed_everything(0)
    return LoRAGPT2(**{**TINY, **options})


class Cycles(FederatedDataModule):
    """Three clients with sequences that count up by 1, 2 and 3."""

    num_clients = 3

    def client_train_dataset(self, client):
        tokens = (torch.arange(9) * (client + 1) + torch.arange(22)[:, None]) % 11
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    client_test_dataset = client_train_dataset


def train(folder, model, **options):
    trainer, data, algorithm = make_trainer(folder, **options), Cycles(batch_size=11), FedBC(dual_lr=0.1)
    trainer.fit(model, data, algorithm)
    return trainer, model, data, algorithm


def test_only_adapters_are_trained_and_exchanged():
    model = LoRAGPT2()
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    # A (r, inputs) and B (outputs, r) of c_attn, the two c_proj and c_fc, in two blocks
    assert sum(trained.values()) == 2 * 8 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))


def test_targets_may_be_the_next_token_or_all_that_follow():
    model = make()
    tokens = torch.randint(11, (4, 8))
    assert model(tokens).shape == (4, 8, 11)
    every, last = torch.randint(11, (4, 8)), torch.randint(11, (4,))
    logits = model(tokens)
    expected = torch.nn.functional.cross_entropy(logits[:, -1], last)
    assert model.loss(*model._apply_to((tokens, last))).item() == pytest.approx(expected.item())
    every[:, :3] = -100
    expected = torch.nn.functional.cross_entropy(logits[:, 3:].flatten(0, 1), every[:, 3:].flatten())
    assert model.loss(*model._apply_to((tokens, every))).item() == pytest.approx(expected.item())


def test_it_learns_with_frozen_weights_as_they_were(tmp_path):
    model = make(lr=0.05)
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer, *_ = train(tmp_path, model, max_rounds=15, clients_per_round=3, local_epochs=4)
    assert float(trainer.callback_metrics["loss/local"]) < 0.7 * math.log(11)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_gradient_checkpointing_gives_the_same_numbers(tmp_path):
    states = []
    for checkpointing in (False, True):
        model = make(gradient_checkpointing=checkpointing)
        train(tmp_path / str(checkpointing), model, max_rounds=2, clients_per_round=2)
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)


def test_peft_loads_a_clients_adapter(tmp_path):
    run = train(tmp_path / "run", make(lr=0.05), max_rounds=2, clients_per_round=3)
    folder = run[0].export(*run[1:], client=1, out=tmp_path / "adapter")
    base = make().network.unload()  # without adapters, as before peft wrapped it
    loaded = peft.PeftModel.from_pretrained(base, str(folder))
    run[0].export(*run[1:], client=1, out=tmp_path / "whole.ckpt")
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    model = make()
    model.load_state_dict(whole)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(loaded(input_ids=tokens).logits, model.eval()(tokens))


def test_impossible_arguments_are_refused():
    with pytest.raises(ConfigurationError, match="embedding_dim: got 9; it must be a multiple of num_heads, 2"):
        LoRAGPT2(**{**TINY, "embedding_dim": 9, "num_heads": 2})


@pytest.mark.parametrize("tokens", [torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 8), torch.zeros(2, 0).long()])
def test_inputs_that_are_no_tokens_are_refused(tokens):
    with pytest.raises(ConfigurationError, match=r"LoRAGPT2 takes tokens \(B, L\) of int64"):
        make()(tokens)
