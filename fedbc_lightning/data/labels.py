"""Facts about a data set that are found without reading its samples: classes, and indices in an underlying data set."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data.datasets import ArrayDataset, BatchTransformDataset, num_items

# Cache of labels by the id of a data set; a reference to the data set is kept because ids are used again
Known = dict[int, tuple[weakref.ref, np.ndarray | None]]


def labels_of(dataset: Dataset, known: Known | None = None) -> np.ndarray | None:
    """Return the classes of the samples, int64 ``(n,)``, or None if they cannot be known without reading samples.

    Classes are looked up in ``.targets`` or ``.labels`` of a data set, or in the last of its ``.tensors``, also below
    ``Subset`` and ``ConcatDataset``. They must be integers, one per sample.

    Args:
        dataset: Data set of any class.
        known: Cache that this function fills, so that many subsets of a data set convert its labels once; it does not
            keep data sets alive.
    """
    known = {} if known is None else known
    found = known.get(id(dataset))
    if found is not None and found[0]() is dataset:
        return found[1]
    labels = _find_labels(dataset, known)
    with suppress(TypeError):  # some classes do not allow weak references
        known[id(dataset)] = weakref.ref(dataset), labels
    return labels


def _find_labels(dataset: Any, known: Known) -> np.ndarray | None:
    if isinstance(dataset, ArrayDataset):
        labels = as_classes(dataset.pool.tensors[-1], len(dataset.pool)) if len(dataset.pool.tensors) > 1 else None
        return labels if labels is None or dataset.indices is None else labels[dataset.indices.numpy()]
    if isinstance(dataset, BatchTransformDataset):
        return labels_of(dataset.raw, known)
    # Most classes of torchvision have targets, some (SVHN, STL10) labels.
    for name in ("targets", "labels"):
        labels = as_classes(getattr(dataset, name, None), num_items(dataset))
        if labels is not None:
            return labels
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset, known)
        return None if labels is None else labels[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_of(part, known) for part in dataset.datasets]
        found = [part for part in parts if part is not None]
        return np.concatenate(found) if len(found) == len(parts) else None
    tensors: Any = getattr(dataset, "tensors", ())
    return as_classes(tensors[-1], num_items(dataset)) if len(tensors) > 1 else None


def as_classes(values: Any, length: int) -> np.ndarray | None:
    """Return the values as int64 ``(n,)`` if they are integers or booleans, one per sample; else None."""
    if values is None or not hasattr(values, "__len__") or len(values) != length:
        return None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array.astype(np.int64) if array.ndim == 1 and array.dtype.kind in "iub" else None


def natural_clients(values: Any, order: Callable[[str], Any] | None = None) -> tuple[np.ndarray, list[str]]:
    """Number the natural clients of samples, in the sorted order of their names.

    Args:
        values: Client of each sample, numbers or strings ``(M,)``.
        order: Key by which the names are sorted; None is the order of the values.

    Returns:
        The number of each sample's client, int64 ``(M,)``, and the names of the clients.

    Raises:
        ConfigurationError: A value is missing, or numbers and strings are mixed.

    Example:
        >>> natural_clients(["Romeo", "Juliet", "Romeo"])
        (array([1, 0, 1]), ['Juliet', 'Romeo'])
    """
    array = np.asarray(values)
    if array.dtype.kind in "fO":
        # Of all values NaN alone differs from itself; pandas puts it where a value is missing.
        missing = next((k for k, value in enumerate(array.tolist()) if value is None or value != value), None)
        if missing is not None:
            raise ConfigurationError(f"data.clients: sample {missing} has no client; give it one, or leave it out")
    try:
        names, numbers = np.unique(array, return_inverse=True)
    except TypeError:
        raise ConfigurationError("data.clients: found numbers and strings; give one kind of name") from None
    found = [str(name) for name in names]
    if order is not None:
        by_key = sorted(range(len(found)), key=lambda number: order(found[number]))
        numbers, found = np.argsort(by_key)[numbers], [found[number] for number in by_key]
    return numbers.astype(np.int64), found


def absolute_indices(dataset: Dataset | None) -> np.ndarray | None:
    """Return the indices of the samples in the underlying data set, int64 ``(n,)``; None if they are all of it."""
    if isinstance(dataset, BatchTransformDataset):
        return absolute_indices(dataset.raw)
    if isinstance(dataset, ArrayDataset):
        return None if dataset.indices is None else dataset.indices.numpy()
    if isinstance(dataset, Subset):
        indices, base = np.asarray(dataset.indices, dtype=np.int64), absolute_indices(dataset.dataset)
        return indices if base is None else base[indices]
    return None


def identify(dataset: Dataset | None) -> bytes:
    """Return bytes for a hash: the indices of a client's samples, or their number if there are no indices."""
    indices = absolute_indices(dataset)
    if indices is not None:
        return b"indices" + indices.tobytes()
    return b"size %d;" % (0 if dataset is None else num_items(dataset))
