"""Run as a script: fits whose client rows lie in a file, in processes that share a node, or are two nodes.

``python -m helpers.row_processes ranks|nodes FOLDER``
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from fedbc_lightning import SCAFFOLD, ConfigurationError, FedBC
from fedbc_lightning.algorithms import Ditto, FedAvg, FedAvgPlus, FedBuff
from fedbc_lightning.state import client_rows, file_rows
from helpers.boring import NUM_CLIENTS, BoringData, make_model, make_trainer

ROUNDS = 8
ALGORITHMS: dict[str, Any] = {
    "fedbc": lambda: FedBC(dual_lr=0.01, dual_momentum=0.5, dual_momentum_style="public", init_from="local"),
    "fedbc-global": lambda: FedBC(dual_lr=0.01),
    "fedavg": lambda: FedAvg(weighting="uniform"),
    "fedbuff": lambda: FedBuff(buffer_size=2),
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
    mode, target = sys.argv[1], Path(sys.argv[2])
    if mode == "ranks":
        run_parallel(target, ("fedbc", "scaffold", "ditto"), devices=2)
    else:
        two_nodes = {"devices": 1, "num_nodes": 2, "strategy": "ddp"}
        run_parallel(target, ("fedbc", "fedavg+"), **two_nodes)
        run_unshared(target, **two_nodes)
