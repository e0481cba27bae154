"""MNIST and its variants, EMNIST, CIFAR: in the original formats, and clear words about missing or damaged files."""

import gzip
import hashlib
import io

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    EMNISTDataModule,
    MNISTDataModule,
    MNISTPersonalDataModule,
    MNISTRobustDataModule,
)
from helpers.data_formats import ready, write_cifar10, write_cifar100, write_emnist, write_mnist
from helpers.refusals import refused
from torchvision.datasets import MNIST

from fedbc_lightning.partition import IID, Dirichlet, PowerLaw

ALL = (MNISTDataModule, EMNISTDataModule, CIFAR10DataModule, CIFAR100DataModule)
FOLDERS = ("MNIST/raw", "EMNIST/raw", "cifar-10-batches-py", "cifar-100-python")
MNIST_COUNTS = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]


def total(data):
    return sum(int(data.num_samples(split).sum()) for split in ("train", "val", "test"))


def images_of(data):
    return data.source.pool.tensors[0]


def message_of(data):
    with refused() as error:
        data.prepare_data()
    return str(error.value)


# formats


def test_mnist(tmp_path):
    images, digits = write_mnist(tmp_path)
    data = ready(MNISTDataModule(str(tmp_path), IID(4), download=False, test_fraction=0.25))
    assert (data.num_clients, total(data)) == (4, 700)
    assert np.array_equal(data.labels, digits)
    assert torch.equal(images_of(data)[:, 0], torch.from_numpy(images))
    inputs, targets = next(iter(data.client_train_dataloader(0)))
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((32, 1, 28, 28), torch.float32, torch.int64)
    assert data.source[5][0][0].numpy() == pytest.approx((images[5] / 255 - 0.1307) / 0.3081, abs=1e-5)


@pytest.mark.parametrize(("kind", "write"), [(CIFAR10DataModule, write_cifar10), (CIFAR100DataModule, write_cifar100)])
def test_cifar(tmp_path, monkeypatch, kind, write):
    images, classes = write(tmp_path, monkeypatch)
    data, plain = (
        ready(kind(str(tmp_path), Dirichlet(4, 1.0), download=False, augment=augment)) for augment in (True, False)
    )
    assert (data.num_clients, total(data)) == (4, len(images))
    assert np.array_equal(data.labels, classes)
    assert torch.equal(images_of(data), torch.from_numpy(images))
    assert images_of(data).is_contiguous()
    mean, std = (np.array(of)[:, None, None] for of in (kind.mean, kind.std))
    assert data.source[7][0].numpy() == pytest.approx((images[7] / 255 - mean) / std, abs=1e-5)
    (moved, targets), (still, same) = (next(iter(d.client_train_dataloader(0))) for d in (data, plain))
    assert torch.equal(targets, same)
    assert not torch.equal(moved, still)
    for loaders in zip(data.client_eval_dataloader(0), plain.client_eval_dataloader(0), strict=True):
        assert torch.equal(loaders[0][0], loaders[1][0])


@pytest.mark.parametrize("split", ["byclass", "bymerge", "balanced", "digits", "mnist"])
def test_emnist_stands_upright(tmp_path, split):
    images, labels = write_emnist(tmp_path, split)
    data = ready(EMNISTDataModule(str(tmp_path), split, partitioner=IID(3), download=False))
    assert np.array_equal(data.labels, labels)
    assert torch.equal(images_of(data)[:, 0], torch.from_numpy(images))
    assert images_of(data).is_contiguous()
    assert total(data) == len(images)


def test_emnist_keeps_the_classes_asked_for(tmp_path):
    images, labels = write_emnist(tmp_path)
    kept = [45, *range(36, 45)]
    data = ready(EMNISTDataModule(str(tmp_path), "byclass", kept, IID(3), download=False))
    of_them = np.isin(labels, kept)
    assert torch.equal(images_of(data)[:, 0], torch.from_numpy(images[of_them]))
    assert np.array_equal(np.array(kept)[data.labels], labels[of_them])
    assert np.unique(data.labels).tolist() == list(range(10))


def test_emnist_letters_count_from_zero(tmp_path):
    images, labels = write_emnist(tmp_path, "letters", 260, 52)
    data = ready(EMNISTDataModule(str(tmp_path), "letters", partitioner=IID(3), download=False))
    assert np.array_equal(data.labels, labels - 1)
    only = ready(EMNISTDataModule(str(tmp_path), "letters", [25, 0], IID(3), download=False))
    assert torch.equal(images_of(only)[:, 0], torch.from_numpy(images[np.isin(labels, [1, 26])]))
    assert np.bincount(only.labels).tolist() == [12, 12]
    assert only.class_names == ["z", "a"]


# the variants of Fed+


def test_mnist_robust(tmp_path):
    images, digits = write_mnist(tmp_path)
    data = ready(MNISTRobustDataModule(str(tmp_path), num_clients=10, download=False, seed=3))
    assert set(data.parts.sizes.tolist()) == {70}
    assert set(data.num_samples("train").tolist()) <= set(range(31, 40))
    assert len(data.negated_clients) == 1
    owner = np.empty(700, dtype=np.int64)
    owner[data.parts.indices] = data.parts.client_of_each()
    is_negated = np.isin(owner, data.negated_clients)
    expected = np.where(is_negated[:, None, None], 255 - images, images)
    assert torch.equal(images_of(data)[:, 0], torch.from_numpy(expected))
    assert images_of(data).dtype == torch.uint8
    assert np.array_equal(data.labels, digits)
    for num_clients, fraction, expected_number in ((50, None, 10), (20, None, 2), (5, 0.0, 0), (5, 0.01, 1)):
        some = ready(MNISTRobustDataModule(str(tmp_path), num_clients, fraction, download=False))
        assert len(set(some.negated_clients.tolist())) == expected_number


def test_mnist_personal(tmp_path):
    images, digits = write_mnist(tmp_path, 1800, 200)
    data = ready(MNISTPersonalDataModule(str(tmp_path), num_clients=5, negated_fraction=0.4, download=False, seed=1))
    assert data.noisy_classes.shape == (5, 2)
    assert (data.noisy_classes[:, 0] < data.noisy_classes[:, 1]).all()
    assert len(np.unique(data.noisy_classes, axis=0)) > 1
    pixels = images_of(data)[:, 0].numpy()
    assert pixels.dtype == np.int16
    noise = []
    for client, part in enumerate(data.parts):
        for index in part:
            clean = images[index].astype(int)
            clean = 255 - clean if client in data.negated_clients else clean
            if digits[index] in data.noisy_classes[client]:
                noise.append(pixels[index] - clean)
            else:
                assert np.array_equal(pixels[index], clean)
    noise = np.stack(noise) / 255
    assert len(noise) == pytest.approx(0.2 * 2000, rel=0.1)
    assert np.abs(noise).mean() == pytest.approx(0.5, rel=0.01)  # Laplace(b): mean |x| = b, variance 2 b^2
    assert noise.var() == pytest.approx(0.5, rel=0.02)
    assert np.abs(noise.mean(axis=0)).max() < 0.2
    assert len(np.unique(noise.reshape(len(noise), -1), axis=0)) == len(noise)
    inputs, _ = data.source[int(data.parts[0][0])]
    expected = (pixels[data.parts[0][0]] / 255 - 0.1307) / 0.3081
    assert inputs[0].numpy() == pytest.approx(expected, abs=1e-4)
    robust = ready(MNISTRobustDataModule(str(tmp_path), 5, 0.4, download=False, seed=1))
    assert np.array_equal(robust.negated_clients, data.negated_clients)
    assert robust.partition_hash() == data.partition_hash()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (EMNISTDataModule, {"split": "letters", "classes": [26]}, "classes.*0 to 25"),
        (EMNISTDataModule, {"classes": [1, 1]}, "classes.*each once"),
    ],
)
def test_impossible_arguments_are_refused_by_name(kind, arguments, message):
    with refused(rf"data\.{message}"):
        kind(**arguments)


# files that are missing, damaged or cannot be downloaded


@pytest.mark.parametrize("kind", ALL)
def test_missing_files_are_named(kind, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    for download, words in ((False, "cannot be read"), (True, "cannot be downloaded or read (")):
        message = message_of(kind(str(tmp_path), download=download))
        assert message.startswith(f"data.root='{tmp_path}': {kind.dataset_name} {words}")
        assert f"expected {FOLDERS[ALL.index(kind)]}/" in message


def serve(monkeypatch, files):
    """Answer torchvision's downloads with these files, whatever the server."""

    class Response(io.BytesIO):
        def __init__(self, request):
            self.url = request.full_url
            super().__init__(files[self.url.rpartition("/")[2]])
            self.length = len(self.getvalue())

    monkeypatch.setattr("urllib.request.urlopen", Response)


def test_mnist_is_downloaded_and_mended(tmp_path, monkeypatch):
    images, _ = write_mnist(tmp_path / "source")
    folder = tmp_path / "source" / "MNIST" / "raw"
    files = {f"{path.name}.gz": gzip.compress(path.read_bytes()) for path in folder.iterdir()}
    monkeypatch.setattr(MNIST, "resources", [(name, hashlib.md5(data).hexdigest()) for name, data in files.items()])
    serve(monkeypatch, files)
    root = tmp_path / "new" / "data"
    data = ready(MNISTDataModule(str(root), IID(2)))
    assert torch.equal(images_of(data)[:, 0], torch.from_numpy(images))
    path = root / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:5000])
    assert "delete what is damaged" in message_of(MNISTDataModule(str(root)))
    path.unlink()
    ready(MNISTDataModule(str(root), IID(2)))


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[: len(whole) // 2], lambda whole: whole + b"x", lambda whole: b""]
)
@pytest.mark.parametrize("name", ["emnist-letters-train-images-idx3", "emnist-letters-test-labels-idx1"])
def test_a_damaged_idx_file_is_told(tmp_path, name, damage):
    write_emnist(tmp_path, "letters")
    path = tmp_path / "EMNIST" / "raw" / f"{name}-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    message = message_of(EMNISTDataModule(str(tmp_path), "letters"))
    assert message.startswith(f"data.root='{tmp_path}': EMNIST cannot be downloaded or read")


# real MNIST


@pytest.fixture
def mnist_root(data_root):
    if not (data_root / "MNIST").is_dir():
        pytest.skip(f"no MNIST in {data_root}")
    return str(data_root)


def test_real_mnist(mnist_root):
    data = ready(MNISTDataModule(mnist_root, PowerLaw(20, 1, 1.3), download=False))
    sizes = data.num_samples("train") + data.num_samples("test")
    assert (sizes.min(), sizes.max()) == (110, 16444)
    assert data.label_histogram().sum(axis=0).tolist() == MNIST_COUNTS
    inputs = torch.cat([inputs for inputs, _ in data.pooled_dataloader("test")])
    assert float(inputs.mean()) == pytest.approx(0, abs=0.02)
    assert float(inputs.std()) == pytest.approx(1, abs=0.02)


def test_the_own_test_images_are_kept(tmp_path, monkeypatch, caplog):
    written = [
        (MNISTDataModule, write_mnist(tmp_path), {}),
        (CIFAR10DataModule, write_cifar10(tmp_path, monkeypatch), {"augment": False}),
        (CIFAR100DataModule, write_cifar100(tmp_path, monkeypatch), {"augment": False}),
        (EMNISTDataModule, write_emnist(tmp_path), {"classes": [3, 7]}),
    ]
    for kind, (_, labels), options in written:
        num_train = {CIFAR100DataModule: 500, EMNISTDataModule: 620}.get(kind, 600)
        with caplog.at_level("INFO"):
            data, pooled = (
                ready(kind(str(tmp_path), partitioner=IID(4), download=False, test=test, **options))
                for test in ("shared", "split")
            )
        kept = options.get("classes", labels)
        of_train, of_test = (part[np.isin(part, kept)] for part in (labels[:num_train], labels[num_train:]))
        assert (total(data), len(data.source)) == (len(of_train), len(of_train))
        found = [int(label) for _, label in data.pooled_dataset("test")]
        assert found == ([kept.index(label) for label in of_test] if kept is not labels else of_test.tolist())
        assert total(pooled) == len(of_train) + len(of_test)
        counts = f"{len(of_train)} training and {len(of_test)} test images"
        for said in ("; the training images are dealt out", ", pooled and dealt out to the clients (data.test: shared"):
            assert f"{counts}{said}" in caplog.text
        caplog.clear()
