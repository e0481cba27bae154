"""Partition that is read from a file."""

from __future__ import annotations

import json
from collections import Counter
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
        saved, partition = self._saved, self._partition
        if saved is not None and saved.num_samples != len(values):
            raise self._refuse(
                f"it splits {saved.num_samples} samples, the data has {len(values)}; use the data it was made for"
            )
        try:
            partition.check(len(values), complete=False)
        except ConfigurationError as error:
            raise self._refuse(str(error)) from None
        # Data of the same size in another order pass all checks so far; only their classes give them away. Values are
        # all 0 if the data have no classes.
        if saved is not None and saved.label_histogram is not None and values.any():
            found = count_labels(values[partition.indices], partition.client_of_each(), len(partition))
            if found is None or not np.array_equal(found, saved.label_histogram):
                raise self._refuse("its clients had other classes; use the data it was made for, in the same order")
        return partition

    def _refuse(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"data.partitioner.path='{self.path}': {what}")

    def _read_lists(self) -> Partition:
        try:
            content: Any = json.loads(self.path.read_text(encoding="utf-8"), object_pairs_hook=_by_name)
        except (OSError, ValueError, RecursionError) as error:
            raise self._refuse(f"cannot be read ({error}); give a JSON file of lists, or a partition.npz") from None
        if isinstance(content, dict):
            self.client_names = list(content)
            content = list(content.values())
        # type(index) is int, because true is an int for isinstance
        is_lists = isinstance(content, list) and all(isinstance(part, list) and part for part in content)
        if not content or not is_lists or not all(type(index) is int for part in content for index in part):
            raise self._refuse("give a list of sample indices for each client, e.g. [[0, 5], [2]]")
        return Partition.from_parts([np.array(part) for part in content])


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of a name that stands twice, json keeps the last value without a word: the first client's samples would be lost.
    parts = dict(pairs)
    if len(parts) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"client {name!r} stands in it twice")
    return parts
