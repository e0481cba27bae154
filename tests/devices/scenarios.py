"""What is done on a CPU and, as a script, on a GPU, pretended if there is a LIBRARY.

``python -m devices.scenarios FOLDER [LIBRARY]``
"""

import gc
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fedbc_lightning.datamodules import DigitsDataModule, MNISTDataModule
from fedbc_lightning.models import CIFARCNN, MLP, LogisticRegression
from helpers.boring import BoringData, BoringModel, make_trainer, read_csv
from helpers.data_formats import write_mnist
from helpers.user_modules import CLASSES, FEATURES, UserData
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torchvision.transforms import v2

from devices import pretended
from fedbc_lightning import ConfigurationError, FedAvg, FedBC, FederatedAlgorithm
from fedbc_lightning.algorithms import FedBCFineTune
from fedbc_lightning.engines import sequential
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.partition import IID, Dirichlet

Results = dict[str, Tensor]
accelerator = "cpu"
"""On which is trained; ``"gpu"`` in the script."""
AUGMENT = v2.Compose([v2.RandomCrop(28, padding=2), v2.RandomHorizontalFlip()])


def train(
    folder: Path, module: LightningModule, data: Any, algorithm: FederatedAlgorithm, **options: Any
) -> tuple[Any, Results]:
    """Two rounds, and all that they show: the model, on the CPU as Lightning leaves it, and the metrics."""
    own = {"max_rounds": 2, "clients_per_round": 1.0, "accelerator": accelerator, "devices": 1} | options
    trainer = make_trainer(folder, **own)
    trainer.fit(module, data, algorithm, "last")
    results = dict(module.state_dict())
    assert all(tensor.device.type == "cpu" for tensor in results.values())
    for row in read_csv(f"{trainer.log_dir}/metrics.csv"):
        shown = {name: float(value or "nan") for name, value in row.items() if not name.startswith("time/")}
        results |= {f"{name} after {row['round']}": torch.tensor(value) for name, value in shown.items()}
    return trainer, results


def images(folder: Path, keep_on_device: bool, engine: str) -> Results:
    """Augmented and scaled, moved at once or batch by batch."""
    torch.manual_seed(0)
    write_mnist(folder, num_train=240, num_test=60)
    data = MNISTDataModule(
        str(folder), IID(4), download=False, augment=AUGMENT, batch_size=10, seed=0, keep_on_device=keep_on_device
    )
    return train(folder, LogisticRegression(784, 10), data, FedBC(dual_lr=0.1), engine=engine)[1]


def convolutions(folder: Path) -> Results:
    """A network whose dropout draws on the device."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = BoringData()
    data.arrays = [(torch.randn(12, 3, 32, 32, generator=generator), targets[:12]) for _, targets in data.arrays]
    return train(folder, CIFARCNN(), data, FedAvg(), gradient_clip_val=1.0, engine="sequential")[1]


def buffers(folder: Path) -> Results:
    """Of BatchNorm, each client's own, with other optimizer steps than SGD's."""
    torch.manual_seed(0)

    class WithAdam(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            # Before BatchNorm its gradient is nothing but rounding, which Adam makes as large as any other.
            self.net[0].bias.requires_grad_(False)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    return train(folder, WithAdam(), BoringData(), FedBCFineTune(dual_lr=0.1), buffers="local")[1]


def evaluation(folder: Path) -> Results:
    """Clients of equal sizes are evaluated together, on a GPU as on a CPU: few are evaluated by themselves."""
    torch.manual_seed(0)
    data = UserData((20,) * 60, test_size=5)  # of tensors of their own
    with patch.object(UserModule, "evaluate", autospec=True, side_effect=UserModule.evaluate) as alone:
        _, results = train(folder, MLP(FEATURES, 16, CLASSES), data, FedBC(dual_lr=0.1), engine="vectorized")
    assert alone.call_count < 2 * 120, "clients were evaluated one by one in every evaluation"
    return results | {"evaluated alone": torch.tensor(alone.call_count)}


def digits() -> tuple[LogisticRegression, DigitsDataModule, FedBC]:
    """A linear model of four clients."""
    torch.manual_seed(0)
    return LogisticRegression(64, 10), DigitsDataModule(IID(4), batch_size=10, seed=0), FedBC(dual_lr=0.1)


def recorded(folder: Path, engine: str) -> Results:
    """Steps that the user promises to be functions of weights and batch."""
    return train(folder, *digits(), engine=engine, record_steps=True, local_epochs=2)[1]


def mixed(folder: Path) -> Results:
    """Mixed precision, whose matrix products have eight bits of precision."""
    torch.manual_seed(0)
    model, data = MLP(64, 16, 10, dropout=0.0), DigitsDataModule(IID(4), batch_size=10, seed=0)
    return train(folder, model, data, FedBC(dual_lr=0.1), precision="bf16-mixed")[1]


def resumed(folder: Path) -> Results:
    """Four rounds in two parts, and a client's model, exported; the first part is kept for the other device."""
    for rounds in (2, 4):
        torch.manual_seed(0)
        data = DigitsDataModule(Dirichlet(6, alpha=0.5), batch_size=10, seed=0)
        model, algorithm = LogisticRegression(64, 10), FedBC(dual_lr=0.1)
        trainer, results = train(folder, model, data, algorithm, max_rounds=rounds, name="run")
        if rounds == 2:
            shutil.copytree(folder / "run", folder / "half")
    exported = torch.load(trainer.export(model, data, algorithm, client=3), weights_only=True)["state_dict"]
    return results | {f"exported {name}": value for name, value in exported.items()}


def planned(folder: Path) -> Results:
    """A plan leaves the model as it came."""
    model, data, algorithm = digits()
    plan = make_trainer(folder, accelerator=accelerator, devices=1).plan(model, data, algorithm)
    assert plan.num_parameters == 650
    return {name: value.clone() for name, value in model.state_dict().items()}


def refused(folder: Path) -> Results:
    """What is refused only once the model has been moved leaves it on the CPU, too."""
    model, data, algorithm = digits()
    with pytest.raises(ConfigurationError, match=r"trainer\.engine: vectorized"):
        train(folder, model, data, algorithm, engine="vectorized", precision="bf16-true")
    return dict(model.state_dict())


DRAWING = {"convolutions", "evaluation"}
"""Scenarios with dropout, for which a real GPU has generators of its own."""
ONLY_REAL = {"bf16-mixed"}
"""Scenarios for which the pretended GPU has no operators: torch's autocast must know the device."""

SCENARIOS: dict[str, Callable[[Path], Results]] = {
    "images, kept on the device": partial(images, keep_on_device=True, engine="vectorized"),
    "images, moved": partial(images, keep_on_device=False, engine="sequential"),
    **{f"recorded, {engine}": partial(recorded, engine=engine) for engine in ("sequential", "vectorized")},
    "bf16-mixed": mixed, "convolutions": convolutions, "buffers": buffers, "evaluation": evaluation, "resumed": resumed,
    "planned": planned, "refused": refused,
}  # fmt: skip


NUM_CLIENTS = 12
"""Whose rounds' waits are counted; of unequal sizes, so that their last batches are, too."""


class CountWaits(Callback):
    """How often the CPU waited for the device in each round."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    def on_round_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.waits.append(-pretended.num_waits())

    def on_round_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.waits[-1] += pretended.num_waits()


def count_waits(folder: Path, engine: str, epochs: int) -> list[int]:
    """Of each round but the first, in which things are set up, with so many local epochs."""
    torch.manual_seed(0)
    counted = CountWaits()
    data = DigitsDataModule(Dirichlet(NUM_CLIENTS, alpha=0.5), batch_size=20, seed=0)
    options = {"local_epochs": epochs, "callbacks": [counted], "eval_every_n_rounds": 0, "record_steps": False}
    train(folder, MLP(64, 16, 10), data, FedBC(dual_lr=0.1), engine=engine, max_rounds=3, **options)
    return counted.waits[1:]


def memory(folder: Path) -> dict[str, int]:
    """Return the bytes of tensors on a real GPU: before and after runs, at the peak of each, and those of a model."""
    found = {}
    sequential.BYTES_ON_GPU = 0  # else it holds the rows of several clients together
    for name, num_sampled in (("warm-up", 2), ("two clients", 2), ("eight clients", 8)):  # the first sets up cuBLAS
        torch.manual_seed(0)
        gc.collect()
        found[f"before {name}"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model, data = MLP(64, 16_384, 10), DigitsDataModule(IID(8), batch_size=20, seed=0)
        # A graph has memory of its own
        train(folder / name, model, data, FedAvg(), clients_per_round=num_sampled, record_steps=False)
        found[f"peak with {name}"] = torch.cuda.max_memory_allocated()
        found["model"] = sum(parameter.nbytes for parameter in model.parameters())
        del model, data
    gc.collect()
    found["after all"] = torch.cuda.memory_allocated()
    return found


def main(target: Path, library: Path | None) -> None:
    """All scenarios; on a pretended GPU also the waits of rounds with one and three local epochs, else the memory."""
    if library is not None:
        pretended.use(library)
    else:  # TF32 has 10 bits, too few to compare with a CPU; cuDNN has it on by default
        torch.backends.cudnn.allow_tf32 = False
    found = {}
    for name, scenario in SCENARIOS.items():
        if library is None or name not in ONLY_REAL:
            (target / name).mkdir()
            found[name] = scenario(target / name)
    waits = {
        engine: [count_waits(target / f"waits {engine} {epochs}", engine, epochs) for epochs in (1, 3)]
        for engine in ("sequential", "vectorized")
        if library is not None
    }
    used = memory(target / "memory") if library is None else {}
    torch.save((found, waits, used), target / "results.pt")


if __name__ == "__main__":
    accelerator = "gpu"
    main(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
