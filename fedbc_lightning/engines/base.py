"""What both engines do alike with their workbench: settings that methods ask for, losses, and fine-tuning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.engines.contrasted_step import find_layer
from fedbc_lightning.engines.local_step import Training
from fedbc_lightning.engines.solver_run import Oracle, weight_decay_terms
from fedbc_lightning.engines.stacked.stacked_bench import MappedEvaluation, StackedBench
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.local import AfterStep, FineTuning, ModelContrast, Solver, Term
from fedbc_lightning.local.engine import Trains
from fedbc_lightning.state import ClientStore, Cohort, StateDeclaration, Weights


class BaseEngine(ABC):
    """Trains and evaluates clients on a workbench; methods see it as a :class:`~fedbc_lightning.local.engine.Engine`.

    Args:
        bench: The workbench.

    Attributes:
        cohort_size: Largest number of clients in a cohort.
        stacked: What the steps of several clients at once need; None if the engine trains one after another.
        has_solver: Whether the method writes out its own steps, see :meth:`check_solver`.
    """

    cohort_size: int
    stacked: StackedBench | None = None

    def __init__(self, bench: Workbench) -> None:
        self.bench, self.layout, self.datamodule = bench, bench.layout, bench.datamodule
        self._is_plain_sgd = bench.optimizer.is_plain_sgd and not bench.changes_gradients
        is_mixed = isinstance(bench.user.precision, MixedPrecision)
        self.has_full_precision = bench.layout.dtype.itemsize >= 4 and not is_mixed
        self.has_schedulers, self.has_solver = bench.optimizer.has_schedulers, False
        self.component_shares = bench.datamodule.batch_shares

    @property
    def is_plain_sgd(self) -> bool:
        """Whether every local step is exactly ``w -= lr * grad``; if so, clients keep to it from now on."""
        if self._is_plain_sgd:
            self.bench.kept_to.add("sgd")
        return self._is_plain_sgd

    @property
    def sgd_momentum(self) -> float | None:
        """Momentum of SGD's steps (without Nesterov) at constant rates, to which clients then keep; else None."""
        is_changed = self.has_schedulers or self.has_solver or self.bench.changes_gradients
        momentum = None if is_changed else self.bench.optimizer.sgd_momentum
        if momentum is not None:
            self.bench.kept_to |= {"sgd", "rate"}
        return momentum

    def mapped_evaluation(self, stage: str) -> MappedEvaluation | None:
        """Return what evaluates several clients at once in a stage, or None if they are evaluated one by one.

        Args:
            stage: ``"validation"`` or ``"test"``.
        """
        return None

    def start_round(self) -> None:
        """Prepare for the clients of a round, whose hooks have been called."""
        return

    @abstractmethod
    def group(self, positions: Sequence[int], num_steps: Sequence[int], alone: Collection[int]) -> list[list[int]]:
        """Return the cohorts of a round: which clients are trained together.

        Args:
            positions: Positions of the clients in the order of sampling.
            num_steps: Number of steps of each sampled client, by position.
            alone: Positions of the clients that train by themselves.
        """

    def solve(
        self,
        cohort: Cohort,
        start: Tensor,
        terms: Sequence[Term] = (),
        *,
        solver: Solver | None = None,
        after_step: AfterStep | None = None,
        contrast: ModelContrast | None = None,
        epochs: int | None = None,
        lr_scale: float = 1.0,
        record_gradient_mean: bool = False,
        purpose: str = "client",
        is_last: bool = True,
        trains: Trains = "all",
    ) -> None:
        """Train a cohort, see :meth:`fedbc_lightning.local.engine.Engine.solve`."""
        if start.shape[-1] not in (self.layout.num_parameters, self.layout.num_parameters + self.layout.num_buffers):
            raise ConfigurationError(
                f"algorithm: engine.solve was given a start of shape {tuple(start.shape)}; give a model of "
                f"{self.layout.num_parameters + self.layout.num_buffers} elements, such as server.model, or one for "
                "each client."
            )
        if solver is not None and self.layout.num_kept:
            raise no_kept_parameters(type(solver).__name__)
        if trains != "all" and not self.layout.num_kept:
            raise ConfigurationError(
                "trainer.local_parameters: the method trains the clients' part and the shared part one after another, "
                "and all parameters are shared; name the clients' part, e.g. ['head.*']."
            )
        given = [each for each in (*terms, after_step) if each is not None]
        lacking = [type(each).__name__ for each in given if not hasattr(each, "part")]
        if lacking:
            raise ConfigurationError(f"algorithm: {lacking[0]} has no part(clients: slice), see Term and AfterStep.")
        asked = Training(
            start, self._planned(cohort, epochs), epochs is not None, terms, solver, after_step, lr_scale,
            record_gradient_mean, purpose, is_last, trains, contrast,
        )  # fmt: skip
        cohort.start = start
        self.train(cohort, asked)

    @abstractmethod
    def train(self, cohort: Cohort, asked: Training) -> None:
        """Train a cohort.

        Args:
            cohort: The clients.
            asked: What the method asks for.
        """

    def check_solver(self, name: str, solver: Solver | type[Solver]) -> None:
        """Refuse what a solver's own steps cannot honour, and say once what they leave out of the user's optimizer.

        Args:
            name: Name of the method, for messages.
            solver: The solver, or its class.

        Raises:
            ConfigurationError: The trainer or the module asks for clipping, accumulation, 16-mixed precision, or an
                ``optimizer_step`` of its own.
        """
        if self.layout.num_kept:
            raise no_kept_parameters(name)
        self.check_losses(name)
        self.has_solver = True
        bench = self.bench
        asked = {
            "trainer.gradient_clip_val": bool(bench.local.gradient_clip_val),
            "trainer.accumulate_grad_batches": bench.local.accumulate_grad_batches > 1,
            "trainer.precision 16-mixed": bench.scaler is not None,
            "the module's optimizer_step": bench.overridden["optimizer_step"],
            "the module's configure_gradient_clipping": bench.overridden["configure_gradient_clipping"],
        }
        for what, is_asked in asked.items():
            if is_asked:
                raise ConfigurationError(f"{what}: {name} takes plain SGD steps of its own, which know no such thing.")
        if any(group.get("maximize") for group in bench.optimizer.optimizer.param_groups):
            raise ConfigurationError(f"model: its optimizer maximizes, and {name} takes descent steps of its own.")
        bench.say(_what_is_used(name, solver, bench.optimizer.optimizer))

    def check_losses(self, name: str) -> None:
        """Raise if a batch has no loss by itself, see :meth:`fedbc_lightning.local.engine.Engine.check_losses`."""
        if self.bench.optimizer.by_hand:
            raise ConfigurationError(
                f"model: {type(self.bench.user.module).__name__} uses manual optimization, where training_step takes "
                f"steps and is no function that returns a loss, which {name} needs; take e.g. FedAvg, FedProx, "
                "SCAFFOLD or FedBC."
            )

    def check_layer(self, name: str, layer: str) -> None:
        """Raise if the module has no such layer, see :meth:`fedbc_lightning.local.engine.Engine.check_layer`."""
        self.check_losses(name)
        find_layer(self.bench.user.module, layer)

    def train_loss(self, cohort: Cohort, model: Tensor) -> Tensor:
        """Return each client's mean training loss f_i, (K,), of a model (d + b,) in evaluation mode."""
        self.check_losses("the method")
        # A client that was just trained may hand out this row as its w (`ClientRun.finish`).
        row = self.bench.row.clone()
        losses = torch.cat([self._train_loss(cohort, k, model) for k in range(len(cohort))])
        self.bench.row.copy_(row)
        return losses

    def _train_loss(self, cohort: Cohort, k: int, model: Tensor) -> Tensor:
        bench, client, user = self.bench, cohort.ids[k], self.bench.user
        buffers, kept = (None if rows is None else rows[k] for rows in (cohort.start_buffers, cohort.start_kept))
        bench.load(model, cohort.start_counters[k], buffers, kept=kept)
        # Dropout is off, but the user's step may draw numbers: the loss of a model must not depend on who came before.
        seed_globals(derive(bench.seed, "train loss", bench.round, client), user.device)
        user.shim.set(current_client=client)
        user.module.eval()
        oracle = Oracle(bench)
        batches = bench.datamodule.fixed_batches(client, device=user.device)
        losses = [oracle.loss(bench.row[None], user.to_device(batch), k) for k, batch in enumerate(batches)]
        user.train_mode()
        shares = torch.tensor(self.component_shares(client), dtype=torch.float64)
        return (torch.stack(losses).cpu().double() @ shares).reshape(1)

    def fine_tune(self, client: int, fine_tuning: FineTuning) -> None:
        """Take plain steps from the loaded model on the first samples of a client, for its evaluation."""
        bench = self.bench
        user, layout = bench.user, bench.layout
        batches = bench.datamodule.fixed_batches(client, fine_tuning.split, fine_tuning.batch_size, device=user.device)
        if batches is None:
            return
        batch = next(iter(batches))
        # Fine-tuning is for one client's evaluation: what its steps do to BatchNorm, or to a teacher, must not last.
        buffers, counts = layout.read_buffers(), layout.read_counters()
        w = bench.row.to(layout.master_dtype)[None]
        user.put_scratch_back()  # the client before has left its own
        user.train_mode()
        with layout.frozen.kept():
            for _ in range(fine_tuning.num_steps):
                _, gradient = Oracle(bench, calls_hooks=False).loss_and_gradient(w, user.to_device(batch), 0)
                for term in weight_decay_terms(bench):
                    term.add_gradient(gradient, w)
                w = w - fine_tuning.lr * gradient
        user.module.eval()
        bench.row.copy_(w[0])
        layout.write_buffers(buffers, counts)

    def fine_tune_by_steps(self, clients: Sequence[int], model: Tensor, counters: Tensor, num_steps: int) -> Cohort:
        """Train copies of a model on some clients' data by steps of the user's optimizer, for an evaluation.

        This is the trainer's local training without the terms of a method. No state is read, and hooks that are called
        once per client are not called.

        Args:
            clients: The clients, a cohort of :meth:`group`.
            model: The model (d + b,).
            counters: Its integer buffers.
            num_steps: Number of steps of each client.

        Returns:
            A cohort that holds the trained models.
        """
        sizes = self.datamodule.num_samples("train")[list(clients)].tolist()
        nothing = ClientStore(0, StateDeclaration(), Weights(model[:0], model[:0], counters[:0], model[:0]))
        cohort = Cohort(list(clients), list(range(len(clients))), sizes, nothing, self.bench.user.device)
        cohort.start_counters = counters.expand(len(clients), -1)
        cohort.started.update(dict.fromkeys(clients, (None, None)))
        local = replace(self.bench.local, epochs=None, steps=num_steps, schedule_rounds=None)
        self.train(cohort, Training(model, local, purpose="held-out client", is_last=False))
        return cohort

    def _planned(self, cohort: Cohort, epochs: int | None) -> LocalTraining:
        """Return the local training of a cohort: the trainer's or ``epochs``; a straggler does its part of that."""
        asked = self.bench.local
        if epochs is None:
            return asked if cohort.local is None else cohort.local
        # A straggler trains for a part of the trainer's steps: the same part of the method's epochs is left to it.
        planned = replace(asked, epochs=epochs, steps=None)
        if cohort.local is None:
            return planned
        num_batches = len(self.bench.train_loader(cohort.ids[0]))
        share = cohort.local.num_steps(num_batches) / asked.num_steps(num_batches)
        return replace(planned, epochs=None, steps=max(1, int(share * planned.num_steps(num_batches))))


def no_kept_parameters(name: str) -> ConfigurationError:
    """Return the error for a method or solver that cannot leave a part of the model with each client."""
    return ConfigurationError(
        f"trainer.local_parameters: {name} cannot leave a part of the model with each client, because it takes steps "
        "of its own, trains two models per client, or has no clients; leave local_parameters out, or take one that "
        "trains one model by the module's optimizer, e.g. FedAvg, FedProx, SCAFFOLD or FedBC."
    )


def _what_is_used(name: str, solver: Solver | type[Solver], optimizer: torch.optim.Optimizer) -> str:
    """Return which settings of the user's optimizer a solver uses; an empty text if it uses all of them."""
    groups, is_sgd = optimizer.param_groups, type(optimizer) is torch.optim.SGD
    used = ["learning rate"] if solver.uses_lr else []
    used += ["weight decay"] if is_sgd and any(group["weight_decay"] for group in groups) else []
    left = {key: max(group.get(key, 0.0) for group in groups) for key in ("momentum", "weight_decay")}
    left = {key: value for key, value in left.items() if value and not (is_sgd and key == "weight_decay")}
    if is_sgd and not left and solver.uses_lr:
        return ""
    said = type(optimizer).__name__ + (f" ({', '.join(f'{k} {v:g}' for k, v in left.items())})" if left else "")
    return f"{name} takes plain SGD steps: of the model's {said} it uses {' and '.join(used) or 'nothing'}."
