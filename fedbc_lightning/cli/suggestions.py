"""Guesses which option was meant by a word of the command line that is none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence

from lightning.pytorch import LightningModule

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.choices import choices
from fedbc_lightning.cli.command_arguments import shipped_configs
from fedbc_lightning.core.errors import nearest
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.partition import Partitioner

OTHER_WORDS: dict[str, str] = {
    "seed": "seed_everything", "datamodule": "data", "dataset": "data", "method": "algorithm",
    "epochs": "trainer.local_epochs", "max_epochs": "trainer.local_epochs", "rounds": "trainer.max_rounds",
    "num_rounds": "trainer.max_rounds", "gpu": "trainer.devices", "gpus": "trainer.devices",
    "device": "trainer.accelerator", "resume": "ckpt_path", "checkpoint": "ckpt_path", "ckpt": "ckpt_path",
    "learning_rate": "model.lr", "output_dir": "trainer.default_root_dir", "clients": "trainer.clients_per_round",
}  # fmt: skip
"""Map from names that options have in other programs to ours."""
PLACES: dict[str, type] = {
    "model": LightningModule, "data.partitioner": Partitioner, "data": FederatedDataModule,
    "algorithm": FederatedAlgorithm,
}  # fmt: skip
"""Keys that take a class, with the base class; an argument of one of its classes may have been meant."""


def options_for(name: str, keys: Iterable[str]) -> list[str]:
    """Return the full options whose last part is a name, or which a name of another program means.

    Args:
        name: Name without a section, such as ``max_rounds``.
        keys: All keys that the command takes.

    Example:
        >>> options_for("max_rounds", ["trainer.max_rounds", "data"]), options_for("seed", ["seed_everything"])
        (['trainer.max_rounds'], ['seed_everything'])
    """
    known = list(keys)
    meant = OTHER_WORDS.get(name, "")
    if meant in known or (meant and meant.partition(".")[0] in known):
        return [meant]
    found = [key for key in known if key.rpartition(".")[2] == name and "." in key]
    if not found and any(key.partition(".")[0] == "model" for key in known):  # a command on one run
        found = [f"{place}.{name}" for place, base in PLACES.items() if takes(base, name)]
        found = [place for place in found if not place.startswith("data.") or not _is_inside(place, found)]
    near = None if found else nearest(name, {key.rpartition(".")[2] for key in known if "." in key})
    return found or [key for key in known if near and key.rpartition(".")[2] == near and "." in key]


def _is_inside(place: str, others: Sequence[str]) -> bool:
    """Return whether the same argument of the data's partitioner was found, too, which is what data pass on."""
    return place.count(".") == 1 and any(other.startswith("data.partitioner.") for other in others)


def takes(base: type, argument: str) -> bool:
    """Return whether any class of ours that can be chosen has an argument of this name."""
    return any(argument in inspect.signature(cls).parameters for cls in choices(base) if is_ours(cls))


def did_you_mean_option(name: str, value: str, keys: Iterable[str]) -> str | None:
    """Return the question which option was meant, or None if none is near."""
    found = options_for(name, keys)
    return f"did you mean {' or '.join(f'--{option}{value}' for option in found[:3])}?" if found else None


def about_stray_words(said: str, keys: Iterable[str], sections: Mapping[str, type]) -> str | None:
    """Return what is to be said of words that no option takes.

    Args:
        said: The words, such as ``digits.yaml`` or ``max_rounds=3``.
        keys: All keys that the command takes.
        sections: Map from the sections that take a class to their base classes.
    """
    word, _, rest = said.partition(" ")
    name, equals, value = word.lstrip("-").partition("=")
    shipped = shipped_configs()
    if word.endswith((".yaml", ".yml")) or word in shipped or f"{word}.yaml" in shipped:
        return f"'{word}' stands alone; did you mean --config {word}?"
    if not re.fullmatch(r"[\w.]+", name):
        return None
    given = f"={value}" if equals else f" {rest.partition(' ')[0]}".rstrip() if word.startswith("-") else ""
    section = name.partition(".")[0]
    if section in sections or any(key == name or key.startswith(f"{section}.") for key in keys):
        return f"'{word}' is no option; did you mean --{name}{given}?" if equals or word.startswith("-") else None
    question = did_you_mean_option(name, given, keys)
    return question and f"'{word}' is no option; {question}"
