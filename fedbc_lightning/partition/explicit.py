"""Partition that is read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner, SavedPartition
from fedbc_lightning.partition.counts import count_labels


class Explicit(Partitioner):
    """Uses the partition in a file: ``partition.npz`` from a run's folder, or lists written by hand.

    No client uses samples that the file leaves out, and the seed has no effect. An ``.npz`` file holds no names of
    clients.

    Args:
        path: Path of an ``.npz`` file that :meth:`Partition.save` wrote, or of a JSON file with a list of sample
            indices for each client: ``[[0, 5], [2]]``, or ``{"Romeo": [0, 5], "Juliet": [2]}``.

    Attributes:
        client_names: Names of the clients in the JSON file; None if the file has none.

    Raises:
        ConfigurationError: The file is missing or damaged.
    """

    num_clients: int
    needs_labels: ClassVar[bool] = False
    complete: ClassVar[bool] = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.client_names: list[str] | None = None
        self._saved: SavedPartition | None = None
        if self.path.suffix == ".json":
            self._partition = self._read_lists()
        else:
            self._saved = Partition.load(self.path)
            self._partition = self._saved.partition
        self.num_clients = len(self._partition)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Return the partition in the file, after checking that it fits the data.

        Args:
            values: Class of each sample, ``(M,)``; all 0 if there are no classes.
            seed: Unused, as nothing is drawn.

        Raises:
            ConfigurationError: The file was made for other data.
        """
        if self._saved is not None and self._saved.num_samples != len(values):
            raise ConfigurationError(
                f"path: '{self.path}': it splits {self._saved.num_samples} samples, the data has {len(values)}; use "
                "the data it was made for, or another file"
            )
        try:
            self._partition.check(len(values), complete=False)
        except ConfigurationError as error:
            raise ConfigurationError(f"path: '{self.path}': {error}") from None
        if self._saved is not None and self._saved.label_histogram is not None and values.any():
            self._compare_classes(values, self._saved.label_histogram)
        return self._partition

    def _compare_classes(self, labels: np.ndarray, saved: np.ndarray) -> None:
        partition = self._partition
        found = count_labels(labels[partition.indices], partition.client_of_each(), len(partition))
        if found is None or found.shape != saved.shape:
            raise ConfigurationError(
                f"path: '{self.path}': it was made for data of {saved.shape[1]} classes, here there are "
                f"{len(np.unique(labels))}; use the data it was made for, or another file"
            )
        different = np.flatnonzero((found != saved).any(axis=1))
        if len(different):
            client = different[0]
            raise ConfigurationError(
                f"path: '{self.path}': client {client} had {saved[client].tolist()} samples of the classes, here it "
                f"would have {found[client].tolist()}; use the data it was made for, in the same order, or another file"
            )

    def _read_names(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"path: '{self.path}': client {twice!r} is there twice; give each its own name")
        return dict(pairs)

    def _read_lists(self) -> Partition:
        try:
            content: Any = json.loads(self.path.read_text(encoding="utf-8"), object_pairs_hook=self._read_names)
        except FileNotFoundError:
            raise ConfigurationError(
                f"path: there is no file '{self.path}'; give the partition.npz of a run, or a JSON file of lists"
            ) from None
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"path: '{self.path}': cannot be read ({error}); give a JSON file") from None
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"path: '{self.path}', line {error.lineno}: no valid JSON ({error.msg})") from None
        if isinstance(content, dict) and "num_clients" in content:
            raise ConfigurationError(
                f"path: '{self.path}' describes a partition; the samples are in the partition.npz beside it: give that"
            )
        if isinstance(content, dict):
            self.client_names = list(content)
            content = list(content.values())
        names = self.client_names or range(len(content) if isinstance(content, list) else 0)
        if not isinstance(content, list) or not content:
            raise ConfigurationError(
                f"path: '{self.path}': give a list of sample indices for each client, e.g. [[0, 5], [2]]"
            )
        for name, part in zip(names, content, strict=True):
            if not isinstance(part, list) or not part or not all(type(index) is int for index in part):
                raise ConfigurationError(
                    f"path: '{self.path}': client {name} has {str(part)[:60]}; give it a list of sample indices, "
                    "whole numbers"
                )
        return Partition.from_parts([np.array(part) for part in content])
