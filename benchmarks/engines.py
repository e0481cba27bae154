"""Both engines against hand-written loops on the same steps, in turn within one run.

    python benchmarks/engines.py [W1 W2 W3 W4] [--pairs 3]

Prints client-steps per second and ratios (medians with minimum and maximum): machines are noisy, ratios carry over.
Workloads: W1 logistic 60-10, 30 clients of 40 to 1,471 samples, 10 sampled, E=5; W2 MLP 784-128-10, 100 x 600, 10
sampled; W3 the FedBC paper's CIFAR CNN, 20 clients of 299 to 10,000, 10 sampled; W4 logistic, 10,000 x 20, 1,000
sampled. Batch 20, SGD lr .01 momentum .5, FedAvg. Start-up and evaluation are left out.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from fedbc_lightning.models import CIFARCNN
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning import FedAvg, FedBC, FederatedAlgorithm, FederatedDataModule, FederatedTrainer, UniformSampler

BATCH_SIZE = 20


class Clients(FederatedDataModule):
    """Random inputs and labels, in memory."""

    def __init__(self, sizes: np.ndarray, shape: tuple[int, ...]) -> None:
        super().__init__(batch_size=BATCH_SIZE)
        generator = torch.Generator().manual_seed(0)
        self.arrays = [
            (torch.randn(int(n), *shape, generator=generator), torch.randint(10, (int(n),), generator=generator))
            for n in sizes
        ]

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.arrays)

    def client_train_dataset(self, client: int) -> TensorDataset:
        """All of a client's samples."""
        return TensorDataset(*self.arrays[client])

    def client_test_dataset(self, client: int) -> None:
        """None."""
        return


class Plain(LightningModule):
    """Cross entropy on any network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        inputs, targets = batch
        return functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)


@dataclass
class Workload:
    """What is trained."""

    sizes: np.ndarray
    shape: tuple[int, ...]
    make_net: Callable[[], nn.Module]
    num_sampled: int
    epochs: int
    rounds: int


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def _logistic() -> nn.Module:
    return nn.Linear(60, 10)


WORKLOADS = {
    "W1": Workload(np.geomspace(40, 1471, 30).round(), (60,), _logistic, 10, 5, 4),
    "W2": Workload(np.full(100, 600), (784,), _mlp, 10, 1, 6),
    "W3": Workload(np.geomspace(299, 10_000, 20).round(), (3, 32, 32), CIFARCNN, 10, 1, 1),
    "W4": Workload(np.full(10_000, 20), (60,), _logistic, 1000, 1, 2),
}


def loop(work: Workload, data: Clients, *, flat: bool) -> float:
    """Client-steps per second of a loop by hand: with torch.optim.SGD, or with a flat vector ("the floor")."""
    net = work.make_net()
    parameters = list(net.parameters())
    row = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for p in parameters:
        p.data = row[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    z, grad, moment = row.clone(), torch.empty_like(row), torch.empty_like(row)
    steps, started = 0, time.perf_counter()
    for t in range(1, work.rounds + 1):
        total, weight = torch.zeros_like(z), 0
        for client in UniformSampler()(data.num_clients, work.num_sampled, seed=0, round=t):
            inputs, targets = data.arrays[client]
            row.copy_(z)
            moment.zero_()
            optimizer = None if flat else torch.optim.SGD(parameters, lr=0.01, momentum=0.5)
            for _ in range(work.epochs):
                for chosen in torch.randperm(len(inputs)).split(BATCH_SIZE):
                    loss = functional.cross_entropy(net(inputs[chosen]), targets[chosen])
                    for p in parameters:
                        p.grad = None
                    loss.backward()
                    if optimizer is not None:
                        optimizer.step()
                    else:
                        torch.cat([p.grad.reshape(-1) for p in parameters], out=grad)
                        row.sub_(moment.mul_(0.5).add_(grad), alpha=0.01)
                    steps += 1
            total.add_(row, alpha=len(inputs))
            weight += len(inputs)
        z = total / weight
    return steps / (time.perf_counter() - started)


def ours(work: Workload, data: Clients, algorithm: FederatedAlgorithm, engine: str = "sequential") -> float:
    """Client-steps per second of the framework, tables written."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=work.rounds, clients_per_round=work.num_sampled, local_epochs=work.epochs, accelerator="cpu",
            logger=False, eval_every_n_rounds=0, enable_progress_bar=False, enable_checkpointing=False,
            default_root_dir=folder, seed=0, engine=engine,  # type: ignore[arg-type]
        )  # fmt: skip
        trainer.fit(Plain(work.make_net()), data, algorithm)
        with open(f"{trainer.log_dir}/clients.csv") as file:
            steps = sum(int(row["num_steps"]) for row in csv.DictReader(file))
        with open(f"{trainer.log_dir}/metrics.csv") as file:
            seconds = sum(float(row["time/round_seconds"] or 0) for row in csv.DictReader(file))
    return steps / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.workloads:
        work = WORKLOADS[name]
        data = Clients(work.sizes, work.shape)
        runs: dict[str, Callable[[], float]] = {
            "floor": lambda work=work, data=data: loop(work, data, flat=True),  # type: ignore[misc]
            "torch.optim": lambda work=work, data=data: loop(work, data, flat=False),  # type: ignore[misc]
            "FedAvg": lambda work=work, data=data: ours(work, data, FedAvg()),  # type: ignore[misc]
            "vectorized": lambda work=work, data=data: ours(work, data, FedAvg(), "vectorized"),  # type: ignore[misc]
            "FedBC": lambda work=work, data=data: ours(work, data, FedBC(dual_lr=1e-3)),  # type: ignore[misc]
        }
        speeds: dict[str, list[float]] = {kind: [] for kind in runs}
        for _ in range(arguments.pairs):
            for kind, run in runs.items():
                speeds[kind].append(run())
        for kind, values in speeds.items():
            ratios = [v / f for v, f in zip(values, speeds["floor"], strict=True)]
            print(
                f"{name} {kind:12} {statistics.median(values):8.0f} steps/s   / floor "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
