"""A run as users and callbacks see it: attributes of the trainer, with Lightning's names; a round is an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar, overload

from lightning.fabric import Fabric
from lightning.pytorch import Callback
from torch import Tensor

from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.evaluation.summary import Evaluation
from fedbc_lightning.federation.coding import Codecs
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.privacy import Privacy
from fedbc_lightning.federation.sampling import ClientSampler
from fedbc_lightning.federation.system import Stragglers, System
from fedbc_lightning.run.result import FitResult
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.run_progress import Progress
from fedbc_lightning.run.run_writer import Recorder
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.run.spawn_result import Outcome
from fedbc_lightning.state.declaration import BufferPolicy, ClientStore, ServerState
from fedbc_lightning.state.layout import ParameterLayout

Value = TypeVar("Value")


class Shown(Generic[Value]):
    """An attribute that one of the trainer's parts has under the same name.

    Args:
        part: Function from the trainer to the part, or to None while there is none.
    """

    def __init__(self, part: Callable[[Any], Any]) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name under which the attribute stands in its class."""
        self._name = name

    @overload
    def __get__(self, trainer: None, owner: type) -> Shown[Value]: ...

    @overload
    def __get__(self, trainer: object, owner: type) -> Value: ...

    def __get__(self, trainer: object | None, owner: type) -> Shown[Value] | Value:
        """Return the value that the part has now."""
        return self if trainer is None else getattr(self._find(trainer), self._name)

    def __set__(self, trainer: object, value: Value) -> None:
        """Give the part another value."""
        setattr(self._find(trainer), self._name, value)

    def _find(self, trainer: object) -> Any:
        part = self._part(trainer)
        if part is None:
            raise _absent(trainer, self._name)
        return part


def _absent(trainer: object, name: str) -> AttributeError:
    """Return the error for an attribute of a run, where this process has not made one."""
    return AttributeError(
        f"'{type(trainer).__name__}' object has no '{name}' in this process: there is "
        "none before a run, nor after a run in processes that it started"
    )


def _settings(trainer: RunView) -> RunSettings:
    return trainer.settings


def _progress(trainer: RunView) -> Progress:
    return trainer.progress


def _run(trainer: RunView) -> Run | None:
    return trainer._run


def _federation(trainer: RunView) -> Federation | None:
    return None if trainer._run is None else trainer._run.federation


def _trained(trainer: RunView) -> Federation | Outcome | None:
    return trainer._outcome if trainer._run is None else trainer._run.federation


class RunView:
    """Shows settings, progress and state of a run as attributes of ``FederatedTrainer``.

    The names follow ``lightning.Trainer``, as far as EarlyStopping, Timer and ModelSummary use them. Our own callbacks
    name this class as the type of the trainer that their hooks are given. Lightning's Callback names its own Trainer
    there, hence their ``type: ignore[override]``.

    Args:
        settings: What the user chose; its attributes are attributes of the trainer.
        fabric: Fabric of the trainer's runs.

    Attributes:
        progress: How far the last run has come; its attributes are attributes of the trainer.
        state: Lightning's name for the verb that runs, ``state.fn``.
    """

    def __init__(self, settings: RunSettings, fabric: Fabric) -> None:
        self.settings, self.progress = settings, Progress()
        self.state = SimpleNamespace(fn=None, stage=None)
        self._fabric = fabric
        self._run: Run | None = None
        self._recorder: Recorder | None = None
        self._outcome: Outcome | None = None

    max_rounds = Shown[int](_settings)
    clients_per_round = Shown[int | float](_settings)
    local = Shown[LocalTraining](_settings)
    sampler = Shown[ClientSampler](_settings)
    stragglers = Shown[Stragglers | None](_settings)
    privacy = Shown[Privacy | None](_settings)
    codec = Shown[Codecs | None](_settings)
    system = Shown[System | None](_settings)
    engine = Shown[Literal["sequential", "vectorized", "auto"]](_settings)
    num_nodes = Shown[int](_settings)
    precision = Shown[str](_settings)
    deterministic = Shown[bool | Literal["warn"] | None](_settings)
    callbacks = Shown[list[Callback]](_settings)
    eval_every_n_rounds = Shown[int](_settings)
    eval_clients = Shown[int | float | Literal["all"] | None](_settings)
    heldout_finetune_steps = Shown[int](_settings)
    buffers = Shown[BufferPolicy](_settings)
    local_parameters = Shown[list[str]](_settings)
    keep_local_models = Shown[bool | None](_settings)
    client_dtype = Shown[Literal["float32", "bfloat16"] | None](_settings)
    histogram_every_n_rounds = Shown[int](_settings)
    enable_checkpointing = Shown[bool](_settings)
    checkpoint_every_n_rounds = Shown[int | None](_settings)
    default_root_dir = Shown[Path](_settings)
    name = Shown[str](_settings)

    current_round = Shown[int](_progress)
    finished_round = Shown[int](_progress)
    should_stop = Shown[bool](_progress)
    callback_metrics = Shown[dict[str, Tensor]](_progress)
    evaluation = Shown[Evaluation](_progress)
    log_dir = Shown[str | None](_progress)
    logger = Shown[Any](_progress)
    loggers = Shown[list[Any]](_progress)

    seed = Shown[int](_run)
    evaluator = Shown[Evaluator](_run)
    federation = Shown[Federation](_run)
    datamodule = Shown[FederatedDataModule](_run)
    layout = Shown[ParameterLayout](_federation)
    server = Shown[ServerState](_trained)
    clients = Shown[ClientStore](_trained)

    @property
    def recorder(self) -> Recorder:
        """Recorder of the last training run, which writes its tables and checkpoints."""
        if self._recorder is None:
            raise _absent(self, "recorder")
        return self._recorder

    @property
    def result(self) -> FitResult:
        """What the last training run has recorded, as :meth:`fit` returns it; also after a run was interrupted."""
        if self._outcome is not None and isinstance(self._outcome.result, FitResult):
            return self._outcome.result
        if self._recorder is None:
            raise _absent(self, "result")
        return self._recorder.result()

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
        return self._fabric.is_global_zero

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self._fabric.global_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._fabric.world_size

    @property
    def strategy(self) -> Any:
        """A stand-in for Lightning's strategy; EarlyStopping needs no reduction, because all ranks decide alike."""
        return SimpleNamespace(
            reduce_boolean_decision=lambda decision, all=True: decision,
            broadcast=lambda value, src=0: value,  # no exchange: ranks call callbacks at different times
            barrier=lambda name=None: None,
            root_device=self._fabric.device,
        )

    @property
    def current_epoch(self) -> int:
        """Number of the current round, which callbacks see as the epoch."""
        return self.current_round

    @property
    def global_step(self) -> int:
        """Number of the current round, which callbacks see as the step, too."""
        return self.current_round

    @property
    def max_epochs(self) -> int:
        """Number of rounds T, which callbacks see as the number of epochs."""
        return self.max_rounds

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Last metrics by name, the same as ``callback_metrics``."""
        return self.callback_metrics

    sanity_checking = False
    fast_dev_run = False
    val_check_interval = None  # makes EarlyStopping check after evaluations, not after local epochs
    check_val_every_n_epoch = 1
