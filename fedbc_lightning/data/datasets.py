"""Data sets in memory, whose batches are gathered and transformed as a whole, and facts about any data set."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import ConfigurationError

Transform = Callable[[Tensor], Tensor]
"""Function from the inputs of a batch ``(B, ...)`` to the model's inputs; it must treat each sample independently.

It runs on the device of the batch.
"""

Augment = Callable[[Tensor, Generator], Tensor]
"""Function from the inputs of a training batch ``(B, ...)`` and a CPU generator to augmented inputs of the same shape.

It runs before the transform.
"""


class TensorPool:
    """Tensors that many data sets share, and their copies on devices.

    Args:
        tensors: Tensors ``(M, ...)``, inputs first and targets last.

    Attributes:
        keep_on_device: Whether all tensors are copied to a device that needs batches; None copies them if they fill at
            most a quarter of its free memory.
        kind: dtype, shape of a sample and device of each tensor.
        sample_bytes: Number of bytes of one sample.
    """

    keep_on_device: bool | None = None

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)  # stays the same object if it is a tuple, by which as_arrays finds a pool again
        if not self.tensors or any(tensor.size(0) != self.tensors[0].size(0) for tensor in self.tensors):
            raise ValueError(f"tensors: lengths {[len(t) for t in self.tensors]}; give one or more, all of one length")
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}
        kind = tuple((tensor.dtype, tensor.shape[1:], tensor.device) for tensor in self.tensors)
        self.kind = _KINDS.setdefault(kind, kind)
        self.sample_bytes = max(1, sum(tensor[:1].nbytes for tensor in self.tensors))
        self._num_samples, self._device = self.tensors[0].size(0), self.tensors[0].device

    def __len__(self) -> int:
        return self._num_samples

    def on(self, device: torch.device | None) -> tuple[Tensor, ...]:
        """Return the tensors on ``device``, or where they lie if ``keep_on_device`` does not allow a copy."""
        if device is None or device == self._device:
            return self.tensors
        if device not in self._copies:
            fits = self.keep_on_device
            if fits is None:
                fits = sum(tensor.nbytes for tensor in self.tensors) <= _free_bytes(device) // 4
            self._copies[device] = tuple(upload(t, device) for t in self.tensors) if fits else self.tensors
        return self._copies[device]


# One shared object per kind, so that comparing equal kinds is fast: a round compares thousands
_KINDS: dict[tuple, tuple] = {}

# Pool of each TensorDataset, which all of its subsets share
_POOLS: WeakKeyDictionary[TensorDataset, TensorPool] = WeakKeyDictionary()


class ArrayDataset(Dataset):
    """Samples of shared in-memory tensors; whole batches are gathered, moved, augmented and transformed at once.

    It is also an ordinary map-style data set: item i is a tuple, transformed but not augmented.

    Args:
        tensors: Tensors ``(M, ...)``, inputs first and targets last, e.g. uint8 images ``(M, C, H, W)`` and int64
            classes ``(M,)``; or a pool shared with other data sets.
        indices: Rows of the tensors that belong to this data set, int64 ``(n,)``; None is all rows.
        transform: Function applied to the inputs of every batch, e.g. from uint8 to normalised float.
        augment: Function applied to the inputs of training batches, before the transform.

    Example:
        >>> dataset = ArrayDataset((torch.arange(4.0), torch.arange(4)), torch.tensor([3, 1]))
        >>> len(dataset), dataset[0]
        (2, (tensor(3.), tensor(3)))
        >>> dataset.batch(torch.tensor([1, 0]))
        [tensor([1., 3.]), tensor([1, 3])]
    """

    def __init__(
        self,
        tensors: Sequence[Tensor] | TensorPool,
        indices: Tensor | None = None,
        transform: Transform | None = None,
        augment: Augment | None = None,
    ) -> None:
        self.pool = tensors if isinstance(tensors, TensorPool) else TensorPool(tensors)
        self.indices = indices
        self.transform = transform
        self.augment = augment

    def __len__(self) -> int:
        return len(self.pool) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        position = range(len(self))[index]  # raises IndexError behind the last one, which ends a loop over the samples
        return tuple(tensor[0] for tensor in self.batch(torch.tensor([position])))

    def batch(self, indices: Tensor) -> list[Tensor]:
        """Gather the batch of positions ``(B,)`` in this data set, not augmented, where the tensors lie."""
        return self.gather(self.rows(indices), self.pool.tensors)

    def rows(self, positions: Tensor) -> Tensor:
        """Return the rows of the shared tensors that belong to positions ``(B,)`` of this data set."""
        return positions if self.indices is None else self.indices.index_select(0, positions)

    def gather(self, rows: Tensor, tensors: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
        """Gather and finish a batch that is not augmented, given its rows in the shared tensors.

        Args:
            rows: Rows of the shared tensors, int64 ``(B,)``.
            tensors: The shared tensors, or their copies on the device.
            device: Device of the batch; None is where the tensors lie.
        """
        return self.finish([tensor.index_select(0, rows) for tensor in tensors], None, device)

    def finish(self, batch: list[Tensor], generator: Generator | None, device: torch.device | None) -> list[Tensor]:
        """Move a batch to the device, augment its inputs if ``generator`` is given, and transform them."""
        # Moved first: bytes are a quarter of the float32 that a transform makes of them, and it runs on the device.
        if device is not None:
            batch = [upload(t, device) for t in batch]
        if self.augment is not None and generator is not None:
            batch[0] = self.augment(batch[0], generator)
        if self.transform is not None:
            batch[0] = self.transform(batch[0])
        return batch

    def subset(self, indices: np.ndarray | Tensor) -> ArrayDataset:
        """Return the samples at positions ``(n,)`` as a data set that shares the tensors of this one."""
        return ArrayDataset(self.pool, self.rows(torch.as_tensor(indices)), self.transform, self.augment)


def num_items(dataset: Dataset) -> int:
    """Return ``len(dataset)`` of a map-style data set; torch's base class does not declare ``__len__``."""
    return len(dataset)  # type: ignore[arg-type]


def num_bytes(dataset: Dataset | None) -> int:
    """Return the bytes that a client's data set takes: its own tensors or indices; 64 KiB for other classes."""
    if dataset is None:
        return 0
    if not isinstance(dataset, ArrayDataset):
        return 2**16
    own = dataset.pool.tensors if dataset.indices is None else (dataset.indices,)
    return sum(tensor.nbytes for tensor in own) + 2**12  # 4 KiB for the Python objects


def augment_of(dataset: Dataset) -> Augment | None:
    """Return the function that augments a data set's training batches; None if it has none or augments by itself."""
    return dataset.augment if isinstance(dataset, ArrayDataset) else None


def take(dataset: Dataset, indices: np.ndarray) -> Dataset:
    """Return the samples at ``indices (n,)`` as a data set, in memory if :func:`as_arrays` can, else a ``Subset``."""
    arrays = as_arrays(dataset)
    return Subset(dataset, indices.tolist()) if arrays is None else arrays.subset(indices)


def as_arrays(dataset: Dataset) -> ArrayDataset | None:
    """Return a data set's in-memory form, or None if it has none.

    :class:`ArrayDataset`, ``TensorDataset`` and ``Subset`` of these have one, but not subclasses that read items in
    their own way. All subsets of one ``TensorDataset`` share its pool.
    """
    if isinstance(dataset, ArrayDataset):
        return dataset if is_gathered(type(dataset)) else None
    if isinstance(dataset, TensorDataset):
        if not _reads_items_as(type(dataset), TensorDataset) or not len(dataset.tensors):
            return None
        # The user may have given the data set other tensors since its pool was made.
        pool = _POOLS.get(dataset)
        if pool is None or pool.tensors is not dataset.tensors:
            pool = _POOLS[dataset] = TensorPool(dataset.tensors)
        return ArrayDataset(pool)
    if isinstance(dataset, Subset) and _reads_items_as(type(dataset), Subset):
        base = as_arrays(dataset.dataset)
        return None if base is None else base.subset(np.asarray(dataset.indices, dtype=np.int64))
    return None


def join(datasets: Sequence[Dataset], *, is_training: bool = False) -> Dataset:
    """Concatenate data sets, in memory if all are in memory and agree in tensors and transforms.

    Raises:
        ConfigurationError: Training data are augmented in different ways, but a batch is augmented as a whole.
    """
    if len(datasets) == 1:
        return datasets[0]
    datasets = [as_arrays(dataset) or dataset for dataset in datasets]
    augment = augment_of(datasets[0])
    if is_training and any(augment_of(dataset) != augment for dataset in datasets):
        raise ConfigurationError(
            "data: training data that are augmented in different ways cannot be joined; give all the same augment"
        )
    arrays = [array for array in map(as_arrays, datasets) if array is not None]
    if len(arrays) < len(datasets) or not have_one_kind(arrays):
        return ConcatDataset(datasets)
    first = arrays[0]
    if all(array.pool is first.pool for array in arrays):
        rows = torch.cat([array.rows(torch.arange(len(array))) for array in arrays])
        return ArrayDataset(first.pool, rows, first.transform, first.augment)
    gathered = [[t if a.indices is None else t[a.indices] for t in a.pool.tensors] for a in arrays]
    columns = [torch.cat(column) for column in zip(*gathered, strict=True)]
    return ArrayDataset(columns, None, first.transform, first.augment)


def have_one_kind(datasets: Sequence[Any]) -> bool:
    """Return whether in-memory data sets can be joined: they agree in the kind of tensors, transform and augment."""
    kinds, transforms = [dataset.pool.kind for dataset in datasets], [dataset.transform for dataset in datasets]
    parts = kinds, transforms, [dataset.augment for dataset in datasets]
    return all(part.count(part[0]) == len(part) for part in parts)  # fast, because equal objects mostly are identical


def is_gathered(kind: type) -> bool:
    """Return whether batches of such data sets are gathered from tensors, since no subclass reads items its own way."""
    return issubclass(kind, ArrayDataset) and _reads_items_as(kind, ArrayDataset)


def _reads_items_as(kind: type, base: type) -> bool:
    methods = ("__getitem__", "__getitems__", "__len__", "__hash__", "batch", "rows", "gather", "finish")
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in methods)


def _free_bytes(device: torch.device) -> int:
    # 4 GiB are assumed of other devices, so that at most 1 GiB of data is copied to them.
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 4 * 2**30


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


SPLIT_NAMES = ("train", "val", "valid", "validation", "test")


def refuse_splits(names: Iterable[str], where: str, advice: str) -> None:
    """Raise if a name, such as a client's, is that of a split: a mapping or a folder of splits is taken for clients.

    Raises:
        ConfigurationError: A name is that of a split; it says where, and what to do.
    """
    found = next((name for name in names if name.lower() in SPLIT_NAMES), None)
    if found is not None:
        raise ConfigurationError(f"{where}: {found!r} is a split, and no name of a client or class; {advice}")


def class_names_of(data: Any) -> list[str] | None:
    """Return ``classes``, names of classes 0, 1, ..., of a data module, a data set or the one below a ``Subset``.

    The names are distinct, and fewer than the samples: else they are texts of samples, and the result is None.
    """
    while isinstance(data, Subset):
        data = data.dataset
    names = getattr(data, "classes", None)
    if not isinstance(names, (list, tuple)) or not names or not isinstance(names[0], str):
        return None
    is_per_sample = len({*names}) < len(names) or (hasattr(data, "__len__") and len(names) >= len(data))
    return None if is_per_sample else list(names)


def labels_of_classes(num_classes: int, names: Sequence[str] | None, prefix: str = "") -> list[str]:
    """Return how tables and pictures call classes 0, 1, ...: by names, or by numbers behind a prefix."""
    names = names or ()
    return [*names[:num_classes], *(f"{prefix}{label}" for label in range(len(names), num_classes))]


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
