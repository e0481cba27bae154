"""Quadratic clients in float64, f_i(w) = mean over samples of 1/2 (w - a)^T A (w - a): trajectories are closed form."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.federation.participation import ClientSampler

SIZES = (3, 5, 2, 7, 4)
"""Training samples of the five default clients: unequal, so that sample weights and uniform weights differ."""


def sample_quadratics(
    sizes: tuple[int, ...] = SIZES, dim: int = 4, seed: int = 0, spread: float = 2.0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """One pair (A (n, d, d), a (n, d)) per client; eigenvalues of each A in [0.5, 2], centres ``spread`` apart."""
    rng = np.random.default_rng(seed)
    clients = []
    for size in sizes:
        basis = np.linalg.qr(rng.standard_normal((size, dim, dim)))[0]
        matrices = np.einsum("nij,nj,nkj->nik", basis, rng.uniform(0.5, 2.0, (size, dim)), basis)
        centre = spread * rng.standard_normal(dim)
        clients.append((matrices, centre + 0.3 * rng.standard_normal((size, dim))))
    return clients


class QuadraticModule(LightningModule):
    """w = (head, tail), two parameters so that optimizer groups can part them; a batch is (A (B, d, d), a (B, d)).

    The layer ``features`` returns w - a of each sample, (B, d).

    Args:
        dim: Length d of w.
        lr: Step size of ``head`` (and of ``tail``, unless ``tail_lr`` is given).
        momentum: Of SGD.
        tail_lr: Makes two optimizer groups, ``tail`` FIRST, so that the flat vector is (tail, head).
        decay: Per-step factor of the learning rate (an ExponentialLR of interval ``step``).
        lbfgs: LBFGS in place of SGD: four closure calls in a step.
        weight_decay: Of SGD.
    """

    def __init__(
        self, dim: int = 4, lr: float = 0.1, momentum: float = 0.0, tail_lr: float | None = None,
        decay: float | None = None, lbfgs: bool = False, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        start = torch.linspace(-1.0, 1.0, dim, dtype=torch.float64)
        self.head = torch.nn.Parameter(start[:1].clone())
        self.tail = torch.nn.Parameter(start[1:].clone())
        self.features = torch.nn.Identity()
        self.lr, self.momentum, self.tail_lr, self.decay = lr, momentum, tail_lr, decay
        self.lbfgs, self.weight_decay = lbfgs, weight_decay

    def vector(self) -> np.ndarray:
        """The parameters as (head, tail), whatever the order of the trainer's flat vector."""
        return torch.cat([self.head, self.tail]).detach().cpu().numpy().copy()

    def from_layout(self, flat: np.ndarray) -> np.ndarray:
        """The trainer's flat vector (ordered by optimizer group) as (head, tail)."""
        return flat if self.tail_lr is None else np.concatenate([flat[-1:], flat[:-1]])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        matrices, centres = batch
        offset = self.features(torch.cat([self.head, self.tail]) - centres)
        loss = 0.5 * torch.einsum("bi,bij,bj->b", offset, matrices, offset).mean()
        self.log("train_objective", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.lbfgs:
            return torch.optim.LBFGS(self.parameters(), lr=self.lr, max_iter=4)
        groups: list[dict[str, Any]] = [{"params": [self.head, self.tail]}]
        if self.tail_lr is not None:
            groups = [{"params": [self.tail], "lr": self.tail_lr}, {"params": [self.head]}]
        optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.decay is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class QuadraticData(FederatedDataModule):
    """The clients of :func:`sample_quadratics`; full batches unless ``batch_size`` is given; no test data.

    Args:
        clients: What :func:`sample_quadratics` returns, as it does without arguments where None is given.
        batch_size: None for full batches.
    """

    def __init__(
        self, clients: list[tuple[np.ndarray, np.ndarray]] | None = None, batch_size: int | None = None
    ) -> None:
        self.clients = clients or sample_quadratics()
        super().__init__(batch_size=batch_size or sum(len(centres) for _, centres in self.clients))

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    def client_train_dataset(self, client: int) -> Dataset:
        matrices, centres = self.clients[client]
        return TensorDataset(torch.as_tensor(matrices), torch.as_tensor(centres))

    def client_test_dataset(self, client: int) -> Dataset | None:
        return None


def _numpy(value: Any) -> np.ndarray:
    """A float64 copy of a tensor or array."""
    return torch.as_tensor(value).detach().cpu().double().numpy().copy()


class RecordingSampler(ClientSampler):
    """Draws S of N clients from its own generator and keeps each round's list, in the order of the clients' turns."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[int]] = {}

    def __call__(self, num_clients: int, num_sampled: int, seed: int, round: int) -> list[int]:
        drawn = np.random.default_rng([seed, round]).permutation(num_clients)[:num_sampled].tolist()
        self.rounds[round] = drawn
        return list(drawn)


class Recorder(Callback):
    """Keeps who trained in each round, and z and all client state after it, as NumPy arrays.

    Args:
        scalars: Names of client scalars to keep.
        vectors: Names of client vectors to keep.
        server: Names of server vectors to keep.
    """

    def __init__(
        self, scalars: tuple[str, ...] = (), vectors: tuple[str, ...] = (), server: tuple[str, ...] = ()
    ) -> None:
        self.names = {"scalars": scalars, "vectors": vectors, "server": server}
        self.sampled: dict[int, list[int]] = {}
        self.trajectory: dict[str, list[np.ndarray]] = {}

    def on_round_end(self, trainer: Any, pl_module: Any) -> None:
        trained = [r["client"] for r in trainer.server.records if r["status"] in ("ok", "nonfinite")]
        self.sampled[int(trainer.current_round)] = trained
        keep = self._keep
        keep("z", pl_module.vector())
        keep("flat_z", trainer.server.z)
        for name in self.names["scalars"]:
            keep(name, trainer.clients.scalar(name))
        for name in self.names["vectors"]:
            rows = [trainer.clients.vector(name, client) for client in range(trainer.datamodule.num_clients)]
            keep(name, np.stack([pl_module.from_layout(_numpy(row)) for row in rows]))
        for name in self.names["server"]:
            keep("server_" + name, pl_module.from_layout(_numpy(trainer.server[name])))

    def _keep(self, name: str, value: Any) -> None:
        self.trajectory.setdefault(name, []).append(_numpy(value))

    def rounds(self) -> list[list[int]]:
        """The clients that trained in each round."""
        return [self.sampled[number] for number in sorted(self.sampled)]

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything kept, one row per finished round."""
        return {name: np.stack(values) for name, values in self.trajectory.items()}
