"""LibSVM's format: rows, classes, and the line that is wrong."""

import bz2
import gzip

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import LibSVMDataModule
from helpers.data_formats import ready as set_up
from helpers.refusals import refused

from fedbc_lightning.partition import IID, Shards

ROWS = "-1 3:1 5:0.5\n+1 1:-2.5 # a comment\n-1\n\n+1 2:1e-1 5:2\n"
DENSE = [[0, 0, 1, 0, 0.5], [-2.5, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0.1, 0, 0, 2]]


def ready(path, *arguments, **options):
    return set_up(LibSVMDataModule(str(path), *arguments, seed=0, **options))


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_rows(tmp_path, suffix):
    path = tmp_path / f"small{suffix}"
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix]
    path.write_bytes(pack(ROWS.encode()))
    data = ready(path, IID(1))
    inputs, targets = data.source.pool.tensors
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert inputs.tolist() == torch.tensor(DENSE).tolist()
    assert (targets.tolist(), data.classes) == ([0, 1, 0, 1], [-1.0, 1.0])
    wide = ready(path, IID(1), num_features=7, row_norm=2.0).source.pool.tensors[0]
    assert wide.shape == (4, 7)
    assert wide.norm(dim=1).tolist() == pytest.approx([2, 2, 0, 2])
    with refused(r"data\.num_features=4: .* 5"):
        ready(path, num_features=4)


def test_classes_are_numbered(tmp_path):
    path = tmp_path / "three"
    path.write_text("7 1:1\n2 1:1\n7 1:1\n4 1:1\n")
    data = ready(path, IID(1))
    assert (data.labels.tolist(), data.classes) == ([2, 0, 2, 1], [2.0, 4.0, 7.0])
    for content, shown in (("0.5 1:1\n1 1:1\n", "0.5, 1"), ("1 1:1\n1 2:1\n", "labels are 1;")):
        path.write_text(content)
        with refused(shown):
            ready(path)


def test_damaged_and_missing_files(tmp_path):
    packed = gzip.compress(("-1 1:1 2:3\n+1 1:7\n" * 3000).encode())
    (tmp_path / "a.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "empty").write_text("")
    for number, line in enumerate(["x 1:1", "1 1:1 2:", "1 3:1 2:1", "1 2:nan", "inf 2:1"]):
        (tmp_path / f"bad{number}").write_text(f"-1 1:1\n+1 1:1\n{line}\n+1 1:1\n")
    for path in [*tmp_path.iterdir(), tmp_path / "nowhere"]:
        with refused(rf"{path}': (cannot be read|no such file).*; expected lines"):
            ready(path)


def test_a1a(data_root):
    path = data_root / "libsvm" / "a1a"
    if not path.is_file():
        pytest.skip(f"no libsvm/a1a in {data_root}")
    data = ready(path, num_features=123)
    assert data.source.pool.tensors[0].shape == (1605, 123)
    assert ready(path).source.pool.tensors[0].shape == (1605, 119)
    assert (data.num_clients, data.labels.sum()) == (5, 395)
    assert np.ptp(data.label_histogram()[:, 1]) < 30
    sorted_by_label = ready(path, Shards(5, shards_per_client=1), num_features=123).label_histogram()
    assert sorted(sorted_by_label[:, 1].tolist()) == [0, 0, 0, 74, 321]
