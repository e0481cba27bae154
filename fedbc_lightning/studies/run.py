"""One run of a study: its command line, its folder, and what makes it this run and no other."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from fedbc_lightning.cli.arguments import find_config
from fedbc_lightning.core.errors import ConfigurationError

MAX_BYTES = 250
"""Of a folder's name."""


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Attributes:
        variant: Its name.
        method: Name of the algorithm in the tables.
        seed: Of everything.
        algorithm: The class.
        configs: Of ``fit``.
        settings: Full key -> value, over the configs.
        folder: It lies there, in ``version_0``.
        tried: The values that a run of tuning tries; empty: it is a run that is reported.
    """

    variant: str
    method: str
    seed: int
    algorithm: str
    configs: list[str]
    settings: dict[str, Any]
    folder: Path
    tried: str = ""

    @property
    def title(self) -> str:
        """For messages."""
        return " / ".join([self.variant, self.method, *([self.tried] if self.tried else []), f"seed {self.seed}"])

    def words(self) -> list[str]:
        """The command line of ``fit`` but for ``--ckpt_path``."""
        words = ["fit"]
        for config in self.configs:
            words += ["--config", str(find_config(config))]
        words += ["--algorithm", self.algorithm, "--seed_everything", str(self.seed)]
        words += [f"--{key}={as_word(value)}" for key, value in self.settings.items()]
        own = {"default_root_dir": self.folder.parent, "name": self.folder.name, "enable_progress_bar": "false"}
        return words + [f"--trainer.{key}={value}" for key, value in own.items()]

    def kind(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """What is equal where clients of several runs can be trained as one: all but the algorithm and the seeds."""
        own = {k: v for k, v in self.settings.items() if not k.startswith("algorithm.") and k != "data.seed"}
        return tuple(self.configs), own

    def identity(self) -> dict[str, str]:
        """What makes it this run and no other, wherever its folder lies; the configs by their texts."""
        texts = dict(digest(find_config(config)) for config in self.configs)
        settings = {key: as_word(value) for key, value in self.settings.items()}
        return {**texts, "algorithm": self.algorithm, "seed": str(self.seed), **settings}


def digest(config: Path | str) -> tuple[str, str]:
    """What a config is called, and a hash of its text."""
    name, text = (config.name, config.read_text(encoding="utf-8")) if isinstance(config, Path) else ("text", config)
    return f"config {name}", sha256(text.encode()).hexdigest()[:12]


def as_word(value: Any) -> str:
    """A value as a word of a command line, in YAML.

    Example:
        >>> as_word(1e-05), as_word(None), as_word([1, 2]), as_word(True), as_word("a")
        ('1.0e-05', 'null', '[1, 2]', 'true', 'a')
    """
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return text.removesuffix("...").strip()


def slug(name: str) -> str:
    """A name as that of a folder.

    Example:
        >>> slug("E = 5"), slug("FedGeoMed+"), slug("C=1, e=1.2")
        ('E_=_5', 'FedGeoMed+', 'C=1_e=1.2')

    Raises:
        ConfigurationError: It is too long for one.
    """
    found = re.sub(r"[^\w.+=-]+", "_", name).strip("_")
    found = found if found.strip(".") else "_"
    if len(found.encode()) > MAX_BYTES:
        raise ConfigurationError(f"'{name[:40]}...' is too long for the name of a folder; give a shorter name.")
    return found
