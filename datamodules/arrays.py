"""Data module for data of your own in arrays of NumPy or torch, or in files of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import check_unpacked
from fedbc_lightning.data import IndexedDataModule, LoadedData
from fedbc_lightning.data.datasets import Transform
from fedbc_lightning.partition import IID, Natural, Partitioner

from .own_rows import Rows, form_of, join_rows, labels_of_tensor, number_classes, readable
from .transforms import Scale, WholeBatch, try_transform

FORMATS = "give a NumPy array, a torch tensor, or the path of a .npy, .npz (one array) or .pt file (one tensor)"


class ArraysDataModule(IndexedDataModule):
    """Federates inputs and targets in memory or in files, with or without a client of each sample.

    Each array is a NumPy array, a torch tensor, or the path of a ``.npy``, ``.npz`` (one array) or ``.pt`` file (one
    tensor, from ``torch.save``). The type of the inputs ``(M, ...)`` decides how they are used. Floats become float32.
    uint8 are pixels, which are scaled to [0, 1] batch by batch unless there is a ``transform``. Other integers are
    tokens and become int64 (to use whole numbers as features, give them as floats). Targets ``(M,)`` that are integers
    are classes 0, 1, ..., and strings ``(M,)`` are names of classes. Integer targets with more dimensions, e.g. the
    next token at every position, become int64. Targets that are floats, for a regression, become float32.

    Args:
        inputs: Inputs of all samples, ``(M, ...)``.
        targets: Targets of all samples, ``(M, ...)``.
        clients: Client of each sample ``(M,)``, integers or strings; None if there are no natural clients, so that a
            partitioner makes clients.
        test_inputs: Inputs of test data, in the same form; with None a part of each client's samples are test data, see
            ``test_fraction``.
        test_targets: Targets of ``test_inputs``.
        test_clients: Client of each test sample, one of ``clients``; with None the test data belong to no client, and
            evaluate the global model.
        transform: Transform of the inputs of every batch, for training and test: a function, or a transform of
            ``torchvision.transforms.v2``.
        partitioner: Partitioner that assigns samples to clients; None is ``Natural()`` if there are ``clients``, else
            ``IID(10)``.
        test_fraction: Fraction of each client's samples that are its test data, in (0, 1); None uses the test data that
            are given, or 0.2 if there are none.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        classes: Sorted names of classes 0, 1, ... if targets are strings, else None; available after ``setup``.

    Raises:
        ConfigurationError: Lengths disagree, a file cannot be read, or values cannot be trained on.

    Example:
        >>> inputs, targets = np.random.default_rng(0).random((6, 4)), np.array([0, 1, 0, 1, 0, 1])
        >>> data = ArraysDataModule(inputs, targets, clients=["ada", "ada", "bob", "bob", "bob", "bob"])
        >>> data.setup()
        >>> data.num_samples("train").tolist(), data.client_names
        ([1, 3], ['ada', 'bob'])
    """

    default_test_fraction: ClassVar[float | None] = 0.2

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        clients: Any = None,
        test_inputs: Any = None,
        test_targets: Any = None,
        test_clients: Any = None,
        transform: nn.Module | Transform | None = None,
        partitioner: Partitioner | None = None,
        *,
        test_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        partitioner = partitioner or (IID(10) if clients is None else Natural())
        super().__init__(partitioner, test_fraction=test_fraction, **kwargs)
        if (test_inputs is None) != (test_targets is None):
            raise ConfigurationError("data.test_inputs and data.test_targets: give both or neither")
        if test_clients is not None and (test_inputs is None or clients is None):
            raise ConfigurationError("data.test_clients: they need data.test_inputs and data.clients")
        self.arrays = {"inputs": inputs, "targets": targets, "clients": clients}
        self.test_arrays = {"test_inputs": test_inputs, "test_targets": test_targets, "test_clients": test_clients}
        self.classes: list[str] | None = None
        self.transform = WholeBatch(transform) if isinstance(transform, nn.Module) else transform

    def load(self) -> LoadedData:
        """Return the samples in their order, followed by the test samples."""
        train = self._read_rows(self.arrays)
        test = None if self.test_arrays["test_inputs"] is None else self._read_rows(self.test_arrays)
        labels = labels_of_tensor(train.targets)
        found = f"targets of {form_of(train.targets)}" if labels is None else f"{len(np.unique(labels)):,} classes"
        owners = "" if train.clients is None else f", {len(np.unique(train.clients)):,} clients"
        rank_zero_info(f"data.inputs: {len(train.inputs):,} samples of {form_of(train.inputs)}, {found}{owners}.")
        if self.transform is not None:
            try_transform(train.inputs[:2], self.transform)
        pixels = Scale(1 / 255) if train.inputs.dtype == torch.uint8 else None
        return join_rows(train, test, self.transform or pixels)

    def _read_rows(self, arrays: dict[str, Any]) -> Rows:
        """Read inputs, targets and clients, and convert them to the types in which they are used."""
        (inputs_name, inputs), (targets_name, targets), (clients_name, clients) = arrays.items()
        x, labels = _to_tensor(_read(inputs, inputs_name), inputs_name), _read(targets, targets_name)
        if labels.dtype.kind in "USO" and labels.ndim == 1 and all(isinstance(name, (str, bytes)) for name in labels):
            names = _as_names(labels)
            if self.classes is None:  # those of the training data, which are read first
                self.classes = np.unique(names).tolist()
            labels = number_classes(names, np.array(self.classes), f"data.{targets_name}")
        elif self.classes is not None:
            raise ConfigurationError(f"data.{targets_name}: found {labels.dtype}; give names of classes")
        y = _to_tensor(labels, targets_name)
        # _to_tensor leaves uint8 to pixels; as targets they are classes, int64 like all others
        y = y.to(torch.int64) if y.dtype == torch.uint8 else y
        owners = None if clients is None else _read(clients, clients_name)
        lengths = {len(x), len(y), *(() if owners is None else (len(owners),))}
        if len(lengths) > 1 or not len(x):
            raise ConfigurationError(
                f"data.{inputs_name}: found {sorted(lengths)} entries in inputs, targets and clients; give equal "
                "numbers, one or more"
            )
        if y.ndim == 1 and y.dtype == torch.int64 and int(y.min()) < 0:
            raise ConfigurationError(f"data.{targets_name}: found class {int(y.min())}; number the classes 0, 1, ...")
        if owners is not None and (owners.dtype.kind not in "iuUSO" or owners.ndim != 1):
            raise ConfigurationError(f"data.{clients_name}: found {owners.dtype}; give integers or strings (M,)")
        return Rows(x, y, _as_names(owners) if owners is not None and owners.dtype.kind in "SO" else owners)


def _as_names(array: np.ndarray) -> np.ndarray:
    return np.char.decode(array, "utf-8", "backslashreplace") if array.dtype.kind == "S" else array.astype(str)


def _to_tensor(array: np.ndarray, name: str) -> Tensor:
    """Convert an array to a tensor: uint8 stays, other integers become int64 and floats float32."""
    if array.dtype.kind not in "biuf" or not array.ndim:
        names = " or names of classes (M,)" if name.endswith("targets") else ""
        raise ConfigurationError(
            f"data.{name}: found {array.dtype} of shape {array.shape}; give numbers (M, ...){names}"
        )
    kind = np.uint8 if array.dtype == np.uint8 else np.int64 if array.dtype.kind in "biu" else np.float32
    with np.errstate(over="ignore"):
        numbers = np.require(array, kind, ["C", "W"])  # torch warns of arrays that are not writeable
    if numbers.dtype.kind == "f":
        finite = np.isfinite(numbers).all(axis=tuple(range(1, numbers.ndim)))
        if not finite.all():
            raise ConfigurationError(f"data.{name}: sample {finite.argmin()} holds a number that is not finite")
    return torch.from_numpy(numbers)


def _read(value: Any, name: str) -> np.ndarray:
    """Return the array that was given, or the one in the file that was given."""
    if isinstance(value, (str, Path)):
        path = Path(value).expanduser()
        with readable(path, name, FORMATS), path.open("rb") as file:  # np.load would leave a damaged .npz open
            check_unpacked(path, path.stat().st_size if path.suffix == ".pt" else None)
            if path.suffix == ".pt":
                value = torch.load(file, map_location="cpu", weights_only=True)
            else:
                value = np.load(file, allow_pickle=False)
            if path.suffix == ".npz":
                (value,) = dict(value).values()  # raises ValueError unless it holds one array
            if not isinstance(value, (np.ndarray, Tensor)):
                raise TypeError(f"it holds a {type(value).__name__}")
    try:
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"data.{name}: {str(error).splitlines()[0]}; {FORMATS}") from None
