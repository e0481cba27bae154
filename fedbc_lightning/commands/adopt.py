"""The command ``adopt``, which turns a config of LightningCLI into one of ``fedbc-cli fit``."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import capture_parser
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.table import Table

from fedbc_lightning.cli.classes import find_class, load
from fedbc_lightning.cli.command_arguments import PROG, check_syntax
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.cli.parser import FederatedArgumentParser
from fedbc_lightning.core.checks import check_arguments
from fedbc_lightning.core.errors import UsageError
from fedbc_lightning.core.files import url_of, write
from fedbc_lightning.core.lightning_arguments import LIGHTNING_ARGUMENTS
from fedbc_lightning.core.lightning_names import AnyCallback, both, listed
from fedbc_lightning.core.printing import Console
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.distributed.fabric import START_METHODS
from fedbc_lightning.studies.study_run import as_word
from fedbc_lightning.trainer.arguments import REFUSED_CALLBACKS, refused_kind

DESCRIPTION = """\
Turn a config of LightningCLI into one of fedbc-cli fit, and say what changed and why. The model and the data module
stay as they are; a partitioner deals the samples to clients. Without --output the config is printed."""

SECTIONS = ("model", "data", "optimizer", "lr_scheduler")
"""Sections that take a class."""

LENGTHS = ("fast_dev_run", "max_epochs", "max_steps", "limit_train_batches")
"""Arguments that say how long the training is."""

NUMBERS = (*LENGTHS, "accumulate_grad_batches", "check_val_every_n_epoch")
"""Arguments with which the command calculates."""

EPOCHS = 1000
"""Epochs of lightning.Trainer where neither max_epochs nor max_steps is given."""

LOCAL_STEPS = 10
"""Steps between two rounds where a config counts steps and no epochs."""

IMPLIED = {
    "limit_val_batches": 1.0, "limit_test_batches": 1.0, "limit_predict_batches": 1.0, "val_check_interval": 1.0,
    "num_sanity_val_steps": 2, "log_every_n_steps": 50,
}  # fmt: skip
"""What lightning.Trainer takes where None, the default, is given."""

PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's short forms of precision."""


def adopt(words: list[str]) -> int:
    """Run ``fedbc-cli adopt``: write a config of ours, print what changed, and parse the config as ``fit`` does.

    Args:
        words: Words of the command line after the command.

    Returns:
        The exit status, 0.

    Raises:
        ConfigurationError: What should be a number of the trainer is none.
        SystemExit: The parser refuses the new config, and has said why in one line.
        UsageError: The file is no config of LightningCLI, or does not name a class that is needed.
    """
    given = command_parser().parse_args(words)
    if given.file is None:
        raise UsageError(f"which config? {PROG} adopt LIGHTNING.yaml [--output OURS.yaml]")
    source, out = Path(given.file), given.output and Path(given.output)
    if not source.is_file():
        raise UsageError(f"no file {source}; give a config of LightningCLI")
    if out and (url_of(out) or out.exists()):
        raise UsageError(f"--output {out}: give the name of a new file, on a disk")
    check_syntax(source)
    adoption = Adoption(yaml.safe_load(source.read_text(encoding="utf-8")), str(source), given)
    text = yaml.safe_dump(adoption.config, sort_keys=False, allow_unicode=True)
    fit = ["fit", "--config", text]
    parser = capture_parser(FederatedCLI, args=fit, parser_kwargs={"prog": PROG})
    parser.parse_args(fit)  # says in one line, before anything is written, what fit could not read
    if out:
        write(out, f"# From {source}, by {PROG} adopt\n{text}")
        adoption.show(Console())
        print(f"\nTrain:  {PROG} fit --config {out}")
    else:
        print(text, end="")
        sys.stdout.flush()
        adoption.show(Console(stderr=True))  # so that the standard output is the config alone
    return 0


def command_parser() -> FederatedArgumentParser:
    """Return the parser of the command."""
    parser = FederatedArgumentParser(prog="fedbc-cli adopt", description=DESCRIPTION)
    parser.add_argument("file", type=str, nargs="?", help="Config of LightningCLI, e.g. its saved config.yaml.")
    parser.add_argument("--output", "-o", type=str, help="New file to write.")
    for section in SECTIONS:
        text = f"Class of the section {section}, where it has arguments alone, as after LightningCLI(MyModel, MyData)."
        parser.add_argument(f"--{section}", type=str, help=text)
    parser.add_argument("--num_clients", type=int, default=10, help="Clients to which the samples are dealt.")
    return parser


class Adoption:
    """A config of ours, made from one of LightningCLI, with the list of what was changed.

    Args:
        content: What the file holds.
        source: Name of the file, for messages.
        given: Options of the command.

    Attributes:
        config: The config of ours.
        changes: Pairs of a key, or what it becomes, and the reason; no key is dropped without one.

    Raises:
        ConfigurationError: What should be a number of the trainer is none.
        UsageError: It is no config of LightningCLI, or a class is not named.
    """

    def __init__(self, content: dict[str, Any], source: str, given: Any) -> None:
        self.config: dict[str, Any] = {}
        self.changes: list[tuple[str, str]] = []
        self._defaults: list[str] = []
        self._source, self._given = source, given
        content = self._of_fit(dict(content))
        seed = content.pop("seed_everything", 0)
        self.config["seed_everything"] = 0 if isinstance(seed, bool) or seed is None else seed
        if self.config["seed_everything"] is not seed:
            self._note(f"seed_everything: {as_word(seed)} → 0", "A number, so that a run can be repeated.")
        self.config["trainer"] = self._trainer(self._mapping("trainer", content.pop("trainer", None)))
        self.config["algorithm"] = "FedAvg"
        self._note("algorithm: FedAvg", f"Added: the plainest method; {PROG} fit --algorithm.help lists the others.")
        for key in SECTIONS:
            section = self._section(key, content.pop(key, None))
            if section is not None:
                self.config[key] = self._dealt(section) if key == "data" else section
        self._note_rest(content)

    def _of_fit(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the sections of ``fit``, which stand in the file itself or below that key."""
        if "fit" in content:
            for command in [key for key in ("validate", "test", "predict") if key in content]:
                del content[command]
                self._note(command, "Left out: this is the config of fit, which the other commands take, too.")
            content |= self._mapping("fit", content.pop("fit"))
        if "algorithm" in content or "algorithms" in content:
            raise UsageError(f"{self._source} has a section algorithm, so it is one of ours, not of LightningCLI")
        if not content.keys() & {"trainer", "model", "data"}:
            raise UsageError(f"{self._source} is no config of LightningCLI: it has no section trainer, model or data")
        return content

    def _mapping(self, key: str, value: Any) -> dict[str, Any]:
        if value is not None and not isinstance(value, dict):
            raise UsageError(f"{self._source}: {key} is no section, which has keys and values")
        return dict(value or {})

    # trainer

    def _trainer(self, given: dict[str, Any]) -> dict[str, Any]:
        numbers = {name: value for name in NUMBERS if (value := given.get(name)) is not None}
        # As LightningCLI reads numbers in quotation marks
        numbers |= {name: load(value) or value for name, value in numbers.items() if isinstance(value, str)}
        check_arguments(Trainer, numbers, f"{self._source}: trainer")
        given |= numbers
        ours = self._length(given)
        callbacks = self._callbacks(given)
        every = given.pop("check_val_every_n_epoch", 1) or 1
        if every != 1:
            ours["eval_every_n_rounds"] = every
            self._change("check_val_every_n_epoch", every, f"eval_every_n_rounds: {every}")
        precision = str(given.get("precision"))
        if precision in PRECISIONS:
            given["precision"] = PRECISIONS[precision]
        parameters = inspect.signature(Trainer).parameters
        for name, value in given.items():
            if name not in LIGHTNING_ARGUMENTS:
                self._note(f"trainer.{name}: {as_word(value)}", "Left out: it is no argument of lightning.Trainer.")
            elif value is None or repr(value) in map(repr, (parameters[name].default, IMPLIED.get(name))):
                self._defaults.append(name)
            elif LIGHTNING_ARGUMENTS[name].use is not None or not _is_possible(name, value):
                self._leave_out(name, value)
            else:
                ours[name] = value
                if LIGHTNING_ARGUMENTS[name].note and value is not False:
                    self._note(f"trainer.{name}", f"Kept. {LIGHTNING_ARGUMENTS[name].note}")
        return ours | ({"callbacks": callbacks} if callbacks else {})

    def _length(self, given: dict[str, Any]) -> dict[str, Any]:
        """Translate what says how long the training is; schedules go on over the rounds, as over Lightning's epochs."""
        found = {name: given.pop(name) for name in LENGTHS if name in given}
        chosen = {name: value for name, value in found.items() if value not in (None, -1) and value is not False}
        limit, steps, rounds = (chosen.get(name) for name in ("limit_train_batches", "max_steps", "max_epochs"))
        has_epochs, rounds = rounds is not None, EPOCHS if rounds is None else rounds
        if "fast_dev_run" in chosen:
            used, ours = ["fast_dev_run"], {"max_rounds": 1, "local_steps": int(chosen["fast_dev_run"])}
        elif steps is not None and not has_epochs:
            local = max(1, min(LOCAL_STEPS, steps))
            used, ours = ["max_steps"], {"max_rounds": math.ceil(steps / local), "local_steps": local}
        elif isinstance(limit, int):
            local = max(1, limit // (given.get("accumulate_grad_batches") or 1))
            used, ours = ["max_epochs", "limit_train_batches"], {"max_rounds": rounds, "local_steps": local}
        else:
            used, ours = ["max_epochs"], {"max_rounds": rounds, "local_epochs": 1}
        for name in used:
            self._change(name, found.pop(name, None), ", ".join(f"{key}: {value}" for key, value in ours.items()))
        if "max_epochs" in used and not has_epochs:
            self._note(f"max_rounds: {EPOCHS}", "Choose fewer; this is Lightning's number where none is given.")
        for name, value in found.items():
            if name in chosen and value != 1.0:
                self._leave_out(name, value)
            else:
                self._defaults.append(name)
        self._note("trainer.local_schedules: continue", "Added: current_epoch and schedulers go on over the rounds.")
        return ours | {"local_schedules": "continue"}

    def _callbacks(self, given: dict[str, Any]) -> list[Any]:
        """Return the callbacks that can be kept, with those that take the place of arguments of the trainer."""
        kept = [each for one in listed(given.pop("callbacks", None)) for each in self._kept(one)]
        if (duration := given.pop("max_time", None)) is not None:
            kept.append({"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": duration}})
            self._change("max_time", duration, "callbacks: Timer")
        if given.pop("enable_model_summary", None):
            kept.append({"class_path": "lightning.pytorch.callbacks.ModelSummary"})
            self._change("enable_model_summary", True, "callbacks: ModelSummary")
        return kept

    def _kept(self, callback: Any) -> Iterator[Any]:
        """Yield the callback, or what takes its place, or nothing."""
        section = callback if isinstance(callback, dict) else {"class_path": callback}
        path = str(section.get("class_path"))
        arguments = self._mapping(f"trainer.callbacks: {path}: init_args", section.get("init_args"))
        cls = find_class(path, AnyCallback)
        name, kind = f"trainer.callbacks: {path.rpartition('.')[2]}", cls and refused_kind(cls)
        if cls in both(ModelCheckpoint) and arguments.get("monitor") is not None:
            init_args = {"monitor": arguments.pop("monitor"), "mode": arguments.pop("mode", "min")}
            yield {"class_path": "fedbc_lightning.callbacks.RoundCheckpoint", "init_args": init_args}
            defaults = inspect.signature(ModelCheckpoint).parameters
            left = ", ".join(k for k, value in arguments.items() if k not in defaults or value != defaults[k].default)
            more = f" Without {left}." if left else ""
            self._note(f"{name} → RoundCheckpoint", f"The best round is kept as checkpoints/best.ckpt.{more}")
        elif kind is not None:
            instead = "`last.ckpt` is always written" if kind is ModelCheckpoint else REFUSED_CALLBACKS[kind]
            self._note(name, f"Left out; in its place: {instead}.")
        elif arguments.get("check_on_train_epoch_end"):
            del arguments["check_on_train_epoch_end"]
            self._note(f"{name}.check_on_train_epoch_end", "Left out: it checks after each evaluated round.")
            yield {**section, "init_args": arguments}
        else:
            yield callback

    # classes

    def _section(self, key: str, section: Any) -> Any:
        """Return a section with its class, which the command line names where the file does not."""
        path = getattr(self._given, key)
        if not isinstance(section, str):
            section = self._mapping(key, section)
        if "class_path" in section or isinstance(section, str):
            return section
        if path is None and (section or key in ("model", "data")):
            raise UsageError(f"{self._source}: {key} does not say its class; add --{key} my_module.MyClass")
        return {"class_path": path, "init_args": section} if section else path

    def _dealt(self, section: Any) -> Any:
        """Return the data, with a partitioner where they are no clients' data already."""
        cls = find_class(str(section if isinstance(section, str) else section["class_path"]), LightningDataModule)
        if cls is not None and issubclass(cls, FederatedDataModule):
            return section
        self._note(
            "data → PartitionedDataModule(data, IID)",
            f"Added: samples are dealt to {self._given.num_clients} equal clients; Dirichlet and others make them "
            f"unequal. {PROG} partition --config shows who has what.",
        )
        dealt = {"class_path": "fedbc_lightning.partition.IID", "init_args": {"num_clients": self._given.num_clients}}
        return {
            "class_path": "fedbc_lightning.PartitionedDataModule",
            "init_args": {"data": section, "partitioner": dealt},
        }

    # what is said

    def _note_rest(self, content: dict[str, Any]) -> None:
        if content.pop("ckpt_path", None) is not None:
            why = "A checkpoint of lightning.Trainer holds no clients; load its weights in the model's __init__."
            self._note("ckpt_path", f"Left out: {why}")
        for key, value in content.items():
            if value is not None:
                self._note(key, "Left out: your own LightningCLI reads it, and fedbc-cli has no such section.")
        if self._defaults:
            self._note("rest of trainer", f"Left out, as Lightning's default: {', '.join(self._defaults)}.")

    def _change(self, name: str, value: Any, ours: str) -> None:
        self._note(f"trainer.{name}: {as_word(value)} → {ours}", LIGHTNING_ARGUMENTS[name].note)

    def _leave_out(self, name: str, value: Any) -> None:
        use, note = LIGHTNING_ARGUMENTS[name]
        self._note(f"trainer.{name}: {as_word(value)}", f"Left out{f'; use {use}' if use else ''}. {note}")

    def _note(self, what: str, why: str) -> None:
        self.changes.append((what, why))

    def show(self, console: Console) -> None:
        """Print the changes as a table of two columns."""
        table = Table("changed", "why", box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for change in self.changes:
            table.add_row(*change)
        console.print(table, highlight=False, markup=False)


def _is_possible(name: str, value: Any) -> bool:
    """Return whether an argument that is kept can keep its value."""
    if name == "strategy":
        return str(value) in START_METHODS
    return not (name == "accelerator" and isinstance(value, dict)) and not str(value).startswith("transformer")
