"""Walk over what a module can hold: ``python tests/walkers/state.py [--part K/N] [--only WORD ...] [--all-lines]``.

A case is a module with one more tensor, generated over its role, form, dtype, value and how a step changes it.
It trains for two rounds on one client, with a new module that resumes in between, and its model is exported.
Each case equals :class:`lightning.Trainer` bit for bit, or is refused by name before a round is over. All else is
printed, and the exit status is then 1. All cases take 9 CPU minutes.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.programs import settle
from helpers.user_modules import CLASSES, FEATURES, UserData

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import FedAvg
from fedbc_lightning.core.errors import ConfigurationError

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}

FORMS: dict[str, Callable[[torch.dtype, float], Tensor]] = {
    "()": lambda dtype, value: torch.full((), value, dtype=dtype),
    "(0,)": lambda dtype, value: torch.full((0,), value, dtype=dtype),
    "(0, 4)": lambda dtype, value: torch.full((0, 4), value, dtype=dtype),
    "(1,)": lambda dtype, value: torch.full((1,), value, dtype=dtype),
    "(2, 3)": lambda dtype, value: torch.full((2, 3), value, dtype=dtype),
    "transposed": lambda dtype, value: torch.full((3, 2), value, dtype=dtype).t(),
}
KINDS: list[tuple[torch.dtype, float]] = [
    *((torch.float32, value) for value in (0.3, 1e8, float("inf"), -float("inf"), float("nan"))),
    (torch.float64, 1 / 3), (torch.float64, 1e300), (torch.float16, 0.3), (torch.bfloat16, 0.3),
    (torch.int64, 2**53 + 1), (torch.int32, 7), (torch.uint8, 7), (torch.bool, 1), (torch.complex64, 0.3 + 0.4j),
]  # fmt: skip
TYPES = (torch.float32, torch.float64)  # of parameters


class Holder(LightningModule):
    """A linear layer, and a tensor of one role that its step reads and changes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.last = case, 0.0
        torch.manual_seed(5)
        self.net = nn.Linear(FEATURES, CLASSES)
        if case.role == "extra":
            return
        made = FORMS.get(case.form, lambda *kind: None)(case.dtype, case.value)
        if case.role in ("parameter", "tied", "frozen"):
            self.subject = nn.Parameter(made, requires_grad=case.role != "frozen")
            if case.role == "tied":
                self.twin = self.subject
        else:
            self.register_buffer("subject", made, persistent=case.role == "buffer")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch[0])
        subject = getattr(self, "subject", None)
        if subject is not None and subject.is_floating_point():
            # An infinite number is masked, as in attention, so that it has no gradient.
            known = torch.where(torch.isfinite(subject), subject, 0).clamp(-10, 10).sum()
            scores = scores + 0.01 * known.to(scores.dtype)
            if self.case.role in ("parameter", "tied"):
                scores = scores * torch.where(torch.isfinite(subject), subject, 0).sigmoid().sum().to(scores.dtype)
        CHANGES[self.case.change](self, batch_idx)
        # A loss that is NaN may have gradients that are finite.
        return nn.functional.cross_entropy(scores, batch[1]) + (float("nan") if self.case.change == "lose" else 0.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)

    def get_extra_state(self) -> Any:
        """A tensor, or a plain tree."""
        return torch.tensor(self.last) if self.case.form == "tensor" else [1, {"seen": self.last}]

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""
        self.last = float(state[1]["seen"] if isinstance(state, list) else state)


class Bare(Holder):
    """A holder without extra state."""

    get_extra_state, set_extra_state = LightningModule.get_extra_state, LightningModule.set_extra_state


def add(module: Holder, batch_idx: int) -> None:
    """Write in place."""
    with torch.no_grad():
        subject = module.subject
        subject.logical_not_() if subject.dtype == torch.bool else subject.add_(1)


def assign(module: Holder, batch_idx: int) -> None:
    """Put a new tensor in its place."""
    subject = module.subject
    module.subject = subject.logical_not() if subject.dtype == torch.bool else subject + 1


def grow(module: Holder, batch_idx: int) -> None:
    """Keep one more row, as memory banks do."""
    module.subject = torch.cat([module.subject.reshape(-1), torch.ones(1, dtype=module.subject.dtype)])


def begin(module: Holder, batch_idx: int) -> None:
    """Make a tensor of None."""
    module.subject = torch.ones(3) if module.subject is None else module.subject + 1


def note(module: Holder, batch_idx: int) -> None:
    """Change what the extra state tells."""
    module.last += 1.0


CHANGES: dict[str, Callable[[Holder, int], None]] = {
    "kept": lambda module, batch_idx: None, "add": add, "assign": assign, "grow": grow, "note": note,
    "begin": begin, "lose": lambda module, batch_idx: None,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One module, engine and policy for buffers."""

    role: str
    form: str
    dtype: torch.dtype
    value: float
    change: str
    engine: str = "sequential"
    buffers: str = "average"

    def __str__(self) -> str:
        kind = f"{str(self.dtype).removeprefix('torch.')} {self.value:.8g}"
        return f"{self.role} {self.form} {kind}, {self.change}, {self.engine}, buffers {self.buffers}"

    def module(self) -> Holder:
        """The module with the same values every time."""
        return (Holder if self.role == "extra" else Bare)(self)


def all_cases() -> Iterator[Case]:
    """All of them, in one order."""
    modules = [
        *itertools.product(
            ("parameter", "tied"), FORMS, [kind for kind in KINDS if kind[0] in TYPES], ("kept", "lose")
        ),
        *itertools.product(("frozen",), FORMS, KINDS, ("kept", "add")),
        *itertools.product(("buffer", "scratch"), FORMS, KINDS, ("kept", "add", "assign", "grow")),
        *itertools.product(("buffer", "scratch"), ("None",), [(torch.float32, 0.0)], ("kept", "begin")),
        *itertools.product(("extra",), ("plain", "tensor"), [(torch.float32, 0.0)], ("kept", "note")),
    ]
    for (role, form, kind, change), buffers in itertools.product(modules, ("average", "local", "global")):
        for engine in ("sequential", "vectorized"):
            yield Case(role, form, *kind, change, engine, buffers)


def reference(case: Case, root: Path) -> Holder:
    """What lightning.Trainer makes of the module in two fits."""
    module, data = case.module(), UserData((9,))
    data.setup("fit")
    travels = {"buffer": case.buffers != "global", "frozen": case.buffers != "global", "scratch": False}
    first = None if travels.get(case.role, True) or module.subject is None else module.subject.detach().clone()
    for number in (1, 2):
        trainer = lightning.Trainer(
            default_root_dir=root, max_epochs=1, enable_checkpointing=False, enable_model_summary=False, **QUIET
        )
        trainer.fit(module, data.client_train_dataloader(client=0, round=number, seed=0))
        # What does not travel is as it was for every client: a buffer that is not persistent, or any under this policy.
        if not travels.get(case.role, True) and first is None:
            module.subject = None
        if first is not None:
            module.subject = nn.Parameter(first.clone(), False) if case.role == "frozen" else first.clone()
    return module


def federated(case: Case, root: Path, *, is_resumed: bool) -> tuple[Holder, dict[str, Any]]:
    """The module after two rounds, in one run or with a resumed one, and what its export gives back."""
    settings = {"local_epochs": 1, "seed": 0, "engine": case.engine, "buffers": case.buffers}
    ckpt_path = None
    for rounds in (1, 2) if is_resumed else (2,):
        module = case.module()
        trainer = FederatedTrainer(max_rounds=rounds, default_root_dir=root, **settings, **QUIET)
        trainer.fit(module, datamodule=UserData((9,)), algorithm=FedAvg(), ckpt_path=ckpt_path)
        ckpt_path = f"{trainer.log_dir}/checkpoints/last.ckpt"
    client = 0 if case.buffers == "local" else None
    out = trainer.export(case.module(), UserData((9,)), FedAvg(), ckpt_path=ckpt_path, client=client)
    if case.change in ("grow", "begin"):  # torch refuses to load another shape, under lightning.Trainer, too
        return module, torch.load(out)["state_dict"]
    return module, type(module).load_from_checkpoint(out, case=case).state_dict()


def difference(found: Any, expected: Any, *, is_bitwise: bool) -> str | None:
    """Say where two state dicts differ."""
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            if found[name] != value:
                return f"{name} is {found[name]} for {value}"
            continue
        here = found[name]
        if here.shape != value.shape or here.dtype != value.dtype:
            return f"{name} is {tuple(here.shape)} {here.dtype} for {tuple(value.shape)} {value.dtype}"
        # Σ n_j b_j / Σ n_j is formed in float64, which is exact for all but float64 itself.
        bound = 1e-6 if not is_bitwise else 1e-15 if value.dtype == torch.float64 else 0.0
        if not torch.allclose(here, value, rtol=bound, atol=bound, equal_nan=True):
            return f"{name} is {here.reshape(-1)[:3].tolist()} for {value.reshape(-1)[:3].tolist()}"
    return None


def outcome(case: Case, root: Path) -> str:
    """Try one case: "equal", "refused" or what is different."""
    expected = reference(case, root / "plain").state_dict()
    try:
        for is_resumed in (False, True):
            module, exported = federated(case, root / str(is_resumed), is_resumed=is_resumed)
            # A client's own buffers are in its own model alone.
            found = exported if case.buffers == "local" else module.state_dict()
            unlike = difference(found, expected, is_bitwise=case.engine == "sequential")
            unlike = unlike or difference(exported, found, is_bitwise=True)
            if unlike:
                return f"{'resumed' if is_resumed else 'in one run'}: {unlike}"
    except ConfigurationError as error:
        is_before = not any(map(_has_trained, root.rglob("metrics.csv")))
        names = "subject" in str(error) or "extra state" in str(error) or "Mixed" in str(error)
        if is_before and names:
            return "refused"
        return f"refused{'' if is_before else ' late'}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return "equal"


def _has_trained(table: Path) -> bool:
    return len(table.read_text().splitlines()) > 2  # the header and round 0


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", help="part K of N parts, in any order of cases (default: 0/1, all)")
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names hold all of these words")
    parser.add_argument("--all-lines", action="store_true", help="print every case")
    options = parser.parse_args(words)
    warnings.simplefilter("ignore")
    part, num_parts = map(int, options.part.split("/"))
    counts: Counter[str] = Counter()
    for case in all_cases():
        if zlib.crc32(str(case).encode()) % num_parts != part or not all(word in str(case) for word in options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(case, Path(folder))
        counts[found if found in ("equal", "refused") else "different"] += 1
        if options.all_lines or found not in ("equal", "refused"):
            print(f"{case}: {found}", flush=True)
    print(f"equal {counts['equal']}, refused by name {counts['refused']}, different {counts['different']}")
    return int(counts["different"] > 0)


if __name__ == "__main__":
    settle()
    for name in ("lightning", "lightning.pytorch", "fedbc_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.exit(main())
