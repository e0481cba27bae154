"""One run of a study: its command line, its folder, and how far it has come.

Processes that do or watch a study need no other word from each other than what the folder of a run says, by a note of
its beginning and end and a row per round: it makes no difference whether they are workers of one command, jobs of a
cluster, or commands on several machines that share a disk.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from fedbc_lightning.cli.command_arguments import find_config
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import read_mapping, write
from fedbc_lightning.run.run_record import RunRecord

# Largest length of a folder's name in bytes; most file systems allow 255.
MAX_BYTES = 250
# File in a run's folder that says which run it is, when it began, and how it has ended.
NOTE = "run.json"
NOTE_TYPES = {
    "run": dict[str, str], "is_finished": bool, "error": str | None, "began_at": float, "ended_at": float, "round": int,
    "losses": int,
}  # fmt: skip
# Number of processes that may die in one round of a run before it counts as failed.
MAX_LOSSES = 2
LOST = f"its process died {MAX_LOSSES} times in one round (killed, or out of memory?)"


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

    @property
    def named_data(self) -> str:
        """The settings of the data that are texts, such as classes and paths; numbers say how clients share them."""
        return str({k: v for k, v in self.settings.items() if k.startswith("data") and isinstance(v, str)})

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
        texts = {}
        for config in map(find_config, self.configs):
            name, text = (config.name, config.read_text("utf-8")) if isinstance(config, Path) else ("text", config)
            texts[f"config {name}"] = sha256(text.encode()).hexdigest()[:12]
        settings = {key: as_word(value) for key, value in self.settings.items()}
        return {**texts, "algorithm": self.algorithm, "seed": str(self.seed), **settings}


def as_word(value: Any) -> str:
    """Format a value in YAML, as a word of a command line.

    Example:
        >>> as_word(1e-05), as_word(None), as_word([1, 2]), as_word(True), as_word("a")
        ('1.0e-05', 'null', '[1, 2]', 'true', 'a')
    """
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
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


@dataclass
class State:
    """The progress of a run.

    Attributes:
        run: The run that this is about.
        status: ``waiting``, ``running``, ``finished`` or ``failed``.
        round: Last round that the run has finished.
        max_rounds: T of the run; None until it has begun.
        error: Reason why the run failed, or None.
        logged: Names of what it has logged so far.
    """

    run: Run
    status: str = "waiting"
    round: int = 0
    max_rounds: int | None = None
    error: str | None = None
    logged: Sequence[str] = ()

    @property
    def is_open(self) -> bool:
        """Whether the run has neither finished nor failed."""
        return self.status not in ("finished", "failed")

    def look(self, since: float) -> None:
        """Read from the folder how far the run has come.

        Args:
            since: Seconds since the epoch; the run is tried again if it failed before.
        """
        note, record = read_note(self.run.folder), RunRecord.newest(self.run.folder)
        if record is not None:  # a run that was interrupted has rounds, too
            self.round, self.logged = record.written()
        if note.get("is_finished") and record is not None:
            self.status = "finished"
        elif note.get("error") and note.get("ended_at", since - 1) >= since:
            self.status, self.error = "failed", note["error"]
        elif note:
            self.status = "running" if note.get("began_at", since - 1) >= since else "waiting"
            if record is not None:
                self.max_rounds = self.max_rounds or record.max_rounds


def read_note(folder: Path) -> dict[str, Any]:
    """Read the note in a run's folder; it is empty if there is none.

    Raises:
        ConfigurationError: It was changed so that it cannot be read.
    """
    return read_mapping(folder / NOTE, NOTE_TYPES)


def has_ended(folder: Path) -> bool:
    """Return whether the note in a folder says that its run has finished, and the run's tables are still there."""
    return read_note(folder).get("is_finished", False) and RunRecord.newest(folder) is not None


def is_finished(run: Run) -> bool:
    """Return whether a run has finished without error, as its note says.

    Raises:
        ConfigurationError: The folder holds a run with other settings, whose numbers do not belong to this study.
    """
    there, here = read_note(run.folder).get("run", {}), run.identity()
    # Settings are compared as texts, configs by a hash: a study whose base was edited must not mix old and new runs.
    for key in dict.fromkeys([*here, *there]) if there else ():
        if here.get(key) != there.get(key):
            raise ConfigurationError(
                f"{run.title}: '{run.folder}' was begun with {key} {there.get(key, 'not given')}, and now it is "
                f"{here.get(key, 'not given')}. Give the study another name, or remove that folder."
            )
    return has_ended(run.folder)


def note_beginning(run: Run, since: float) -> bool:
    """Note that this process begins a run or goes on with it; return False if the run is to be given up.

    Whoever finds a beginning without an end, in a folder that no process has locked, knows that a process has died. If
    the run has not come further since, the next process will die of the same cause.

    Args:
        run: The run, whose folder this process has locked.
        since: Seconds since the epoch when the study was started; older beginnings do not count.
    """
    # The caller holds the lock, so no living process does the run: a beginning without an end is that of a dead one.
    # Only deaths without progress count. A job that a cluster takes away every few hours may be killed a hundred times.
    note, record = read_note(run.folder), RunRecord.newest(run.folder)
    reached = record.written()[0] if record else 0
    is_lost = note.get("began_at", since - 1) >= since and note.get("round") == reached
    losses = note.get("losses", 0) + 1 if is_lost else 0
    if losses >= MAX_LOSSES:
        note_end(run, error=LOST)
        return False
    write_note(run, is_finished=False, began_at=time.time(), round=reached, losses=losses)
    return True


def note_end(run: Run, error: str | None = None) -> None:
    """Note that a run has finished, or why it has failed.

    Args:
        run: The run.
        error: Reason why it failed, in one sentence; None if it finished.
    """
    if error is None and RunRecord.newest(run.folder) is None:  # to wait for the table would be to wait for ever
        error = f"it has finished, but its metrics.csv is gone; remove '{run.folder}', and it is run again."
    write_note(run, is_finished=error is None, error=error, ended_at=time.time())


def write_note(run: Run, **note: Any) -> None:
    """Write the note in a run's folder."""
    write(run.folder / NOTE, json.dumps({"run": run.identity(), **note}, indent=1))
