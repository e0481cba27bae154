"""The argument parser: it takes our classes as well as Lightning's, and reports errors in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from numbers import Number
from types import MappingProxyType
from typing import Any, NoReturn

import yaml
from jsonargparse.typing import register_type
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.messages import one_line_of
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.lightning_names import AnyDataModule, AnyModule
from fedbc_lightning.core.secret import check_settings
from fedbc_lightning.core.text import printable
from fedbc_lightning.trainer.trainer import FederatedTrainer

# The default of an argument of Lightning's Timer is an Enum, which config.yaml must hold by its value.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def _number(value: Any) -> Number:
    if not isinstance(value, Number) or isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return value


# torchvision's transforms call their arguments numbers.Number, which jsonargparse 4.53 cannot write into config.yaml.
register_type(Number, serializer=lambda value: value, deserializer=_number, fail_already_registered=False)

# Map from the keys that take a class to its base class
CLASS_KEYS = {
    "algorithm": FederatedAlgorithm,
    "model": LightningModule,
    "data": LightningDataModule,
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
    "trainer.callbacks": Callback,
    "trainer.logger": Logger,
}

# Map from Lightning's classes to types that also take the same classes of the package ``pytorch_lightning``
EITHER: dict[Any, Any] = {LightningModule: AnyModule, LightningDataModule: AnyDataModule}


# Matches ``:role:`text```, ```text``` and *text*; a ``~`` before a dotted name keeps its last part only
MARKUP = re.compile(
    r"(?P<role>:\w+:)?(?P<ticks>`+)(?P<last>~?)(?P<code>[^`]+)(?P=ticks)|(?<![\w*])\*(?P<emphasis>\w[^*]*)\*(?![\w*])"
)


def plain(text: str) -> str:
    """Remove the markup of a text: ``:class:`~a.B``` becomes B, ```x``` becomes x.

    Example:
        >>> plain("see :class:`~a.B` and ``x_i``, *not* a * b")
        'see B and x_i, not a * b'
    """
    return MARKUP.sub(lambda m: m["emphasis"] or (m["code"].rpartition(".")[2] if m["last"] else m["code"]), text)


class BriefHelpFormatter(private_cli.OpenHelpFormatter):
    """A help formatter without lists of classes, of which torch has hundreds: ``--KEY.help`` has those of interest."""

    def start_section(self, heading: str | None) -> None:
        """Begin a section; the heading of a class is a line of its docstring, which is shown without markup."""
        super().start_section(heading and plain(heading))

    def shortened(self, text: str) -> str:
        """Return the help of an argument: no classes, types as Python 3.10 writes them, no markup."""
        inside = r"\[((?:[^][]|\[[^][]*\])*)\]"
        text = re.sub(f"Optional{inside}", r"\1 | null", text)
        text = re.sub(f"Union{inside}", lambda found: re.sub(r", (?![^[]*\])", " | ", found[1]), text)
        return re.sub(", known subclasses: [^()]*", "", plain(text))


class FederatedArgumentParser(LightningArgumentParser):
    """Lightning's parser, extended by :class:`FederatedTrainer` and all classes of :class:`FederatedAlgorithm`.

    Attributes:
        texts: Texts of configs, with those that are parsed in their place.
        words: The command line, by whose configs the place of a mistake is found.
    """

    texts: Mapping[str, str] = MappingProxyType({})
    words: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": BriefHelpFormatter, "allow_abbrev": False, **kwargs})

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a class under a key, and return the names of these arguments; see the base class."""
        if isinstance(lightning_class, type) and issubclass(lightning_class, FederatedTrainer):
            return self.add_class_arguments(
                lightning_class, nested_key, fail_untyped=False, instantiate=False, sub_configs=True
            )
        is_algorithm = isinstance(lightning_class, type) and issubclass(lightning_class, FederatedAlgorithm)
        if is_algorithm or (subclass_mode and lightning_class in EITHER):
            base = EITHER.get(lightning_class, lightning_class)
            self.add_subclass_arguments(base, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Parse a command line, or what jsonargparse passes on to the parser of a class; see the base class."""
        if args is not None and not self.exit_on_error:
            # jsonargparse 4.53 reads the value of a key inside of two classes, such as data.partitioner.seed, and
            # passes it on to the parser of the inner class as Python writes it.
            args = [re.sub("=None$", "=null", word) for word in args]
        return super().parse_args(args, *rest, **kwargs)

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Any:
        """Parse a config's text, which may give an algorithm by its usual name; see the base class."""
        return super().parse_string(self.texts.get(content, content), *args, **kwargs)

    def dump(self, cfg: Any, **kwargs: Any) -> str:
        """Return the text of a config, which is refused if it would hold a secret; see the base class."""
        check_settings(dict(cfg.items()))
        # What was parsed is valid, and each run of a study is dumped before it is built
        return super().dump(cfg, **{"skip_validation": True, **kwargs})

    def keys(self) -> Iterator[str]:
        """Yield all keys that can be given; those of a command come without its name."""
        for action in private_cli.actions(self):
            if isinstance(action.choices, dict):
                for subparser in action.choices.values():
                    yield from subparser.keys()
            else:
                yield action.dest

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error in one line, and exit with status 2."""
        if not self.exit_on_error:  # a parser inside a parser: the outer one reports
            super().error(message, ex)
        prog = self.prog.partition(" ")[0]
        said = one_line_of(message, self.keys(), CLASS_KEYS, self.words)
        sys.stderr.write(f"{prog}: error: {printable(said)}\n")
        self.exit(2)
