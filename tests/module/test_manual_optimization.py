"""Manual optimization: the programs of Lightning's users, and every method's terms at the step of each optimizer."""

from contextlib import nullcontext

import pytest
import torch
from helpers.refusals import refused
from helpers.user_modules import FEATURES, UserData, WarmupClassifier
from lightning.fabric.plugins.precision import Precision
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adam, lr_scheduler

from fedbc_lightning import FedAvg, FedBC, FederatedTrainer
from fedbc_lightning.algorithms import MOON, SCAFFOLD, Ditto, FedAvgPlus, FedNova, FedProx, FedRep, PFedMe, QFedAvg
from fedbc_lightning.local import MixWith

from .test_parity import QUIET, federated, fresh, plain

SIZES, EPOCHS = (14, 9, 11), 2


class Gan(LightningModule):
    """A generator with Adam, and a discriminator with momentum, as in Lightning's documentation."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))

    def configure_optimizers(self):
        return [Adam(self.generator.parameters(), lr=0.01), SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)]

    def losses(self, x):
        """Yield the generator's loss, then the discriminator's, which is computed after the generator has moved."""
        noise, one = x[:, :2], torch.ones(len(x), 1)
        bce = functional.binary_cross_entropy_with_logits
        yield bce(self.discriminator(self.generator(noise)), one)
        fake = self.discriminator(self.generator(noise).detach())
        yield (bce(self.discriminator(x), one) + bce(fake, 0 * one)) / 2

    def training_step(self, batch, batch_idx):
        names, found = ("generator", "discriminator"), self.losses(batch[0])
        for name, optimizer in zip(names, self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = next(found)
            self.log(f"{name}_loss", loss)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class Dangling(Gan):
    """Leaves the discriminator's gradients of the generator's loss lying around, and clips by hand."""

    def training_step(self, batch, batch_idx):
        for loss, optimizer in zip(self.losses(batch[0]), self.optimizers(), strict=True):
            optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
        return {"loss": loss, "step": self.trainer.global_step}


class Accumulating(Gan):
    """One optimizer, which steps every second batch, and a scheduler stepped by the epoch."""

    def configure_optimizers(self):
        optimizer = Adam(self.discriminator.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = functional.mse_loss(self.discriminator(batch[0]), batch[0].sum(1, keepdim=True)) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


class Unequal(Gan):
    """A discriminator that steps every second batch, schedulers of each, and raw steps past Lightning's wrapper."""

    def configure_optimizers(self):
        pair = super().configure_optimizers()
        return pair, [lr_scheduler.ExponentialLR(pair[0], 0.9), lr_scheduler.ReduceLROnPlateau(pair[1], patience=0)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers(use_pl_optimizer=False)
        decay, plateau = self.lr_schedulers()
        found = self.losses(batch[0])
        first.zero_grad()
        next(found).backward()
        first.step()
        decay.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward(next(found))
            second.step()
            plateau.step(1.0)


class Closures(Gan):
    """Steps in closures, LBFGS among them, which calls its own many times; all parameters are in two optimizers."""

    def configure_optimizers(self):
        return [torch.optim.LBFGS(self.discriminator.parameters(), lr=0.5, max_iter=3), SGD(self.parameters(), lr=0.1)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():

            def closure(optimizer=optimizer):
                optimizer.zero_grad()
                loss = list(self.losses(batch[0]))[1]
                self.manual_backward(loss)
                return loss

            with optimizer.toggle_model():
                optimizer.step(closure=closure)


PROGRAMS = [Gan, Dangling, Accumulating, Unequal, Closures]


class Watch(Callback):
    """Keeps the weights with which each client ends, and what each of its batches shows; a gradient may overflow."""

    def __init__(self, overflows=False):
        self.overflows, self.weights, self.seen, self.client = overflows, {}, {}, 0

    def on_client_start(self, trainer, pl_module, client):
        self.client = client

    def on_client_end(self, trainer, pl_module, client):
        self.weights[client] = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_after_backward(self, trainer, pl_module):
        if self.overflows and pl_module.trainer.global_step == 1:
            pl_module.discriminator[0].weight.grad.fill_(torch.inf)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.setdefault(self.client, []).append(type(optimizer).__name__)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        shown = {name: float(value) for name, value in outputs.items()}
        self.seen.setdefault(self.client, []).append((shown, pl_module.trainer.global_step))


class Scaling(MixedPrecision):
    """Scales as 16-mixed does, but computes in float32; the federated trainer finds a scaler with plain precision."""

    autocast_context_manager = nullcontext


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step")
@pytest.mark.parametrize(("program", "is_scaled"), [(p, False) for p in PROGRAMS] + [(p, True) for p in PROGRAMS[:3]])
def test_each_client_trains_as_under_lightning(tmp_path, monkeypatch, program, is_scaled):
    """Three clients after one another: weights bit for bit, outputs, hooks and ``global_step``."""
    watch, data = Watch(is_scaled), UserData(SIZES)
    if is_scaled:
        monkeypatch.setattr(Precision, "scaler", GradScaler("cpu", growth_interval=4), raising=False)
    federated(tmp_path, fresh(program), data, callbacks=[watch], local_epochs=EPOCHS)
    for client in range(3):
        module, alone = fresh(program), Watch(is_scaled)
        plugins = [Scaling("16-mixed", "cpu", GradScaler("cpu", growth_interval=4))] if is_scaled else None
        plain(tmp_path, module, data, client=client, callbacks=[alone], max_epochs=EPOCHS, plugins=plugins)
        for key, value in module.state_dict().items():
            assert torch.equal(value, watch.weights[client][key]), (client, key)
        assert watch.seen[client] == alone.seen[0]


class Counting(SCAFFOLD):
    """Keeps K_i, and how many gradients each mean is of."""

    def client_update(self, engine, cohort, server):
        super().client_update(engine, cohort, server)
        self.counts = [*cohort.num_steps.tolist(), *cohort.num_gradients.unique().tolist()]


def test_terms_and_means_are_of_unscaled_gradients(tmp_path, monkeypatch):
    """A scale that is a power of two changes no bit; a step that overflows is not one of the K_i, nor of c_i's."""

    def fit(scaler, overflows=False):
        monkeypatch.setattr(Precision, "scaler", scaler, raising=False)
        algorithm, settings = Counting(), {"callbacks": [Watch(overflows)], "local_epochs": 3, "max_rounds": 2}
        trainer = federated(tmp_path, fresh(Gan), UserData((12,)), algorithm, **settings)
        return trainer.federation.server.z, trainer.federation.clients.gather("control", [0]), algorithm.counts

    z, control, counts = fit(GradScaler("cpu"))
    torch.testing.assert_close((z, control, counts), fit(None), rtol=0, atol=0)
    _, control, fewer = fit(GradScaler("cpu"), overflows=True)
    assert control.isfinite().all()
    assert (counts, fewer) == ([18, 9], [17, 8, 9])


def by_hand(data, rounds, dual_lr, tolerance):
    """FedBC on the GAN in plain torch: the generator's and the discriminator's rows are one row z."""
    model = fresh(Gan)
    parameters = list(model.parameters())
    z, dual = parameters_to_vector(parameters).detach(), torch.zeros(len(SIZES))
    for round in range(1, rounds + 1):
        trained = []
        for client in range(len(SIZES)):
            vector_to_parameters(z.clone(), parameters)
            anchors, optimizers = [p.detach().clone() for p in parameters], model.configure_optimizers()
            loader = data.client_train_dataloader(client=client, round=round, seed=0)
            for epoch in range(EPOCHS):
                loader.set_epoch(epoch)
                for x, _ in loader:
                    for loss, optimizer in zip(model.losses(x), optimizers, strict=True):
                        model.zero_grad()
                        loss.backward()
                        for p, anchor in zip(parameters, anchors, strict=True):
                            p.grad = 2 * dual[client] * (p.detach() - anchor) + (0 if p.grad is None else p.grad)
                        optimizer.step()
            trained.append(parameters_to_vector(parameters).detach())
        dual = (dual + dual_lr * ((torch.stack(trained) - z).square().sum(dim=1) - tolerance)).clamp(min=0)
        z = (dual / dual.sum()) @ torch.stack(trained)
    return z, dual.double()


def test_fedbc_on_a_gan_equals_a_loop_by_hand(tmp_path):
    """Two optimizers, four rounds: λ grows, its pull is in both optimizers' steps, and z is the mean by λ."""
    data = UserData(SIZES)
    algorithm = FedBC(dual_init=0.0, dual_lr=0.5, tolerance=0.001)
    trainer = federated(tmp_path, module := fresh(Gan), data, algorithm, max_rounds=4, local_epochs=EPOCHS)
    z, dual = by_hand(data, 4, dual_lr=0.5, tolerance=0.001)
    torch.testing.assert_close(parameters_to_vector(module.parameters()).detach(), z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trainer.federation.clients.scalar("dual"), dual, rtol=1e-4, atol=1e-6)
    assert (dual > 0.01).any()


@pytest.mark.parametrize(
    ("module", "rates"), [(Closures, [[0, 0.5], [0.1]] * 2), (WarmupClassifier, [[0.1], [1 / 60]])]
)
def test_an_after_step_gets_the_rates_of_the_step_before_it(tmp_path, monkeypatch, module, rates):
    seen = []
    monkeypatch.setattr(MixWith, "apply", lambda self, w, step_size: seen.append(step_size.unique().tolist()))
    federated(tmp_path, fresh(module), UserData((10,)), FedAvgPlus(0.5), local_epochs=1)
    assert seen == [pytest.approx(step) for step in rates]


METHODS = {
    "SCAFFOLD": SCAFFOLD,
    "FedProx": lambda: FedProx(mu=0.5),
    "FedPlus": lambda: FedAvgPlus(0.5),
    "Ditto": lambda: Ditto(0.5),
    "FedRep": FedRep,
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_train_and_resume(tmp_path, name):
    """Terms, after-steps, mean gradients and held parts: other weights than FedAvg's, and resumed the same bits."""
    kept = {"local_parameters": ["discriminator.*"]} if name == "FedRep" else {}

    def fit(method, root, rounds, ckpt_path=None):
        settings = QUIET | {"enable_checkpointing": True, "max_rounds": rounds, "local_epochs": EPOCHS, "seed": 0}
        trainer = FederatedTrainer(**settings, **kept, default_root_dir=tmp_path / root)
        trainer.fit(fresh(Gan), UserData(SIZES), method(), ckpt_path=ckpt_path)
        return trainer

    whole = fit(METHODS[name], "whole", 4)
    fit(METHODS[name], "part", 2)
    resumed = fit(METHODS[name], "part", 4, ckpt_path="last")
    assert resumed.finished_round == whole.finished_round == 4
    assert torch.equal(resumed.federation.server.z, whole.federation.server.z)
    if name != "Ditto":  # whose z is FedAvg's
        assert not torch.equal(fit(FedAvg, "FedAvg", 4).federation.server.z, whole.federation.server.z)


REFUSED = [
    ({"gradient_clip_val": 1.0}, FedAvg, "trainer.gradient_clip_val: call self.clip_gradients"),
    ({"accumulate_grad_batches": 2}, FedAvg, "trainer.accumulate_grad_batches: step every so many"),
    ({"engine": "vectorized"}, FedAvg, "manual optimization"),
    ({"local_schedules": "continue"}, FedAvg, "in manual optimization the module steps them by itself"),
    ({}, FedNova, "leave out schedulers, clipping, manual optimization"),
    ({}, lambda: SCAFFOLD(control="step_size"), "or manual optimization"),
    ({}, PFedMe, "training_step takes steps and is no function"),
    ({}, lambda: QFedAvg(lipschitz=1.0), "training_step takes steps and is no function"),
    ({}, lambda: MOON(features="discriminator"), "training_step takes steps and is no function"),
]


@pytest.mark.parametrize(("options", "method", "said"), REFUSED, ids=[said[:25] for *_, said in REFUSED])
def test_what_does_not_go_with_manual_optimization_is_refused(tmp_path, options, method, said):
    settings = {**QUIET, "enable_checkpointing": False, "default_root_dir": tmp_path}
    with refused(said):
        FederatedTrainer(**settings, **options).fit(fresh(Gan), UserData((5, 4)), method())


def test_a_step_of_an_optimizer_that_was_not_returned_is_refused(tmp_path):
    class Keeping(Gan):
        def configure_optimizers(self):
            self.both = super().configure_optimizers()
            return self.both[0]

        def training_step(self, batch, batch_idx):
            for loss, optimizer in zip(self.losses(batch[0]), self.both, strict=True):
                self.manual_backward(loss)
                optimizer.step()

    with refused("training steps SGD, an optimizer that configure_optimizers does not"):
        federated(tmp_path, fresh(Keeping), UserData())
