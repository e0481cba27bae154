"""Gives each client the optimizer and schedulers that the user's ``configure_optimizers`` returns.

They are made once, and reset for each client to what was returned; a ``configure_optimizers`` that reads
``self.trainer`` is called again for each. Optimizers that treat every element alike work on flat slices of the
parameter row.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.private_torch import listens_to_steps
from fedbc_lightning.core.seeding import seed_globals
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.kept_optimizers import KeptState, kept_by
from fedbc_lightning.module.schedulers import LASTING, Configured, FastForward, Groups, ScheduleState, configure
from fedbc_lightning.state.layout import ParameterLayout

# Optimizers that treat every element alike: on one flat slice per group they make bitwise the same steps, faster
ELEMENTWISE = frozenset({
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta,
    torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop,
    torch.optim.ASGD,
})  # fmt: skip

PLAIN = frozenset({float, int})
_settings = itemgetter("params", "foreach", "fused", "differentiable", "lr", "momentum", "dampening", "weight_decay")


class Changes(NamedTuple):
    """What hooks have set in the optimizers' groups and schedulers; a list is empty where nothing was set.

    Attributes:
        options: Options of each group.
        schedulers: Values in the ``state_dict`` of each scheduler.
    """

    options: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]

    def __bool__(self) -> bool:
        return any(map(any, self))

    def add(self, others: Changes) -> None:
        """Take later changes."""
        for mine, theirs in zip(self, copy.deepcopy(others), strict=True) if others else ():
            mine.extend({} for _ in theirs[len(mine) :])
            for known, new in zip(mine, theirs, strict=False):
                known |= new

    def write(self, groups: Groups, configs: Sequence[LRSchedulerConfig]) -> None:
        """Write them into groups and schedulers."""
        for group, options in zip(groups, self.options, strict=False):
            group.update(options)
        for config, values in zip(configs, self.schedulers, strict=False):
            if values:
                config.scheduler.load_state_dict(copy.deepcopy(config.scheduler.state_dict() | values))


class LocalOptimizer:
    """Holds the optimizer and schedulers that one client after another uses.

    Args:
        user: The user's module.
        layout: Layout of its parameters, ordered by the optimizer's groups.
        row: Row (d + p,) whose views are the parameters.
        grad: Row (d + p,) of the gradient.
        configured: Result of the first call of ``configure_optimizers``, made with the module's own parameters.

    Attributes:
        by_hand: Whether the module steps its optimizers and schedulers itself (manual optimization).
        optimizers: The optimizers, of which automatic optimization has one, the ``optimizer``.
        has_schedulers: Whether there are schedulers, returned or stepped by the module itself.
        learning_rates: The learning rate of each group in the current round, if the server has schedulers.
        written: What hooks of the run and of rounds set: every client begins with it.
    """

    def __init__(
        self, user: UserModule, layout: ParameterLayout, row: Tensor, grad: Tensor, configured: Configured
    ) -> None:
        self._user = user
        self._layout = layout
        self._row, self._grad = row, grad
        # A module that zeroes or steps itself may handle gradients: it finds its own parameters in the optimizer.
        own = any(overrides(user.module, name, LightningModule) for name in ("optimizer_zero_grad", "optimizer_step"))
        self.by_hand = not user.module.automatic_optimization
        self.is_flat = type(configured.optimizers[0]) in ELEMENTWISE and not own and not self.by_hand
        self.learning_rates: list[float] | None = None
        self.written = Changes([], [])
        # The module's attributes, as a client's hook found them
        self._attributes: list[tuple[MutableMapping[str, Any], str, Any]] = []
        self._fast_forward = FastForward()
        self._take(configured)
        self._facts = self._look()

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is exactly ``w -= lr * grad``."""
        return type(self.optimizer) is SGD and not any(
            g["momentum"] or g["weight_decay"] or g["maximize"] for g in self.optimizer.param_groups
        )

    @property
    def sgd_momentum(self) -> float | None:
        """Momentum of all groups, if the optimizer is SGD without Nesterov, dampening and maximizing; else None."""
        groups = self.optimizer.param_groups
        if type(self.optimizer) is not SGD or any(g["nesterov"] or g["dampening"] or g["maximize"] for g in groups):
            return None
        found = {float(group["momentum"]) for group in groups}
        return found.pop() if len(found) == 1 else None

    @property
    def rates(self) -> tuple[float, ...]:
        """The current learning rate of each parameter group."""
        return tuple([float(group.get("lr", 0.0)) for group in self.optimizer.param_groups])

    def use_per_tensor(self) -> None:
        """Keep the module's own parameters in the optimizer from now on."""
        self.is_flat = False
        self._fast_forward = FastForward()  # the kept states belong to flat groups
        if not self.is_made_anew:
            self.configured.state.restore()
        self._take(self._configure() if self.is_made_anew else self.configured)
        self._facts = self._look()  # flat groups leave out frozen parameters

    def plain_step(self) -> Callable[[], Any]:
        """Return the function that makes one optimizer step on the gradient row; call it without autograd.

        It is the optimizer's own ``step`` without what torch wraps around it for profilers, the compiler and step
        hooks, which costs more than the arithmetic of a small model; SGD's operations are called by themselves. Where
        there are hooks, or a scheduler that counts steps, the wrapping stays.
        """
        for leaf, grad in self._leaves:
            if leaf.grad is not grad:
                leaf.grad = grad
        if self.has_schedulers or self.has_step_hooks:
            return self.optimizer.step
        return self._bare_step if self._flat_sgd is None else self._flat_sgd.step

    @property
    def graphed(self) -> FlatSGD | None:
        """What takes the steps, if it can be a part of a CUDA graph: its memory stays for all clients."""
        return None if self.has_schedulers or self.has_step_hooks or self.is_made_anew else self._flat_sgd

    @property
    def has_step_hooks(self) -> bool:
        """Whether step hooks are registered on this optimizer or on all, or a function is wrapped around its step."""
        return listens_to_steps(self.optimizer) or not _is_of_torch(self.optimizer.step)

    def show_gradient(self, is_there: bool = True) -> None:
        """Set the gradient row as the gradient of the flat parameters, or None if the step has no gradient."""
        for leaf, grad in self._leaves:
            leaf.grad = grad if is_there else None

    def reset(self, lr_scale: float = 1.0, *, epochs: int = 0, steps: int = 0, own: Changes | None = None) -> None:
        """Reset optimizer and schedulers for the next client.

        Args:
            lr_scale: Factor by which the client's learning rates are multiplied.
            epochs: Number of epochs of earlier rounds, for schedulers of interval ``epoch``.
            steps: Number of steps of earlier rounds, for schedulers of interval ``step``.
            own: What the client's own hooks set, from :meth:`taking_own`.
        """
        # A new optimizer for each client would cost more than the steps of a small model, so one is reset in place.
        if self.is_made_anew:
            self._take(self._configure())
        elif isinstance(self._fresh, KeptState):
            self._fresh.restore()
        else:
            self.optimizer.state.clear()
            self._fresh.load(self.optimizer.param_groups, self._all_schedulers)
            self.optimizer.state.update(initial_state(self.optimizer))
        for changes in (self.written, own or Changes([], [])):
            changes.write(self.configured.groups, self._all_schedulers)
        if self.schedulers and (epochs or steps):
            count = epochs if self.schedulers[0].interval == "epoch" else steps
            moving = FastForward() if own else self._fast_forward
            # What the schedulers may depend on; None if it may change
            shim = self._user.shim
            made_from = None if self.is_made_anew and shim.reads - LASTING else shim.peek(sorted(LASTING))
            moving.move(self.optimizer, self.schedulers, count, made_from)
        self._set_rates(self.configured.groups, lr_scale)

    def _configure(self) -> Configured:
        """Call ``configure_optimizers`` once more.

        Raises:
            ConfigurationError: It returns another number of groups than when training began.
        """
        made, layout, known = configure(self._user), self._layout, self._facts[1]
        frozen = layout.frozen_now()
        is_other = _sizes(made) != known if self.is_made_anew else len(made.groups) != len(known)
        if frozen and is_other:  # it may leave out what a hook has frozen, as nothing was when training began
            layout.put_frozen_back(frozenset())
            made = configure(self._user)
            layout.put_frozen_back(frozen)
        if len(made.groups) != len(known):
            self.check("configure_optimizers, called again,", made)
        return made

    def load_options(self, groups: Groups, lr_scale: float) -> None:
        """Give the same groups of another optimizer the options with which each client begins."""
        self._made.load(groups, ())
        self.written.write(groups, ())
        self._set_rates(groups, lr_scale)

    def _set_rates(self, groups: Groups, lr_scale: float) -> None:
        """Write the learning rates of the server's schedulers, if there are any, and scale those of all groups."""
        if self.learning_rates is not None:
            for group, lr in zip(groups, self.learning_rates, strict=True):
                group["lr"] = lr
        if lr_scale != 1:
            for group in groups:
                group["lr"] = group["lr"] * lr_scale

    @contextmanager
    def taking_writes(self, hook: str) -> Iterator[None]:
        """Let every client begin with what a hook of the run or of a round sets: options of groups, or attributes.

        Args:
            hook: Name of the hook, for messages.

        Raises:
            ConfigurationError: The hook changed what methods and engines were set up for, or a learning rate that
                belongs to the server's schedulers.
        """
        self.reset()
        before = ScheduleState.read(self.configured.groups, ()).groups
        with self._made_else(hook) as by_attributes:
            yield
        self.check(hook)
        in_groups = Changes(_changes(before, ScheduleState.read(self.configured.groups, ()).groups), [])
        self._check_rates(hook, in_groups)
        for found in (in_groups, by_attributes):
            self.written.add(found)
        if in_groups or by_attributes:
            self._fast_forward = FastForward()  # its states were moved from other rates
            by_attributes.write(self.configured.groups, self._all_schedulers)
            self.check(hook)

    @contextmanager
    def taking_own(self, hook: str) -> Iterator[Changes]:
        """Find what a hook of one client sets for it by attributes that ``configure_optimizers`` reads.

        The attributes are put back before the next such hook, as no other client may find them.

        Args:
            hook: Name of the hook, for messages.

        Yields:
            What :meth:`reset` takes for this client; it is filled when the hook has ended.
        """
        self.put_attributes_back()
        holders = [vars(self._user.module), self._user.module.hparams]
        before = [dict(holder) for holder in holders]
        with self._made_else(hook) as own:
            yield own
        if not own:
            return
        now = self._now_made(hook)
        for holder, were in zip(holders, before, strict=True):
            for name in [name for name, was in were.items() if name in holder and holder[name] is not was]:
                value, holder[name] = holder[name], were[name]
                if self._now_made(hook) != now:
                    self._attributes.append((holder, name, were[name]))
                holder[name] = value

    def put_attributes_back(self) -> None:
        """Restore the attributes that hooks of a client have changed for it."""
        while self._attributes:
            holder, name, value = self._attributes.pop()
            holder[name] = value

    @contextmanager
    def _made_else(self, hook: str) -> Iterator[Changes]:
        """Find what ``configure_optimizers`` makes otherwise after a hook than before it."""
        found, before = Changes([], []), self._now_made(hook)
        yield found
        if before is not None and (now := self._now_made(hook)) is not None:
            found.add(Changes(*map(_changes, before, now)))
            self._check_rates(hook, found)

    def _now_made(self, hook: str) -> ScheduleState | None:
        """Return what ``configure_optimizers`` makes now, and leave no other trace; None if it is called for each.

        Only what differs before and after a hook counts: what clients' code did to attributes is in both.
        """
        if self.is_made_anew:
            return None
        user, attributes, returned = self._user, vars(self._user.module), self._user.returned
        parts = {id(each): each for each in (*kept_by(user.module), *self.configured.parts)}
        before, kept = dict(attributes), KeptState(parts.values(), user.module)
        with isolate_rng():
            seed_globals(0, user.device)  # what draws numbers makes the same before and after
            configured = self._configure()
        self.check(hook, configured)
        schedulers = [*configured.schedulers, *map(LRSchedulerConfig, configured.kept_schedulers)]
        made = ScheduleState.read(configured.groups, schedulers)
        attributes.clear()
        attributes.update(before)
        kept.restore()
        user.returned = returned
        return made

    def _look(self) -> tuple[Any, ...]:
        """Return what methods and engines rely on."""
        return _kinds(self.configured), _sizes(self.configured), self.sgd_momentum, self.is_plain_sgd

    def check(self, hook: str, made: Configured | None = None) -> None:
        """Raise if the optimizer is another one than that for which methods and engines were set up."""
        if _kinds(made or self.configured) != self._facts[0] or (not made and self._look() != self._facts):
            raise ConfigurationError(
                f"model: {hook} changed the optimizer's class, groups, schedulers or SGD's momentum or weight decay, "
                "for which the method was set up; write them in configure_optimizers, the same in each call. Hooks may "
                "change learning rates and the other options of its groups."
            )

    def check_steps(self, hook: str) -> None:
        """Raise as :meth:`check` does if steps take another momentum or weight decay; it is called for each of them."""
        if (self.sgd_momentum, self.is_plain_sgd) != self._facts[2:]:
            self.check(hook)

    def _check_rates(self, hook: str, changes: Changes) -> None:
        if self.learning_rates is not None and any("lr" in options for options in changes.options):
            raise ConfigurationError(
                f"model: {hook} set a learning rate, but those of the clients are the server's scheduler's (interval "
                "'round', or one that monitors what evaluation logs); leave out one of the two."
            )

    def forget(self) -> None:
        """Reset the optimizer if it holds state of the last client."""
        if any(each.state for each in self.optimizers):
            self.reset()

    def _take(self, configured: Configured) -> None:
        self.configured = configured
        self.optimizers, self.schedulers = configured.optimizers, configured.schedulers
        self.optimizer = self.optimizers[0]
        self._all_schedulers = [*self.schedulers, *map(LRSchedulerConfig, configured.kept_schedulers)]
        self.has_schedulers = bool(self._all_schedulers)
        self.is_made_anew = bool(configured.reads)
        needs_wrapping = any(group.get("differentiable") for group in self.optimizer.param_groups)
        bare = partial(inspect.unwrap(type(self.optimizer).step), self.optimizer)
        self._bare_step = self.optimizer.step if needs_wrapping else bare
        self._leaves: list[tuple[nn.Parameter, Tensor]] = []
        self._flat_sgd: FlatSGD | None = None
        # One flat slice for each group gives the same bits as one tensor after another, and was 1.3 to 1.6 times as
        # fast on small models. The slices share the row's memory, so a step moves the module's own parameters.
        if self.is_flat:
            groups = self.optimizer.param_groups
            for group, slices in zip(groups, self._layout.group_parts, strict=True):
                leaves = [(nn.Parameter(self._row[part]), self._grad[part]) for part in slices]
                group["params"] = [leaf for leaf, _ in leaves]
                choose_loop(group)
                self._leaves += leaves
            self.optimizer.state.update(initial_state(self.optimizer))
            if type(self.optimizer) is SGD and len(self._leaves) == len(groups):
                self._flat_sgd = FlatSGD(self.optimizer, self._leaves, self._bare_step)
        if not self.is_made_anew:  # else they are made once more for each client
            self._made, self._fresh = ScheduleState.read(configured.groups, ()), self._state()
        self._user.shim.set_optimizers(self.optimizers, self.schedulers, by_hand=self.by_hand)

    def _state(self) -> ScheduleState | KeptState:
        """Return the present state, in the form that is reset sooner where that holds all of it."""
        configured = self.configured
        # Only torch's own classes keep all of their state in groups and state_dict.
        is_of_torch = all(type(part).__module__.startswith("torch.") for part in configured.parts)
        if is_of_torch and not configured.kept_optimizers and len(self.optimizers) == 1:
            return ScheduleState.read(configured.groups, self._all_schedulers)
        return KeptState(configured.parts, self._user.module)

    # schedulers

    def step_schedulers(self, interval: str, count: int, *, plateau: bool) -> None:
        """Step the schedulers of an interval (``step`` or ``epoch``), as Lightning does.

        Args:
            interval: Interval of the schedulers to step.
            count: Number of steps or epochs that have ended so far.
            plateau: True steps the schedulers that monitor a metric, False the others.

        Raises:
            ConfigurationError: A monitored metric was not logged.
        """
        for config in () if self.by_hand else self.schedulers:
            if config.interval != interval or config.reduce_on_plateau != plateau or count % config.frequency:
                continue
            metrics: dict[Any, Tensor] = self._user.collector.shown("callback") if plateau else {}
            if not plateau or config.monitor in metrics:
                self._user.module.lr_scheduler_step(config.scheduler, metrics.get(config.monitor))
            elif config.strict:
                raise ConfigurationError(
                    f"model: a scheduler monitors '{config.monitor}', which training did not log; there is: "
                    f"{', '.join(sorted(metrics))}. If validation logs it, let its name begin with val_."
                )


def _kinds(configured: Configured) -> tuple[Any, ...]:
    """Return the classes of optimizers and schedulers, and the number of groups."""
    schedulers = [type(config.scheduler) for config in configured.schedulers]
    return list(map(type, configured.optimizers)), len(configured.groups), schedulers


def _sizes(configured: Configured) -> list[int]:
    """Return the number of elements of each group."""
    return [sum(p.numel() for p in group["params"]) for group in configured.groups]


def _changes(before: Groups, after: Groups) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in now.items() if value != was.get(name)}
        for was, now in zip(before, after, strict=True)
    ]


def initial_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the state that an optimizer's constructor gives to the parameters that are in its groups now.

    Of torch's optimizers only Adagrad has any before its first step, and with torch 2.8 that step fails without it.
    """
    if type(optimizer) is not torch.optim.Adagrad:
        return {}
    return torch.optim.Adagrad([dict(group) for group in optimizer.param_groups], **optimizer.defaults).state


def choose_loop(group: dict[str, Any]) -> None:
    """Set ``foreach`` to False for a group of flat parameters, which torch would otherwise decide in every step."""
    if "foreach" in group and group["foreach"] is None and group.get("fused") is None:
        group["foreach"] = False


def _is_of_torch(function: Any) -> bool:
    """Return whether a function, and every function that it wraps, comes from torch."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] != "torch":
            return False
        function = getattr(function, "__wrapped__", None)
    return True


class Part(NamedTuple):
    """The part of the rows that one parameter group moves.

    Attributes:
        leaf: The group's only parameter, under which the optimizer keeps the momentum.
        row: The same values without autograd.
        grad: Their gradients.
        space: Memory for a direction that is neither the gradient nor the momentum.
    """

    leaf: nn.Parameter
    row: Tensor
    grad: Tensor
    space: Tensor


class FlatSGD:
    """Takes the steps of ``torch.optim.SGD`` with the same bits, and leaves the same state in the optimizer.

    In a CUDA graph the learning rate is a factor in memory, so there the last bit may be another.

    The operations are those of ``_single_tensor_sgd`` in torch 2.8 to 2.15, in their order. Groups and state are read
    from the optimizer in every step, because the user's code may change or replace them at any time.

    Args:
        optimizer: The optimizer.
        leaves: The only parameter of each group, and its gradient.
        other_step: The optimizer's own step, which is taken where the groups are not the usual ones.

    Attributes:
        is_captured: Whether steps read learning rates from memory, as those of a CUDA graph must.
        momenta: Memory of the momentum of each group that stays from client to client, if :meth:`settle` was called.
    """

    def __init__(
        self, optimizer: SGD, leaves: Sequence[tuple[nn.Parameter, Tensor]], other_step: Callable[[], Any]
    ) -> None:
        self._optimizer, self._other_step = optimizer, other_step
        self._parts = [Part(leaf, leaf.detach(), grad, torch.empty_like(grad)) for leaf, grad in leaves]
        self.is_captured = False
        self.momenta: list[Tensor] = []
        self._rates: list[Tensor] = []

    def settle(self) -> tuple | None:
        """Put momentum and learning rates where a CUDA graph finds them, and return the settings of the groups.

        Returns:
            The settings; None if a step is torch's own, or its first one differs from the others by its dampening.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._parts) or not all(map(_is_usual, groups, self._parts)):
            return None
        settings = tuple([(g["momentum"], g["weight_decay"], g["nesterov"], g["maximize"]) for g in groups])
        if any(group["momentum"] and group["dampening"] for group in groups):
            return None
        if not self.momenta:
            self.momenta = [torch.zeros_like(part.grad) for part in self._parts]
            self._rates = [part.grad.new_zeros(()) for part in self._parts]
        for group, part, mine, rate in zip(groups, self._parts, self.momenta, self._rates, strict=True):
            rate.fill_(-group["lr"])
            if group["momentum"]:
                state = self._optimizer.state[part.leaf]
                buffer = state.get("momentum_buffer")
                if buffer is not mine:  # before the first step, 0 gives what torch begins with
                    mine.zero_() if buffer is None else mine.copy_(buffer)
                    state["momentum_buffer"] = mine
        return settings

    def step(self) -> None:
        """Take one step; call this without autograd."""
        groups, parts = self._optimizer.param_groups, self._parts
        if len(groups) != len(parts) or not all(map(_is_usual, groups, parts)):
            self._other_step()
            return
        for k, (group, (leaf, row, grad, space)) in enumerate(zip(groups, parts, strict=True)):
            decay, momentum = group["weight_decay"], group["momentum"]
            direction = torch.neg(grad, out=space) if group["maximize"] else grad
            if decay:
                direction = torch.add(direction, row, alpha=decay, out=space)
            if momentum:
                state = self._optimizer.state[leaf]
                buffer = state.get("momentum_buffer")
                if buffer is None:
                    buffer = state["momentum_buffer"] = direction.clone()
                else:
                    buffer.mul_(momentum).add_(direction, alpha=1 - group["dampening"])
                direction = torch.add(direction, buffer, alpha=momentum, out=space) if group["nesterov"] else buffer
            if self.is_captured:
                row.addcmul_(direction, self._rates[k])
            else:
                row.add_(direction, alpha=-group["lr"])


def _is_usual(group: dict[str, Any], part: Part) -> bool:
    """Return whether a group holds the flat parameter with its gradient, and settings that are plain numbers."""
    parameters, foreach, fused, differentiable, *numbers = _settings(group)
    return (
        len(parameters) == 1 and parameters[0] is part.leaf and part.leaf.grad is part.grad
        and foreach is False and not (fused or differentiable) and PLAIN.issuperset(map(type, numbers))
    )  # fmt: skip


class StackedOptimizer:
    """Holds one elementwise optimizer, whose parameters are the columns of each group in a matrix of K rows.

    A group whose parameters are in part kept by the clients has two: its shared and its kept columns.

    An elementwise optimizer treats every element alike, so its step on (K, d) is the step of K clients. All K clients
    have taken the same number of steps so far, which Adam's bias correction relies on.

    Args:
        configured: A copy of what ``configure_optimizers`` returned.
        layout: The layout of the parameters.
    """

    def __init__(self, configured: Configured, layout: ParameterLayout) -> None:
        (self._optimizer,), self._parts = configured.optimizers, layout.group_parts
        self._step = torch.no_grad()(inspect.unwrap(type(self._optimizer).step))
        self._leaves: list[tuple[nn.Parameter, Tensor]] = []
        self._take_step: Callable[[], Any]
        self._num_rows = 0

    def start(self, w: Tensor, grad: Tensor, like: LocalOptimizer, lr_scale: float) -> None:
        """Start anew on the rows of ``w`` (K, d), whose gradients will stand in ``grad`` (K, d).

        Args:
            w: The rows.
            grad: The gradients.
            like: The optimizer of single clients, with whose options these K clients begin.
            lr_scale: Factor by which the learning rates are multiplied.
        """
        self._optimizer.state.clear()
        self._leaves = []
        like.load_options(self._optimizer.param_groups, lr_scale)
        for group, parts in zip(self._optimizer.param_groups, self._parts, strict=True):
            group["params"] = [nn.Parameter(w[:, part]) for part in parts]
            choose_loop(group)
            self._leaves += [(leaf, grad[:, part]) for leaf, part in zip(group["params"], parts, strict=True)]
        self._optimizer.state.update(initial_state(self._optimizer))
        self._cut(len(w))

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]

    def step(self, num_rows: int) -> None:
        """Take one step of the first rows, without autograd; the clients of the other rows have finished."""
        if num_rows != self._num_rows:
            self._cut(num_rows)
        self._take_step()

    def _cut(self, num_rows: int) -> None:
        """Leave the first rows alone in the optimizer."""
        self._num_rows = num_rows
        rows = [(leaf, grad[:num_rows]) for leaf, grad in self._leaves]
        for leaf, grad in rows:
            if len(leaf) != num_rows:
                self._keep(leaf, num_rows)
            leaf.grad = grad
        self._take_step = partial(self._step, self._optimizer)
        # 6 us on the row of one client, where torch's own step takes 10.
        if type(self._optimizer) is SGD and len(rows) == len(self._parts):
            self._take_step = FlatSGD(self._optimizer, rows, self._take_step).step

    def _keep(self, leaf: nn.Parameter, num_rows: int) -> None:
        state = self._optimizer.state[leaf]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value[:num_rows]
        leaf.grad = None
        leaf.data = leaf.data[:num_rows]
