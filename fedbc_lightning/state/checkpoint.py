"""Checkpoint files: written atomically, read safely, compared before use."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedbc_lightning.core import files
from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.storable import find_unreadable, plain_copy

# Key under which a checkpoint, otherwise an ordinary Lightning one, holds the federated state
KEY = "fedbc_lightning"

# Version of the federated state's format in a checkpoint; it is raised when the format changes
FORMAT = 1

# What parts of a fingerprint are if it does not hold them
WHERE_ABSENT = {
    "trainer.local_schedules": "fresh", "trainer.local_parameters": "none", "trainer.codec.up": "none",
    "trainer.codec.down": "none",
}  # fmt: skip

# Key under which an exported model names the run, round and client that it was taken from
SOURCE = "fedbc_lightning_source"


def save_atomically(checkpoint: Any, path: Path, check: Callable[[], None] = lambda: None) -> None:
    """Write a checkpoint so that `path` holds the old or the new file, whenever the process or the machine dies.

    The steps are: temporary file, fsync, replace, fsync of the folder. The replace is the only commit point. Before
    it, the temporary file is opened as :func:`load` will do it, without running code; it is memory-mapped, so
    that the time of this check does not grow with the size of the model.

    Args:
        checkpoint: The content of the checkpoint.
        path: The file to write, on a disk or in an object store; its folder is made if it is missing.
        check: Raises if the folder belongs to another process by now.

    Raises:
        ConfigurationError: The checkpoint holds an object that could not be loaded again; the old file stays.
    """
    checkpoint = plain_copy(checkpoint)  # the entries of module and callbacks may hold NumPy's numbers
    files.make_folder(path.parent)
    try:
        with files.replacing(path) as partial:
            with files.open_file(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            torch.load(partial, map_location="cpu", mmap=True)
            check()  # who takes the folder over from now on removes the temporary file, so nothing is replaced
    except Exception as error:
        found = None if files.os_error(error) else find_unreadable(checkpoint)
        if found is None:
            raise
        kept = f" '{path}' stays as it was." if path.exists() else ""
        raise ConfigurationError(
            f"checkpoint: a value could not be loaded again without running code: {found}; let the state_dict of "
            "callbacks and data, get_extra_state and on_save_checkpoint hold numbers, strings and tensors only, or "
            f"allow its class (torch.serialization.add_safe_globals).{kept}"
        ) from error
    files.sync_folder(path.parent)


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint that this package wrote, without running code unless the user has allowed it.

    Raises:
        ConfigurationError: The file does not exist, cannot be read, or was not written by this package.
    """
    path = files.url_of(path) or path  # as the user wrote it, in messages
    with files.on_disk(Path(path)) as file:
        if file.parent.name == files.CHECKPOINTS:  # elsewhere the user may have links of his own
            files.refuse_link(file)
        if not file.is_file():
            raise ConfigurationError(f"ckpt_path: there is no file '{path}'.")
        try:
            # torch packs without making smaller, and does not compare checksums: a flipped bit would become a number.
            files.check_unpacked(file, file.stat().st_size)
            checkpoint = torch.load(file, map_location="cpu")
        except Exception as error:
            # torch.load's default is for safety: a checkpoint may hold numbers, strings, tensors and their containers.
            named = re.search(r"GLOBAL (\S+)", str(error))
            problem = f"it holds an object of {named.group(1)}" if named else f"{first_line(error)}; is it cut off?"
            raise ConfigurationError(f"ckpt_path: '{path}' cannot be read ({problem}).") from error
    if isinstance(checkpoint, dict) and SOURCE in checkpoint:
        raise ConfigurationError(f"ckpt_path: '{path}' is an exported model; give the run that it comes from.")
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        raise ConfigurationError(f"ckpt_path: '{path}' was not written by fedbc_lightning.")
    found = checkpoint[KEY].get("format") if isinstance(checkpoint[KEY], dict) else None
    if found != FORMAT:
        raise ConfigurationError(f"ckpt_path: '{path}' has format {found}, this version reads format {FORMAT}.")
    return checkpoint


def check_fingerprint(saved: dict[str, Any], current: dict[str, Any], path: str | Path) -> None:
    """Compare the model, partition and algorithm that a checkpoint was made with, with those of this run.

    Args:
        saved: The fingerprint in the checkpoint: name of a part -> its description.
        current: The fingerprint of this run.
        path: The path of the checkpoint, for the error message.

    Raises:
        ConfigurationError: The fingerprints differ; the message names the first three differences.
    """
    differences = []
    for part in dict.fromkeys([*current, *saved]):
        here, there = (described.get(part, WHERE_ABSENT.get(part)) for described in (current, saved))
        if there == here:
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            differences += [
                f"{part} '{name}' is {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
                for name in sorted({*here, *there})
                if here.get(name) != there.get(name)
            ]
        else:
            differences.append(f"{part} is {there} there, {here} here")
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ConfigurationError(
            f"ckpt_path: '{path}' is of another run: {'; '.join(differences[:3])}{more}. "
            "Give the model, data, partitioner, seed and algorithm it was made with, or start anew without ckpt_path."
        )
