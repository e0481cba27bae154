"""FederatedCLI is Lightning's CLI for a FederatedTrainer, an algorithm, a model and data split over clients."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from jsonargparse import SUPPRESS, Namespace
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback, instantiate_class

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.callbacks import RoundProgressBar
from fedbc_lightning.cli.class_help import show_class_help
from fedbc_lightning.cli.classes import import_object, name_classes, rewritten_configs
from fedbc_lightning.cli.command_arguments import SUBCOMMANDS, prepare_arguments
from fedbc_lightning.cli.overview import usage, version
from fedbc_lightning.cli.parser import EITHER, FederatedArgumentParser
from fedbc_lightning.cli.printed_tables import print_metrics, print_plan, show_partition
from fedbc_lightning.core import private_cli, seeding
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import url_of, write
from fedbc_lightning.core.origin import code_hash
from fedbc_lightning.core.text import printable
from fedbc_lightning.run.folder import how_to_go_on
from fedbc_lightning.run.trust import signed
from fedbc_lightning.trainer.trainer import FederatedTrainer

# So that their classes can be given by their short names.
for _package in ("models", "datamodules", "callbacks", "distributed.flower_backend"):
    importlib.import_module(f"fedbc_lightning.{_package}")


# Commands that write files of models, with their option --force
WRITING = ("export", "predict")


class SaveRunConfig(SaveConfigCallback):
    """Writes the parsed config into a new run folder at the start of ``fit``, on rank 0; a resumed run keeps its file.

    Settings of a resumed run are reset, so that ``fedbc-cli fit --config <run>/config.yaml`` runs the same from the
    start.
    """

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Do nothing: the run has no folder yet."""

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write the file atomically, unless there is one."""
        if not trainer.is_global_zero:
            return
        path = Path(trainer.log_dir) / self.config_filename
        if path.exists():
            return
        config = self.config.clone()
        config["ckpt_path"], config["other_seed"], config["strict"] = None, False, False
        self.parser.dump_header = [version(), f"code {code_hash()}"]
        with trainer.recorder.disk_told():
            write(path, signed(self.parser.dump(config, skip_none=False)))


class FederatedCLI(private_cli.OpenCLI):
    """A command line with the sections seed_everything, trainer, algorithm, model, data, optimizer and lr_scheduler.

    ``fedbc-cli`` is ``FederatedCLI()``, which takes any module, data and algorithm by class path, and shipped ones by
    name. If classes are given, it becomes the command line of one project.

    Args:
        model_class: Class of the model, or None for any LightningModule.
        datamodule_class: Class of the data, or None for any data module.
        args: Words of the command line; by default those of ``sys.argv``.
        run: Whether the first word is a command, which is run; False: only parse and build.
        started: When the program began, by ``time.perf_counter``, for the start-up in a plan; None is now.
        **kwargs: Further arguments of :class:`lightning.pytorch.cli.LightningCLI`.

    Attributes:
        trainer: The :class:`FederatedTrainer` (None for ``partition``).
        algorithm: The method (None for ``partition``).
        model: The module, its initial values drawn from ``derive(seed_everything, "init")`` (None for ``partition``).
        datamodule: The data.
        result: Value that the command returned: the metrics of ``validate`` and ``test``, the file of ``export``, the
            :class:`~fedbc_lightning.planning.Plan` of ``plan``.

    Raises:
        ConfigurationError: A setting cannot be honoured.
    """

    current: FederatedCLI | None = None
    """The command line that is running, which Ctrl-C interrupts."""

    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule] | None = None,
        *,
        args: list[str] | None = None,
        run: bool = True,
        started: float | None = None,
        **kwargs: Any,
    ) -> None:
        FederatedCLI.current = self
        self._started = time.perf_counter() if started is None else started
        self.trainer: Any = None
        self.result: Any = None
        self._model_base: Any = model_class or LightningModule
        self._data_base: Any = datamodule_class or LightningDataModule
        words = list(sys.argv[1:] if args is None else args)
        self._command = words[0] if run and words and words[0] in SUBCOMMANDS else None
        if self._command:
            words = prepare_arguments(words)
        defaults = {
            "trainer_class": FederatedTrainer,
            "parser_class": FederatedArgumentParser,
            "save_config_callback": SaveRunConfig,
            "seed_everything_default": 0,
        }
        super().__init__(model_class, datamodule_class, args=words, run=run, **{**defaults, **kwargs})

    # what is parsed

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Create a parser that writes our version above the configs that it dumps."""
        return super().init_parser(**{"dump_header": [version()], **kwargs})

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands with those arguments of their methods that are built from sections."""
        return {name: {"model", "datamodule", "algorithm", "dataloaders", "force"} for name in SUBCOMMANDS}

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--seed_everything``, which is always a number, so that a saved config repeats its run exactly."""
        text = "Seed of everything random: initial model, partition, sampling, shuffling, dropout, augmentation."
        parser.add_argument("--seed_everything", type=int, default=self.seed_everything_default, help=text)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the sections trainer, algorithm, model and data."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{key}": value for key, value in self.trainer_defaults.items() if key != "callbacks"}
        parser.set_defaults(defaults)
        trains = self._command != "partition"
        algorithm: Any = FederatedAlgorithm
        parser.add_lightning_class_args(algorithm, "algorithm", subclass_mode=True, required=trains)
        parser.add_lightning_class_args(self._model_base, "model", self.subclass_mode_model, required=trains)
        parser.add_lightning_class_args(self._data_base, "data", self.subclass_mode_data, required=True)

    def add_commands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Add the command that is run; all commands if none is."""
        group = parser.add_subcommands()
        for name in [self._command] if self._command else self.subcommands():  # a parser takes 0.1 s to build
            options = {"description": SUBCOMMANDS[name], "usage": usage(name), **kwargs.get(name, {})}
            owner: Any = type(self) if name == "partition" else self.trainer_class
            command = self.command_parser(owner, name, **options)
            group.add_subcommand(name, command)
            for key, kind in {"ckpt_path": str, "other_seed": bool, "strict": bool}.items():
                if key not in self.command_arguments(name):  # config.yaml has the keys of fit, so all must take them
                    command.add_argument(f"--{key}", type=kind | None, default=None, help=SUPPRESS)
            if name == "predict":
                command.set_defaults(out="predictions")
            if name in WRITING:
                command.add_argument("--force", action="store_true", help="Write over a file that is there.")
            for key, section in (command.groups or {}).items():
                section.title = key  # else the first line of a base class's docstring

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse into ``self.config``; ``--algorithm.help`` or ``--model.help`` without a name lists the classes."""
        words = name_classes(args)
        if show_class_help(words):
            parser.exit(0)
        for each in (parser, *self.command_parsers.values()):
            assert isinstance(each, FederatedArgumentParser)
            each.texts, each.words = rewritten_configs(words), words
        self.config = parser.parse_args(words)

    def set_seed(self) -> None:
        """Seed Python, NumPy and torch with ``seed_everything``; see the base class."""
        seed = self.setting(self.config, "seed_everything")
        if not 0 <= seed < 2**32:
            raise ConfigurationError(f"seed_everything: got {seed}; give a number from 0 to {2**32 - 1}.")
        seed_everything(seed, workers=True, verbose=False)

    # what is built

    def add_instantiators(self) -> None:
        """Let the outermost object of each section get its hyper-parameters; see the base class."""
        for key in ("model", "data"):
            kind, takes_any = getattr(self, f"_{key}_base"), getattr(self, f"subclass_mode_{key}")
            base = EITHER.get(kind) or private_cli.built_class(kind)
            self.parser.add_instantiator(OutermostInstantiator(self, key), base, subclasses=bool(takes_any))

    def instantiate_classes(self) -> None:
        """Build data, algorithm, model and trainer; the model's initial values depend on the seed only."""
        cpu = torch.device("cpu")
        with seeding.preserved_globals(cpu):
            seeding.seed_globals(seeding.derive(seeding.global_seed(), "init"), cpu)
            try:
                self.config_init = self.parser.instantiate_classes(self._needed_config())
            except (TypeError, ValueError) as error:  # jsonargparse wraps what a constructor raises
                raise _innermost(error) from None
        built = (self.setting(self.config_init, key) for key in ("data", "model", "algorithm"))
        self.datamodule, self.model, self.algorithm = built
        if self.subcommand != "partition":
            self._give_optimizers()
            self.trainer = self.instantiate_trainer()

    def _needed_config(self) -> Namespace:
        """Return the config: for ``partition`` the data's part only, for ``export`` without processes and loggers."""
        if self.subcommand not in ("partition", "export", "plan", "predict", "verify"):
            return self.config
        config = self.config.clone()
        section = config[self.subcommand]
        off: dict[str, Any] = {"enable_progress_bar": False, "logger": False}
        if self.subcommand in ("export", "predict", "verify"):  # each process would do the same
            off |= {"strategy": "auto", "devices": 1, "num_nodes": 1}
        if self.subcommand in ("export", "verify"):  # runs nothing, and keeps the model on the CPU
            off["accelerator"] = "cpu"
        elif self.subcommand == "predict" and isinstance(devices := section["trainer"]["devices"], list):
            off["devices"] = devices[:1]
        if self.subcommand in ("partition", "export"):  # a callback may change what a client sends
            off["callbacks"] = None
        if self.subcommand == "partition":
            for key in ("model", "algorithm", "optimizer", "lr_scheduler"):
                section.pop(key, None)
        section["trainer"].update(Namespace(**off))
        return config

    def _give_optimizers(self) -> None:
        """Let ``configure_optimizers`` build the optimizer of the command line, if there is one.

        LightningCLI builds one and returns it on every call; a federated run needs a new one per client.
        """
        chosen, lr_scheduler = (self.setting(self.config_init, key) for key in ("optimizer", "lr_scheduler"))
        if not self.auto_configure_optimizers or not chosen:
            if lr_scheduler:
                raise ConfigurationError("lr_scheduler needs an optimizer: give --optimizer too, e.g. --optimizer SGD")
            return

        def configure_optimizers(module: LightningModule) -> Any:
            optimizer = instantiate_class(module.parameters(), chosen)
            scheduler = instantiate_class(optimizer, lr_scheduler) if lr_scheduler else None
            return self.configure_optimizers(module, optimizer, scheduler)

        configure_optimizers.settings = {"optimizer": chosen, "lr_scheduler": lr_scheduler}  # type: ignore[attr-defined]
        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)

    # what is run

    def method_arguments(self, command: str) -> dict[str, Any]:
        """Return the arguments of the trainer's method for a command; see the base class."""
        arguments = {**super().method_arguments(command), "algorithm": self.algorithm}
        return arguments | ({"force": self.setting(self.config_init, "force")} if command in WRITING else {})

    def run_command(self, command: str) -> None:
        """Run a command, and print what it returns."""
        if command == "partition":
            self.partition(self.setting(self.config_init, "out"))
            return
        built = time.perf_counter()
        self.result = getattr(self.trainer, command)(**self.method_arguments(command))
        if command in ("verify", "export", "predict"):
            shown = self.result[0].parent if command == "predict" else self.result
            print(printable(url_of(shown) or shown))
        elif command == "plan":
            self.result.start_seconds += built - self._started
            print_plan(self.result)
        elif command != "fit" and self.trainer.is_global_zero:
            print_metrics(self.result, title=command)

    def partition(self, out: str | None = None) -> None:
        """Draw the split of the data over the clients and print its numbers.

        Args:
            out: Folder for picture and numbers; by default ``<default_root_dir>/<name>/partition``.
        """
        trainer = self.setting(self.config, "trainer")
        folder = Path(out) if out else Path(trainer["default_root_dir"]) / trainer["name"] / "partition"
        show_partition(self.datamodule, folder)


class OutermostInstantiator(private_cli.Instantiator):
    """Builds the model or the data, giving it the ``hparams`` that ``load_from_checkpoint`` needs.

    Lightning's instantiator gives them to every module inside as well, such as an ordinary data module that is
    federated, whose ``self.hparams`` would then be those of another class.
    """

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        """Build one object of ``class_type``."""
        class_path = self.setting().get("class_path")
        # Random numbers that data draw must not change the model, which is built after them.
        with nullcontext() if self.key == "model" else seeding.preserved_globals(torch.device("cpu")):
            if class_path is None or import_object(class_path) is class_type:
                links = applied_instantiation_links
                return super().__call__(class_type, *args, applied_instantiation_links=links, **kwargs)
            return class_type(*args, **kwargs)


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None and not isinstance(error, ConfigurationError):
        error = error.__cause__
    return error


def resume_hint() -> str | None:
    """Return a line on how to resume the interrupted run; None on ranks other than the first."""
    trainer = FederatedCLI.current.trainer if FederatedCLI.current else None
    if trainer is None:
        return "interrupted before the run began"
    if not trainer.is_global_zero:
        return None
    resume = how_to_go_on(Path(trainer.log_dir), None) if trainer.log_dir else None
    if resume is None:
        return "interrupted; no round was finished, so there is nothing to resume"
    if sys.stdout.isatty() and any(isinstance(callback, RoundProgressBar) for callback in trainer.callbacks):  # it says
        return f"interrupted after round {trainer.finished_round}"
    return f"interrupted; go on with: {resume}"
