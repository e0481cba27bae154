"""Run as a script: fits whose client rows lie in a file, in processes that share a node, or are two nodes.

``python -m helpers.row_processes ranks|nodes FOLDER``
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from matplotlib.figure import Figure

from fedbc_lightning import SCAFFOLD, ConfigurationError, FedBC
from fedbc_lightning.algorithms import Ditto, FedAvgPlus
from fedbc_lightning.state import client_rows, file_rows
from helpers.boring import NUM_CLIENTS, BoringData, make_model, make_trainer

ROUNDS = 8
ALGORITHMS: dict[str, Any] = {
    "fedbc": lambda: FedBC(dual_lr=0.01, dual_momentum=0.5, dual_momentum_style="public", init_from="local"),
    "scaffold": SCAFFOLD,
    "ditto": lambda: Ditto(penalty=0.1),
    "fedavg+": lambda: FedAvgPlus(sigma=0.1, over="all"),
}


def fit(
    folder: Path, algorithm: str = "fedbc", ckpt_path: str | None = None, data: BoringData | None = None, **options: Any
) -> Any:
    """A quiet run of :data:`ROUNDS` rounds with 3 of 6 clients."""
    trainer = make_trainer(folder, **{"max_rounds": ROUNDS, **options})
    trainer.fit(make_model(), data or BoringData(), ALGORITHMS[algorithm](), ckpt_path=ckpt_path)
    return trainer


def state_of(trainer: Any) -> dict[str, Any]:
    """All that a run has come to, rows from wherever they lie."""
    clients = trainer.clients
    names = [*clients._vectors.starts, *clients._tables.starts]
    rows = {name: [clients.vector(name, client) for client in range(NUM_CLIENTS)] for name in names}
    scalars = {name: clients.scalar(name).clone() for name in clients.scalar_names}
    return {"server": dict(trainer.server.values), "scalars": scalars, "rows": rows}


class Killer(Callback):
    """Sends a signal at the k-th of the moments of a kind.

    Args:
        moment: ``client``: a client's training ends; ``evaluation``: one begins; ``before commit`` or ``after commit``:
            a checkpoint takes the place of the older one.
        k: Which of them, counted from 1.
        number: The signal.
        pid: The process that gets it; None: this one.
    """

    def __init__(self, moment: str, k: int, number: int = signal.SIGKILL, pid: int | None = None) -> None:
        self._count = {moment: k}
        self._number, self._pid = number, pid
        replace = os.replace

        def observed(source: Any, target: Any) -> None:
            is_checkpoint = Path(target).name == "last.ckpt"
            if is_checkpoint:
                self._happens("before commit")
            replace(source, target)
            if is_checkpoint:
                self._happens("after commit")

        os.replace = observed

    def on_client_end(self, trainer: Any, pl_module: Any, client: int) -> None:
        self._happens("client")

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._happens("evaluation")

    def _happens(self, moment: str) -> None:
        if moment in self._count:
            self._count[moment] -= 1
            if not self._count[moment]:
                os.kill(self._pid or os.getpid(), self._number)


def run_parallel(folder: Path, names: tuple[str, ...], **options: Any) -> None:
    """Algorithms on two processes, stopped and resumed on the way."""
    for name in names:
        fit(folder / name, name, max_rounds=3, checkpoint_every_n_rounds=2, **options)
        trainer = fit(folder / name, name, ckpt_path="last", checkpoint_every_n_rounds=2, **options)
        torch.save(state_of(trainer), folder / f"{name}-{torch.distributed.get_rank()}.pt")


def run_unshared(folder: Path, **options: Any) -> None:
    """Two nodes, of which the second has another disk."""
    if os.environ["NODE_RANK"] == "1":
        row_file = file_rows.RowFile
        file_rows.RowFile = lambda path, *args, **kwargs: row_file(Path("/elsewhere", *path.parts[1:]), *args, **kwargs)
    try:
        fit(folder / "unshared", **options)
    except ConfigurationError as error:
        Path(folder, f"error-{torch.distributed.get_rank()}.txt").write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    client_rows.IN_MEMORY_BELOW = 0
    Figure.savefig = lambda *args, **kwargs: None  # type: ignore[method-assign]
    mode, target = sys.argv[1], Path(sys.argv[2])
    if mode == "ranks":
        run_parallel(target, ("fedbc", "scaffold", "ditto"), devices=2)
    else:
        two_nodes = {"devices": 1, "num_nodes": 2, "strategy": "ddp"}
        run_parallel(target, ("fedbc", "fedavg+"), **two_nodes)
        run_unshared(target, **two_nodes)
