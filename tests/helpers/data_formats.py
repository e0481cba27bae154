"""Small files in the original formats of data sets that must otherwise be downloaded."""

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def write_mnist(root: Path, num_train: int = 600, num_test: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """IDX files under ``root/MNIST/raw``; returns all images (M, 28, 28) uint8 and digits (M,)."""
    rng = np.random.default_rng(0)
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images, digits = _draw(rng, num_train + num_test, (28, 28))
    for name, part in (("train", slice(None, num_train)), ("t10k", slice(num_train, None))):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(_idx(images[part]))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(_idx(digits[part]))
    return images, digits


def write_cifar10(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_train: int = 600, num_test: int = 100
) -> tuple[np.ndarray, np.ndarray]:
    """Pickled batches under ``root/cifar-10-batches-py``; returns all images (M, 3, 32, 32) uint8 and classes (M,).

    Only torchvision's list of checksums is patched, with those of the files written here.
    """
    from torchvision.datasets import CIFAR10

    rng = np.random.default_rng(0)
    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)
    images, classes = _draw(rng, num_train + num_test, (3, 32, 32))
    parts = [*np.array_split(np.arange(num_train), 5), np.arange(num_train, num_train + num_test)]

    names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    sums = [
        _write(folder / name, {"data": images[part].reshape(len(part), -1), "labels": classes[part].tolist()})
        for name, part in zip(names, parts, strict=True)
    ]
    meta = _write(folder / CIFAR10.meta["filename"], {"label_names": [f"class {label}" for label in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", sums[:5])
    monkeypatch.setattr(CIFAR10, "test_list", sums[5:])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": meta[1]})
    return images, classes


def write_image_folder(root: Path, num_per_class: int = 20, num_classes: int = 3, size: int = 16) -> Path:
    """PNG files ``root/class_<k>/<i>.png``; returns root."""
    rng = np.random.default_rng(0)
    for label in range(num_classes):
        (root / f"class_{label}").mkdir(parents=True)
        for number in range(num_per_class):
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"class_{label}" / f"{number:03d}.png")
    return root


def _idx(values: np.ndarray) -> bytes:
    """Images (n, h, w) or labels (n,) in the format of MNIST."""
    magic = {3: 2051, 1: 2049}[values.ndim]
    return struct.pack(f">{1 + values.ndim}i", magic, *values.shape) + values.astype(np.uint8).tobytes()


def _write(path: Path, content: object) -> list[str]:
    """Write an object, pickled unless it is bytes, and return the file's name and checksum."""
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return [path.name, hashlib.md5(path.read_bytes()).hexdigest()]


def _draw(rng: np.random.Generator, count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Noise whose brightness tells the class, so that something can be learned from it."""
    classes = rng.permutation(np.arange(count) % 10)
    noise = rng.integers(0, 25, (count, *shape))
    return (noise + 22 * classes.reshape(-1, *[1] * len(shape))).astype(np.uint8), classes


# EMNIST, CIFAR-100


def write_emnist(
    root: Path, split: str = "byclass", num_train: int = 620, num_test: int = 124
) -> tuple[np.ndarray, np.ndarray]:
    """IDX files under ``root/EMNIST/raw``, images transposed as they are there; returns upright images and labels."""
    num_classes = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26}.get(split, 10)
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(num_train + num_test) % num_classes) + (split == "letters")
    images = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    folder = root / "EMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, part in (("train", slice(None, num_train)), ("test", slice(num_train, None))):
        contents = {"images-idx3": _idx(images[part].transpose(0, 2, 1)), "labels-idx1": _idx(labels[part])}
        for kind, content in contents.items():
            path = folder / f"emnist-{split}-{name}-{kind}-ubyte"
            path.write_bytes(content)
    return images, labels


def write_cifar100(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_train: int = 500, num_test: int = 100
) -> tuple[np.ndarray, np.ndarray]:
    """Pickles under ``root/cifar-100-python`` as Python 2 and its NumPy wrote them; returns images and fine classes.

    Only torchvision's list of checksums is patched, with those of the files written here.
    """
    from torchvision.datasets import CIFAR100

    rng = np.random.default_rng(0)
    folder = root / CIFAR100.base_folder
    folder.mkdir(parents=True)
    classes = rng.permutation(np.arange(num_train + num_test) % 100)
    images = rng.integers(0, 256, (len(classes), 3, 32, 32), dtype=np.uint8)
    for name, part in (("train", slice(None, num_train)), ("test", slice(num_train, None))):
        fine = classes[part].tolist()
        coarse = [label // 5 for label in fine]
        content = {"data": images[part].reshape(len(fine), -1), "fine_labels": fine, "coarse_labels": coarse}
        pickled = pickle.dumps(content, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        assert pickled.count(b"\x89\x88\x87q") == 1
        old = pickled.replace(b"\x89\x88\x87q", b"K\x00K\x01\x87q")  # dtype("u1", 0, 1)
        monkeypatch.setattr(CIFAR100, f"{name}_list", [_write(folder / name, old)])
    names = {"fine_label_names": [f"class {label}" for label in range(100)]}
    _, md5 = _write(folder / CIFAR100.meta["filename"], names)
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": md5})
    return images, classes


def ready(data: Any) -> Any:
    """Set a data module up as ``fit`` and then ``test`` do, and return it."""
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    data.validate_clients()
    return data
