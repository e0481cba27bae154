"""The sequential engine: one client after another through one workbench, with the user's own steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.core.twins import overrides
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.engines.client_run import ClientRun
from fedbc_lightning.engines.optimizer_run import MissingGradientError, OptimizerRun
from fedbc_lightning.engines.oracle import Oracle
from fedbc_lightning.engines.recorded.step_recorder import StepRecorder
from fedbc_lightning.engines.solver_run import SolverRun, weight_decay_terms
from fedbc_lightning.local import AfterStep, FineTuning, Solver, Term
from fedbc_lightning.local.rows import of_each
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.hooks import CLIENT_HOOKS, STEP_HOOKS
from fedbc_lightning.module.optimizers import LocalOptimizer
from fedbc_lightning.server.base import FEW_ROWS
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.layout import ParameterLayout

if TYPE_CHECKING:
    from fedbc_lightning.engines.stacked.mapped_evaluation import MappedEvaluation

log = logging.getLogger("lightning.pytorch." + __name__)  # below Lightning's logger, whose lines people see


MAX_COHORT = FEW_ROWS
BYTES_OF_ROWS = 2**22
"""Largest size of a cohort's matrices (K, d): they fit into a processor's cache beside a step's own tensors."""
NUM_MATRICES = 8
"""w, start, terms, staged state and what the server's parts make of them."""


class SequentialEngine:
    """Trains the clients of a cohort one after another.

    Args:
        user: The user's module.
        layout: The layout of its parameters.
        optimizer: Made for them.
        row: The workbench (d,) that the parameters are views of.
        grad: The gradient row (d,).
        local: What every client does.
        datamodule: Gives each client's loader.
        seed: The run's seed.

    Attributes:
        cohort_size: The most clients that the server's parts get at once: one, but for small models.
        is_trial: Whether it is only tried out, and says nothing.
        has_solver: Whether the method writes out its own steps, see :meth:`check_solver`.
    """

    def __init__(
        self,
        user: UserModule,
        layout: ParameterLayout,
        optimizer: LocalOptimizer,
        row: Tensor,
        grad: Tensor,
        local: LocalTraining,
        datamodule: FederatedDataModule,
        seed: int,
    ) -> None:
        self.user, self.layout, self.optimizer = user, layout, optimizer
        self.row, self.grad, self.optimized_grad = row, grad, grad[: layout.num_optimized]
        self._rows = grad[None], row[None]
        self.grad_views = [grad[e.offset : e.end].view(e.shape) for e in layout.entries[: layout.num_grouped]]
        self.local, self.datamodule, self.seed = local, datamodule, seed
        self.round = 0
        self.is_trial = self.has_solver = False
        self.grad_scale = 1.0
        self.recorder = StepRecorder(user, layout, local.record_steps)
        self._components: dict[int, list[Any]] = {}
        self._shares: dict[int, list[float]] = {}
        module, hooks = user.module, user.hooks
        self.scaler = getattr(user.precision, "scaler", None)
        self.overridden = {
            name: overrides(module, name, LightningModule)
            for name in ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
        }
        if self.scaler is not None and (optimizer.needs_closure or self.overridden["optimizer_step"]):
            raise ConfigurationError(
                "trainer.precision: 16-mixed scales gradients, which works neither with an optimizer_step of the "
                "module's own nor with an optimizer that calls its closure, such as LBFGS; use bf16-mixed or 32-true."
            )
        self._is_half = layout.dtype != layout.master_dtype
        self._is_watched = any(map(hooks.listens, STEP_HOOKS)) or any(self.overridden.values())
        self.shows_gradients = any(map(hooks.listens, ("on_before_optimizer_step", "on_train_batch_end")))
        self.shows_gradients |= self.overridden["configure_gradient_clipping"]
        is_heard = self._is_watched or any(map(hooks.listens, CLIENT_HOOKS))  # of each client in its turn
        self._is_heard = is_heard or user.has_transfer_hooks
        row_bytes = NUM_MATRICES * layout.num_parameters * layout.master_dtype.itemsize
        self.cohort_size = 1 if is_heard or layout.has_buffers else max(1, min(MAX_COHORT, BYTES_OF_ROWS // row_bytes))

    @property
    def seconds_elsewhere(self) -> float:
        """For which it has waited for other runs of the process, so far."""
        return 0.0

    @property
    def is_plain_sgd(self) -> bool:
        """Whether every local step is exactly ``w -= lr * grad``."""
        return self.optimizer.is_plain_sgd and not self.local.gradient_clip_val and not any(
            self.overridden[name] for name in ("optimizer_step", "configure_gradient_clipping")
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether nothing happens in a step but forward, backward, terms, clipping and the optimizer's own step."""
        return (
            self.optimizer.is_flat and not self._is_watched and self.scaler is None
            and self.local.accumulate_grad_batches == 1
        )  # fmt: skip

    @property
    def is_quiet(self) -> bool:
        """Whether only ``training_step`` is the user's, so that a client may pass of which the module hears nothing."""
        optimizer = self.optimizer
        return self.is_plain and not (
            self._is_heard or optimizer.schedulers or optimizer.is_made_anew or optimizer.has_step_hooks
        )

    @property
    def has_schedulers(self) -> bool:
        """See :class:`~fedbc_lightning.local.engine.Engine`."""
        return bool(self.optimizer.schedulers)

    def check_solver(self, name: str, solver: Solver | type[Solver]) -> None:
        """Refuse what a solver's own steps cannot honour; say once what they leave out of the user's optimizer.

        A method with a solver calls it in its ``check``; from then on the cohorts here are of one client.

        Raises:
            ConfigurationError: Clipping, accumulation, 16-mixed, or an ``optimizer_step`` of the module's own.
        """
        self.has_solver = True
        asked = {
            "trainer.gradient_clip_val": bool(self.local.gradient_clip_val),
            "trainer.accumulate_grad_batches": self.local.accumulate_grad_batches > 1,
            "trainer.precision 16-mixed": self.scaler is not None,
            "the module's optimizer_step": self.overridden["optimizer_step"],
            "the module's configure_gradient_clipping": self.overridden["configure_gradient_clipping"],
        }
        for what, is_asked in asked.items():
            if is_asked:
                raise ConfigurationError(f"{what}: {name} takes plain SGD steps of its own, which know no such thing.")
        optimizer = self.optimizer.optimizer
        groups = optimizer.param_groups
        if any(group.get("maximize") for group in groups):
            raise ConfigurationError(f"model: its optimizer maximizes, and {name} takes descent steps of its own.")
        is_sgd = type(optimizer) is torch.optim.SGD
        used = ["learning rate"] if solver.uses_lr else []
        used += ["weight decay"] if is_sgd and any(group["weight_decay"] for group in groups) else []
        left = {key: max(group.get(key, 0.0) for group in groups) for key in ("momentum", "weight_decay")}
        left = {key: value for key, value in left.items() if value and not (is_sgd and key == "weight_decay")}
        if not self.is_trial and (not is_sgd or left or not solver.uses_lr):
            said = type(optimizer).__name__ + (f" ({', '.join(f'{k} {v:g}' for k, v in left.items())})" if left else "")
            rank_zero_info(
                f"{name} takes plain SGD steps: of the model's {said} it uses {' and '.join(used) or 'nothing'}."
            )

    def group(self, positions: Sequence[int], num_steps: Sequence[int], alone: Collection[int]) -> list[list[int]]:
        """The cohorts of a round: which clients are trained together.

        Args:
            positions: Positions of the clients in the order of sampling.
            num_steps: Number of steps of each sampled client, by position.
            alone: Positions of the clients that train by themselves.
        """
        together, size = [p for p in positions if p not in alone], 1 if self.has_solver else self.cohort_size
        cohorts = [together[k : k + size] for k in range(0, len(together), size)]
        return cohorts + [[position] for position in positions if position in alone]

    def step_sizes(self, rates: Sequence[float]) -> Tensor:
        """Learning rates by parameter: (1, 1) where one group holds all, else (1, d) by slice, 0 outside the groups."""
        layout, device = self.layout, self.grad.device
        if layout.group_slices == [slice(0, layout.num_parameters)]:
            return torch.full((1, 1), rates[0], dtype=layout.master_dtype, device=device)
        sizes = torch.zeros_like(self.grad, dtype=layout.master_dtype)
        for part, rate in zip(layout.group_slices, rates, strict=True):
            sizes[part] = rate
        return sizes[None]

    # clients

    def solve(
        self,
        cohort: Cohort,
        start: Tensor,
        terms: Sequence[Term] = (),
        *,
        solver: Solver | None = None,
        after_step: AfterStep | None = None,
        epochs: int | None = None,
        lr_scale: float = 1.0,
        record_gradient_mean: bool = False,
        purpose: str = "client",
        is_last: bool = True,
    ) -> None:
        """See :class:`~fedbc_lightning.local.engine.Engine`; a solver is given cohorts of one client."""
        local, num_clients = self._planned(cohort, epochs), len(cohort)
        if solver is not None:
            if num_clients > 1:
                raise ConfigurationError(
                    "algorithm: a method with a solver of its own must call engine.check_solver in check()."
                )
            solved = SolverRun(self, cohort, local, solver, terms)
            self._fill_in(cohort, [solved.run(start.reshape(-1), lr_scale, purpose, is_last=is_last)])
            return
        runs: list[ClientRun] = []
        own_terms = [[term] if num_clients == 1 else of_each(term, num_clients) for term in terms]
        own_after = [after_step] * num_clients
        if after_step is not None and num_clients > 1:
            own_after = list(of_each(after_step, num_clients))
        for k in range(num_clients):
            own_start = start if start.ndim == 1 else start[k]
            of_client = [term[k] for term in own_terms], own_after[k]
            args = (self, cohort, k, local, *of_client, record_gradient_mean)
            try:
                run = OptimizerRun(*args).run(own_start, lr_scale, purpose, is_last=is_last)
            except MissingGradientError:
                log.info(
                    "A step left a parameter without a gradient, which torch leaves alone: from here on the optimizer "
                    "gets the module's own parameters, not flat slices. Same numbers, a little slower."
                )
                self.optimizer.use_per_tensor()
                run = OptimizerRun(*args).run(own_start, lr_scale, purpose, is_last=is_last)
            runs.append(run)
        self._fill_in(cohort, runs)

    def _fill_in(self, cohort: Cohort, runs: Sequence[ClientRun]) -> None:
        """Take what local training gave into the cohort."""
        cohort.w = _stacked([run.w for run in runs])
        cohort.buffers, cohort.counters = _stacked([run.buffers for run in runs]), runs[-1].counters
        cohort.steps, cohort.losses = [run.num_updates for run in runs], [run.loss for run in runs]
        sizes = {rates: self.step_sizes(rates) for rates in {run.mean_rates for run in runs}}
        if cohort.taken_before is not None:
            cohort.taken_after = [run.taken for run in runs]
        cohort.step_size = torch.cat([sizes[run.mean_rates] for run in runs])
        cohort.require_finite(cohort.model)
        gradient_means = [run.gradient_mean for run in runs if run.gradient_mean is not None]
        if gradient_means:
            cohort.gradient_mean = _stacked(gradient_means)
            cohort.require_finite(cohort.gradient_mean)
        for k, run in enumerate(runs):
            cohort.records[k].update(run.record)
            if not run.is_finite:
                cohort.valid[k] = False

    def _planned(self, cohort: Cohort, epochs: int | None) -> LocalTraining:
        """What the cohort does: as the trainer says or for ``epochs``; a straggler its share of that."""
        if epochs is None:
            return self.local if cohort.local is None else cohort.local
        asked = replace(self.local, epochs=epochs, steps=None)
        if cohort.local is None:
            return asked
        (client,) = cohort.ids
        num_batches = len(self.datamodule.client_train_dataloader(client, self.round, seed=self.seed))
        share = cohort.local.num_steps(num_batches) / self.local.num_steps(num_batches)
        return replace(asked, epochs=None, steps=max(1, int(share * asked.num_steps(num_batches))))

    def train_loss(self, cohort: Cohort, model: Tensor) -> Tensor:
        """f_i (K,) of a model (d + b,): the mean training loss over the client's samples, in evaluation mode."""
        return torch.cat([self._train_loss(cohort, k, model) for k in range(len(cohort))])

    def _train_loss(self, cohort: Cohort, k: int, model: Tensor) -> Tensor:
        """Return the mean training loss of client k, (1,)."""
        client, buffers = cohort.ids[k], cohort.start_buffers
        self.load(model, cohort.start_counters, None if buffers is None else buffers[k])
        seed_globals(derive(self.seed, "train loss", self.round, client), self.user.device)
        self.user.shim.set(current_client=client)
        self.user.eval_mode()
        oracle = Oracle(self)
        batches = self.datamodule.fixed_batches(client, device=self.user.device)
        losses = [oracle.loss(self.row[None], self.user.to_device(batch), k) for k, batch in enumerate(batches)]
        self.user.train_mode()
        shares = torch.tensor(self.component_shares(client), dtype=torch.float64)
        return (torch.stack(losses).cpu().double() @ shares).reshape(1)

    def mapped_evaluation(self, stage: str) -> MappedEvaluation | None:
        """What evaluates several clients at once in ``"validation"`` or ``"test"``; None: they go one by one."""

    def fine_tune(self, client: int, fine_tuning: FineTuning) -> None:
        """Take one plain step from the loaded model on the first samples of a client, for its evaluation."""
        batch = self.datamodule.first_batch(client, fine_tuning.split, fine_tuning.batch_size, device=self.user.device)
        if batch is None:
            return
        buffers, counts = self.layout.read_buffers(), self.layout.read_counters()
        w = self.row.to(self.layout.master_dtype)[None]
        self.user.train_mode()
        _, gradient = Oracle(self, calls_hooks=False).loss_and_gradient(w, self.user.to_device(batch), 0)
        for term in weight_decay_terms(self):
            term.add_gradient(gradient, w)
        self.user.eval_mode()
        self.row.copy_((w - fine_tuning.lr * gradient)[0])
        self.layout.write_buffers(buffers, counts)

    # data in fixed batches

    def components(self, client: int) -> list[Any]:
        """A client's training data in fixed batches, in its own order, as the loader gives them; kept for the run."""
        if client not in self._components:
            self._components[client] = list(self.datamodule.fixed_batches(client, device=self.user.device))
        return self._components[client]

    def component_shares(self, client: int) -> list[float]:
        """The share of the client's samples that lies in each of :meth:`components`; sums to 1."""
        if client not in self._shares:
            self._shares[client] = self.datamodule.batch_shares(client)
        return self._shares[client]

    @property
    def has_full_precision(self) -> bool:
        """Whether losses and gradients are computed in float32 or float64 throughout."""
        return self.layout.dtype.itemsize >= 4 and not isinstance(self.user.precision, MixedPrecision)

    # the workbench

    def attach(self) -> None:
        """Make the module's parameters views of the workbench again, where they are not."""
        if not self.layout.is_attached(self.row):
            self.layout.attach(self.row)

    def load(self, model: Tensor, counters: Tensor, buffers: Tensor | None = None) -> None:
        """Write a model (d + b,) into the user's module, with ``buffers`` (b,) in place of its own if given."""
        if not self.layout.is_attached(self.row):
            raise ConfigurationError(
                "model: its parameters were replaced during training (by .to(), .half() or "
                "load_state_dict(assign=True) inside a hook or step?); change them in place."
            )
        has_more = len(model) > self.layout.num_parameters
        self.row.copy_(model[: self.layout.num_parameters] if has_more else model)
        if self.layout.has_buffers:
            values = model[self.layout.num_parameters :] if buffers is None else buffers
            self.layout.write_buffers(values, counters)

    def add_terms(self, terms: Sequence[Term]) -> None:
        """Add the terms' gradients to the gradient row, in the master dtype."""
        if not self._is_half:
            for term in terms:
                term.add_gradient(*self._rows)
            return
        grad, w = self.grad.to(self.layout.master_dtype)[None], self.row.to(self.layout.master_dtype)[None]
        for term in terms:
            term.add_gradient(grad, w)
        self.grad.copy_(grad[0])

    def update_row(self, update: Callable[[Tensor], None]) -> None:
        """Change the iterate in place by a function of (1, d), in the master dtype."""
        w = self.row.to(self.layout.master_dtype)[None]
        update(w)
        if self._is_half:
            self.row.copy_(w[0])

    def clip(self) -> None:
        """Clip the gradient of the optimized parameters."""
        self.local.clip(self.optimized_grad)


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """(K, n) of K rows; one is not copied."""
    return torch.stack(list(rows)) if len(rows) > 1 else rows[0][None]
