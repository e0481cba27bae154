"""A layer that a client's hooks freeze for a time is moved by no method, or the method says so in one line."""

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers.marks import of_each
from helpers.user_modules import CLASSES, FEATURES, ThawingClassifier, UserData
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from algorithms.registry import METHODS
from algorithms.running import QUIET
from fedbc_lightning import SCAFFOLD, ConfigurationError, FederatedTrainer

REFUSED = ("perfed", "fedlils", "pfedme", "apfl", "moon", "composed-scaffold", "fedrep", "fedbabu", "fednova")
"""Methods with steps of their own or that count equal steps, and those that need more than this module has."""


class Frozen(ThawingClassifier):
    """Whose first layer is frozen in each second epoch, and that keeps how far it moved in these and in others."""

    def __init__(self):
        super().__init__()
        self.moved = {True: [0.0], False: [0.0]}

    def on_client_start(self, client):
        self.net[-1].bias.requires_grad_(False)

    def on_train_epoch_start(self):
        assert not self.net[-1].bias.requires_grad, "a second training of the client thaws what on_client_start froze"
        self.before = self.net[0].weight.detach().clone()
        self.net[0].requires_grad_(self.current_epoch % 2 == 0)

    def on_train_epoch_end(self):
        self.moved[self.net[0].weight.requires_grad].append((self.net[0].weight - self.before).abs().max().item())
        self.net[0].requires_grad_(True)  # methods with steps of their own must have seen it before


@of_each(METHODS)
def test_a_layer_that_hooks_freeze_stays_or_is_refused(tmp_path, setting):
    torch.manual_seed(0)
    settings = QUIET | {"default_root_dir": str(tmp_path), "max_rounds": 2, "local_epochs": 2}
    with pytest.raises(ConfigurationError) if setting.name.startswith(REFUSED) else nullcontext():
        FederatedTrainer(**settings).fit(model := Frozen(), datamodule=UserData((20, 12)), algorithm=setting.build())
    if not setting.name.startswith(REFUSED):
        assert max(model.moved[False]) < 1e-6
        assert max(model.moved[True]) > 1e-4 or len(model.moved[True]) == 1  # L2GD and its kin have no epochs


SIZES, ROUNDS, LR = (14, 9), 4, 0.1


class Layers(LightningModule):
    """Hooks freeze the first layer: in epoch 0, in round 2, and in round 3 where the rate is not 0."""

    def __init__(self, momentum):
        super().__init__()
        self.momentum = momentum
        self.net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=LR, momentum=self.momentum)
        return [optimizer], [LambdaLR(optimizer, lambda epoch: self.rate(epoch) / LR)]

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.moves(self.trainer.current_round, self.current_epoch, is_end=False))

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=self.momentum > 0)

    def moves(self, round, epoch, is_end):
        """Whether a step moves the first layer."""
        return {2: False, 3: epoch == 1}.get(round, epoch > 0)

    def rate(self, epoch):
        return LR * (epoch != 1) / (1 + epoch)


class ByHand(Layers):
    """The first layer's optimizer accumulates, and steps in a hook at the end of epochs, but not in round 2."""

    automatic_optimization = False

    def configure_optimizers(self):
        return [SGD(self.net[k].parameters(), lr=LR, momentum=self.momentum) for k in (0, 2)]

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers()[1].step()
        self.optimizers()[1].zero_grad()

    def on_train_epoch_start(self):
        self.optimizers()[0].zero_grad()

    def on_train_epoch_end(self):
        if self.moves(self.trainer.current_round, self.current_epoch, is_end=True):
            self.optimizers()[0].step()

    def moves(self, round, epoch, is_end):
        return round != 2 and is_end

    def rate(self, epoch):
        return LR


def scaffold_by_hand(module, data, control):
    """SCAFFOLD's Algorithm 1 in plain torch: each layer has its own steps, and without any its c_i stays."""
    parameters = list(module.parameters())
    sizes = torch.tensor([sum(p.numel() for p in module.net[k].parameters()) for k in (0, 2)])
    z = parameters_to_vector(parameters).detach()
    c, own = torch.zeros_like(z), torch.zeros(len(SIZES), len(z), dtype=z.dtype)
    for round in range(1, ROUNDS + 1):
        trained, before = [], own.clone()
        for client in range(len(SIZES)):
            w, (gradient, total, count, moved, velocity) = z, torch.zeros(5, len(z), dtype=z.dtype)
            loader = data.client_train_dataloader(client=client, round=round, seed=0)
            for epoch in range(3):
                loader.set_epoch(epoch)
                for batch_idx, (x, y) in enumerate(loader):
                    vector_to_parameters(w, parameters)
                    loss = cross_entropy(module.net(x.double()), y)
                    gradient = gradient + parameters_to_vector(torch.autograd.grad(loss, parameters))
                    is_end, lr = batch_idx + 1 == len(loader), module.rate(epoch)
                    takes = torch.tensor([module.moves(round, epoch, is_end), True]).repeat_interleave(sizes)
                    total, count, moved = total + takes * gradient, count + takes, moved + takes * lr
                    moving = module.momentum * velocity + gradient + c - own[client]
                    velocity = torch.where(takes, moving, velocity)
                    w = w - lr * takes * velocity
                    gradient = gradient * ~takes * (isinstance(module, ByHand) and not is_end)
            trained.append(w)
            new = own[client] - c + (z - w) / moved if control == "step_size" else total / count
            own[client] = torch.where((moved if control == "step_size" else count) > 0, new, own[client])
        c, z = c + (own - before).mean(dim=0), torch.stack(trained).mean(dim=0)
    return z, c, own


COUNTED = (Layers, "step_size", 0), (Layers, "gradient_mean", 0), (Layers, "gradient_mean", 0.9), (ByHand, "auto", 0.9)


@pytest.mark.parametrize(("module", "control", "momentum"), COUNTED)
def test_scaffold_counts_the_steps_of_each_layer(tmp_path, module, control, momentum):
    torch.manual_seed(0)
    data, trained = UserData(SIZES), module(momentum)
    expected = scaffold_by_hand(copy.deepcopy(trained).double(), data, control)
    trainer = FederatedTrainer(**QUIET, default_root_dir=str(tmp_path), max_rounds=ROUNDS, local_epochs=3)
    trainer.fit(trained, datamodule=data, algorithm=SCAFFOLD(control=control))
    server, own = trainer.federation.server, trainer.federation.clients.gather("control", [0, 1])
    torch.testing.assert_close((server.z, server["control"], own), expected, rtol=1e-6, atol=1e-8)
