"""FederatedTrainer fits, validates and tests any LightningModule on many clients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core import determinism
from fedbc_lightning.core.lightning_names import AnyCallback, AnyLogger
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.distributed.fabric import make_fabric
from fedbc_lightning.federation.coding import Codecs
from fedbc_lightning.federation.privacy import Privacy
from fedbc_lightning.federation.sampling import ClientSampler, UniformSampler
from fedbc_lightning.federation.system import Stragglers, System
from fedbc_lightning.module.adapter import check_module, unwrapped
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.planning import Plan, make_plan
from fedbc_lightning.run.evaluation_hooks import evaluate_once
from fedbc_lightning.run.export import Export
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.predict import Prediction
from fedbc_lightning.run.processes import run_in_processes
from fedbc_lightning.run.restore import begin, find_beginning
from fedbc_lightning.run.result import FitResult
from fedbc_lightning.run.round_loop import RoundLoop
from fedbc_lightning.run.run import Request, Run
from fedbc_lightning.run.run_writer import Recorder
from fedbc_lightning.run.set_up import set_up
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.run.trainer_attributes import RunView
from fedbc_lightning.state.declaration import BufferPolicy
from fedbc_lightning.trainer.arguments import (
    callbacks_of,
    check_algorithm,
    check_arguments,
    check_callbacks,
    check_datamodule,
    default_callbacks,
)


class FederatedTrainer(RunView):
    """Trains a LightningModule on the clients of a FederatedDataModule with a federated algorithm.

    Names follow ``lightning.Trainer`` wherever the meaning is the same.

    Args:
        max_rounds: T, the total number of rounds; rounds before a resume count.
        clients_per_round: S, the clients sampled in a round: an int is a number, a float a fraction of N, 1.0 all.
        local_epochs: E, passes over a client's data per round; default 1 if ``local_steps`` is None. Each client gets a
            new optimizer in every round, so momentum and Adam's moments start at zero.
        local_steps: Optimizer steps per client and round, instead of ``local_epochs``.
        local_schedules: ``"fresh"``: ``current_epoch``, ``global_step`` and schedulers of interval ``epoch`` or
            ``step`` start anew for each client and round. ``"continue"``: they continue over the rounds in which a
            client takes part, and ``max_epochs``, ``max_steps`` and ``estimated_stepping_batches`` are those of one
            round times ``max_rounds``. The epochs and steps that a client has taken are columns of ``clients.csv``; an
            epoch that is broken off counts by the fraction of its batches that were done. If a method trains a client
            twice in a round, its last training counts.
        sampler: Rule that samples the clients of a round; default uniform without replacement, or with ``privacy`` each
            client independently.
        stragglers: Simulation of sampled clients that do less work or drop out; None: there are none.
        privacy: Differential privacy of z for whole clients, by a bound of their updates and noise; None: there is
            none. See ``docs/howto/private_training.md``.
        codec: Codecs that shorten what clients send (``up``: ``TopK``, ``QSGD``, ``Sign``, ``BFloat16`` or ``Float8``)
            and receive (``down``: ``QSGD``, ``BFloat16`` or ``Float8``); None: all travels as it is. See
            ``docs/howto/coded_messages.md``.
        system: A simulated clock: how fast clients compute and send, when they are there, and how long a round waits;
            None: there is none. See ``docs/howto/simulated_time.md``.
        engine: ``"sequential"`` trains one client after another, with any module. ``"vectorized"`` trains many clients
            at once, by ``torch.func`` over ``training_step``, for small models; it also evaluates clients with equal
            numbers of samples together, and raises an error that names what it cannot do. To choose it is to promise
            that the steps are functions of weights and batch; some are compared with the steps as written. ``"auto"``
            takes ``"vectorized"`` if ``training_step`` is promised to be such a function (see ``record_steps``), it
            can be mapped, the model has at most 2,000 parameters, and a process trains at least 50 clients in a round,
            else ``"sequential"``.
        record_steps: Whether local steps that occur often are recorded and replayed, which gives the same numbers
            faster. ``"auto"``: if ``training_step`` has the decorator :func:`fedbc_lightning.recordable`, as in all
            models of this package, by which you promise that it is a function of weights and batch. True: always,
            which is the same promise. False: never. Some steps are compared with the step as written in any case.
        accelerator: Kind of device, as in Lightning: ``auto``, ``cpu``, ``gpu``, ...
        strategy: Way in which processes are started: ``auto``, ``ddp``, ``ddp_spawn``, ``ddp_fork`` or
            ``ddp_notebook``. Each process trains whole clients; gradients are never synchronised. A forked process
            (``ddp_fork``, and ``ddp_notebook``, which ``auto`` takes in a notebook) computes with one thread, because
            threads do not survive a fork.
        devices: Number of processes on the CPU, number of GPUs, or a list of GPU indices, as in Lightning.
        num_nodes: Number of machines.
        precision: ``32-true``, ``64-true``, ``16-mixed``, ``bf16-mixed``, ``16-true`` or ``bf16-true``. The server's
            state is at least float32.
        deterministic: Whether runs on GPUs must repeat bit for bit. True: an operation without a deterministic
            algorithm raises an error; ``"warn"``: it gives a warning. None: cuDNN takes its deterministic algorithms,
            which suffices for most networks. False: torch's settings stay as they are.
        callbacks: Lightning callbacks, with the hooks of the table in ``docs/howto/hooks.md``.
        logger: None or True: TensorBoard in the run folder; False: no logger; or Lightning loggers.
        eval_every_n_rounds: Evaluate after every n-th round and after the last one; 0: never.
        eval_clients: Clients that are evaluated one by one: a number, a fraction, or ``all``; None: all clients up to
            1,000, or 1,000 of more, the same ones in every round. 0: none, and the global model is evaluated on the
            pooled data alone. The same number, fraction or ``all`` holds for clients that are held out.
        heldout_finetune_steps: Optimizer steps that a copy of the global model takes on each held-out client's training
            data before ``accuracy/heldout_finetuned`` is measured; 0: none, and only ``accuracy/heldout`` is measured.
            Who is held out is said by ``heldout_clients`` of the data module.
        gradient_clip_val: Bound of the gradient, the algorithm's terms included; None: the gradient is not clipped.
        gradient_clip_algorithm: Clip by ``norm`` (default) or by ``value``.
        accumulate_grad_batches: Number of batches per optimizer step.
        buffers: Treatment of floating-point buffers such as BatchNorm's. ``average``: the server averages them like
            parameters (integer buffers take the maximum). ``local``: every client keeps its own, and the server's mean
            is for evaluation only. ``global``: they stay as in the initial model. The same holds for parameters with
            ``requires_grad=False`` that training writes, such as those of a teacher network.
        local_parameters: Names or patterns (``head.*``) of parameters that stay with each client, or ``batch_norm`` for
            those of all BatchNorm layers; the algorithm sees and sends the others alone. None: all are shared. See
            ``docs/howto/partial_sharing.md``.
        keep_local_models: Whether every client's last model is kept for metrics such as ``accuracy/local`` if the
            algorithm does not keep it; None: if all of them take at most 64 MiB and there are no ``local_parameters``.
        client_dtype: Data type in which the clients' vectors are kept between rounds: ``float32``, or ``bfloat16``,
            which rounds them and takes half the space; None: that of the model. If the vectors of all N clients take
            more than 64 MiB, they lie in ``checkpoints/clients.bin``.
        histogram_every_n_rounds: Rounds between two histograms over clients in TensorBoard, which stand behind all
            curves; 0: there are none.
        enable_checkpointing: Whether ``checkpoints/last.ckpt`` is written, from which a run resumes.
        checkpoint_every_n_rounds: Rounds between two checkpoints; None: as often as writing them takes at most 5 % of
            the time.
        enable_progress_bar: Whether to show progress over rounds and a final table.
        default_root_dir: Folder of all runs; a run is written to ``<default_root_dir>/<name>/<method>-<seed>``.
        name: Name of the experiment; its runs are written to ``<default_root_dir>/<name>/<method>-<seed>``.
        seed: Seed of everything random; None: that of ``seed_everything``, or else 0.

    Raises:
        ConfigurationError: Some values are impossible; the message names all of them.

    Example:
        >>> trainer = FederatedTrainer(max_rounds=2, clients_per_round=0.5, local_epochs=1)
        >>> trainer.max_rounds
        2
    """

    def __init__(
        self,
        *,
        max_rounds: int = 100,
        clients_per_round: int | float = 1.0,
        local_epochs: int | None = None,
        local_steps: int | None = None,
        local_schedules: Literal["fresh", "continue"] = "fresh",
        sampler: ClientSampler | None = None,
        stragglers: Stragglers | None = None,
        privacy: Privacy | None = None,
        codec: Codecs | None = None,
        system: System | None = None,
        engine: Literal["sequential", "vectorized", "auto"] = "sequential",
        record_steps: bool | Literal["auto"] = "auto",
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Literal["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"] = "32-true",
        deterministic: bool | Literal["warn"] | None = None,
        callbacks: list[AnyCallback] | AnyCallback | None = None,
        logger: AnyLogger | Iterable[AnyLogger] | bool | None = None,
        eval_every_n_rounds: int = 1,
        eval_clients: int | float | Literal["all"] | None = None,
        heldout_finetune_steps: int = 0,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        accumulate_grad_batches: int = 1,
        buffers: BufferPolicy = "average",
        local_parameters: list[str] | None = None,
        keep_local_models: bool | None = None,
        client_dtype: Literal["float32", "bfloat16"] | None = None,
        histogram_every_n_rounds: int = 10,
        enable_checkpointing: bool = True,
        checkpoint_every_n_rounds: int | None = None,
        enable_progress_bar: bool = True,
        default_root_dir: str | os.PathLike = "runs",
        name: str = "default",
        seed: int | None = None,
    ) -> None:
        check_arguments(locals())
        determinism.prepare(deterministic)
        callbacks = [callbacks] if isinstance(callbacks, AnyCallback) else list(callbacks or [])
        check_callbacks(callbacks)
        local = LocalTraining(
            epochs=None if local_steps is not None else (local_epochs or 1),
            steps=local_steps,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm or "norm",
            record_steps=record_steps,
            schedule_rounds=max(1, max_rounds) if local_schedules == "continue" else None,
        )
        settings = RunSettings(
            max_rounds=max_rounds, clients_per_round=clients_per_round, local=local,
            sampler=sampler or UniformSampler() if privacy is None else privacy.sampler(sampler),
            stragglers=stragglers, privacy=privacy, codec=codec, system=system, engine=engine, accelerator=accelerator,
            strategy=strategy, devices=devices, num_nodes=num_nodes, precision=precision, deterministic=deterministic,
            callbacks=default_callbacks(callbacks, enable_progress_bar), logger=logger,
            eval_every_n_rounds=eval_every_n_rounds, eval_clients=eval_clients,
            heldout_finetune_steps=heldout_finetune_steps, buffers=buffers,
            local_parameters=list(local_parameters or []),
            keep_local_models=keep_local_models, client_dtype=client_dtype,
            histogram_every_n_rounds=histogram_every_n_rounds, enable_checkpointing=enable_checkpointing,
            checkpoint_every_n_rounds=checkpoint_every_n_rounds, default_root_dir=Path(default_root_dir), name=name,
            seed=seed,
        )  # fmt: skip
        super().__init__(settings, make_fabric(accelerator, strategy, devices, num_nodes, precision))

    # what users call

    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: str | os.PathLike | None = None,
        other_seed: bool = False,
    ) -> FitResult:
        """Train the model on the clients; it holds z afterwards.

        Args:
            model: Any LightningModule with automatic optimization.
            datamodule: A FederatedDataModule; wrap any other in PartitionedDataModule.
            algorithm: The federated algorithm, e.g. ``FedBC(dual_lr=1e-3)``.
            ckpt_path: Checkpoint from which to resume as if the run had never stopped; ``last``: that of the newest run
                of this name; if there is no such run, a warning says so and a new run starts. None: start a new run.
            other_seed: Whether the run may resume with another seed than that of the checkpoint. The later rounds are
                then not those of an uninterrupted run, so it is an error otherwise.

        Returns:
            What the run has recorded: tables, the best round, paths, and a plot. After Ctrl-C, ``trainer.result`` is
            that of the rounds that were finished.

        Raises:
            ConfigurationError: A setting cannot be honoured.
        """
        return self._launch(TrainerFn.FITTING, model, datamodule, algorithm, ckpt_path, self._train, other_seed)

    def validate(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: str | os.PathLike | None = None,
    ) -> dict[str, float]:
        """Evaluate the global and local models on the validation data; see :meth:`fit` for the arguments.

        Returns:
            The metrics by name, as in ``metrics.csv``.
        """
        return self._launch(TrainerFn.VALIDATING, model, datamodule, algorithm, ckpt_path, evaluate_once)

    def test(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: str | os.PathLike | None = None,
    ) -> dict[str, float]:
        """Evaluate the global and local models on the test data; see :meth:`fit` for the arguments.

        Returns:
            The metrics by name, as in ``metrics.csv``.
        """
        return self._launch(TrainerFn.TESTING, model, datamodule, algorithm, ckpt_path, evaluate_once)

    def predict(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: str | os.PathLike | None = None,
        dataloaders: Iterable[Any] | None = None,
        client: str | int | None = None,
    ) -> list[Any]:
        """Run ``predict_step`` of the global model, or of a client's own, over batches; see :meth:`fit`.

        Args:
            model: The LightningModule, as for :meth:`fit`.
            datamodule: The FederatedDataModule, as for :meth:`fit`.
            algorithm: The federated algorithm, as for :meth:`fit`.
            ckpt_path: Checkpoint whose models are used, or ``last``; None: those of this trainer's last run with the
                model, or else the model as it is.
            dataloaders: A DataLoader; None: ``predict_dataloader`` of the data module or the model, where one is
                overridden, else the test data of the client, or of all clients.
            client: Client whose own model is used, as for :meth:`export`; None: the global model.

        Returns:
            The values that ``predict_step`` returned, one per batch, on the CPU.

        Raises:
            ConfigurationError: The client or the model does not exist, or there is nothing to predict on.
        """
        prediction = Prediction(client, dataloaders)
        return self._launch(TrainerFn.PREDICTING, model, datamodule, algorithm, ckpt_path, prediction.predict)

    def export(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: str | os.PathLike | None = None,
        client: str | int | None = None,
        out: str | os.PathLike | None = None,
        force: bool = False,
    ) -> Path:
        """Write one model of a run as an ordinary checkpoint, which ``MyModule.load_from_checkpoint`` reads.

        It is the model that is evaluated as local or global: for a method that fine-tunes before evaluation, the
        fine-tuned one. A client that never took part has the initial model.

        Args:
            model: The LightningModule, as for :meth:`fit`.
            datamodule: The FederatedDataModule, as for :meth:`fit`.
            algorithm: The federated algorithm, as for :meth:`fit`.
            ckpt_path: A checkpoint (on the command line also a run folder); None or ``last``: that of the newest run of
                this name.
            client: Client whose own model is written: a number from 0 to N - 1, or a name in ``partition.json``; None:
                the global model.
            out: File to write; None: a file beside the checkpoint, e.g. ``round_50_client_17.ckpt``. A name that ends
                in ``.safetensors`` gives the tensors alone; one without a dot, if the module has a ``PeftModel``, a
                folder with the adapter for ``PeftModel.from_pretrained``.
            force: Whether an existing file is overwritten.

        Returns:
            The path of the file.

        Raises:
            ConfigurationError: The client or the model does not exist, or the file cannot be written.
        """
        export = Export(client, None if out is None else Path(out), force)
        ckpt_path = "last" if ckpt_path is None else ckpt_path
        return self._launch(TrainerFn.TESTING, model, datamodule, algorithm, ckpt_path, export.write)

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: FederatedAlgorithm | None = None,
    ) -> Plan:
        """Estimate time, memory, disk and bytes of :meth:`fit` from a few steps, without writing anything.

        One process measures, whatever ``devices`` says. Only the module's own attributes may change by it.

        Args:
            model: The LightningModule, as for :meth:`fit`.
            datamodule: The FederatedDataModule, as for :meth:`fit`.
            algorithm: The federated algorithm, as for :meth:`fit`.

        Returns:
            The estimates, see :class:`~fedbc_lightning.planning.Plan`.

        Raises:
            ConfigurationError: A setting cannot be honoured; :meth:`fit` would raise the same.
        """
        settings, num_processes, started = self.settings, self.world_size, time.perf_counter()
        devices = settings.devices[:1] if isinstance(settings.devices, list) else 1
        alone = copy(self)  # callbacks are given a trainer with one process; this one stays as it is
        RunView.__init__(
            alone,
            replace(settings, strategy="auto", devices=devices, num_nodes=1),
            make_fabric(settings.accelerator, "auto", devices, 1, settings.precision),
        )
        task = partial(make_plan, num_processes=num_processes, started=started)
        return alone._launch(TrainerFn.FITTING, model, datamodule, algorithm, None, task)

    # the run

    def _launch(
        self, fn: TrainerFn, model: Any, datamodule: Any, algorithm: Any, ckpt_path: str | os.PathLike | None,
        task: Callable[[Run], Any], takes_other_seed: bool = False,
    ) -> Any:  # fmt: skip
        """Run a task in all processes, and return its result."""
        model = unwrapped(model)
        check_module(model)
        check_datamodule(datamodule, model)
        check_algorithm(algorithm)
        request = Request(fn, model, datamodule, algorithm, ckpt_path, task, takes_other_seed)
        self.state.fn = fn
        self.progress = self.progress.of_next_run()
        result, outcome = run_in_processes(self, self._fabric, request, self._perform)
        if outcome is None:
            return result
        self._run, self._outcome, self.progress = None, outcome, outcome.progress
        return outcome.result

    def _perform(self, request: Request, lock: RunLock) -> tuple[Run, Any]:
        """Set a run up in this process and do its task; return both the run and the result."""
        settings, fabric, model = self.settings, self._fabric, request.model
        beginning = find_beginning(request, settings.experiment, fabric, lock, self._run)
        hooks = Hooks(self, model, [*settings.callbacks, *callbacks_of(model)])
        with preserved_globals(fabric.device), _left_on_the_cpu(model):
            run = self._run = set_up(request, settings, fabric, hooks, self.progress, lock, beginning)
            try:
                begin(run, beginning, takes_other_seed=request.takes_other_seed)
                return run, request.task(run)
            finally:
                run.tear_down()

    def _train(self, run: Run) -> FitResult:
        """Train a run that was set up for :meth:`fit`."""
        self._recorder = Recorder(run)
        RoundLoop(run, self._recorder).run()
        return self._recorder.result()


@contextmanager
def _left_on_the_cpu(model: LightningModule) -> Iterator[None]:
    """Move the model to the CPU at the end of the context, where ``lightning.Trainer`` leaves it, too."""
    try:
        yield
    finally:
        model.cpu()
