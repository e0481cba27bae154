"""Modules whose state is more than what training moves; as a script on two processes.

``python -m helpers.modules_with_more FOLDER``: each of :data:`CASES`, what it ended with to one file per rank.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn
from torchmetrics import MaxMetric, MeanMetric

from fedbc_lightning import FedAvg, FederatedTrainer
from fedbc_lightning.federation.checkpoint_content import module_state_of
from helpers.boring import BoringData, BoringModel, make_model, make_trainer, read_csv

State = dict[str, torch.Tensor]


class Pretrained(BoringModel):
    """Sets weights, buffers, a frozen parameter and a buffer that does not travel when the run starts."""

    def __init__(self, lr: float = 0.1, amount: float = 0.25, early: bool = False) -> None:
        super().__init__(lr)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("offset", torch.zeros(10), persistent=False)
        self.amount, self.early = amount, early
        if early:
            self.fill()

    def fill(self) -> None:
        with torch.no_grad():
            self.net[0].weight.fill_(self.amount)
            self.net[3].weight.data = torch.full((3, 8), 0.5) + torch.arange(3)[:, None]
            self.net[1].running_mean.fill_(3.0)
            self.frozen.fill_(2.0)
            self.offset.fill_(self.amount)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs + self.offset) * self.frozen

    def on_fit_start(self) -> None:
        if not self.early:
            self.amount += self.trainer.global_rank
            self.fill()


class Halving(Callback):
    """Halves a weight before the second round, and sets a bias after it; process 1 would have it otherwise."""

    def on_round_start(self, trainer: FederatedTrainer, pl_module: Any) -> None:
        if trainer.current_round == 2:
            with torch.no_grad():
                pl_module.net[0].weight.mul_(0.5 + trainer.global_rank)

    def on_round_end(self, trainer: FederatedTrainer, pl_module: Any) -> None:
        if trainer.current_round == 2:
            with torch.no_grad():
                pl_module.net[3].bias.fill_(7.0 + trainer.global_rank)


def state_of(trainer: FederatedTrainer) -> State:
    """The global model, and every client's own."""
    state = {f"z {name}": value for name, value in module_state_of(trainer.federation).items()}
    models = trainer.federation.models().local
    return state | {f"client {k}": models(k)[0] for k in range(6)} if models is not None else state


def hooks_that_write(folder: Path, **options: Any) -> State:
    trainer = make_trainer(folder, callbacks=[Halving()], **options)
    trainer.fit(make_model(Pretrained), BoringData(), FedAvg())
    return state_of(trainer)


class Teacher(BoringModel):
    """Learns from a copy of itself that follows it slowly: as BYOL, MoCo and mean teacher do."""

    def __init__(self, lr: float = 0.1, as_buffers: bool = False, begins_at: int = 1) -> None:
        super().__init__(lr)
        self.teacher = nn.Linear(10, 8)
        self.begins_at = begins_at
        if as_buffers:
            for name, parameter in list(self.teacher.named_parameters()):
                delattr(self.teacher, name)
                self.teacher.register_buffer(name, parameter.detach())
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        target = self.teacher(batch[0])
        if self.trainer.current_round >= self.begins_at:
            with torch.no_grad():
                for name in ("weight", "bias"):
                    self.follow(name, getattr(self.teacher, name), getattr(self.net[0], name))
        # A client knows of no other process, as code of the users' that divides by their number must
        return loss + (self.net[0](batch[0]) - target).square().mean() / self.trainer.world_size

    def follow(self, name: str, mine: torch.Tensor, target: torch.Tensor) -> None:
        mine.lerp_(target, 0.1)


class Bank(BoringModel):
    """Remembers the size of each batch in a buffer that grows, and the last output in one that is None at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("last", None)
        self.register_buffer("kept", torch.zeros(50, 10))
        self.late = nn.Parameter(torch.zeros(()), requires_grad=False)

    def training_step(self, batch, batch_idx):
        self.kept = batch[0][:1]
        if self.trainer.current_round == 2:
            self.late.add_(1)
        self.sizes = torch.cat([self.sizes, torch.tensor([len(batch[0])])])
        self.last = self(batch[0]).detach()
        return super().training_step(batch, batch_idx)


class BestSoFar(BoringModel):
    """As of lightning-hydra-template: the best accuracy over evaluations."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.accuracy, self.best = MeanMetric(), MaxMetric()

    def on_train_start(self) -> None:
        self.best.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy((self(batch[0]).argmax(1) == batch[1]).float())

    def on_test_epoch_end(self) -> None:
        self.best(self.accuracy.compute())
        self.log("test_accuracy", self.accuracy.compute())
        self.log("test_best", self.best.compute())


def evaluations(trainer: FederatedTrainer) -> State:
    """The numbers of ``evaluation.csv`` and of the global model."""
    rows, metrics = (read_csv(f"{trainer.log_dir}/{name}.csv") for name in ("evaluation", "metrics"))
    found = [[float(row[name]) for name in rows[0]] for row in rows]
    pooled = [[float(row[f"{name}/global"]) for name in ("accuracy", "best")] for row in metrics]
    return {"clients": torch.tensor(found), "pooled": torch.tensor(pooled)}


def best_so_far(folder: Path, **options: Any) -> State:
    trainer = make_trainer(folder, max_rounds=4, **options)
    trainer.fit(make_model(BestSoFar, lr=0.5), BoringData(), FedAvg())
    return evaluations(trainer) if trainer.is_global_zero else {}


def teachers(
    folder: Path, as_buffers: bool = False, begins_at: int = 1, algorithm: Any = None, hooks: Any = (), **options: Any
) -> State:
    trainer = make_trainer(folder, **options)
    model = make_model(type("Hooked", (Teacher,), dict(hooks)), as_buffers=as_buffers, begins_at=begins_at)
    trainer.fit(model, BoringData(), algorithm or FedAvg(), "last")
    return state_of(trainer)


def late_and_local(folder: Path, **options: Any) -> State:
    """A teacher that begins in round 2, and buffers whose shape changes."""
    banks = make_trainer(folder / "banks", buffers="local", clients_per_round=6, **options)
    banks.fit(make_model(Bank), BoringData(), FedAvg())
    models = [module_state_of(banks.federation, banks.federation.models().local(k)) for k in range(6)]
    state = {f"bank {k} {name}": value for k, model in enumerate(models) for name, value in model.items()}
    return state | teachers(folder / "late", begins_at=2, buffers="local", **options)


CASES: dict[str, Callable[..., State]] = {
    case.__name__: case for case in (hooks_that_write, teachers, late_and_local, best_so_far)
}
"""Name -> what trains in a folder with settings of the trainer, and returns what it ended with."""


if __name__ == "__main__":
    target = Path(sys.argv[1])
    states = {name: case(target / name, devices=2) for name, case in CASES.items()}
    torch.save(states, target / f"rank {torch.distributed.get_rank()}.pt")
