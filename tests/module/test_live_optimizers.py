"""``configure_optimizers`` is no factory: what a module keeps and moves by itself is as new for every client."""

from types import SimpleNamespace

import pytest
import torch
from helpers.marks import each_engine
from helpers.user_modules import UserData, _Classifier
from lightning.pytorch import Callback
from torch import nn
from torch.optim import SGD, lr_scheduler

from fedbc_lightning import FedAvg

from .test_parity import EPOCHS, federated, fresh, plain

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=EPOCHS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=9.0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Counted()),
}


class Counted:
    """A factor that is a matter of how often it was asked for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, epoch):
        self.count += 1
        return 1 / self.count


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer, as its authors wrote it: no step without a closure."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        closure = torch.enable_grad()(closure)
        loss = closure()
        pairs = [(p, p.grad.clone()) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for _, grad in pairs]).norm()
        before = [p.clone() for p, _ in pairs]
        for p, grad in pairs:
            p.add_(grad * 0.05 / norm)
        closure()
        for (p, _), old in zip(pairs, before, strict=True):
            p.copy_(old)
        self.base_optimizer.step()
        return loss


class Curved(SGD):
    """Divides by the curvature, which it finds by differentiating the gradients once more."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
            parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
            curvature = torch.autograd.grad(sum(p.grad.sum() for p in parameters), parameters)
        with torch.no_grad():
            for p, h in zip(parameters, curvature, strict=True):
                p.sub_(self.param_groups[0]["lr"] * p.grad / (1 + h.abs()))
        return loss


class InInit(_Classifier):
    """Makes its optimizer and scheduler before any training."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.optimizer = self.make_optimizer()
        self.scheduler = make(self.optimizer)

    def make_optimizer(self):
        return SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self):
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self.scheduler, "monitor": "train_loss"}}


class InConfigure(InInit):
    """Makes them when it is asked for them."""

    def configure_optimizers(self):
        self.optimizer = self.make_optimizer()
        self.scheduler = self.make(self.optimizer)
        return super().configure_optimizers()


class HalfLive(InInit):
    """Makes a new scheduler each time, whose length it asks of the trainer, around the optimizer that it keeps."""

    def configure_optimizers(self):
        assert self.trainer.max_epochs == EPOCHS or self.trainer.current_client is None
        self.scheduler = self.make(self.optimizer)
        return super().configure_optimizers()


class ByHand(InInit):
    """Steps a scheduler that it does not return."""

    def configure_optimizers(self):
        return self.optimizer

    def on_train_epoch_end(self):
        plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(*([1.0] if plateau else []))


class InList(ByHand):
    """Keeps it in a dict, and steps it in the step."""

    def __init__(self, make):
        super().__init__(make)
        self.kept = {"schedulers": [self.scheduler]}
        del self.scheduler

    def training_step(self, batch, batch_idx):
        self.scheduler = self.kept["schedulers"][0]
        if batch_idx == 1:
            ByHand.on_train_epoch_end(self)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        pass


class WithSAM(InInit):
    def make_optimizer(self):
        return SAM(self.parameters(), SGD, lr=0.1, momentum=0.9)


class SecondOrder(InInit):
    def make_optimizer(self):
        return Curved(self.parameters(), lr=0.1)

    def backward(self, loss):
        loss.backward(create_graph=True)


class Unused(InInit):
    """Has a parameter that no loss reaches."""

    def make_optimizer(self):
        self.unused = nn.Linear(2, 2)
        return super().make_optimizer()


class Hidden(InInit):
    """Keeps them where nobody looks, in an object of its own class."""

    def __init__(self, make):
        super().__init__(make)
        self.recipe = SimpleNamespace(optimizer=self.optimizer, scheduler=self.scheduler)
        del self.optimizer, self.scheduler

    def configure_optimizers(self):
        scheduler = {"scheduler": self.recipe.scheduler, "monitor": "train_loss"}
        return {"optimizer": self.recipe.optimizer, "lr_scheduler": scheduler}

    def on_train_start(self):
        """A hook, after which hooks' writes are looked for by asking once more."""


class Unreturned(InInit):
    """Steps a second optimizer in a hook, which Lightning never sees."""

    def __init__(self, make):
        super().__init__(make)
        self.second = torch.optim.Adam(self.net[0].parameters(), lr=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.second.zero_grad()
        self.net[0](batch[0]).square().mean().backward()
        self.second.step()


class Watch(Callback):
    """Keeps the weights with which each client ends."""

    def __init__(self):
        self.weights = {}

    def on_client_end(self, trainer, pl_module, client):
        self.weights[client] = {name: value.clone() for name, value in pl_module.state_dict().items()}


KINDS = [InInit, InConfigure, HalfLive, ByHand, InList, WithSAM, SecondOrder, Unused, Hidden, Unreturned]


@pytest.mark.filterwarnings("ignore:A .OneCycleLR. scheduler is using", "ignore:Using backward.. with create_graph")
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_client_trains_as_under_lightning(tmp_path, kind, name):
    """Three clients after one another, each as ``lightning.Trainer`` trains it alone, bit for bit."""
    watch, data = Watch(), UserData((23, 9, 14))
    federated(tmp_path, fresh(lambda: kind(SCHEDULERS[name])), data, callbacks=[watch])
    for client in range(3):
        module = fresh(lambda: kind(SCHEDULERS[name]))
        plain(tmp_path, module, data, client=client)
        for key, value in module.state_dict().items():
            assert torch.equal(value, watch.weights[client][key]), (client, key)


@each_engine
def test_schedulers_of_rounds_leave_what_the_module_keeps_alone(tmp_path, engine):
    """The server steps a copy; round k has the rate 0.1 / 2 ** k, and the kept optimizer is as before after the run."""

    class OfRounds(InInit):
        def configure_optimizers(self):
            return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self.scheduler, "interval": "round"}}

    module = fresh(lambda: OfRounds(SCHEDULERS["StepLR"]))
    before = [p for group in module.optimizer.param_groups for p in group["params"]]
    trainer = federated(tmp_path, module, UserData((9, 9)), FedAvg(), max_rounds=3, engine=engine)
    assert trainer.federation.schedule.learning_rates == [0.1 / 8]
    assert module.optimizer.param_groups[0]["lr"] == 0.1
    assert all(map(lambda a, b: a is b, module.optimizer.param_groups[0]["params"], before))
    assert not module.optimizer.state
