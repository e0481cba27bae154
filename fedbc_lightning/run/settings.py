"""The settings of a run: the arguments of FederatedTrainer, after they were checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning.pytorch import Callback

from fedbc_lightning.core.lightning_names import AnyLogger
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.federation.coding import Codecs
from fedbc_lightning.federation.privacy import Privacy
from fedbc_lightning.federation.sampling import ClientSampler
from fedbc_lightning.federation.system import Stragglers, System
from fedbc_lightning.state.declaration import BufferPolicy


@dataclass
class RunSettings:
    """What the user chose for a run.

    Attributes:
        local: The arguments that tell how long and how a client trains.

    All other attributes are named after the arguments of ``FederatedTrainer``, whose docstring describes them.
    """

    max_rounds: int
    clients_per_round: int | float
    local: LocalTraining
    sampler: ClientSampler
    stragglers: Stragglers | None
    privacy: Privacy | None
    codec: Codecs | None
    system: System | None
    engine: Literal["sequential", "vectorized", "auto"]
    accelerator: str
    strategy: str
    devices: list[int] | str | int
    num_nodes: int
    precision: Literal["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
    deterministic: bool | Literal["warn"] | None
    callbacks: list[Callback]
    logger: AnyLogger | Iterable[AnyLogger] | bool | None
    eval_every_n_rounds: int
    eval_clients: int | float | Literal["all"] | None
    heldout_finetune_steps: int
    buffers: BufferPolicy
    local_parameters: list[str]
    keep_local_models: bool | None
    client_dtype: Literal["float32", "bfloat16"] | None
    histogram_every_n_rounds: int
    enable_checkpointing: bool
    checkpoint_every_n_rounds: int | None
    default_root_dir: Path
    name: str
    seed: int | None

    def has_histograms(self, round: int) -> bool:
        """Return whether an evaluated round is the first at or behind a multiple of their interval, or the last one."""
        every = self.histogram_every_n_rounds
        return bool(every) and (round % every < self.eval_every_n_rounds or round == self.max_rounds)

    @property
    def experiment(self) -> Path:
        """Folder of all runs of this name."""
        return self.default_root_dir / self.name
