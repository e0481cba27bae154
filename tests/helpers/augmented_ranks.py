"""Training on augmented images; as a script on two processes: ``python -m helpers.augmented_ranks IMAGES FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from fedbc_lightning.datamodules import ImageFolderDataModule
from fedbc_lightning.models import LogisticRegression
from matplotlib.figure import Figure
from torchvision.transforms import v2

from fedbc_lightning import FedAvg, FederatedTrainer
from fedbc_lightning.partition import IID

AUGMENT = v2.Compose([v2.RandomCrop(16, padding=3), v2.ColorJitter(0.4)])


def train_on_images(images: Path, folder: Path, devices: int, augment: bool = True) -> torch.Tensor:
    """The server's model after two rounds over four clients; images are decoded when they are needed."""
    torch.manual_seed(0)
    data = ImageFolderDataModule(
        str(images), IID(4), augment=AUGMENT if augment else False, batch_size=4, seed=0, max_memory_gib=1e-9
    )
    trainer = FederatedTrainer(
        max_rounds=2, devices=devices, accelerator="cpu", seed=1, logger=False, eval_every_n_rounds=0,
        enable_progress_bar=False, enable_checkpointing=False, default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(LogisticRegression(num_features=768, num_classes=3), data, FedAvg())
    return trainer.server.z.clone()


if __name__ == "__main__":
    Figure.savefig = lambda *args, **kwargs: None  # type: ignore[method-assign]
    target = Path(sys.argv[2])
    model = train_on_images(Path(sys.argv[1]), target, 2)
    if torch.distributed.get_rank() == 0:
        torch.save(model, target / "server.pt")
