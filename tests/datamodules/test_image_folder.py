"""Image folders: trees, sizes, memory, and clear words about what is no such tree."""

import resource
from itertools import product
from tempfile import gettempdir
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import ImageFolderDataModule, image_folder
from helpers.data_formats import ready, write_image_folder
from helpers.refusals import refused
from PIL import Image

from fedbc_lightning.data import ArrayDataset
from fedbc_lightning.partition import IID, Dirichlet


def test_image_folder(tmp_path):
    root = write_image_folder(tmp_path / "images")
    data = ready(ImageFolderDataModule(str(root), IID(3)))
    assert data.classes == ["class_0", "class_1", "class_2"]
    assert data.labels.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert isinstance(data.source, ArrayDataset)
    with Image.open(root / "class_1" / "003.png") as file:
        pixels = np.asarray(file)
    assert data.source[23][0].numpy() == pytest.approx(pixels.transpose(2, 0, 1) / 127.5 - 1, abs=1e-5)


def test_images_that_do_not_fit_into_memory_lie_in_a_file(tmp_path):
    root = write_image_folder(tmp_path / "images")
    options = {"partitioner": Dirichlet(2, 1.0), "augment": True, "batch_size": 5, "seed": 0}
    held, mapped = (ready(ImageFolderDataModule(str(root), max_memory_gib=gib, **options)) for gib in (1.0, 1e-9))
    assert isinstance(mapped._decode([root / "class_0" / "000.png"] * 20, (3, 16, 16)), np.memmap)
    assert held.partition_hash() == mapped.partition_hash()
    for one, other in zip(*(data.client_train_dataloader(1, 3) for data in (held, mapped)), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("limit", ["folder", "process"])
def test_a_full_temporary_folder_is_told_before_an_image_is_decoded(tmp_path, monkeypatch, limit):
    data = ImageFolderDataModule(str(write_image_folder(tmp_path / "images")), IID(2), max_memory_gib=1e-9)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == "folder":
        monkeypatch.setattr(image_folder, "disk_usage", lambda folder: SimpleNamespace(free=60 * 3 * 16 * 16 - 1))
    else:  # the system refuses the room, as it does where a quota is used up
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, before[1]))
    try:
        with refused() as error:
            data.setup()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for part in ("max_memory_gib", "60 images", "45 KiB", f"'{gettempdir()}'", "TMPDIR", "image_size"):
        assert part in str(error.value)


def test_the_folders_own_test_images_are_kept(tmp_path, caplog):
    for number, (name, count) in enumerate({"train": 4, "val": 3, "test": 2}.items()):
        write_image_folder(tmp_path / name, num_per_class=count)
        Image.new("RGB", (16, 16), (number,) * 3).save(tmp_path / name / "class_1" / "marked.png")
    with caplog.at_level("INFO"):
        data = ready(ImageFolderDataModule(str(tmp_path), IID(2), test="shared"))
        assert len(ready(ImageFolderDataModule(str(tmp_path), IID(2))).source) == 30
    found = "; of train/ (13), val/ (10), test/ (7) "
    assert f"{found}test/ evaluates the global model, all others train\n" in caplog.text
    assert f"{found}all are pooled (data.test: split)\n" in caplog.text
    assert (data.num_samples("train").sum(), len(data.source)) == (23, 23)
    marks = [
        round(float(image.min() * 127.5 + 127.5)) for image, _ in data.pooled_dataset("test") if image.std() < 1e-6
    ]
    assert marks == [2]
    with refused(r"data.test='shared': there is no folder test or val with images"):
        ready(ImageFolderDataModule(str(tmp_path / "test"), IID(2), test="shared"))


def test_image_size_scales_and_crops(tmp_path):
    root = write_image_folder(tmp_path / "images", num_per_class=2)
    Image.fromarray(np.zeros((10, 30), np.uint8)).save(root / "class_2" / "zebra.png")
    data = ready(ImageFolderDataModule(str(root), IID(2), image_size=8))
    assert data.source.pool.tensors[0].shape == (7, 3, 8, 8)
    with refused(r"data.image_size: '.*zebra.png' has 10 x 30 pixels.*16 x 16"):
        ready(ImageFolderDataModule(str(root), IID(2)))


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_of_grey_become_eight(tmp_path, suffix):
    pixels = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    for kind in "ab":
        (tmp_path / kind).mkdir()
        for number in range(10):
            Image.fromarray(pixels).save(tmp_path / kind / f"{number}.{suffix}")
    data = ready(ImageFolderDataModule(str(tmp_path), IID(2)))
    stored = data.source.pool.tensors[0]
    assert (stored.dtype, stored.shape) == (torch.uint8, (20, 3, 8, 8))
    assert np.array_equal(stored[0].numpy(), np.rint(np.stack([pixels] * 3) / 257))


@pytest.mark.parametrize("suffix", ["png", "tif", "jpg"])
def test_grey_images_have_one_channel_if_asked_for(tmp_path, suffix):
    random = np.random.default_rng(0)
    for kind in "ab":
        (tmp_path / kind).mkdir()
        for number in range(10):
            path = tmp_path / kind / f"{number}.{suffix}"
            Image.fromarray(random.integers(0, 255, (8, 6), np.uint8)).save(path)
    with Image.open(path) as file:
        pixels = np.asarray(file)
    colour, grey = (ready(ImageFolderDataModule(str(tmp_path), IID(2), grayscale=value)) for value in (False, True))
    assert grey.source[19][0].numpy() == pytest.approx(pixels[None] / 127.5 - 1, abs=1e-5)
    assert torch.equal(colour.source[19][0], grey.source[19][0].expand(3, 8, 6))


@pytest.mark.parametrize(("kind", "message"), [(np.int32, "I"), (np.float32, "F")])
def test_images_without_a_known_white_are_refused(tmp_path, kind, message):
    root = write_image_folder(tmp_path / "images")
    Image.fromarray(np.ones((8, 8), dtype=kind)).save(root / "class_1" / "x.tif")
    with refused(rf"class_1/x\.tif' .in Pillow's mode {message} .*8 or 16 bits"):
        ready(ImageFolderDataModule(str(root), IID(2)))


def test_trees_that_are_none(tmp_path):
    def message(root):
        with refused(r"expected <root>/<class>") as error:
            ready(ImageFolderDataModule(str(root), IID(2)))
        return str(error.value)

    assert "no such folder" in message(tmp_path / "absent")
    assert "images of 0 classes" in message(tmp_path)
    write_image_folder(tmp_path / "outer", num_classes=1)
    assert "images of 1 classes" in message(tmp_path / "outer")


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_broken_image_is_named(tmp_path, suffix):
    root = write_image_folder(tmp_path / "images", num_per_class=2)
    path = root / "class_2" / f"cut.{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with refused(rf"cannot read the image '{path}'"):
        ready(ImageFolderDataModule(str(root), IID(2)))


@pytest.mark.parametrize("arguments", [{"image_size": 0}, {"std": (1.0, 0.0, 1.0)}, {"mean": (0.5, 0.5)},
                                       {"mean": (0.4, 0.5, 0.6), "grayscale": True}])  # fmt: skip
def test_image_folder_refuses_by_name(arguments):
    with refused(r"data\.(\w+=.* data\.)?" + next(iter(arguments))):
        ImageFolderDataModule("anywhere", **arguments)


def sites(root, *folders):
    """Two sites with images of three classes; the images of site 10 are white, those of site 9 black."""
    for name, folder, kind in product(("10", "9"), folders or ("",), ("cat", "dog", "owl")):
        path = root / name / folder / kind
        path.mkdir(parents=True)
        for other in ("._0.png", "notes.txt"):
            (path / other).write_text("no image")
        for number in range(5):
            Image.new("L", (8, 8), 255 * (name == "10")).save(path / f"{number}.png")
    return root


def test_folders_of_sites_are_the_clients(tmp_path, caplog):
    for name in ("Rome", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "Rome" / ".DS_Store").write_text("no image")
    for run in ("runs/x/FedBC-0", "runs/x/partition"):  # of this tool, which are no sites
        (tmp_path / run).mkdir(parents=True)
        for name in ("partition.json", "partition.png"):
            (tmp_path / run / name).touch()
    with caplog.at_level("INFO"):
        data = ready(ImageFolderDataModule(sites(tmp_path), layout=["client", "class"]))
    found = "30 images of 3 classes of 2 clients (9, 10), 8 x 8 pixels, RGB: cat, dog, owl\n"
    assert f"'{tmp_path}': {found}" in caplog.text
    assert f"'{tmp_path}': 1 folders are empty: Rome" in caplog.text
    assert "6 files are no images that can be read: 10/cat/notes.txt, 10/dog/notes.txt, 10/owl/" in caplog.text
    assert (data.client_names, data.classes) == (["9", "10"], ["cat", "dog", "owl"])
    assert data.label_histogram().tolist() == [[5, 5, 5], [5, 5, 5]]
    assert data.num_samples("test").tolist() == [3, 3]
    assert [data.client_train_dataset(k)[0][0].mean().item() for k in (0, 1)] == [-1, 1]
    assert ready(ImageFolderDataModule(tmp_path, IID(3), layout=["client", "class"])).num_clients == 3


def test_split_folders_of_sites_are_their_own(tmp_path, caplog):
    layout = ["client", "split", "class"]
    with caplog.at_level("INFO"):
        data = ready(ImageFolderDataModule(sites(tmp_path, "train", "val", "test"), layout=layout))
    assert "val/ (30), test/ (30) test/ tests the clients, val/ validates them" in caplog.text
    assert all((data.num_samples(split) == 15).all() for split in ("train", "val", "test"))
    pooled = ready(ImageFolderDataModule(tmp_path, layout=layout, test="split", test_fraction=0.4))
    assert pooled.num_samples("test").tolist() == [18, 18]
    shared = ready(ImageFolderDataModule(tmp_path, layout=layout, test="shared"))
    assert (len(shared.pooled_dataset("test")), shared.num_samples("test").sum()) == (30, 0)


def test_a_table_says_whose_images_are(tmp_path, caplog):
    root = write_image_folder(tmp_path / "images", num_per_class=4)
    table = root / "owners.csv"  # which is no image, and nobody is told of
    (root / "all").symlink_to(root)
    names = [f"class_{kind}/00{number}.png" for kind in range(3) for number in range(4)]
    table.write_text("file,client\n" + "".join(f"{name},{'NA' if k % 2 else '7'}\n" for k, name in enumerate(names)))
    data = ready(ImageFolderDataModule(root, clients=table))
    assert data.client_names == ["7", "NA"]
    assert data.label_histogram().tolist() == [[2, 2, 2], [2, 2, 2]]
    rows = [f"{name},{k % 2},{'ab'[k % 3 == 0]},{'test' if k < 4 else 'train'}\n" for k, name in enumerate(names)]
    table.write_text("file,client,class,split\n" + "".join(rows[:10]))
    with caplog.at_level("INFO"):
        data = ready(ImageFolderDataModule(root, clients=str(table), layout=["client"]))
    assert "2 images have no row in '" in caplog.text
    assert "files are no images" not in caplog.text
    assert "are left out: class_2/002.png, class_2/003.png" in caplog.text
    assert (data.classes, data.num_samples("train").tolist()) == (["a", "b"], [3, 3])
    assert data.num_samples("test").tolist() == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"'10/cat/0.png' in '.*' may be read in two ways: give \[client, class\] if '10' is a client and 'cat' a "
         r"class, or \[class\] if '10' is a class"),
        ({"root": "train"}, r"'train/10/cat/0.png' .* give \[split, client, class\] if '10' .*, or \[split, class\]"),
        ({"root": "by", "folder": "train"}, r"give \[client, class\] if 'by' is a client and '10' a class"),
        ({"folder": "train"}, r"give \[client, split, class\] if '10' is a client and 'cat' a class"),
        ({"root": "in", "layout": ["client", "class"]}, r"deeper folders than .* of one client, 'in'; give a"),
        ({"root": "train", "layout": ["client", "class"]}, "'train' is a split, .*; give data.layout the role split"),
        ({"folder": "val", "layout": ["client", "class"]}, "'val' is a split, .*; give data.layout the role split"),
        ({"link": "10"}, "10/dog/link' leads to '.*/10', which was found before; remove the link"),
        ({"layout": ["client"]}, r"folders and table name \['file', 'client'\]; name class, and"),
        ({"layout": ["client", "split", "class"]}, r"'10/cat/0.png' .* has not the folders \[client, split"),
        ({"layout": ["split", "class"]}, "data.layout: '10' is no split; give train, val, "),
        ({"table": "file,site\n"}, "data.clients: no column 'client' in '.*t.csv'; there are file, site"),
        ({"table": "file,client,class\n"}, r"data\.clients='.*t\.csv': no row is below its header"),
        ({"table": "file,client\n10/cat/0.png,\n"}, r"row 1 misses a value, or its file, '10/cat/0.png', is not"),
        ({"table": "file,client,class\n10/dog/../cat/0.png,a,b\n"}, r"row 1 .*, '10/dog/../cat/0.png', is not below"),
        ({"table": "file,client\n10/cat/0.png,a\n10/cat/9.png,a\n"}, r"t.csv': row 2 .*'10/cat/9.png'"),
    ],
)  # fmt: skip
def test_folders_that_were_not_announced_are_refused(tmp_path, options, message):
    root = sites(tmp_path / options.get("root", ""), options.get("folder", ""))
    table = tmp_path / "t.csv"
    table.write_text(options.get("table", ""))
    if "link" in options:
        (root / "10" / "dog" / "link").symlink_to(root / options["link"])
    given = {"layout": options.get("layout"), "clients": table if "table" in options else None}
    with refused(message):
        ready(ImageFolderDataModule(tmp_path if "root" in options else root, **given))
