"""One run of a study: its command line, its folder, and the settings that identify it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedbc_lightning.cli.command_arguments import find_config
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.yaml_numbers import dump
from fedbc_lightning.run.run_record import RunRecord

# Largest length of a folder's name in bytes; most file systems allow 255.
MAX_BYTES = 250


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Attributes:
        variant: Name of the variant.
        method: Name of the algorithm in the tables.
        seed: Seed of the whole run (``seed_everything``).
        algorithm: Class of the algorithm, as ``--algorithm`` takes it.
        configs: Configs of ``fit``, layered in this order.
        settings: Map from full keys to values, which override the configs.
        folder: Folder of the run; its tables lie in a folder below it, such as ``FedBC-0``.
        tried: Values that a tuning run tries, as text; empty for a run that is reported.
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
        """Name of the run in messages."""
        return " / ".join([self.variant, self.method, *([self.tried] if self.tried else []), f"seed {self.seed}"])

    @cached_property
    def record(self) -> RunRecord:
        """What the run has left; it is read once, so ask for it when the run has finished."""
        found = RunRecord.newest(self.folder)
        assert found is not None
        return found

    def words(self) -> list[str]:
        """Return the command line of ``fit``, without ``--ckpt_path``."""
        words = ["fit"]
        for config in self.configs:
            words += ["--config", str(find_config(config))]
        words += ["--algorithm", self.algorithm, "--seed_everything", str(self.seed)]
        words += [f"--{key}={as_word(value)}" for key, value in self.settings.items()]
        own = {"default_root_dir": self.folder.parent, "name": self.folder.name, "enable_progress_bar": "false"}
        return words + [f"--trainer.{key}={value}" for key, value in own.items()]

    def identity(self) -> dict[str, str]:
        """Return what identifies the run: its settings and hashes of its configs' texts, but not its folder."""
        texts = dict(digest(find_config(config)) for config in self.configs)
        settings = {key: as_word(value) for key, value in self.settings.items()}
        return {**texts, "algorithm": self.algorithm, "seed": str(self.seed), **settings}


def digest(config: Path | str) -> tuple[str, str]:
    """Return the name of a config and a hash of its text."""
    name, text = (config.name, config.read_text(encoding="utf-8")) if isinstance(config, Path) else ("text", config)
    return f"config {name}", sha256(text.encode()).hexdigest()[:12]


def as_word(value: Any) -> str:
    """Format a value in YAML, as a word of a command line.

    Example:
        >>> as_word(1e-05), as_word(None), as_word([1, 2]), as_word(True), as_word("a")
        ('1.0e-05', 'null', '[1, 2]', 'true', 'a')
    """
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = dump(value, default_flow_style=True, width=10**6).strip()
    return text.removesuffix("...").strip()


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and value of every setting of a config, with full keys as the command line takes them.

    Example:
        >>> list(flat({"model": {"class_path": "m.M", "init_args": {"lr": 0.1}}, "seed": 1}))
        [('model', 'm.M'), ('model.lr', '0.1'), ('seed', '1')]
    """
    for key, value in content.items():
        full = f"{prefix}{key}"
        if isinstance(value, Mapping) and "class_path" in value:
            yield full, str(value["class_path"])
            yield from flat(value.get("init_args") or {}, f"{full}.")
        elif isinstance(value, Mapping) and value:
            yield from flat(value, f"{full}.")
        else:
            yield full, as_word(value)


def slug(name: str) -> str:
    """Turn a name into that of a folder.

    Example:
        >>> slug("E = 5"), slug("FedGeoMed+"), slug("C=1, e=1.2")
        ('E_=_5', 'FedGeoMed+', 'C=1_e=1.2')

    Raises:
        ConfigurationError: The name is too long for a folder.
    """
    found = re.sub(r"[^\w.+=-]+", "_", name).strip("_")
    found = found if found.strip(".") else "_"
    if len(found.encode()) > MAX_BYTES:
        raise ConfigurationError(f"'{name[:40]}...' is too long for the name of a folder; give a shorter name.")
    return found
