"""benchmarks/loading.py: every way gives every image, and the table says so."""

import re

import pytest
import torch
from helpers.data_formats import write_image_folder
from helpers.scripts import imported_script


@pytest.fixture(scope="module")
def script():
    with imported_script("benchmarks/loading.py") as module:
        yield module


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
def test_the_table(script, tmp_path, capsys):
    root = write_image_folder(tmp_path / "images", num_per_class=8)
    script.main(["--data", str(root), "--clients", "2", "3", "--batch-size", "5", "--repeats", "2"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"batches of 5, {torch.get_num_threads()} threads, 2 turns"
    found = [
        re.fullmatch(r" +(\d) clients  (.{12}) +.* for 24 images   / memory (.*) \(.* to .*\)", row) for row in lines
    ]
    ways = ["memory", "memory + v2", "workers 0", "workers 2"]
    assert [(match[1], match[2].strip()) for match in found] == [(n, way) for n in "23" for way in ways]
    assert {match[3] for match in found[::4]} == {"1.0"}


def test_all_ways_give_the_same_kind_of_images(script, tmp_path):
    root = write_image_folder(tmp_path / "images", num_per_class=8)
    ways = script.prepare(root, 2, 12)
    for loaders in ways.values():
        for loader in loaders:
            (inputs, targets), *rest = loader(1)
            assert not rest
            assert (inputs.shape, inputs.dtype, targets.dtype) == ((12, 3, 16, 16), torch.float32, torch.int64)
            assert -2.1 < float(inputs.min()) < -1.8
            assert 1.9 < float(inputs.max()) < 2.3
    for loaders in ways.values():
        targets = torch.cat([next(iter(loader(1)))[1] for loader in loaders])
        assert targets.bincount().tolist() == [8, 8, 8]
