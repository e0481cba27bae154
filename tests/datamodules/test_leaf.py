"""LEAF's JSON files: what is read, and which file and user are named when something is wrong."""

import json

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import FEMNISTDataModule
from fedbc_lightning.datamodules.leaf import read_users
from helpers.data_formats import ready
from helpers.refusals import refused
from helpers.text_formats import write_leaf

from fedbc_lightning.partition import Dirichlet, Natural


def writer_images(seed, count):
    """Bytes (count, 784), LEAF's form of them, and classes."""
    rng = np.random.default_rng(seed)
    pixels, classes = rng.integers(0, 256, (count, 784), dtype=np.uint8), rng.integers(0, 62, count).tolist()
    return pixels, (pixels / 255).tolist(), classes


def write_writers(folder, sizes, seed=0):
    users = {}
    for name, size in sizes.items():
        _, x, y = writer_images(seed + len(users), size)
        users[name] = (x, y)
    return write_leaf(folder, users)


def test_femnist_with_test_files(tmp_path):
    pixels, x, y = writer_images(0, 9)
    write_leaf(tmp_path / "train" / "a.json", {"f0001_41": (x[:4], y[:4]), "f0002_03": (x[4:6], y[4:6])})
    write_leaf(tmp_path / "test" / "a.json", {"f0001_41": (x[6:8], y[6:8]), "f0002_03": (x[8:], y[8:])})
    data = ready(FEMNISTDataModule(str(tmp_path)))
    assert data.client_names == ["f0001_41", "f0002_03"]
    assert (data.num_samples("train").tolist(), data.num_samples("test").tolist()) == ([4, 2], [2, 1])
    assert data.source.pool.tensors[0].dtype == torch.uint8
    assert np.array_equal(data.source.pool.tensors[0].numpy().reshape(9, 784), pixels)
    assert data.labels.tolist() == y
    inputs, targets = next(iter(data.client_eval_dataloader(0, "test")))
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((2, 1, 28, 28), torch.float32, torch.int64)
    assert inputs.numpy().reshape(2, 784) == pytest.approx(pixels[6:8] / 255, abs=1e-6)


def test_files_and_users_are_joined(tmp_path):
    write_writers(tmp_path / "all_data_0.json", {"ann": 5, "bob": 7})
    write_writers(tmp_path / "all_data_1.json", {"bob": 3, "cyd": 6}, seed=9)
    data = ready(FEMNISTDataModule(str(tmp_path)))
    assert data.client_names == ["ann", "bob", "cyd"]
    assert (data.num_samples("train") + data.num_samples("test")).tolist() == [5, 10, 6]
    assert data.num_samples("test").min() >= 1  # a fifth, as there are no test files
    alone = ready(FEMNISTDataModule(str(tmp_path / "all_data_1.json"), Natural(min_samples=6), test_fraction=0.5))
    assert (alone.client_names, alone.num_samples("test").tolist()) == (["cyd"], [1])
    dealt = ready(FEMNISTDataModule(str(tmp_path), Dirichlet(2, 100.0, min_samples=2)))
    assert (dealt.num_clients, dealt.client_names) == (2, None)


def test_a_split_by_user_tests_the_global_model(tmp_path):
    write_writers(tmp_path / "train" / "a.json", {"ann": 5, "bob": 7})
    write_writers(tmp_path / "test" / "a.json", {"cyd": 4})
    data = ready(FEMNISTDataModule(str(tmp_path)))
    assert (data.client_names, data.num_samples("test").tolist()) == (["ann", "bob"], [0, 0])
    assert len(data.pooled_dataset("test")) == 4
    with refused(r"data\.test_fraction=0\.3"):
        ready(FEMNISTDataModule(str(tmp_path), test_fraction=0.3))
    write_writers(tmp_path / "test" / "b.json", {"ann": 2})
    with refused(r"client 2 .'cyd'.* has no training samples"):
        ready(FEMNISTDataModule(str(tmp_path)))


def test_missing_files(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with refused(r"data\.path=.*expected <path>/\{train,test\}/\*\.json"):
            ready(FEMNISTDataModule(str(path)))


def test_truncated_at_any_place(tmp_path):
    path = write_leaf(tmp_path / "a.json", {"ann": ([[1, 2]], [3]), "bob": ([[4], ["x"]], [5, 6])})
    text = path.read_text()
    for end in range(0, len(text), 7):
        path.write_text(text[:end])
        with refused(r"a\.json': cannot be read"):
            list(read_users(path))
    path.write_text("\n " + json.dumps(dict(reversed(json.loads(text).items())), indent=1))
    assert [(user.name, user.targets) for user in read_users(path)] == [("ann", [3]), ("bob", [5, 6])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("user_data"), "cannot be read .'user_data'"),
        (lambda c: c["user_data"]["bob"].pop("y"), "user 'bob': x has 2 samples and y 0"),
        (lambda c: c["user_data"]["bob"]["x"].__setitem__(0, [0.5] * 783), "user 'bob': .*784 numbers"),
        (lambda c: c["user_data"]["bob"]["x"].__setitem__(0, [255.0] * 784), "user 'bob': .*found pixels up to 255"),
        (lambda c: c["user_data"]["bob"]["y"].__setitem__(0, 62), "user 'bob': .*classes up to 62"),
        (lambda c: c.update(users=[], num_samples=[], user_data={}), "no user in its files has a sample"),
    ],
)
def test_file_and_user_are_named(tmp_path, change, message):
    path = write_writers(tmp_path / "a.json", {"ann": 3, "bob": 2})
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with refused(message) as error:
        ready(FEMNISTDataModule(str(path)))
    assert "a.json" in str(error.value)
