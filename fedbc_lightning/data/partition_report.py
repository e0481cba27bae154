"""Reports on how the data are split over the clients: numbers, a picture, and the exact split as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbc_lightning.core.files import make_folder, write
from fedbc_lightning.data.datamodule import SPLITS, FederatedDataModule
from fedbc_lightning.data.datasets import num_items
from fedbc_lightning.data.indexed import IndexedDataModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Largest number of clients whose sizes and classes are listed in partition.json
MAX_LISTED_CLIENTS = 10_000
# Number of pictures that are kept in memory, for further runs with the same partition
MAX_KEPT_PICTURES = 16

_drawn: dict[str, bytes] = {}


def describe_partition(datamodule: FederatedDataModule) -> dict[str, Any]:
    """Describe the split of the data over the clients in numbers.

    Args:
        datamodule: Data module after ``setup``.

    Returns:
        ``num_clients``; ``num_samples`` (``total``, ``min``, ``max``, ``mean``, over all splits);
        ``num_train``, ``num_val``, ``num_test``; ``hash``;
        ``heldout_clients``, their numbers, if there are any; and, if there are labels, the entries of
        :func:`describe_labels`.
    """
    sizes = {split: datamodule.num_samples(split) for split in SPLITS}
    total = np.sum([*sizes.values()], axis=0)
    numbers = {
        "num_clients": datamodule.num_clients,
        "num_samples": {"total": int(total.sum()), **_summary(total)},
        **{f"num_{split}": int(sizes[split].sum()) for split in SPLITS},
        "hash": datamodule.partition_hash(),
        **({"heldout_clients": datamodule.heldout.tolist()} if len(datamodule.heldout) else {}),
    }
    histogram = datamodule.label_histogram()
    return numbers if histogram is None else numbers | describe_labels(histogram)


def describe_labels(histogram: np.ndarray) -> dict[str, Any]:
    """Describe in numbers how the classes differ between clients.

    Args:
        histogram: Number of samples of each class at each client, ``(N, num_classes)``.

    Returns:
        ``num_classes``; ``classes_per_client`` (``min``, ``max``, ``mean``); ``label_emd``, the mean over clients of
        sum_c abs(p_i(c) - p(c)), in [0, 2] (0: IID; the "earth mover's distance" of Zhao et al. 2018).

    Example:
        >>> describe_labels(np.array([[5, 0], [0, 5]]))["label_emd"]
        1.0
    """
    overall = histogram.sum(axis=0) / max(histogram.sum(), 1)
    shares = histogram / np.maximum(histogram.sum(axis=1, keepdims=True), 1)
    return {
        "num_classes": int((overall > 0).sum()),
        "classes_per_client": _summary((histogram > 0).sum(axis=1)),
        "label_emd": float(np.abs(shares - overall).sum() / len(histogram)),
    }


def in_words(numbers: dict[str, Any]) -> list[str]:
    """Return in lines what a reader wants to know first of the numbers of :func:`describe_partition`."""
    sizes, classes = numbers["num_samples"], numbers.get("classes_per_client")
    parts = ", ".join(f"{numbers[f'num_{split}']:,} {split}" for split in SPLITS if numbers[f"num_{split}"])
    lines = [f"{numbers['num_clients']:,} clients, {sizes['total']:,} samples ({parts}); {_range(sizes)}"]
    if classes is not None:
        distance = f"label EMD {numbers['label_emd']:.2f} (0: IID, at most 2)"
        lines.append(f"{numbers['num_classes']} classes; {_range(classes)}; {distance}")
    if "heldout_clients" in numbers:
        lines.append(f"{len(numbers['heldout_clients']):,} of the clients are held out and never train")
    return lines


def save_partition_report(datamodule: FederatedDataModule, folder: str | Path) -> dict[str, Any]:
    """Write ``partition.png`` and ``partition.json`` into a folder, which is created if it is missing.

    If a partitioner made the split, ``partition.npz`` holds it exactly, so that
    :class:`~fedbc_lightning.partition.Explicit` can use it again.

    Args:
        datamodule: Data module after ``setup``.
        folder: Folder of the files.

    Returns:
        The content of ``partition.json``: the entries of :func:`describe_partition`, ``seed``, and per client ``sizes``
        (by split), ``label_histogram`` (both None above 10,000 clients), ``client_names`` and ``class_names`` (None
        if there are none).
    """
    folder = Path(folder)
    make_folder(folder)
    histogram = datamodule.label_histogram()
    listed = datamodule.num_clients <= MAX_LISTED_CLIENTS
    report = {
        **describe_partition(datamodule),
        "seed": datamodule.split_seed,
        "sizes": {split: datamodule.num_samples(split).tolist() for split in SPLITS} if listed else None,
        "label_histogram": histogram.tolist() if listed and histogram is not None else None,
        "client_names": datamodule.client_names,
        "class_names": datamodule.class_names,
    }
    write(folder / "partition.json", json.dumps(report) + "\n")
    if isinstance(datamodule, IndexedDataModule):
        count = num_items(datamodule.source)
        datamodule.parts.save(folder / "partition.npz", num_samples=count, label_histogram=histogram)
    write(folder / "partition.png", partition_png(datamodule))
    return report


def partition_png(datamodule: FederatedDataModule) -> bytes:
    """Return the picture of :func:`draw_partition` as PNG.

    The picture is kept, because the runs of a study often share a partition.

    Args:
        datamodule: Data module after ``setup``.
    """
    key = repr((describe_partition(datamodule), datamodule.client_names, datamodule.class_names))
    if key not in _drawn:
        from fedbc_lightning.data import partition_picture  # matplotlib takes half a second to import

        if len(_drawn) >= MAX_KEPT_PICTURES:
            del _drawn[next(iter(_drawn))]
        _drawn[key] = partition_picture.png(draw_partition(datamodule))
    return _drawn[key]


def draw_partition(datamodule: FederatedDataModule) -> Figure:
    """Draw the split: classes of each client (left) and number of samples of each client (right).

    Without labels only the right part is drawn. No display is needed, and the state of pyplot does not change.

    Args:
        datamodule: Data module after ``setup``.
    """
    from fedbc_lightning.data import partition_picture

    sizes = {split: datamodule.num_samples(split) for split in SPLITS}
    title = "\n".join(in_words(describe_partition(datamodule)))
    names = datamodule.client_names, datamodule.class_names
    return partition_picture.draw(title, sizes, datamodule.label_histogram(), *names)


def _summary(values: np.ndarray) -> dict[str, float]:
    return {"min": int(values.min()), "max": int(values.max()), "mean": float(values.mean())}


def _range(numbers: dict[str, float]) -> str:
    return f"{numbers['min']:,} to {numbers['max']:,} per client, mean {numbers['mean']:,.1f}"
