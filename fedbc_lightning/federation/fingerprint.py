"""What must be equal in a run and in a checkpoint for the run to be resumed from it."""

from __future__ import annotations

from typing import Any

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.state.declaration import StateDeclaration
from fedbc_lightning.state.layout import ParameterLayout


def describe_run(
    layout: ParameterLayout,
    datamodule: FederatedDataModule,
    algorithm: FederatedAlgorithm,
    declaration: StateDeclaration,
    *,
    continues_schedules: bool,
    settings: dict[str, str],
) -> dict[str, Any]:
    """Describe model, partition, method and its state; this reads the whole partition.

    Args:
        layout: The model's parameters and buffers.
        datamodule: The clients' data.
        algorithm: The method.
        declaration: The state that the method and its parts keep.
        continues_schedules: Whether the clients' schedulers go on from round to round.
        settings: What channel and simulation must keep, by the names of their settings.
    """
    return {
        "model": layout.fingerprint(),
        "partition": {
            "number of clients": datamodule.num_clients,
            **{f"{s} samples": int(datamodule.num_samples(s).sum()) for s in ("train", "val", "test")},
            "sha256 of the indices": datamodule.partition_hash()[:16],
        },
        "algorithm": type(algorithm).__name__,
        "state": declaration.fingerprint(),
        **({"trainer.local_schedules": "continue"} if continues_schedules else {}),
        **settings,
        **({"trainer.local_parameters": ", ".join(e.name for e in layout.kept_entries)} if layout.num_kept else {}),
    }
