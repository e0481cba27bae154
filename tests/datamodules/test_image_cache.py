"""Decoded images on the disk: found again, made anew after any change of a file, and never wrong."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import ImageFolderDataModule, image_cache, image_folder
from helpers.data_formats import write_image_folder
from PIL import Image

from fedbc_lightning.partition import IID


class Counted:
    """Counts the images that are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_images, self._decode = 0, image_folder.decode_images
        monkeypatch.setattr(image_folder, "decode_images", self._counted)

    def _counted(self, paths, *args) -> None:
        self.num_images += len(paths)
        self._decode(paths, *args)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


@pytest.fixture
def root(tmp_path):
    """Three classes of PNG files, of which one has a JPEG, too."""
    folder = write_image_folder(tmp_path / "images")
    with Image.open(folder / "class_1" / "003.png") as file:
        file.convert("RGB").save(folder / "class_1" / "more.jpg")
    return folder


def images(root: Path, cache: bool | str = True, size: int | None = None) -> torch.Tensor:
    """The decoded images of a folder."""
    data = ImageFolderDataModule(str(root), IID(3), num_threads=2, cache=cache, image_size=size)
    data.prepare_data()
    data.setup()
    return data.source.pool.tensors[0]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def test_the_next_start_finds_the_images_decoded(root, tmp_path, counted, caplog):
    first = images(root, str(tmp_path / "kept"))
    assert counted.num_images == 61
    assert f"are kept in '{tmp_path / 'kept'}" in caplog.text
    again = images(root, str(tmp_path / "kept"))
    assert counted.num_images == 61
    assert torch.equal(first, again)
    assert torch.equal(first, images(root, cache=False))
    assert len(files(tmp_path / "kept")) == 1


def test_by_default_they_are_in_the_users_cache_folder(root, counted):
    images(root)
    images(root)
    assert counted.num_images == 61
    assert files(image_cache.platformdirs.user_cache_path("fedbc_lightning") / "images")


def test_without_a_cache_nothing_is_written(root, tmp_path, counted, monkeypatch):
    monkeypatch.setattr(image_cache.platformdirs, "user_cache_path", lambda name: tmp_path / "users" / name)
    images(root, cache=False)
    images(root, cache=False)
    assert counted.num_images == 122
    assert not (tmp_path / "users").exists()


def _repaint(root: Path) -> None:
    """Another picture of the same size in bytes, whose time of change is put back."""
    path = root / "class_0" / "flat.bmp"
    stat = path.stat()
    Image.new("RGB", (16, 16), (9, 9, 9)).save(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


CHANGES = {
    "changed": _repaint,
    "added": lambda root: Image.new("RGB", (16, 16)).save(root / "class_0" / "new.png"),
    "removed": lambda root: (root / "class_2" / "000.png").unlink(),
    "renamed": lambda root: (root / "class_2" / "000.png").rename(root / "class_0" / "zzz.png"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_folder_decodes_anew(root, tmp_path, change):
    Image.new("RGB", (16, 16)).save(root / "class_0" / "flat.bmp")
    cache = str(tmp_path / "kept")
    before = images(root, cache)
    CHANGES[change](root)
    after = images(root, cache)
    assert torch.equal(after, images(root, cache=False))
    assert not torch.equal(before, after)
    assert len(files(tmp_path / "kept")) == 2


def test_another_image_size_is_another_file(root, tmp_path):
    cache = str(tmp_path / "kept")
    images(root, cache)
    assert images(root, cache, size=4).shape == (61, 3, 4, 4)
    assert len(files(tmp_path / "kept")) == 2


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "bit": _flip_a_bit,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: np.savez(path, images=np.zeros((61, 3, 16, 16), np.uint8), key=np.array("another")),
    "pickle": lambda path: np.savez(path, images=np.array([{}], dtype=object), key=np.array(path.stem)),
    "text": lambda path: path.write_text("hello"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_made_again(root, tmp_path, counted, caplog, damage):
    cache = str(tmp_path / "kept")
    expected = images(root, cache)
    DAMAGES[damage](files(tmp_path / "kept")[0])
    assert torch.equal(images(root, cache), expected)
    assert "does not hold the decoded images" in caplog.text
    assert counted.num_images == 122
    assert torch.equal(images(root, cache), expected)
    assert counted.num_images == 122


def test_an_image_that_changes_while_it_is_decoded_is_not_kept(root, tmp_path, monkeypatch):
    decode = image_folder.decode_images

    def decode_and_change(paths, *args):
        decode(paths, *args)
        os.utime(paths[0])

    monkeypatch.setattr(image_folder, "decode_images", decode_and_change)
    images(root, str(tmp_path / "kept"))
    assert not files(tmp_path / "kept")


def test_processes_that_write_at_once_leave_one_whole_file(root, tmp_path):
    """Threads stand for the processes: each has a temporary file of its own."""
    expected, found = images(root, cache=False), []
    threads = [threading.Thread(target=lambda: found.append(images(root, str(tmp_path / "kept")))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(torch.equal(each, expected) for each in found)
    assert [path.suffix for path in files(tmp_path / "kept")] == [".npz"]


def test_a_folder_that_cannot_be_written_is_said_and_nothing_else(root, tmp_path, caplog):
    (tmp_path / "kept").write_text("a file, no folder")
    assert len(images(root, str(tmp_path / "kept"))) == 61
    assert "cannot be kept" in caplog.text


def test_the_files_that_were_not_used_for_the_longest_time_make_room(root, tmp_path, monkeypatch):
    cache = tmp_path / "kept"
    images(root, str(cache), size=4)
    images(root, str(cache), size=5)
    small, larger = sorted(files(cache), key=lambda path: path.stat().st_size)
    left = cache / "killed.tmp"
    left.write_bytes(b"")
    for age, path in enumerate((small, larger, left), start=1):
        os.utime(path, (age, age))
    images(root, str(cache), size=4)  # used again, and so the newest
    monkeypatch.setattr(image_cache, "MAX_BYTES", small.stat().st_size + 61 * 3 * 36)
    images(root, str(cache), size=6)
    assert small in files(cache)
    assert larger not in files(cache)
    assert not left.exists()
    assert len(files(cache)) == 2


def test_images_beyond_the_bound_are_not_kept(root, tmp_path, monkeypatch):
    monkeypatch.setattr(image_cache, "MAX_BYTES", 100)
    images(root, str(tmp_path / "kept"))
    assert not files(tmp_path / "kept")
