"""The workbench: the user's module on flat rows with its optimizer, where one client after another is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.loading import ClientLoader, ClientLoaders
from fedbc_lightning.data.own_batches import OwnLoader
from fedbc_lightning.engines.recorded.step_graphs import Rows, StepGraphs
from fedbc_lightning.engines.recorded.step_recorder import StepRecorder
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.client_optimizers import LocalOptimizer
from fedbc_lightning.module.hooks import CLIENT_HOOKS, STEP_HOOKS
from fedbc_lightning.module.mistakes import refuse_loss
from fedbc_lightning.module.schedulers import Configured, needs_closure
from fedbc_lightning.state.layout import ParameterLayout


class Work:
    """Counts what one process has trained; another thread may read it at any time.

    Engines add to ``num_steps`` and do nothing else in a step. Nothing that is computed depends on these numbers.

    Attributes:
        num_clients: Number of clients that this process trains in the current round.
        num_begun: Number of these clients whose training has begun.
        num_steps: Number of local steps so far, over all rounds; K clients that train at once take K steps.
    """

    def __init__(self) -> None:
        self.num_clients = self.num_begun = self.num_steps = 0
        self._begun: set[int] = set()
        self._at_work = self._steps_before = 0
        self._planned = 1

    def start_round(self, num_clients: int) -> None:
        """Begin a round in which this process trains so many clients."""
        self._begun = set()
        self.num_clients, self.num_begun, self._at_work = num_clients, 0, 0

    def begin(self, clients: Iterable[int], num_planned: int) -> None:
        """Begin a training of some clients; a method may train a client several times in a round.

        Args:
            clients: The clients that train, one or several at once.
            num_planned: Number of steps that they take together.
        """
        # Ditto trains each client twice: the second training adds no client to those that have begun.
        before = self.num_begun
        self._begun.update(clients)
        self.num_begun = len(self._begun)
        self._at_work = (self.num_begun - before) or self._at_work
        self._steps_before, self._planned = self.num_steps, max(1, num_planned)

    @property
    def fraction(self) -> float:
        """The part of the round's local training that is done, from 0 to 1; clients count alike.

        Example:
            >>> work = Work()
            >>> work.start_round(num_clients=4)
            >>> work.begin([7], num_planned=10)
            >>> work.begin([3], num_planned=10)
            >>> work.num_steps += 5
            >>> work.num_begun, work.fraction
            (2, 0.375)
        """
        done = min(1.0, (self.num_steps - self._steps_before) / self._planned)
        return (self.num_begun - self._at_work * (1 - done)) / max(1, self.num_clients)


@dataclass(eq=False)
class Workbench:
    """Holds the user's module on one row of weights w and one row of gradients, and what its steps depend on.

    An engine holds a workbench and hands it to whatever trains or evaluates a client.

    Attributes:
        user: The user's module.
        layout: The layout of its parameters in the rows.
        optimizer: The user's optimizer and schedulers on the rows.
        row: The weights w, (d + p,); the module's parameters are views of this row.
        grad: The gradient, (d + p,).
        local: The local training that every client is asked for.
        datamodule: The data module, which gives each client's loader.
        seed: The run's seed.
        round: The current round.
        grad_scale: The scale of gradients at which each client starts in 16-mixed precision.
        recorder: Replays steps that came often.
        graphs: Replays them as CUDA graphs.
        said: Lines that were logged once, see :meth:`say`.
        kept_to: What the method relies on: ``sgd`` (its momentum and weight decay), ``rate`` (one for all steps).
        work: Counts clients and steps, for who shows the progress of a round.
        scaler: The gradient scaler of 16-mixed precision, or None.
        overridden: Whether the module has its own ``backward``, ``optimizer_step``, ..., by name.
        shows_gradients: Whether a hook or the module may look at a step's gradients.
        has_hooks: Whether the module or a callback has hooks.
        has_client_hooks: Whether the module or a callback is called for each client or step.
    """

    user: UserModule
    layout: ParameterLayout
    optimizer: LocalOptimizer
    row: Tensor
    grad: Tensor
    local: LocalTraining
    datamodule: FederatedDataModule
    seed: int

    def __post_init__(self) -> None:
        self.round, self.grad_scale = 0, 1.0
        self.optimized_grad = self.grad[: self.layout.num_optimized]
        self.grad_views = self.layout.views(self.grad)[: self.layout.num_grouped]
        self.recorder = StepRecorder(self.user, self.layout, self.local.record_steps)
        self.graphs = StepGraphs(Rows(self.row, self.grad, self.layout, self.optimizer))
        self.work = Work()
        self._shared_row = self.row[: self.layout.num_parameters]
        self.said: set[str] = set()
        self.kept_to: set[str] = set()
        self._components: dict[int, list[Any]] = {}
        self._look_at_module()

    def _look_at_module(self) -> None:
        """Find out which code of the user's has a part in the steps.

        Raises:
            ConfigurationError: The gradient scaler of 16-mixed precision does not work with this code, or manual
                optimization is combined with what the trainer does to the steps of automatic optimization.
        """
        user, hooks = self.user, self.user.hooks
        self.scaler: Any = getattr(user.precision, "scaler", None)
        self.overridden = {
            name: overrides(user.module, name, LightningModule)
            for name in ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
        }
        takes_closure = self.overridden["optimizer_step"] or any(map(needs_closure, self.optimizer.optimizers))
        if self.scaler is not None and takes_closure:
            raise ConfigurationError(
                "trainer.precision: 16-mixed scales gradients, which works neither with an optimizer_step of the "
                "module's own nor with an optimizer that calls its closure, such as LBFGS; use bf16-mixed or 32-true."
            )
        self._check_manual_optimization()
        # torch's own loop of forward, backward and step is taken only if nobody could see the difference.
        self._customizes_steps = any(map(hooks.listens, STEP_HOOKS)) or any(self.overridden.values())
        self.shows_gradients = any(map(hooks.listens, ("on_before_optimizer_step", "on_train_batch_end")))
        self.shows_gradients |= self.overridden["configure_gradient_clipping"]
        self.has_hooks = hooks.is_there_any
        self.has_client_hooks = self._customizes_steps or any(map(hooks.listens, CLIENT_HOOKS))

    def _check_manual_optimization(self) -> None:
        asked = {
            "gradient_clip_val: call self.clip_gradients in training_step": bool(self.local.gradient_clip_val),
            "accumulate_grad_batches: step every so many batches by hand": self.local.accumulate_grad_batches > 1,
        }
        for what, is_asked in asked.items():
            if is_asked and self.optimizer.by_hand:
                raise ConfigurationError(f"trainer.{what}, for the model uses manual optimization.")

    @classmethod
    def of_module(
        cls,
        user: UserModule,
        configured: Configured,
        local: LocalTraining,
        datamodule: FederatedDataModule,
        seed: int,
        kept_names: Collection[str] = (),
    ) -> Workbench:
        """Lay the module's parameters out in one row, in the order of its optimizer's groups.

        Args:
            user: The user's module, moved and converted.
            configured: What a call of the user's ``configure_optimizers`` returned.
            local: The local training that every client is asked for.
            datamodule: The data module.
            seed: The run's seed.
            kept_names: Names of the parameters that stay with their client.
        """
        seen = set[nn.Parameter]()  # a parameter of two optimizers lies where the first of them has it
        groups = [[p for p in group["params"] if not (p in seen or seen.add(p))] for group in configured.groups]  # type: ignore[func-returns-value]
        layout = ParameterLayout(user.module, groups, kept_names)
        row = torch.empty(layout.num_parameters + layout.num_kept, dtype=layout.dtype, device=user.device)
        grad = torch.zeros_like(row)
        row.copy_(torch.cat([layout.read(), layout.read_kept()]))
        layout.attach(row)
        optimizer = LocalOptimizer(user, layout, row, grad, configured)
        return cls(user, layout, optimizer, row, grad, local, datamodule, seed)

    def renewed(self) -> Workbench:
        """Return a workbench on the same rows that has recorded and kept nothing yet."""
        new = replace(self)
        new.said = self.said
        return new

    def say(self, text: str) -> None:
        """Log a line once in a run; an empty text is not logged."""
        if text and text not in self.said:
            self.said.add(text)
            rank_zero_info(text)

    def start_round(self, round: int, grad_scale: float, learning_rates: list[float] | None) -> None:
        """Take over what changes from round to round.

        Args:
            round: The round that begins.
            grad_scale: The server's scale of gradients.
            learning_rates: The learning rate of each group, or None for those of ``configure_optimizers``.
        """
        self.round, self.grad_scale = round, grad_scale
        self.recorder.start_round(self.has_hooks)
        self.optimizer.learning_rates = learning_rates

    # what a step consists of

    @property
    def changes_gradients(self) -> bool:
        """Whether gradients are clipped, or the module takes the optimizer's step itself."""
        own = any(self.overridden[name] for name in ("optimizer_step", "configure_gradient_clipping"))
        return bool(self.local.gradient_clip_val) or own or self.optimizer.by_hand

    @property
    def takes_plain_steps(self) -> bool:
        """Whether a step consists of forward, backward, terms, clipping and the optimizer's own step alone."""
        return (
            self.optimizer.is_flat and not self._customizes_steps and self.scaler is None
            and self.local.accumulate_grad_batches == 1
        )  # fmt: skip

    @property
    def runs_only_training_step(self) -> bool:
        """Whether local training runs no code of the user's but ``training_step``, so all of it may be replayed."""
        optimizer = self.optimizer
        return self.takes_plain_steps and not (
            self.has_client_hooks or self.user.has_transfer_hooks or optimizer.has_schedulers or optimizer.is_made_anew
            or optimizer.has_step_hooks
        )  # fmt: skip

    def backward(self, loss: Tensor, *args: Any, calls_hooks: bool = True, **kwargs: Any) -> None:
        """Compute the gradients of a loss, scaled, by the module's ``backward``, between Lightning's hooks if called.

        Raises:
            ConfigurationError: The loss has several elements, or no gradient.
        """
        hooks, module = self.user.hooks, self.user.module
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        if calls_hooks:
            hooks.call("on_before_backward", loss)
        try:
            module.backward(loss, *args, **kwargs) if self.overridden["backward"] else loss.backward(*args, **kwargs)
        except RuntimeError:
            refuse_loss(loss, module)
            raise
        if calls_hooks:
            hooks.call("on_after_backward")

    def step_scaled(self, optimizer: Any, **kwargs: Any) -> tuple[Any, bool]:
        """Take a step through the gradient scaler, which skips it and lowers its scale if the gradient overflowed.

        Returns:
            What the step returned, and whether it was taken.
        """
        # GradScaler does not tell whether it skipped the step; that it has lowered its scale is the only sign.
        before = self.scaler.get_scale()
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result, self.scaler.get_scale() >= before

    def step_sizes(self, rates: Sequence[float]) -> Tensor:
        """Return learning rates by parameter: (1, 1) if one group holds all, else (1, d), 0 outside of the groups."""
        return self.row_rates(rates)[:, : self.layout.num_parameters]

    def row_rates(self, rates: Sequence[float]) -> Tensor:
        """Return learning rates as :meth:`step_sizes` does, but for all of a row: (1, 1), else (1, d + p)."""
        layout = self.layout
        if len(layout.group_parts) == 1 and layout.num_optimized == len(self.grad):
            return torch.full((1, 1), rates[0], dtype=layout.master_dtype, device=self.grad.device)
        sizes = torch.zeros_like(self.grad, dtype=layout.master_dtype)
        for parts, rate in zip(layout.group_parts, rates, strict=True):
            for part in parts:
                sizes[part] = rate
        return sizes[None]

    # a client's data

    def train_loader(self, client: int) -> ClientLoader:
        """Return the loader of a client's training data in the current round."""
        loader = self.datamodule.client_train_dataloader(client, self.round, seed=self.seed, device=self.user.device)
        if isinstance(loader, OwnLoader):
            per_round = replace(self.local, schedule_rounds=None).limits(len(loader))["max_epochs"]
            loader.first_epoch = (self.round - 1) * per_round
            loader.may_go_on = self.local.steps is not None
        return loader

    def train_loaders(self, clients: Sequence[int]) -> ClientLoaders:
        """Return the loaders of clients' training data in the current round, each made when it is asked for."""
        make = self.datamodule.client_dataloaders
        loaders = make(clients, "train", self.round, seed=self.seed, device=self.user.device)
        assert loaders is not None  # every client that trains has samples
        return loaders

    def components(self, client: int) -> list[Any]:
        """Return a client's training data in fixed batches, in its own order; they are kept for the run."""
        if client not in self._components:
            self._components[client] = list(self.datamodule.fixed_batches(client, device=self.user.device))
        return self._components[client]

    # the rows

    def attach(self) -> None:
        """Make the module's parameters views of the row again, where they are not."""
        if not self.layout.is_attached(self.row):
            self.layout.attach(self.row)

    def load(
        self, model: Tensor, counters: Tensor, buffers: Tensor | None = None, *, kept: Tensor | None = None
    ) -> None:
        """Write a model into the user's module.

        Args:
            model: Parameters and floating-point buffers, (d + b,).
            counters: The integer buffers.
            buffers: Floating-point buffers (b,) in place of those of the model.
            kept: The kept parameters (p,); None leaves those of the module.

        Raises:
            ConfigurationError: A parameter was replaced by another tensor, so that the row would not reach it.
        """
        if not self.layout.is_attached(self.row):
            raise ConfigurationError(
                f"model: '{self.layout.detached()}' was given another tensor during training (by .data = ..., .to() or "
                "load_state_dict(assign=True)); write into it (.data.copy_), and let a target network that only "
                "follows another one have requires_grad=False from __init__ on."
            )
        num_parameters = self.layout.num_parameters
        has_more = len(model) > num_parameters
        self._shared_row.copy_(model[:num_parameters] if has_more else model)
        if kept is not None:
            self.row[num_parameters:].copy_(kept)
        if self.layout.places:
            values = model[num_parameters:] if buffers is None else buffers
            self.layout.write_buffers(values, counters)
