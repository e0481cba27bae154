"""Models out in Hugging Face's formats: safetensors, and adapters that peft loads by itself."""

import json

import pytest
import safetensors
import torch
from helpers.boring import BoringData, BoringModel, make_model, make_trainer
from lightning.pytorch import LightningModule
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning import ConfigurationError, FedBC, FederatedDataModule
from fedbc_lightning.state.checkpoint import SOURCE

# peft 0.21 asks transformers 5.23 in the old way
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated"),
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
]


class Texts(FederatedDataModule):
    """Four clients with six sequences each of their own cycle of tokens."""

    num_clients = 4

    def client_train_dataset(self, client):
        tokens = (torch.arange(9) * (client + 1) + torch.arange(6)[:, None]) % 11
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    client_test_dataset = client_train_dataset


def base():
    transformers = pytest.importorskip("transformers", reason="the extra llm is not installed")
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    )


class Adapted(LightningModule):
    """A tiny GPT-2 with LoRA."""

    def __init__(self, network=None):
        super().__init__()
        peft = pytest.importorskip("peft", reason="the extra llm is not installed")
        network = network or base()
        torch.manual_seed(1)
        self.network = peft.get_peft_model(
            network, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )

    def training_step(self, batch, batch_idx):
        logits = self.network(input_ids=batch[0]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.5)


def train(folder, model):
    trainer, data, algorithm = make_trainer(folder, max_rounds=2), Texts(batch_size=3), FedBC(dual_lr=0.1)
    trainer.fit(model, data, algorithm)
    return trainer, model, data, algorithm


def test_peft_alone_loads_an_adapter(tmp_path):
    run = train(tmp_path, Adapted())
    import peft

    for client in (None, 2):
        folder = run[0].export(*run[1:], client=client, out=tmp_path / f"adapter_{client}")
        assert {path.name for path in folder.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
        whole = torch.load(run[0].export(*run[1:], client=client, out=tmp_path / f"{client}.ckpt"), weights_only=True)
        alone = peft.PeftModel.from_pretrained(base(), folder)
        tokens = torch.arange(8)[None]
        run[1].load_state_dict(whole["state_dict"])
        assert torch.equal(alone.eval()(tokens).logits, run[1].network.eval()(tokens).logits)
        assert not torch.equal(alone(tokens).logits, base().eval()(tokens).logits)
    with pytest.raises(ConfigurationError, match=r"out: .*adapter_2' is a folder"):
        run[0].export(*run[1:], client=2, out=folder)


@pytest.mark.parametrize("how", ["gradient checkpointing", "bfloat16 base"])
def test_large_models_means_train(tmp_path, how):
    network = base()
    if how == "gradient checkpointing":
        network.gradient_checkpointing_enable({"use_reentrant": False})
        plain = train(tmp_path / "plain", Adapted())[1].state_dict()
    else:
        network = network.to(torch.bfloat16)
    model = Adapted(network)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(tmp_path / "other", model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
        if how == "bfloat16 base":
            assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    if how == "gradient checkpointing":
        torch.testing.assert_close(dict(model.state_dict()), dict(plain))


def test_any_model_as_safetensors(tmp_path):
    run = make_trainer(tmp_path), make_model(lr=0.05), BoringData(), FedBC(dual_lr=0.1)
    run[0].fit(*run[1:])
    path = run[0].export(*run[1:], client=2, out=tmp_path / "m.safetensors")
    whole = torch.load(run[0].export(*run[1:], client=2, out=tmp_path / "m.ckpt"), weights_only=True)
    with safetensors.safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert json.loads(file.metadata()[SOURCE]) == whole[SOURCE]
    torch.testing.assert_close(found, dict(whole["state_dict"]), rtol=0, atol=0)
    BoringModel().load_state_dict(found)
