"""One's own arrays: types, files, clients, test data, and what is refused."""

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import ArraysDataModule
from helpers.refusals import refused
from torchvision.transforms import v2

from fedbc_lightning.partition import IID, Dirichlet

INPUTS = np.arange(120, dtype=np.float64).reshape(30, 4)
TARGETS = np.arange(30) % 3


def ready(*arguments, **options):
    data = ArraysDataModule(*arguments, seed=0, **options)
    data.setup()
    data.validate_clients()
    return data


def test_without_clients():
    data = ready(INPUTS, TARGETS)
    assert (data.num_clients, data.client_names) == (10, None)
    assert data.num_samples("train").sum() + data.num_samples("test").sum() == 30
    inputs, targets = data.source.pool.tensors
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert torch.equal(inputs, torch.from_numpy(INPUTS).float())
    assert data.label_histogram().sum(axis=0).tolist() == [10, 10, 10]
    assert ready(torch.tensor(INPUTS), TARGETS.tolist(), partitioner=Dirichlet(2, 9.0, 3)).num_clients == 2


@pytest.mark.parametrize("clients", [[11, 2, 5] * 10, ["b", "a", "c"] * 10, torch.tensor([1, 0, 2] * 10)])
def test_clients(clients, caplog):
    with caplog.at_level("INFO"):
        data = ready(INPUTS, TARGETS, clients, test_fraction=0.5)
    assert "data.inputs: 30 samples of float32 of shape (4,), 3 classes, 3 clients." in caplog.text
    assert data.client_names == [str(name) for name in sorted(set(np.asarray(clients).tolist()))]
    assert (data.num_samples("train") + data.num_samples("test")).tolist() == [10, 10, 10]
    first = np.asarray(clients) == sorted(set(np.asarray(clients).tolist()))[0]
    assert sorted(data.parts[0].tolist()) == np.flatnonzero(first).tolist()


@pytest.mark.parametrize(
    ("inputs", "targets", "expected"),
    [
        (INPUTS.astype(np.float16), TARGETS.astype(float), (torch.float32, torch.float32)),
        (INPUTS.astype(">f8"), TARGETS.astype(np.uint8), (torch.float32, torch.int64)),
        (INPUTS.astype(np.int32), TARGETS > 1, (torch.int64, torch.int64)),
        (INPUTS.astype(np.int64)[::-1], INPUTS.astype(np.int32), (torch.int64, torch.int64)),
        (torch.zeros(30, 2, requires_grad=True), torch.zeros(30), (torch.float32, torch.float32)),
    ],
)
def test_types(inputs, targets, expected):
    data = ready(inputs, targets)
    batch = next(iter(data.client_train_dataloader(0)))
    assert tuple(tensor.dtype for tensor in batch) == expected
    assert batch[1].shape[1:] == np.shape(targets)[1:]
    assert (data.labels is None) == (expected[1] == torch.float32 or np.ndim(targets) > 1)


def test_pixels_are_scaled_or_transformed():
    pixels = np.full((30, 3, 4, 4), 51, dtype=np.uint8)
    pixels.setflags(write=False)
    data = ready(pixels, TARGETS)
    assert data.source.pool.tensors[0].dtype == torch.uint8
    assert next(iter(data.client_train_dataloader(0)))[0].unique().tolist() == pytest.approx([0.2])
    steps = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.2] * 3, [0.5] * 3)])
    inputs, _ = next(iter(ready(pixels, TARGETS, transform=steps).client_train_dataloader(0)))
    assert type(inputs) is torch.Tensor
    assert inputs.abs().max() < 1e-6
    inputs, _ = next(iter(ready(pixels, TARGETS, transform=lambda x: x.flatten(1).double()).client_train_dataloader(0)))
    assert (inputs.shape[1:], inputs.dtype) == ((48,), torch.float64)


@pytest.mark.parametrize("kind", ["U", "S", object])
def test_targets_may_be_names(kind):
    names = np.array(["cat", "owl", "ant"]).astype(kind)
    data = ready(INPUTS, names[TARGETS], test_inputs=INPUTS[:2], test_targets=names[[2, 1]])
    assert (data.classes, data.labels.tolist()) == (["ant", "cat", "owl"], [1, 2, 0] * 10)
    assert [int(label) for _, label in data.pooled_dataset("test")] == [0, 2]
    assert ready(INPUTS, TARGETS).classes is None
    for test, message in ((["ant", "emu"], "the class 'emu' does not occur"), ([0, 1], "found int64; give names")):
        with refused(rf"data\.test_targets: {message}"):
            ready(INPUTS, names[TARGETS], test_inputs=INPUTS[:2], test_targets=np.array(test))


def test_test_data():
    test = INPUTS[:6] + 0.5, TARGETS[:6]
    shared = ready(INPUTS, TARGETS, test_inputs=test[0], test_targets=test[1], partitioner=IID(3))
    assert (shared.num_samples("test").tolist(), shared.num_samples("train").sum()) == ([0, 0, 0], 30)
    assert torch.equal(shared.pooled_dataset("test")[5][0], torch.from_numpy(test[0][5]).float())
    owners = ["b", "a", "c"] * 10
    own = ready(INPUTS, TARGETS, owners, *test, ["a", "a", "a", "c", "b", "b"])
    assert (own.num_samples("train").tolist(), own.num_samples("test").tolist()) == ([10, 10, 10], [3, 2, 1])
    inputs, _ = next(iter(own.client_eval_dataloader(2, "test")))
    assert inputs.tolist() == test[0][3:4].tolist()
    with refused(r"client 3 .'d'. has no training samples"):
        ready(INPUTS, TARGETS, owners, *test, list("aaadbb"))
    with refused(r"test_fraction=0\.5"):
        ready(INPUTS, TARGETS, test_inputs=test[0], test_targets=test[1], test_fraction=0.5)


def test_files(tmp_path):
    np.save(tmp_path / "x.npy", INPUTS)
    np.savez_compressed(tmp_path / "y.npz", TARGETS)
    torch.save(torch.tensor([0, 1] * 15), tmp_path / "c.pt")
    np.save(tmp_path / "names.npy", np.array(["b", "a"] * 15))
    paths = [str(tmp_path / name) for name in ("x.npy", "y.npz", "c.pt", "names.npy")]
    data = ready(*paths[:3])
    assert (data.client_names, data.labels.tolist()) == (["0", "1"], TARGETS.tolist())
    assert torch.equal(data.source.pool.tensors[0], torch.from_numpy(INPUTS).float())
    assert ready(*paths[:2], paths[3]).client_names == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("x.npy", lambda p: p.mkdir(), "no such file"),
        ("x.txt", lambda p: p.write_text("1"), "cannot be read"),
        ("x.npy", lambda p: np.save(p, np.array([None, {}], dtype=object)), "cannot be read"),
        ("x.npz", lambda p: np.savez(p, a=INPUTS, b=INPUTS), "cannot be read .too many values"),
        ("x.pt", lambda p: torch.save({"a": torch.zeros(3)}, p), "cannot be read .it holds a dict"),
        ("x.pt", lambda p: torch.save(np.random.default_rng, p), "cannot be read"),
        ("x.npz", lambda p: p.write_bytes(b"PK no archive"), "cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path, name, write, message):
    write(tmp_path / name)
    with refused(rf"data\.inputs='.*{name}': {message}"):
        ready(str(tmp_path / name), TARGETS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": TARGETS[:29]}, r"found .29, 30. entries"),
        ({"inputs": INPUTS[:0], "targets": TARGETS[:0]}, "give equal numbers, one or more"),
        ({"clients": np.linspace(0, 1, 30)}, "found float64; give integers or strings"),
        ({"inputs": np.where(INPUTS == 50, np.nan, INPUTS)}, r"data\.inputs: sample 12 holds"),
        ({"inputs": ["a"] * 30}, r"data\.inputs: found <U1 of shape \(30,\)"),
        ({"targets": [["a"]] * 30}, r"data\.targets: found <U1 of shape \(30, 1\); give .* or names of classes \(M,\)"),
        ({"targets": TARGETS - 1}, r"data\.targets: found class -1; number the classes"),
        ({"test_inputs": INPUTS}, "give both or neither"),
        ({"test_inputs": INPUTS[:, :3], "test_targets": TARGETS}, r"test_inputs: float32 of .*\(3,\), but data.inp"),
        ({"test_inputs": INPUTS, "test_targets": TARGETS * 0.5}, r"data\.test_targets: float32"),
    ],
)
def test_what_is_refused(change, message):
    with refused(message):
        ready(**{"inputs": INPUTS, "targets": TARGETS, **change})
