"""Local training of K clients in lockstep, by ``torch.func`` over the user's ``training_step``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torchmetrics import Metric

from fedbc_lightning.cohort import Cohort
from fedbc_lightning.collector import plain_name
from fedbc_lightning.engines.cohort_batches import Stack, stacked_batches
from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.local import AfterStep, Term
from fedbc_lightning.seeding import derive, seed_globals

if TYPE_CHECKING:
    from fedbc_lightning.engines.sequential import LocalTraining
    from fedbc_lightning.engines.vectorized import VectorizedEngine

SEQUENTIAL = "use engine: sequential"


class TrainingStep(nn.Module):
    """The user's ``training_step`` as a ``forward``, which ``functional_call`` wants."""

    def __init__(self, module: nn.Module, takes_index: bool) -> None:
        super().__init__()
        self.module, self._takes_index = module, takes_index
        self._training_step: Callable[..., Any] = module.training_step  # type: ignore[assignment]

    def forward(self, batch: list[Tensor], batch_idx: int) -> Any:
        """What it returns."""
        return self._training_step(*((batch, batch_idx) if self._takes_index else (batch,)))


class LoggedValues:
    """Takes ``self.log`` inside a mapped step, in place of the collector: the values are outputs of the map."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.batch_sizes: dict[str, int] = {}

    def log(self, name: str, value: Any, *, reduce_fx: Any = "mean", batch_size: int | None = None) -> None:
        """Keep one value; means over a batch only."""
        is_mean = reduce_fx in ("mean", "avg") or getattr(reduce_fx, "__name__", "") == "mean"
        if isinstance(value, Metric) or not is_mean:
            raise ConfigurationError(
                f"trainer.engine: vectorized takes numbers averaged over their batch from training_step, and "
                f"self.log('{name}') gives something else; {SEQUENTIAL}."
            )
        self.values[name] = torch.as_tensor(value).detach().reshape(())
        if batch_size is not None:
            self.batch_sizes[name] = batch_size


class CohortRun:
    """The steps of K clients: each is one mapped step, one elementwise optimizer step, and the terms' K gradients.

    Clients stand in the order of their steps, the most first, so that those at work are the first rows; no work is done
    on clients that have ended.

    Args:
        engine: Its module and optimizer are used.
        cohort: K clients, those with the most steps first; filled in.
        local: What each does.
        terms: Added to every step's gradient.
        after_step: Applied after every step, or None.
        keep_mean: Whether to record the mean raw gradient.
    """

    def __init__(
        self, engine: VectorizedEngine, cohort: Cohort, local: LocalTraining, terms: Sequence[Term],
        after_step: AfterStep | None, keep_mean: bool,
    ) -> None:  # fmt: skip
        self.engine, self.user, self.layout = engine, engine.user, engine.layout
        self.cohort, self.local, self.after_step = cohort, local, after_step
        self.terms = [term for term in terms if not term.is_zero]
        self.w = torch.empty(len(cohort), self.layout.num_parameters, dtype=self.layout.dtype, device=engine.row.device)
        self.grad = torch.zeros_like(self.w)
        self.gradient_sum = torch.zeros_like(self.w) if keep_mean else None
        self._map = vmap(grad(self._loss, has_aux=True), in_dims=(0, 0, None), randomness="different")

    def run(self, start: Tensor, lr_scale: float, purpose: str) -> None:
        """Train all from their start models (d,) or (K, d)."""
        engine, cohort = self.engine, self.cohort
        seed_globals(derive(engine.seed, purpose, engine.round, cohort.ids[0]), self.user.device)
        self.w.copy_(start)
        loaders = [
            engine.datamodule.client_train_dataloader(client, engine.round, seed=engine.seed, device=self.user.device)
            for client in cohort.ids
        ]
        steps = [self.local.num_steps(len(loader)) for loader in loaders]
        num_epochs = self.local.epochs or max(-(-s // len(loader)) for s, loader in zip(steps, loaders, strict=True))
        optimizer = engine.stacked_optimizer
        optimizer.start(self.w, self.grad, engine.optimizer.learning_rates, lr_scale)
        self._begin()
        for step, (active, stacks) in enumerate(stacked_batches(loaders, num_epochs, steps)):
            for stack in stacks:
                self._count(stack, *self._gradients(stack, step, active))
            with torch.no_grad():
                if self.gradient_sum is not None:
                    self.gradient_sum[:active] += self.grad[:active]
                for term in self.terms:
                    term.add_gradient(self.grad, self.w)
                self._clip(self.grad[:active, : self.layout.num_optimized])
                optimizer.step(active)
                if self.after_step is not None:
                    ended = self.w[active:].clone()
                    self.after_step.apply(self.w, engine.step_sizes(optimizer.rates))
                    self.w[active:] = ended
        self._finish(steps, optimizer.rates)

    # a step

    def _loss(
        self, row: Tensor, batch: list[Tensor], batch_idx: int
    ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        """One client's loss, and again with what it logged: vmap maps this over rows and batches."""
        named = {f"module.{e.name}": row[e.offset : e.end].view(e.shape) for e in self.layout.entries}
        self.user.collector = logged = LoggedValues()  # type: ignore[assignment]
        output = functional_call(self.engine.training_step, named, (batch, batch_idx))
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise ConfigurationError(
                f"trainer.engine: vectorized needs a loss in every step, and training_step returned none; {SEQUENTIAL}."
            )
        return loss.reshape(()), (loss.detach().reshape(()), logged.values)

    def _gradients(self, stack: Stack, step: int, active: int) -> tuple[Tensor, dict[str, Tensor]]:
        batch = self.user.to_device(stack.tensors)
        if not self.engine.is_checked:
            self._check_step(batch)
        is_all = len(stack.rows) == active
        rows = self.w[:active] if is_all else self.w[stack.rows]
        try:
            with self.user.autocast():
                gradients, (losses, logged) = self._map(rows, batch, step)
        except ConfigurationError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(
                f"trainer.engine: vectorized cannot map {type(self.user.module).__name__}.training_step over clients "
                f"({reason}); {SEQUENTIAL}."
            ) from error
        if is_all:
            self.grad[:active] = gradients
        else:
            self.grad[stack.rows] = gradients
        return losses, logged

    def _check_step(self, batch: list[Tensor]) -> None:
        """Take the first step of one client alone, to see what a mapped one would hide."""
        self.engine.is_checked = True
        row = self.w[0].clone().requires_grad_()
        named = {e.name: row[e.offset : e.end].view(e.shape) for e in self.layout.entries}
        inputs = {f"module.{name}": value for name, value in named.items()}
        self.user.collector = LoggedValues()  # type: ignore[assignment]
        with torch.enable_grad(), self.user.autocast():
            output = functional_call(self.engine.training_step, inputs, ([part[0] for part in batch], 0))
        if any(metric.update_called for metric in self.user.metrics):
            raise ConfigurationError(
                "trainer.engine: vectorized cannot update a torchmetrics Metric for each client, as training_step "
                f"does; log a number, or {SEQUENTIAL}."
            )
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and loss.requires_grad:
            found = torch.autograd.grad(loss.sum(), list(named.values()), allow_unused=True)
            unused = [name for name, gradient in zip(named, found, strict=True) if gradient is None]
            if unused[: self.layout.num_grouped]:
                raise ConfigurationError(
                    f"trainer.engine: vectorized needs a gradient for every parameter, and '{unused[0]}' has none in "
                    f"training_step; freeze it, or {SEQUENTIAL}."
                )

    def _clip(self, gradients: Tensor) -> None:
        value = self.local.gradient_clip_val
        if not value:
            return
        if self.local.gradient_clip_algorithm == "value":
            gradients.clamp_(-value, value)
        else:
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_((value / (norms + 1e-6)).clamp(max=1.0))

    # what is counted

    def _begin(self) -> None:
        zeros = torch.zeros(len(self.cohort), dtype=torch.float64)
        self._loss_sum, self._num_samples = zeros.clone(), zeros.clone()
        self._batch_loss_sum = zeros.clone()
        self._logged: dict[str, Tensor] = {}
        self._logged_sizes: dict[str, Tensor] = {}

    def _count(self, stack: Stack, losses: Tensor, logged: dict[str, Tensor]) -> None:
        losses = losses.double().cpu()
        self._batch_loss_sum[stack.rows] += losses
        self._loss_sum[stack.rows] += losses * stack.size
        self._num_samples[stack.rows] += stack.size
        for name, values in logged.items():
            size = self.user.collector.batch_sizes.get(name, stack.size)  # type: ignore[attr-defined]
            self._logged.setdefault(plain_name(name), torch.zeros_like(self._loss_sum))[stack.rows] += (
                values.double().cpu() * size
            )
            self._logged_sizes.setdefault(plain_name(name), torch.zeros_like(self._loss_sum))[stack.rows] += size

    def _finish(self, steps: list[int], rates: list[float]) -> None:
        cohort, engine = self.cohort, self.engine
        num_clients = len(cohort)
        cohort.w = self.w
        cohort.buffers = self.layout.read_buffers().expand(num_clients, -1)
        cohort.counters = self.layout.read_counters()
        cohort.steps = steps
        cohort.step_size = engine.step_sizes(rates).expand(num_clients, -1)
        counts = torch.tensor(steps, dtype=torch.float64)
        cohort.losses = (self._batch_loss_sum / counts).tolist()
        finite = torch.isfinite(self.w).all(dim=1).cpu() & torch.isfinite(self._loss_sum)
        if self.gradient_sum is not None:
            cohort.gradient_mean = self.gradient_sum / counts.to(self.w)[:, None]
            finite &= torch.isfinite(cohort.gradient_mean).all(dim=1).cpu()
        cohort.valid &= finite
        means = {"train_loss": (self._loss_sum / self._num_samples).tolist()}
        means |= {f"train_{name}": (sums / self._logged_sizes[name]).tolist() for name, sums in self._logged.items()}
        for k, record in enumerate(cohort.records):
            record.update(num_steps=steps[k], **{name: values[k] for name, values in means.items()})
