"""Transforms of images: what they do, whose random numbers they take, and the same batches on every path."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import MNISTDataModule, transforms
from helpers.command_line import run_cli
from helpers.data_formats import ready, write_image_folder, write_mnist
from helpers.refusals import refused
from torchvision.transforms import v2

from fedbc_lightning.partition import IID

ROOT = Path(__file__).parents[2]
FLOATS = v2.ToDtype(torch.float32, scale=True)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_images(count=6, channels=3, size=8):
    return torch.randint(256, (count, channels, size, size), generator=seeded(9), dtype=torch.uint8)


def test_random_crop_is_a_crop_of_the_padded_image():
    images = random_images()
    cropped = transforms.RandomCrop(2)(images, seeded(1))
    offsets = torch.randint(5, (2, 6), generator=seeded(1))
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for image, crop, row, column in zip(padded, cropped, *offsets, strict=True):
        assert torch.equal(crop, image[:, row : row + 8, column : column + 8])


def test_random_horizontal_flip_mirrors_as_often_as_asked():
    images = random_images(1).expand(4000, -1, -1, -1)
    flipped = transforms.RandomHorizontalFlip(0.3)(images, seeded())
    is_mirrored = (flipped == images[0].flip(-1)).all((1, 2, 3))
    assert torch.equal(flipped[~is_mirrored], images[~is_mirrored])
    assert float(is_mirrored.float().mean()) == pytest.approx(0.3, abs=0.03)
    assert torch.equal(transforms.RandomHorizontalFlip(0.0)(images, seeded()), images)


def test_compose_is_one_after_the_other():
    images, generator = random_images(), seeded(3)
    expected = transforms.RandomHorizontalFlip()(transforms.RandomCrop(2)(images, generator), generator)
    assert torch.equal(
        transforms.Compose([transforms.RandomCrop(2), transforms.RandomHorizontalFlip()])(images, seeded(3)), expected
    )
    mixed = transforms.Compose([transforms.RandomCrop(2), v2.RandomVerticalFlip()])
    assert isinstance(mixed.transforms[1], transforms.EachImage)
    assert mixed(images, seeded(3)).shape == images.shape


def test_normalize_and_scale():
    images = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8).view(1, 2, 1, 2)
    result = transforms.Normalize((0.5, 0.2), (0.5, 0.1))(images)
    assert result.flatten().tolist() == pytest.approx([-1, 1, 0, 2])
    assert transforms.Scale(1 / 51)(images).flatten().tolist() == pytest.approx([0, 5, 1, 2])
    assert images.flatten().tolist() == [0, 255, 51, 102]


@pytest.mark.parametrize(
    ("make", "others"), [(transforms.Scale, [[2.0], [3.0]]), (transforms.Normalize, [[[0.5], [0.5]], [[0.5], [0.2]]])]
)
def test_normalize_and_scale_are_modules_and_equal_by_their_numbers(make, others):
    first, second = (make(*numbers) for numbers in others)
    images = random_images()
    assert torch.equal(torch.nn.Sequential(first)(images), first(images))
    assert {first, make(*others[0])} == {first} != {second}
    assert MNISTDataModule("none", IID(2), transform=first).transform is not None


# torchvision's random transforms


class Noisy(torch.nn.Module):
    """Draws from all three global generators."""

    def forward(self, image):
        shift = torch.randint(3, ()) + random.randrange(3) + np.random.randint(3)
        return image + shift.to(torch.uint8)


@pytest.mark.parametrize("transform", [Noisy(), v2.AutoAugment()])
def test_draws_are_those_of_the_generator_and_leave_the_global_ones_alone(transform):
    images = random_images()
    augment = transforms.EachImage(transform)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = augment(images, seeded(1))
    torch.rand(5), random.random(), np.random.rand()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    assert torch.equal(augment(images, seeded(1)), first)
    assert not torch.equal(augment(images, seeded(2)), first)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert torch.equal(images, random_images())


def batches(data, client=1, round=2, seed=5, epoch=0):
    loader = data.client_train_dataloader(client, round, seed=seed)
    loader.set_epoch(epoch)
    return torch.cat([inputs[targets.argsort(stable=True)] for inputs, targets in loader])


def test_each_seed_round_client_epoch_and_step_has_its_own_augmentation(tmp_path):
    """The same image everywhere: whatever differs was drawn."""
    write_mnist(tmp_path, num_train=40, num_test=10)
    for path in (tmp_path / "MNIST" / "raw").glob("*images*"):
        count = (path.stat().st_size - 16) // 784
        path.write_bytes(path.read_bytes()[:16] + bytes(range(1, 197)) * 4 * count)
    for augment in (transforms.RandomCrop(13), v2.RandomCrop(28, padding=13)):
        data = ready(MNISTDataModule(str(tmp_path), IID(2), download=False, augment=augment, batch_size=10))
        given = {"client": 1, "round": 2, "seed": 5, "epoch": 0}
        first = batches(data, **given)
        assert torch.equal(batches(data, **given), first)
        for name in given:
            assert not torch.equal(batches(data, **given | {name: given[name] - 1 if name == "client" else 9}), first)
        one, other = list(data.client_train_dataloader(1, 2, seed=5))[:2]
        assert not torch.equal(one[0], other[0])


# what is given to a data module


def test_true_false_and_modules():
    usual = transforms.RandomCrop(1)
    assert transforms.as_augment(True, usual) is usual
    assert transforms.as_augment(False, usual) is None
    own = transforms.RandomHorizontalFlip()
    assert transforms.as_augment(own, usual) is own
    assert isinstance(transforms.as_augment(v2.RandomVerticalFlip(), usual), transforms.EachImage)


def test_a_transform_of_torchvision_takes_whole_batches(tmp_path):
    images, _ = write_mnist(tmp_path)
    given = v2.Compose([v2.ToImage(), v2.Resize(14, antialias=True), FLOATS, v2.Normalize([0.5], [0.5])])
    data = ready(MNISTDataModule(str(tmp_path), IID(4), download=False, transform=given))
    inputs, _ = next(iter(data.client_train_dataloader(0)))
    assert type(inputs) is torch.Tensor
    assert (inputs.shape, inputs.dtype) == ((32, 1, 14, 14), torch.float32)
    single = v2.functional.resize(torch.from_numpy(images[3:4]), 14, antialias=True)
    torch.testing.assert_close(data.source[3][0], single / 127.5 - 1)


@pytest.mark.parametrize(
    ("name", "transform", "message"),
    [
        ("augment", v2.Compose([FLOATS, v2.GaussianNoise()]), r"made torch.float32 of torch.uint8; it must keep"),
        ("augment", v2.RandomCrop(64), r"fails on uint8 \(2, 3, 8, 8\): Required crop size"),
        ("transform", v2.Compose([FLOATS, v2.RandomErasing()]), "draws random numbers"),
        ("transform", v2.Grayscale(), "returns integers.*ToDtype"),
        ("transform", v2.Normalize([0.5], [0.5]), "fails on uint8"),
        ("transform", v2.Lambda(lambda images: None), "made a NoneType"),
        ("transform", v2.RandomHorizontalFlip(), "draws random numbers"),
    ],
)
def test_what_cannot_work_is_said_before_training(name, transform, message):
    given = {"transform": transforms.Normalize([0.5], [0.5]), "augment": None}
    given[name] = transforms.EachImage(transform) if name == "augment" else transform
    state = torch.get_rng_state()
    with refused(rf"data\.{name}: .*{message}"):
        transforms.check_transforms(random_images(2), **given)
    assert torch.equal(state, torch.get_rng_state())


YAML = """\
seed_everything: 0
trainer: {max_rounds: 2, accelerator: cpu, devices: 1, logger: false, enable_progress_bar: false}
algorithm: {class_path: FedAvg}
model: {class_path: LogisticRegression, init_args: {num_features: 192, num_classes: 3}}
data:
  class_path: ImageFolderDataModule
  init_args:
    root: images
    partitioner: {class_path: IID, init_args: {num_clients: 2}}
    augment:
      class_path: torchvision.transforms.v2.Compose
      init_args:
        transforms:
          - {class_path: torchvision.transforms.v2.RandomCrop, init_args: {size: 16, padding: 2}}
          - {class_path: torchvision.transforms.v2.ColorJitter, init_args: {brightness: 0.4}}
    transform:
      class_path: torchvision.transforms.v2.Compose
      init_args:
        transforms:
          - {class_path: torchvision.transforms.v2.Resize, init_args: {size: 8}}
          - {class_path: torchvision.transforms.v2.ToDtype, init_args: {dtype: torch.float32, scale: true}}
"""


def test_transforms_are_given_in_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "images")
    Path("images.yaml").write_text(YAML)
    assert run_cli("fit", "--config", "images.yaml") == 0
    saved = Path("runs/default/FedAvg-0/config.yaml")
    text = YAML.replace("{size: 16, padding: 2}", "{padding: 2}")
    for name in ("Compose", "RandomCrop"):
        text = text.replace(f"torchvision.transforms.v2.{name}", f"fedbc_lightning.datamodules.transforms.{name}", 1)
    Path("ours.yaml").write_text(text)
    assert run_cli("fit", "--config", "ours.yaml", "--trainer.max_rounds", "1") == 0
    assert run_cli("fit", "--config", saved) == 0
    checkpoints = [f"runs/default/FedAvg-0{end}/checkpoints/last.ckpt" for end in ("", "-1", "-2")]
    first, other, again = (torch.load(path, weights_only=True)["state_dict"] for path in checkpoints)
    name = next(iter(first))
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
