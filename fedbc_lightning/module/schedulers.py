"""What ``configure_optimizers`` returns, and how its schedulers go on from epoch to epoch and from round to round.

Schedulers of a client start anew in each round, or go on where the client left them (``trainer.local_schedules:
continue``): then each client keeps two counts, and new schedulers are moved to them. Schedulers of rounds belong to the
server. :func:`declare`, :func:`begin` and :func:`end` are this module's part in a round.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.metric_names import Metrics, measured
from fedbc_lightning.core.private_lightning import read_optimizers, read_schedulers
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.kept_optimizers import KeptState, kept_by, parameters_of, unwrapped, with_parts
from fedbc_lightning.module.monitors import is_of_evaluation, name_in_log
from fedbc_lightning.state.cohort import Cohort, Taken
from fedbc_lightning.state.declaration import StateDeclaration

# Number of epochs or steps between kept states; no client is stepped through more than these
STRIDE = 100
# The parameter groups of an optimizer, or the options of each
Groups = Sequence[dict[str, Any]]
NUMBERS = frozenset({float, int, bool, type(None)})

# Names of two scalars of each client, which are also columns of `clients.csv`
EPOCHS, STEPS = "epochs_taken", "steps_taken"

# Names of `self.trainer` that are the same in all rounds of a client, so that schedulers may read them
LASTING = frozenset({
    "max_epochs", "max_steps", "estimated_stepping_batches", "num_training_batches", "max_rounds",
    "accumulate_grad_batches",
})  # fmt: skip


@dataclass
class Configured:
    """The result of one call of ``configure_optimizers``, whichever form it was returned in.

    Attributes:
        optimizers: The optimizer, or several of manual optimization.
        schedulers: The schedulers of interval ``step`` or ``epoch``, which are stepped inside a client.
        round_schedulers: The schedulers of interval ``round``, and those that monitor what evaluation logs; the server
            steps them.
        reads: Names of ``self.trainer`` that the call has read; if there are any, it is repeated for every client.
        parts: All optimizers and schedulers that belong together: also those that are held by others, and those that
            the module keeps and steps by itself.
        kept_schedulers: The parts that are schedulers of these optimizers, which the module keeps without returning.
        kept_optimizers: The parts that are optimizers, which the module keeps without returning.
        state: The state of all parts when they were returned; of calls that are repeated for every client, the first's.
    """

    optimizers: list[Optimizer]
    schedulers: list[LRSchedulerConfig]
    round_schedulers: list[LRSchedulerConfig]
    reads: frozenset[str]
    parts: list[Any]
    kept_schedulers: list[Any]
    kept_optimizers: list[Any]
    state: KeptState

    @property
    def groups(self) -> Groups:
        """The parameter groups of all optimizers, one after the other."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def copied(self) -> Configured:
        """Return copies of all parts as they were returned, for whatever may not move the module's own."""
        copies = self.state.copies()

        def of(configs: Sequence[LRSchedulerConfig]) -> list[LRSchedulerConfig]:
            return [replace(config, scheduler=copies[id(config.scheduler)]) for config in configs]

        parts = list(copies.values())
        return Configured(
            [copies[id(each)] for each in self.optimizers], of(self.schedulers), of(self.round_schedulers), self.reads,
            parts, [], [], KeptState(parts, self.state.module),
        )  # fmt: skip


def configure(user: UserModule) -> Configured:
    """Call the user's ``configure_optimizers``, and read its result in any of Lightning's forms.

    Raises:
        ConfigurationError: It returns no optimizer, several that Lightning would step by itself, or a form that
            Lightning does not know either.
    """
    by_hand = not user.module.automatic_optimization
    user.shim.reads.clear()
    user.renew_optimizers()
    module = user.module
    try:
        returned = module.configure_optimizers()
    except ValueError as error:  # torch refuses a learning rate, a momentum, ...
        raise ConfigurationError(f"model: configure_optimizers failed: {error}.") from error
    reads = frozenset(user.shim.reads)
    try:
        optimizers, schedulers, monitor = ([], [], None) if returned is None else read_optimizers(returned)
        round_schedulers = [s for s in schedulers if isinstance(s, dict) and s.get("interval") == "round"]
        local = [s for s in schedulers if not any(s is r for r in round_schedulers)]
        configs = read_schedulers(local, monitor, by_hand=by_hand)
        at_server = read_schedulers([{**s, "interval": "epoch"} for s in round_schedulers], monitor)
    except MisconfigurationException as error:
        raise ConfigurationError(f"model: {error}") from None
    optimizers = list(map(unwrapped, optimizers))
    if user.renew_returned(optimizers):  # whatever was made around them was made of what training has left
        return configure(user)
    if len(optimizers) != 1 and not (optimizers and by_hand):
        raise ConfigurationError(
            f"model: configure_optimizers returned {len(optimizers)} optimizers; return one, or step several by hand "
            "in training_step, with automatic_optimization = False."
        )
    own = set(module.parameters())
    for optimizer in optimizers:
        _check_optimizer(optimizer, own, by_hand)
    # A plateau scheduler of interval epoch that monitors what only the evaluation after a round logs is the server's.
    on_plateau = [config for config in configs if config.interval == "epoch" and config.reduce_on_plateau]
    of_rounds = [config for config in on_plateau if is_of_evaluation(config.monitor or "")]
    at_server += of_rounds
    configs = [config for config in configs if config not in of_rounds]
    if at_server and configs:
        raise ConfigurationError(
            "model: a scheduler of interval 'round', or one that monitors what evaluation logs, cannot be combined "
            "with one that is stepped inside clients."
        )
    parts = with_parts([*optimizers, *(config.scheduler for config in (*configs, *at_server))])
    there = set(map(id, parts))
    others = [each for each in kept_by(module) if id(each) not in there]
    kept_optimizers = [each for each in others if not own.isdisjoint(parameters_of(each))]
    there_too = there | set(map(id, kept_optimizers))
    kept_schedulers = [each for each in others if id(getattr(each, "optimizer", None)) in there]
    parts += [each for each in others if id(each) in there_too or id(getattr(each, "optimizer", None)) in there_too]
    if not reads or user.returned is None:
        user.returned = KeptState(parts, module)
    return Configured(optimizers, configs, at_server, reads, parts, kept_schedulers, kept_optimizers, user.returned)


def _check_optimizer(optimizer: Any, own: set[nn.Parameter], by_hand: bool) -> None:
    kind = type(optimizer).__name__
    if any(base.__module__.partition(".")[0] == "opacus" for base in type(optimizer).__mro__):
        raise ConfigurationError(
            f"model: Opacus' {kind} makes a gradient of its own inside step(), which neither a method's terms nor "
            "clipping reach; return its original_optimizer."
        )
    if not {"closure", "kwargs"} & inspect.signature(optimizer.step).parameters.keys():
        raise ConfigurationError(
            f"model: step of {kind} takes no closure, with which Lightning calls it; let it take closure=None, and "
            "call that first."
        )
    if by_hand and not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"model: {kind} is no torch.optim.Optimizer, whose hooks add a method's terms in manual optimization."
        )
    if not own.issuperset(parameters_of(optimizer)):
        raise ConfigurationError("model: configure_optimizers returned parameters that are not the module's.")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step must be given a closure, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class ScheduleState(NamedTuple):
    """The state of schedulers and of the parameter groups that they write.

    Attributes:
        groups: The options of each parameter group, such as the learning rate, which schedulers write.
        schedulers: The ``state_dict`` of each scheduler.
    """

    groups: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]

    @classmethod
    def read(cls, groups: Groups, configs: Sequence[LRSchedulerConfig]) -> ScheduleState:
        """Copy the state of optimizers' groups and of their schedulers."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return copy.deepcopy(cls(options, [config.scheduler.state_dict() for config in configs]))

    def load(self, groups: Groups, configs: Sequence[LRSchedulerConfig]) -> None:
        """Write the state into the groups of other optimizers and their schedulers, which were made alike."""
        for group, values in zip(groups, self.groups, strict=True):
            for name in group.keys() - values.keys() - {"params"} if len(group) > len(values) + 1 else ():
                del group[name]  # such as the initial_lr of a scheduler that a hook has made
            # Nearly all are numbers. To copy these, too, took a tenth of the time of a client of one step.
            group.update({name: v if type(v) in NUMBERS else copy.deepcopy(v) for name, v in values.items()})
        for config, values in zip(configs, self.schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(values))


class FastForward:
    """Moves new schedulers to any count of epochs or steps; the result depends on nothing but the count.

    Kept states only save time, so a resumed run, which starts without any, has the same numbers.
    """

    def __init__(self) -> None:
        self._states: dict[Hashable, dict[int, ScheduleState]] = {}

    def move(
        self, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig], count: int, made_from: Hashable | None
    ) -> None:
        """Step new schedulers as often as a client stepped its own in ``count`` epochs or steps.

        Args:
            optimizer: Optimizer of the schedulers.
            configs: Schedulers of one interval.
            count: Number of epochs or steps, as the interval says.
            made_from: Key that is equal for schedulers that were made alike; None for schedulers unlike any others.
        """
        known = {} if made_from is None else self._states.setdefault(made_from, {})
        # A client comes back after any number of rounds. From the nearest kept state below its count, fewer than STRIDE
        # steps are left; the numbers are those of a scheduler that was stepped from the beginning.
        start = next((k for k in range(count - count % STRIDE, 0, -STRIDE) if k in known), 0)
        if start:
            known[start].load(optimizer.param_groups, configs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that their optimizer has not stepped
            for done in range(start + 1, count + 1):
                for scheduler in [config.scheduler for config in configs if done % config.frequency == 0]:
                    scheduler.step()
                if done % STRIDE == 0:
                    known[done] = ScheduleState.read(optimizer.param_groups, configs)


class RoundSchedulers:
    """Holds the schedulers of the server, whose learning rates are those with which the clients of a round start.

    Args:
        configured: A copy of what ``configure_optimizers`` returned; no client uses it.
    """

    def __init__(self, configured: Configured) -> None:
        self._configured, self._configs = configured, configured.round_schedulers
        for monitor in self.monitored:
            if getattr(measured(name_in_log(monitor, ())), "split", None) == "test":
                rank_zero_warn(f"model: a scheduler monitors '{monitor}', of the test data; let it monitor 'val_loss'.")

    @property
    def monitored(self) -> list[str]:
        """The names that evaluation must log."""
        names = [config.monitor or "" for config in self._configs if config.reduce_on_plateau]
        return list(filter(is_of_evaluation, names))

    @property
    def learning_rates(self) -> list[float] | None:
        """Learning rate of each parameter group; None without schedulers of the server."""
        return [float(group["lr"]) for group in self._configured.groups] if self._configs else None

    def check(self, metrics: Collection[str]) -> None:
        """Check that an evaluation, if there was one, logged the monitored metrics.

        Args:
            metrics: Metrics of the round by name.

        Raises:
            ConfigurationError: An evaluation did not log a monitored metric.
        """
        # A hook of the user's may log val_score, say, without an evaluation: evaluation's own names alone count.
        there = [name for name in sorted(metrics) if is_of_evaluation(name) and name_in_log(name, ()) == name]
        for config in self._configs if there else ():
            name = name_in_log(config.monitor or "", metrics)
            if config.monitor in self.monitored and config.strict and name not in metrics:
                raise ConfigurationError(
                    f"model: a scheduler monitors '{config.monitor}', which evaluation did not log; there is: "
                    f"{', '.join(there)}."
                )

    def step(self, round: int, metrics: Metrics) -> None:
        """End a round; a scheduler that monitors a metric moves in the rounds in which that is finite."""
        # The server's schedulers hold an optimizer that never trains: its learning rates alone are given to the
        # clients. Schedulers warn of an optimizer that has not stepped.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*optimizer.step", UserWarning)
            for config in self._configs:
                scheduler: Any = config.scheduler
                if round % config.frequency:
                    continue
                if not config.reduce_on_plateau:
                    scheduler.step()
                elif math.isfinite(value := metrics.get(name_in_log(config.monitor or "", metrics), math.nan)):
                    scheduler.step(value)  # what one client's NaN or infinite loss made of a mean says nothing

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedulers and the learning rates."""
        if not self._configs:
            return {}
        groups, schedulers = ScheduleState.read(self._configured.groups, self._configs)
        return {"schedulers": schedulers, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if state:
            ScheduleState(**state).load(self._configured.groups, self._configs)


def declare(declaration: StateDeclaration) -> None:
    """Declare the number of epochs and of steps that each client has made."""
    declaration.client_scalar(EPOCHS)
    declaration.client_scalar(STEPS)


def begin(cohort: Cohort) -> None:
    """Set the epochs and steps of earlier rounds in a cohort; the model of pooled data uses the last client's row."""
    epochs, steps = cohort[EPOCHS].tolist(), cohort[STEPS].tolist()
    cohort.taken_before = [Taken(done, int(count)) for done, count in zip(epochs, steps, strict=True)]


def end(cohort: Cohort) -> None:
    """Stage the epochs and steps that the clients have made; clients that drop out of the round keep theirs."""
    if cohort.taken_after:
        cohort.stage(EPOCHS, torch.tensor([taken.epochs for taken in cohort.taken_after], dtype=torch.float64))
        cohort.stage(STEPS, torch.tensor([taken.steps for taken in cohort.taken_after], dtype=torch.float64))


def check_schedules(user: UserModule, configured: Configured, max_epochs: int, max_steps: int) -> None:
    """Refuse schedulers that cannot be moved to a number of epochs or steps; copies of them are moved.

    Args:
        user: The user's module.
        configured: What its ``configure_optimizers`` returned.
        max_epochs: Largest number of local epochs of a client in the whole run.
        max_steps: Largest number of local steps of a client in the whole run.

    Raises:
        ConfigurationError: A scheduler cannot be moved; the message has the reason.
    """
    configs, reads = configured.schedulers, sorted(configured.reads & {"current_epoch", "global_step"})
    by_hand = [type(each).__name__ for each in configured.kept_schedulers]
    module_steps = not user.module.automatic_optimization
    if not module_steps and not configs and not by_hand:
        return
    total = max_epochs if configs and configs[0].interval == "epoch" else max_steps
    problem: str | None
    if module_steps:
        problem = "in manual optimization the module steps them by itself, which nobody counts"
    elif by_hand:
        problem = f"{by_hand[0]} is kept by the module and stepped by itself, which nobody counts"
    elif overrides(user.module, "lr_scheduler_step", LightningModule):
        problem = "the module's own lr_scheduler_step may depend on more than their count"
    elif len({c.interval for c in configs}) > 1 or any(c.interval == "step" and c.frequency > 1 for c in configs):
        problem = "both intervals at once, or a frequency above 1 of interval step, need more than one count"
    elif reads:
        problem = f"configure_optimizers or a scheduler reads self.trainer.{reads[0]}, which would count twice"
    else:
        problem = _problem_of_steps(configured.copied(), configured.copied(), user, total)
    if problem is not None:
        raise ConfigurationError(
            f"trainer.local_schedules: continue cannot carry the model's schedulers from round to round: {problem}; "
            "change that, or use fresh."
        )


def _problem_of_steps(configured: Configured, other: Configured, user: UserModule, total: int) -> str | None:
    """Move schedulers to the end of the run, step by step and from a kept state, and return why they differ, or None.

    This finds by itself what a list of classes would not: OneCycleLR that ends too early, and a scheduler whose
    ``state_dict`` leaves something out.
    """
    user.shim.reads.clear()
    kinds = ", ".join(type(config.scheduler).__name__ for config in configured.schedulers)
    fast_forward = FastForward()
    try:
        for each in (configured, other):
            fast_forward.move(each.optimizers[0], each.schedulers, total, "the end of the run")
    except Exception as error:
        return f"{kinds} could not be stepped {total} times ({type(error).__name__}: {first_line(error)})"
    changing = user.shim.reads - LASTING
    if changing:
        return f"{kinds} reads self.trainer.{min(changing)}, which changes, when it is stepped"
    ends = [ScheduleState.read(each.groups, each.schedulers).groups for each in (configured, other)]
    return f"{kinds} keeps something that its state_dict does not hold" if ends[0] != ends[1] else None
