"""Runs the user's LightningModule, without a change to it, inside federated training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.compile import from_compiled
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MinMetric

from fedbc_lightning.core.checks import shown
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import AnyModule, overrides
from fedbc_lightning.core.private_lightning import check_dataloader_idx, is_from_compiled, warnings_of_metrics
from fedbc_lightning.core.private_torch import buffers_of, inside_compiled, is_persistent, set_updated
from fedbc_lightning.core.storable import plain_copy, plain_values
from fedbc_lightning.data.datamodule import TRANSFER_HOOKS, FederatedDataModule
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.module.collector import MetricCollector, ModuleLog, batch_size_of, by_plain_name
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.module.kept_optimizers import KeptState, kept_by
from fedbc_lightning.module.mistakes import locate_step, place_in_run
from fedbc_lightning.module.trainer_proxy import ModuleTrainer
from fedbc_lightning.state.layout import write_buffer

STEPS = ("training_step", "validation_step", "test_step")

# The values that each metric holds; None for a metric without an update
State = list[list[float] | None]
# Part of a module (or ``hparams``) and name of an attribute -> its value
Attributes = dict[tuple[str, str], Any]

# Modules -> all values before their first run, and what hooks of rounds left where they changed one
_changed: WeakKeyDictionary[LightningModule, tuple[Attributes, Attributes]] = WeakKeyDictionary()


class Scratch(NamedTuple):
    """A buffer that does not travel (``persistent=False``): its place, and the value that every client finds there."""

    full_name: str
    module: nn.Module
    name: str
    initial: Tensor | None

    def copy(self) -> Tensor | None:
        """Copy the present value; training may have put another tensor in its place."""
        value: Tensor | None = getattr(self.module, self.name)
        return None if value is None else value.clone()

    def put(self, value: Tensor | None) -> None:
        """Write a value."""
        write_buffer(self.module, self.name, value, None if value is None else value.dtype)


class BestMetrics:
    """Keeps what ``MaxMetric`` and ``MinMetric`` hold between evaluations of the same model on the same data.

    All other metrics are reset for each client and evaluation. These two hold the best value of several evaluations,
    and must not mix models or clients.

    Args:
        module: The module that holds the metrics.

    Attributes:
        values: Map from the key of an evaluation to what the metrics held after the last one that was committed.
        staged: The same, after evaluations that are not committed yet.
        key: Key of the evaluation that runs: its model and its data.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [metric for metric in module.modules() if isinstance(metric, (MaxMetric, MinMetric))]
        self.values: dict[str, State] = {}
        self.staged: dict[str, State] = {}
        self.key = ""

    @property
    def sizes(self) -> list[int]:
        """How many numbers each of the metrics holds."""
        return [len(metric.metric_state) for metric in self._metrics]

    def load(self) -> None:
        """Restore what the metrics, which have been reset, held after the last evaluation with the same key."""
        for metric, held in zip(self._metrics, self.values.get(self.key, []), strict=False):
            if held is not None:
                for name, value in zip(metric.metric_state, held, strict=True):
                    setattr(metric, name, getattr(metric, name).new_tensor(value))
                set_updated(metric)

    def stage(self) -> None:
        """Stage what the metrics hold after an evaluation."""
        if self._metrics:
            self.staged[self.key] = [
                [float(getattr(metric, name)) for name in metric.metric_state] if metric.update_called else None
                for metric in self._metrics
            ]

    def join(self, fabric: Fabric) -> None:
        """Exchange the staged values, since each process has evaluated other clients."""
        if self._metrics:
            for theirs in gather_objects(fabric, self.staged):
                self.staged |= theirs

    def commit(self) -> None:
        """Make the staged values the current ones."""
        self.values = self.values | self.staged
        self.staged = {}

    def rollback(self) -> None:
        """Discard the staged values."""
        self.staged = {}


def _holders(module: LightningModule) -> dict[str, dict[str, Any]]:
    return {name: vars(part) for name, part in module.named_modules()} | {"hparams": module.hparams}


def plain_attributes(module: LightningModule) -> Attributes:
    """Return the attributes of a module's parts, and hyper-parameters, that are plain values."""
    plain = {name: plain_values(holder) for name, holder in _holders(module).items()}
    return {(name, key): value for name, values in plain.items() for key, value in values.items()}


def put_plain_attributes(module: LightningModule, values: Attributes, *, are_all: bool = False) -> None:
    """Set those attributes that have other values now; if these are all that there were, remove newer ones."""
    holders, now = _holders(module), plain_attributes(module)
    for name, key in now.keys() - values.keys() if are_all else ():
        del holders[name][key]  # it hides that of the class, such as a learning rate
    for (name, key), value in values.items():
        if name in holders and ((name, key) not in now or now[name, key] != value):
            holders[name][key] = plain_copy(value)


def forget_hooks(module: LightningModule, *, is_restored: bool) -> None:
    """Begin a run with the module as it is; if it is restored, as it was made, since the checkpoint has the rest."""
    made, left = _changed.pop(module, ({}, {}))
    if is_restored:  # what somebody has changed after the run stays, and will be told
        others = {k: v for k, v in plain_attributes(module).items() if k not in left or left[k] != v}
        put_plain_attributes(module, {k: made[k] for k in left if k in made} | others, are_all=True)


class UserModule:
    """Runs the user's steps under Fabric's precision, and listens to what they log.

    Args:
        module: The user's module.
        fabric: The Fabric of this process, already launched.
        hooks: The hooks that callbacks and the module override.
        shim: The object that the module sees as ``self.trainer``.
        datamodule: The clients' data; its batch-transfer hooks replace the module's, as in Lightning.

    Attributes:
        log: What the module gets as its ``self.log``.
        scratch: The buffers that do not travel, each with the values that every client finds in it.
        evaluating: Names of the module's parts that every client finds in evaluation mode.
        changed_attributes: The attributes with plain values that hooks of rounds have changed, as the last of these
            hooks left them, by the part of the module (or ``hparams``) that has them and their names.
        has_transfer_hooks: Whether the module or its data module overrides a batch-transfer hook.
        returned: The optimizers and schedulers that ``configure_optimizers`` returned last, as they were then.
        place: Client, stage and round of the current evaluation, for a note on an exception.

    Raises:
        ConfigurationError: The module cannot be federated; see :func:`check_module`.
    """

    def __init__(
        self,
        module: LightningModule,
        fabric: Fabric,
        hooks: Hooks,
        shim: ModuleTrainer,
        datamodule: LightningDataModule,
    ) -> None:
        self.module = module
        self.hooks = hooks
        self.shim = shim
        self.device = fabric.device
        self.collector = MetricCollector()
        shim.listen(lambda: self.collector)
        self.log = ModuleLog(lambda: self.collector)
        precision = fabric.strategy.precision
        self.precision = precision
        is_plain = type(precision) is Precision
        self.autocast: Callable[[], AbstractContextManager] = nullcontext if is_plain else precision.forward_context
        self._convert: Callable[[Any], Any] | None = None if is_plain else precision.convert_input
        self._transfer = _find_transfer_hooks(module, datamodule)
        self.has_transfer_hooks = self._transfer is not None
        precision.convert_module(module)
        module.to(self.device)
        self.metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self.best_metrics = BestMetrics(module)
        self._metric_parts = [(m.distributed_available_fn, m.compute) for m in self.metrics]
        self._told = set[str]()
        self.keep_scratch()
        self._kept_optimizers: KeptState | None = None
        self.returned: KeptState | None = None
        self.place = ""
        self.keep_modes()
        self.changed_attributes: Attributes = {}
        self._made = _changed[module][0] if module in _changed else plain_attributes(module)
        steps = {name: getattr(module, name) for name in STEPS}
        self.takes_index = {k: is_param_in_hook_signature(step, "batch_idx", min_args=2) for k, step in steps.items()}

    def keep_scratch(self) -> None:
        """Copy the buffers that do not travel, since no client may find there what the client before it wrote."""
        children = [(prefix, child) for prefix, child in self.module.named_modules() if not isinstance(child, Metric)]
        self._registered = [(prefix, child, set(buffers_of(child))) for prefix, child in children]
        self.scratch = [
            Scratch(f"{prefix}.{name}".lstrip("."), child, name, None if buffer is None else buffer.clone())
            for prefix, child in children
            for name, buffer in buffers_of(child).items()
            if not is_persistent(child, name)
        ]

    def late_scratch(self) -> list[Scratch]:
        """Return the buffers that do not travel and that training has registered."""
        return [
            Scratch(f"{prefix}.{name}".lstrip("."), child, name, None)
            for prefix, child, names in self._registered
            for name in buffers_of(child).keys() - names
            if not is_persistent(child, name)
        ]

    def put_scratch_back(self) -> None:
        """Restore the buffers that do not travel to what every client finds in them, or remove them if they are new."""
        for late in self.late_scratch():
            delattr(late.module, late.name)
        for buffer in self.scratch:
            buffer.put(buffer.initial)

    def renew_optimizers(self) -> None:
        """Put optimizers and schedulers that the module keeps as attributes back, as they were when this began."""
        if self._kept_optimizers is None:
            self._kept_optimizers = KeptState(kept_by(self.module), self.module)
        self._kept_optimizers.restore()

    def renew_returned(self, optimizers: Sequence[Any]) -> bool:
        """Put optimizers back as they were returned, if they are those of the last call and not kept as attributes."""
        last, kept = self.returned, self._kept_optimizers
        if last is None or not last.holds(optimizers) or (kept and kept.holds(optimizers)):
            return False
        last.restore()
        self.returned = None
        return True

    # attach and detach

    def attach(self) -> None:
        """Give the module our trainer and our ``self.log``."""
        # lightning.Trainer would synchronise a Metric over ranks when it is computed. Here each rank computes it for
        # another client, and not equally often, so the ranks would wait for each other for ever.
        for metric in self.metrics:
            metric.distributed_available_fn = bool  # which returns False
            if type(metric).compute.__module__.startswith("torchmetrics."):
                metric.compute = self._telling(metric.compute)  # type: ignore[method-assign]
        for child in self.module.modules():
            if isinstance(child, AnyModule):
                child.trainer = self.shim  # type: ignore[assignment]
                child.log = self.log.of(child)  # type: ignore[method-assign]
        for callback in self.hooks.callbacks:  # as lightning.Trainer does
            callback.log, callback.log_dict = self.module.log, self.module.log_dict  # type: ignore[attr-defined]

    def detach(self) -> None:
        """Undo :meth:`attach`; weights and attributes stay as training left them."""
        left = plain_attributes(self.module)
        _changed[self.module] = self._made, {key: left.get(key) for key in self.changed_attributes}
        for state in filter(None, (self.returned, self._kept_optimizers)):
            state.restore()
        for metric, (available, compute) in zip(self.metrics, self._metric_parts, strict=True):
            metric.distributed_available_fn, metric.compute = available, compute  # type: ignore[method-assign]
        for child in self.module.modules():
            if isinstance(child, AnyModule):
                child.trainer = None
                child.__dict__.pop("log", None)
        for callback in self.hooks.callbacks:
            vars(callback).pop("log", None), vars(callback).pop("log_dict", None)

    def _telling(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        """Return a metric's ``compute`` that gives NaN for a number which torchmetrics warns of, and says so once."""
        undefined: Any = None

        def computed() -> Any:
            nonlocal undefined
            with warnings_of_metrics() as said:
                value = compute()
            client = self.shim.current_client
            place = self.place if client is None else place_in_run(client, self.shim.current_round)
            for text in {*said} - self._told:
                self._told.add(text)
                rank_zero_warn(
                    f"{place}: torchmetrics warns: {text.rstrip('.')} (said once). Means and worst tenths leave out a "
                    "client for which a metric is undefined, and .../num_clients counts the others."
                )
            # A mean over those classes that are there is one. A value that was computed before comes without a warning.
            if said and isinstance(value, Tensor) and value.numel() == 1 and "Ignoring" not in str(said):
                undefined = value
            return value if value is not undefined or value is None else value * torch.nan

        return computed

    def start_collecting(self) -> MetricCollector:
        """Start a new collector for one client or evaluation, and reset metrics and the buffers that do not travel."""
        self.collector = MetricCollector()
        for metric in self.metrics:
            metric.reset()
        self.put_scratch_back()
        return self.collector

    # modes

    def keep_modes(self) -> None:
        """Let every client begin with the modes that the module's parts have now."""
        self.evaluating = frozenset(name for name, child in self.module.named_modules() if not child.training)

    def train_mode(self) -> None:
        """Restore training mode as the user left it: parts that were in evaluation mode stay in it."""
        for name, child in self.module.named_modules():  # training may have replaced some
            if child.training == (name in self.evaluating):  # nn.Module.__setattr__ is slow
                child.training = not child.training

    # attributes

    @contextmanager
    def noting_attributes(self) -> Iterator[None]:
        """Note the attributes that a hook of rounds changes; else a resumed run would begin ``self.lr *= 0.5`` anew."""
        before = plain_attributes(self.module)
        yield
        now = plain_attributes(self.module)
        self.changed_attributes |= {k: value for k, value in now.items() if k not in before or before[k] != value}

    # steps

    def to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Move one batch to the device, through the user's transfer hooks; end the run here if it has been stopped."""
        check()
        if self._convert is not None:
            batch = self._convert(batch)
        if self._transfer is None:
            return batch if _is_on(batch, self.device) else move_data_to_device(batch, self.device)
        before, move, after = self._transfer
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = move_data_to_device(batch, self.device) if move is None else move(batch, self.device, dataloader_idx)
        return after(batch, dataloader_idx) if after is not None else batch

    def training_step(self, batch: Any, batch_idx: int) -> tuple[Tensor | None, Any]:
        """Return the loss of one batch, and everything that ``training_step`` returned.

        Raises:
            ConfigurationError: ``training_step`` returned neither a tensor, a dict with ``loss`` nor None.
        """
        arguments = (batch, batch_idx) if self.takes_index["training_step"] else (batch,)
        # This runs in every step, so plain precision does not even enter an empty context.
        if self.autocast is nullcontext:
            output = self.module.training_step(*arguments)
        else:
            with self.autocast():
                output = self.module.training_step(*arguments)
        if isinstance(output, Tensor):
            return output, output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        is_free = isinstance(output, Mapping) and not self.module.automatic_optimization
        if output is not None and not isinstance(loss, Tensor) and not is_free:
            got = f"a dict of {', '.join(map(str, output))}" if isinstance(output, Mapping) else type(output).__name__
            raise ConfigurationError(
                f"model: training_step returned {got}; return the loss as a tensor, a dict with a "
                "tensor 'loss', or None to skip the step."
            )
        return loss if isinstance(loss, Tensor) else None, output

    def evaluate(self, loader: Any, stage: str) -> dict[str, Any]:
        """Run ``validation_step`` or ``test_step`` over a loader, and return what it logged by names without prefixes.

        Args:
            loader: The loader of the batches.
            stage: ``"validation"`` or ``"test"``: the step that runs, and its hooks.

        Returns:
            Numbers, or tensors that may not be computed yet, so that nobody waits for a device after each loader.
        """
        step, takes_index = getattr(self.module, f"{stage}_step"), self.takes_index[f"{stage}_step"]
        collector = self.start_collecting()
        loaders = "test_dataloaders" if stage == "test" else "val_dataloaders"
        self.shim.set(**{loaders: loader})
        self.best_metrics.load()
        self.hooks.call_module(f"on_{stage}_epoch_start")
        batch_idx, batch = 0, None
        try:
            for raw, batch_idx, number in loader.numbered():
                batch = self.to_device(raw, number or 0)
                if number != collector.dataloader_idx:
                    collector.start_loader(number)
                told = () if number is None else (number,)
                expected = min(loader.batch_size, loader.num_samples - batch_idx * loader.batch_size)
                collector.start_batch(batch, batch_size_of(batch, expected))
                self.hooks.call(f"on_{stage}_batch_start", batch, batch_idx, *told)
                with self.autocast():
                    output = step(*((batch, batch_idx) if takes_index else (batch,)), *told)
                self.hooks.call(f"on_{stage}_batch_end", output, batch, batch_idx, *told)
                batch_idx += 1
            collector.start_loader(None)
        except Exception as error:
            locate_step(error, f"{self.place}, batch {batch_idx}", batch)
            raise
        self.hooks.call_module(f"on_{stage}_epoch_end")
        self.shim.set(**{loaders: None})
        result = by_plain_name(collector.means())
        self.best_metrics.stage()
        return result


def check_module(module: Any) -> None:
    """Raise unless the module can be federated, before anything is trained.

    Raises:
        ConfigurationError: The model is no LightningModule, or has no ``training_step`` or ``configure_optimizers``.
    """
    if not isinstance(module, AnyModule):
        raise ConfigurationError(f"model: got {shown(module)}; give a LightningModule.")
    name = type(module).__name__
    for method in ("training_step", "configure_optimizers"):
        if not overrides(module, method, LightningModule):
            raise ConfigurationError(f"model: {name} has no {method}; add one, as for lightning.Trainer.")
    for step in STEPS:
        # Lightning gives this to steps that take batches themselves.
        if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
            raise ConfigurationError(f"model: {name}.{step} takes dataloader_iter; take (batch, batch_idx).")


def check_loaders(module: LightningModule, datamodule: FederatedDataModule) -> None:
    """Raise unless evaluation steps take ``dataloader_idx`` where the data come from several loaders, and only there.

    Raises:
        ConfigurationError: A step or one of its hooks does not.
    """
    for split in ("val", "test"):
        stage = step_stage(module, split)
        if stage is not None:
            try:
                running = RunningStage.TESTING if stage == "test" else RunningStage.VALIDATING
                methods = f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"
                check_dataloader_idx(module, methods, running, datamodule.has_several_loaders(split))
            except RuntimeError as error:
                raise ConfigurationError(f"model: {error}") from None


def unwrapped(model: Any) -> Any:
    """Return the module inside ``torch.compile(module)``, with compiled steps, as lightning.Trainer does."""
    module = inside_compiled(model)
    if not isinstance(module, LightningModule):
        return model
    if not is_from_compiled(module):
        from_compiled(model)
        for name in (*STEPS, "predict_step"):
            # from_compiled has put Lightning's empty step where the module has none.
            if getattr(type(module), name) is getattr(LightningModule, name):
                delattr(module, name)
    return module


def step_stage(module: LightningModule, split: str) -> str | None:
    """Return the stage whose step runs on a split: its own, else the other one; None if both steps are missing."""
    stages = ("test", "validation") if split == "test" else ("validation", "test")
    return next((stage for stage in stages if overrides(module, f"{stage}_step", LightningModule)), None)


def _is_on(batch: Any, device: torch.device) -> bool:
    if device.type != "cpu" or not isinstance(batch, (list, tuple)):
        return False
    # A list, because this runs before every step and all() of a generator is slower
    return all([isinstance(item, Tensor) and item.device == device for item in batch])  # noqa: C419


def _find_transfer_hooks(module: nn.Module, datamodule: LightningDataModule) -> tuple | None:
    """Return the transfer hooks, the data module's before the module's, as in Lightning; None if none is overridden."""
    found = tuple(
        next((getattr(owner, name) for owner in (datamodule, module) if overrides(owner, name, DataHooks)), None)
        for name in TRANSFER_HOOKS
    )
    return found if any(found) else None
