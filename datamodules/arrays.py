"""Data module for data of your own in arrays of NumPy or torch, or in files of these."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.data.datasets import Transform
from fedbc_lightning.data.labels import natural_clients
from fedbc_lightning.partition import IID, Natural, Partitioner

from .findings import check_file, look_like_classes
from .transforms import Scale, WholeBatch, try_transform

FORMATS = "give a NumPy array, a torch tensor, or the path of a .npy, .npz (one array) or .pt file (one tensor)"
DEFAULT_TEST_FRACTION = 0.2
DAMAGED = (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError)
"""Exceptions that NumPy and torch raise for a damaged file."""


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
        default = IID(10) if clients is None else Natural()
        super().__init__(partitioner or default, test_fraction=test_fraction, **kwargs)
        if (test_inputs is None) != (test_targets is None):
            raise ConfigurationError("data.test_inputs and data.test_targets: give both or neither")
        if test_clients is not None and (test_inputs is None or clients is None):
            raise ConfigurationError("data.test_clients: they need data.test_inputs and data.clients")
        self.arrays = {"inputs": inputs, "targets": targets, "clients": clients}
        self.test_arrays = {"test_inputs": test_inputs, "test_targets": test_targets, "test_clients": test_clients}
        self.classes: list[str] | None = None
        self.transform = WholeBatch(transform) if isinstance(transform, nn.Module) else transform

    def prepare_data(self) -> None:
        """Check that the files exist."""
        for name, value in {**self.arrays, **self.test_arrays}.items():
            if isinstance(value, (str, Path)):
                check_file(Path(value).expanduser(), name, FORMATS)

    def load(self) -> LoadedData:
        """Return the samples in their order, followed by the clients' test samples."""
        arrays = {**self.arrays, "targets": _read(self.arrays["targets"], "targets")}
        test_arrays = dict(self.test_arrays)
        if test_arrays["test_targets"] is not None:
            test_arrays["test_targets"] = _read(test_arrays["test_targets"], "test_targets")
        if _are_names(arrays["targets"]):
            self.classes, arrays["targets"], test_arrays["test_targets"] = _number_classes(
                arrays["targets"], test_arrays["test_targets"]
            )
        inputs, targets, clients = _read_samples(arrays)
        self._describe(inputs, targets, clients)
        if self.transform is not None:
            try_transform(inputs[:2], self.transform)
        transform = self.transform or (Scale(1 / 255) if inputs.dtype == torch.uint8 else None)
        owners, names = (None, None) if clients is None else natural_clients(clients)
        if self.test_arrays["test_inputs"] is None:
            if self.test_fraction is None:
                self.test_fraction = DEFAULT_TEST_FRACTION
            return LoadedData(ArrayDataset((inputs, targets), None, transform), _labels(targets), owners, names)
        test_inputs, test_targets, test_clients = _read_samples(test_arrays)
        for name, test, train in (("inputs", test_inputs, inputs), ("targets", test_targets, targets)):
            if test.dtype != train.dtype or test.shape[1:] != train.shape[1:]:
                raise ConfigurationError(
                    f"data.test_{name}: samples are {_form(test)}, those of data.{name} {_form(train)}"
                )
        if test_clients is None:
            shared = ArrayDataset((test_inputs, test_targets), None, transform)
            dataset = ArrayDataset((inputs, targets), None, transform)
            return LoadedData(dataset, _labels(targets), owners, names, shared_test=shared)
        assert clients is not None  # checked in __init__
        strange = np.setdiff1d(test_clients, clients)
        if len(strange):
            raise ConfigurationError(f"data.test_clients: client {strange[0]!s} is not among data.clients")
        owners, names = natural_clients(np.concatenate([clients, test_clients]))
        is_test = np.arange(len(owners)) >= len(inputs)
        tensors = torch.cat([inputs, test_inputs]), torch.cat([targets, test_targets])
        return LoadedData(ArrayDataset(tensors, None, transform), _labels(tensors[1]), owners, names, is_test)

    def _describe(self, inputs: Tensor, targets: Tensor, clients: np.ndarray | None) -> None:
        """Print what was found, so that the user notices, for example, classes that are taken for numbers."""
        source = self.arrays["inputs"]
        name = f"'{source}'" if isinstance(source, (str, Path)) else "data.inputs"
        labels, hint = _labels(targets), ""
        found = f"targets of {_form(targets)}" if labels is None else f"{len(np.unique(labels)):,} classes"
        if targets.ndim == 1 and labels is None:
            found = "targets are numbers"
            if look_like_classes(targets.numpy()):
                hint = " Are they classes? Then save them as integers."
        owners = "" if clients is None else f", {len(np.unique(clients)):,} clients"
        rank_zero_info(f"{name}: {len(inputs):,} samples of {_form(inputs)}, {found}{owners}.{hint}")


def _number_classes(names: np.ndarray, test: np.ndarray | None) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """Return the sorted names of the classes, and the positions among them of all samples and of all test samples."""
    classes, numbers = np.unique(_as_names(names), return_inverse=True)
    if test is None:
        return classes.tolist(), numbers, None
    if not _are_names(test):
        raise ConfigurationError(f"data.test_targets: found {test.dtype}; give names of classes, as data.targets does")
    test_names = _as_names(test)
    unknown = ~np.isin(test_names, classes)
    if unknown.any():
        raise ConfigurationError(
            f"data.test_targets: sample {unknown.argmax()} is of the class '{test_names[unknown.argmax()]}', which "
            "does not occur in data.targets"
        )
    return classes.tolist(), numbers, np.searchsorted(classes, test_names)


def _are_names(array: np.ndarray) -> bool:
    if array.ndim != 1 or array.dtype.kind not in "USO":
        return False
    return array.dtype.kind != "O" or all(isinstance(name, str) for name in array)


def _as_names(array: np.ndarray) -> np.ndarray:
    return np.char.decode(array, "utf-8", "backslashreplace") if array.dtype.kind == "S" else array.astype(str)


def _read_samples(arrays: dict[str, Any]) -> tuple[Tensor, Tensor, np.ndarray | None]:
    """Read inputs, targets and clients, and convert them to the types in which they are used."""
    (inputs_name, inputs), (targets_name, targets), (clients_name, clients) = arrays.items()
    x, y = _to_tensor(inputs, inputs_name), _to_tensor(targets, targets_name)
    y = y.to(torch.int64) if y.dtype == torch.uint8 else y
    if not len(x) == len(y) > 0:
        raise ConfigurationError(
            f"data.{inputs_name} has {len(x)} samples and data.{targets_name} {len(y)}; give equal numbers, one or more"
        )
    if y.ndim == 1 and y.dtype == torch.int64 and int(y.min()) < 0:
        raise ConfigurationError(f"data.{targets_name}: found class {int(y.min())}; number the classes 0, 1, ...")
    if clients is None:
        return x, y, None
    owners = _read(clients, clients_name)
    if owners.dtype.kind not in "iuUSO" or owners.shape != (len(x),):
        raise ConfigurationError(
            f"data.{clients_name}: found {owners.dtype} of shape {owners.shape}; give an integer or a string for "
            f"each of the {len(x)} samples"
        )
    return x, y, _as_names(owners) if owners.dtype.kind in "SO" else owners


def _to_tensor(value: Any, name: str) -> Tensor:
    """Convert an array to a tensor: uint8 stays, other integers become int64 and floats float32."""
    array = _read(value, name)
    if array.dtype.kind not in "biuf" or not array.ndim:
        names = " or names of classes (M,)" if name.endswith("targets") else ""
        raise ConfigurationError(
            f"data.{name}: found {array.dtype} of shape {array.shape}; give numbers (M, ...){names}"
        )
    if array.dtype == np.uint8:
        return torch.from_numpy(np.require(array, np.uint8, ["C", "W"]))
    if array.dtype.kind in "biu":
        return torch.from_numpy(np.require(array, np.int64, ["C", "W"]))
    with np.errstate(over="ignore"):
        numbers = np.require(array, np.float32, ["C", "W"])  # torch warns of arrays that are not writeable
    finite = np.isfinite(numbers).all(axis=tuple(range(1, numbers.ndim)))
    if not finite.all():
        raise ConfigurationError(f"data.{name}: sample {finite.argmin()} holds a number that is not finite")
    return torch.from_numpy(numbers)


def _read(value: Any, name: str) -> np.ndarray:
    """Return the array that was given, or the array in the file that was given."""
    if isinstance(value, (str, Path)):
        value = _read_file(Path(value).expanduser(), name)
    try:
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"data.{name}: {str(error).splitlines()[0]}; {FORMATS}") from None


def _read_file(path: Path, name: str) -> Any:
    if path.suffix not in (".npy", ".npz", ".pt"):
        raise ConfigurationError(f"data.{name}='{path}': unknown kind of file; {FORMATS}")
    try:
        with path.open("rb") as file:  # opened here because np.load would leave a damaged .npz open
            if path.suffix == ".pt":
                found = {"": torch.load(file, map_location="cpu", weights_only=True)}
            else:
                loaded = np.load(file, allow_pickle=False)
                found = {"": loaded} if path.suffix == ".npy" else dict(loaded)
    except DAMAGED as error:
        if "Object arrays" in str(error):  # NumPy's message about arrays that need pickle
            raise ConfigurationError(
                f"data.{name}='{path}': it holds Python objects; save it as numbers or as strings"
            ) from None
        raise ConfigurationError(f"data.{name}='{path}': cannot be read ({first_line(error)}); {FORMATS}") from None
    values = list(found.values())
    if len(values) != 1 or not isinstance(values[0], (np.ndarray, Tensor)):
        kinds = ", ".join(f"{key} {type(value).__name__}".strip() for key, value in found.items())
        raise ConfigurationError(f"data.{name}='{path}': it holds {kinds or 'nothing'}; {FORMATS}")
    return values[0]


def _labels(targets: Tensor) -> np.ndarray | None:
    return targets.numpy() if targets.ndim == 1 and targets.dtype == torch.int64 else None


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape[1:])}".removeprefix("torch.")
