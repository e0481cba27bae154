"""Walk over what Lightning promises a program: ``python tests/walkers/protocol.py [--part K/N] [--only WORD ...]``.

A case is a program: an optimizer with its schedulers, a way of logging, what a step does, accumulation, epochs, and
whether there is validation. It runs under :class:`lightning.Trainer` and here on one client for one round. Both write
down every hook of module, callback, data module and optimizer in its order, what each public name of ``trainer`` gives
there, and the weights at the end. The differences are those that ``trainer_names.NAMES`` and ``HOOKS`` document, and
no others: all else is printed, and the exit status is then 1. Over all cases, each documented difference
comes up; they take 9 CPU minutes.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.programs import settle
from helpers.user_modules import CLASSES, FEATURES, UserData

from fedbc_lightning import FedAvg, FederatedTrainer
from fedbc_lightning.module.trainer_names import HOOKS, MISSING, NAMES

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}

# Hook -> phase in which names are read there
PHASES = {
    "setup": "setup",
    **dict.fromkeys(("on_fit_start", "on_train_start"), "fit start"),
    **dict.fromkeys(
        ("on_train_batch_start", "training_step", "on_before_zero_grad", "on_before_backward",
         "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"), "step"
    ),
    "on_train_epoch_start": "epoch start",
    "on_train_epoch_end": "epoch end",
    "validation_step": "validation",
    **dict.fromkeys(("on_train_end", "on_fit_end"), "fit end"),
}  # fmt: skip
CALLBACK_HOOKS = sorted(
    name for name in dir(lightning.Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
MODULE_HOOKS = sorted({
    name for name in dir(LightningModule) if name.startswith("on_") and name != "on_gpu"
    } | {"configure_model", "setup", "teardown", "prepare_data", "optimizer_zero_grad", "lr_scheduler_step", "backward"}
)  # fmt: skip
DATA_HOOKS = ("prepare_data", "setup", "teardown", "on_before_batch_transfer", "on_after_batch_transfer")


# What a program writes down


def described(value: Any) -> Any:
    """Return what can be compared of a value between two runs."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {str(key): described(each) for key, each in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if isinstance(value, (int, float, str, type(None))):
        return value
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer", [group["lr"] for group in value.param_groups]
    if hasattr(value, "scheduler"):
        return value.interval, value.frequency, value.monitor, described(value.scheduler.optimizer)
    if hasattr(value, "fn"):
        return str(value.fn), str(value.status), str(value.stage)
    if hasattr(value, "root_device"):
        return str(value.root_device), value.broadcast(7)
    if isinstance(value, (lightning.LightningModule, lightning.Callback, lightning.LightningDataModule)):
        return type(value).__name__
    return ("loader", len(value)) if hasattr(value, "__len__") else "object"


@dataclass
class Log:
    """What one run has written down: its calls, and what names gave at each of them."""

    plans: bool
    calls: list[tuple] = field(default_factory=list)
    names: list[tuple[str, str, Any]] = field(default_factory=list)  # phase, name, value

    def note(self, source: str, hook: str, args: Sequence[Any], trainer: Any) -> None:
        if trainer is None or not trainer.evaluating:
            self.calls.append((source, hook, *map(described, args)))
        elif "validation" in hook:  # with what a batch of an evaluation goes through beside
            self.calls.append((source, hook))
        phase = PHASES.get(hook)
        if trainer is None or phase is None or (phase == "validation" and self.seen_validation):
            return
        self.seen_validation |= phase == "validation"
        self.names.append((phase, f"{source}.{hook}", None))
        for name in ALL_NAMES:
            # Lightning makes the loaders when this name is read.
            if name == "estimated_stepping_batches" and phase in ("setup", "fit start") and not self.plans:
                continue
            value = described(getattr(trainer, name, "missing"))
            if name.endswith("_metrics") and phase in (
                "epoch start",
                "step",
                "epoch end",
            ):  # here they are validation's of rounds
                value = {key: each for key, each in value.items() if not key.startswith("val_")}
            self.names.append((phase, name, value))

    seen_validation = False


LOG = Log(False)
PUBLIC = {name for name in dir(lightning.Trainer(**QUIET)) if not name.startswith("_")}
# The last one last, because Lightning makes the loaders when it is read
ALL_NAMES = [*sorted(PUBLIC - MISSING.keys() - {"estimated_stepping_batches"}), "estimated_stepping_batches"]


def noted(source: str, hook: str, base: Callable) -> Callable:
    """Return a hook that is written down and then does what the base class does."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer, given = (args[0], args[2:]) if source == "callback" else (self.trainer, args)
        LOG.note(source, hook, (*given, *kwargs.values()), trainer)
        return base(self, *args, **kwargs)

    return method


class Spy(lightning.Callback):
    """Writes all hooks of callbacks down, and logs in one kind of program."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.case.logging == "sized":
            self.log("index", float(batch_idx))
            self.log_dict({"of_a_callback": batch[0].max()}, on_epoch=True)


for _name in CALLBACK_HOOKS:
    setattr(Spy, _name, noted("callback", _name, getattr(Spy, _name)))


class Nowhere(Logger):
    """A logger that keeps nothing."""

    name = version = "nowhere"

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        """Drop them."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Drop them."""


class Data(UserData):
    """One client's data, which is the data of a plain run as well."""

    def __init__(self, case: Case) -> None:
        super().__init__(batch_size=5)
        self.val_fraction, self.is_plain = 0.3 if case.validates else 0.0, False

    def train_dataloader(self) -> Any:
        return self.client_train_dataloader(0, seed=0) if self.is_plain else super().train_dataloader()


for _name in DATA_HOOKS:
    setattr(Data, _name, noted("data", _name, getattr(UserData, _name)))


# Programs


class NotingSGD(SGD):
    """SGD that writes down how its step is called."""

    def step(self, closure: Any = None) -> Any:
        LOG.calls.append(("optimizer", "step", closure is not None))
        loss = None if closure is None else closure()
        LOG.calls.append(("optimizer", "closure", described(loss)))
        return super().step()


def _twice(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "noting": lambda m: NotingSGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam-groups": lambda m: Adam([{"params": [m.net.weight]}, {"params": [m.net.bias], "lr": 0.01}], lr=1e-3),
    "lbfgs": lambda m: _twice(m.parameters()),
    "steplr": lambda m: ([o := SGD(m.parameters(), lr=0.1)], [lr_scheduler.StepLR(o, 1, 0.5)]),
    "onecycle": lambda m: (
        [o := SGD(m.parameters(), lr=0.1)],
        [{"scheduler": lr_scheduler.OneCycleLR(o, 0.1, m.trainer.estimated_stepping_batches), "interval": "step"}],
    ),
    "plateau": lambda m: {
        "optimizer": (o := SGD(m.parameters(), lr=0.1)),
        "lr_scheduler": {"scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0), "monitor": "seen"},
    },
}


def _metric(m: Program, loss: Tensor, batch: Any) -> None:
    m.accuracy(m.net(batch[0]), batch[1])
    m.log("accuracy", m.accuracy, on_step=True, on_epoch=True)


LOGGING: dict[str, Callable[[Any, Tensor, Any], None]] = {
    "nothing": lambda m, loss, batch: None,
    "default": lambda m, loss, batch: m.log("train_loss", loss),
    "both": lambda m, loss, batch: m.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True),
    "epoch": lambda m, loss, batch: m.log("train_loss", loss, on_step=False, on_epoch=True, logger=False),
    "more": lambda m, loss, batch: m.log_dict({"a": loss, "b": batch[0].max()}, on_epoch=True, reduce_fx="max"),
    "metric": _metric,
    "sized": lambda m, loss, batch: m.log("train_loss", loss, batch_size=3, on_epoch=True),
}

DOING: dict[str, Callable[[Any, int], Any]] = {
    "plainly": lambda m, batch_idx: None,
    "skips": lambda m, batch_idx: "skip" if batch_idx == 1 else None,
    "breaks": lambda m, batch_idx: None,
    "stops": lambda m, batch_idx: setattr(m.trainer, "should_stop", True) if m.steps == 4 else None,
}


@dataclass(frozen=True)
class Case:
    """One program."""

    optimizer: str
    logging: str
    doing: str
    accumulate: int
    epochs: int
    validates: bool
    plans: bool

    def __str__(self) -> str:
        more = "-validates" * self.validates + "-plans" * self.plans
        return f"{self.optimizer}-{self.logging}-{self.doing}-{self.accumulate}-{self.epochs}{more}"


class Program(LightningModule):
    """A linear classifier that does what its case says."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.steps = case, 0
        torch.manual_seed(5)
        self.net = nn.Linear(FEATURES, CLASSES)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        LOG.note("module", "training_step", (batch, batch_idx), self.trainer)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        LOGGING[self.case.logging](self, loss, batch)
        if self.case.optimizer == "plateau":
            self.log("seen", loss)
        return None if DOING[self.case.doing](self, batch_idx) == "skip" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        LOG.note("module", "validation_step", (batch, batch_idx), self.trainer)
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.case.optimizer](self)

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """As the modules of pytorch-forecasting have one of their own."""
        super().log(f"my_{name}" if name in ("a", "b") else name, *args, **kwargs)


for _name in MODULE_HOOKS:
    setattr(Program, _name, noted("module", _name, getattr(LightningModule, _name)))


class Breaking(Program):
    """Ends each epoch at its fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == 3 else None


def cases() -> Iterator[Case]:
    for values in itertools.product(OPTIMIZERS, LOGGING, DOING, (1, 2), (1, 3), (False, True), (False, True)):
        case = Case(*values)
        if not (case.optimizer == "lbfgs" and case.doing == "skips"):  # torch's LBFGS calls float() on the loss
            yield case


# One case under both trainers


def run(case: Case, root: str, *, is_plain: bool) -> tuple[Log, dict[str, Tensor]]:
    global LOG
    LOG = Log(case.plans)
    module, data = (Breaking if case.doing == "breaks" else Program)(case), Data(case)
    data.is_plain = is_plain
    options = {"default_root_dir": root, "callbacks": [Spy()], "accumulate_grad_batches": case.accumulate, **QUIET}
    options["logger"] = Nowhere() if case.plans else False
    if is_plain:
        trainer = lightning.Trainer(
            max_epochs=case.epochs, num_sanity_val_steps=0, enable_model_summary=False, devices=1, **options
        )
        trainer.fit(module, datamodule=data)
    else:
        trainer = FederatedTrainer(max_rounds=1, local_epochs=case.epochs, seed=0, **options)
        trainer.fit(module, data, FedAvg())
    return LOG, module.state_dict()


def differences(case: Case, root: str) -> tuple[list[str], set[tuple[str, str]], Counter]:
    """Return what is documented nowhere, which documented differences came up, and the counts."""
    (plain, expected), (ours, found) = (run(case, root, is_plain=is_plain) for is_plain in (True, False))
    wrong, documented, counts = [], set[tuple[str, str]](), Counter(cases=1)
    if any(not torch.equal(expected[name], found[name]) for name in expected):
        wrong.append("weights differ")
    calls = [[call for call in log.calls if call[1] not in HOOKS] for log in (plain, ours)]
    documented |= {("hook", call[1]) for log in (plain, ours) for call in log.calls if call[1] in HOOKS}
    at = next((k for k, (one, other) in enumerate(zip(*calls, strict=False)) if one != other), min(map(len, calls)))
    if calls[0] != calls[1]:
        wrong.append(f"call {at}: {calls[0][at : at + 3]} became {calls[1][at : at + 3]}")
    counts["calls"] = len(calls[0])
    pairs = zip(*([each for each in log.names if each[0] != "validation"] for log in (plain, ours)), strict=False)
    pairs = [*pairs, *zip(*([e for e in log.names if e[0] == "validation"] for log in (plain, ours)), strict=False)]
    for (phase, name, one), (_, other_name, other) in pairs:
        if name != other_name:
            break  # the calls differ, which is said above
        counts["names"] += 1
        if one == other:
            counts["equal"] += 1
        elif name in NAMES and phase in NAMES[name].differs:
            counts["documented"] += 1
            documented.add((name, phase))
        else:
            wrong.append(f"trainer.{name} at {phase}: {one} became {other}")
    return wrong, documented, counts


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="0/1", help="the cases whose hash is K modulo N")
    parser.add_argument("--only", nargs="*", default=[], help="the cases that have all of these words in their names")
    parser.add_argument("--all-lines", action="store_true")
    options = parser.parse_args(words)
    part, parts = map(int, options.part.split("/"))
    warnings.simplefilter("ignore")
    counts, seen, status = Counter[str](), set[tuple[str, str]](), 0
    with tempfile.TemporaryDirectory() as root:
        for case in cases():
            if zlib.crc32(str(case).encode()) % parts != part or not all(word in str(case) for word in options.only):
                continue
            wrong, documented, found = differences(case, root)
            counts += found
            seen |= documented
            status |= bool(wrong)
            counts["different"] += bool(wrong)
            for line in dict.fromkeys(wrong) if options.all_lines else wrong[:1]:
                print(f"{case}: {line}"[:400])
    written = {(name, phase) for name, known in NAMES.items() for phase in known.differs} | {("hook", n) for n in HOOKS}
    unseen = sorted(written - seen)
    if parts == 1 and not options.only and unseen:
        print(f"documented as different, but equal in all cases: {unseen}")
        status = 1
    print(
        ", ".join(
            f"{name} {counts[name]:,}" for name in ("cases", "calls", "names", "equal", "documented", "different")
        )
    )
    return status


if __name__ == "__main__":
    settle()
    for name in ("lightning.pytorch", "lightning.fabric", "fedbc_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.exit(main())
