"""FederatedTrainer fits, validates and tests any LightningModule on many clients."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, ProcessRaisedException

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core import determinism
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.seeding import global_seed, preserved_globals
from fedbc_lightning.core.storage import quiet_event_writers
from fedbc_lightning.core.twins import AnyCallback, AnyLogger
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.distributed.fabric import make_fabric, missing_kernels_told
from fedbc_lightning.distributed.lifeline import WAS_KILLED, Lifeline, LostProcessError
from fedbc_lightning.evaluation.evaluator import Evaluation, Evaluator
from fedbc_lightning.federation import checkpoint_content
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.participation import Participation
from fedbc_lightning.federation.sampling import ClientSampler, UniformSampler
from fedbc_lightning.federation.stragglers import Stragglers
from fedbc_lightning.module.adapter import UserModule, check_module, unwrapped
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.module.monitors import how_to_validate
from fedbc_lightning.module.shim import ModuleTrainer
from fedbc_lightning.planning import Plan, make_plan
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run import slurm
from fedbc_lightning.run.evaluation_hooks import evaluate_with_hooks
from fedbc_lightning.run.export import Export
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.monitored import check_what_schedulers_monitor
from fedbc_lightning.run.predict import Prediction
from fedbc_lightning.run.recorder import Recorder, refuse_other_seed, settings, warn_of_other_settings
from fedbc_lightning.run.round_loop import RoundLoop
from fedbc_lightning.state import checkpoint, row_file
from fedbc_lightning.state.declaration import BufferPolicy, ClientStore, ServerState
from fedbc_lightning.trainer.arguments import check_arguments, check_callbacks, check_datamodule, default_callbacks
from fedbc_lightning.trainer.callback_view import CallbackView
from fedbc_lightning.trainer.handover import handover, leave, take_over

Task = Callable[["FederatedTrainer", Any], Any]
"""Function that is run with a trainer that has been set up, and the checkpoint from which it was restored, or None."""


STAGES: dict[TrainerFn, Literal["fit", "validate", "test", "predict"]] = {
    TrainerFn.FITTING: "fit", TrainerFn.VALIDATING: "validate", TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}  # fmt: skip
"""Value of the argument ``stage`` of ``setup`` for each verb of the trainer."""


class FederatedTrainer(CallbackView):
    """Trains a LightningModule on the clients of a FederatedDataModule with a federated algorithm.

    Names follow ``lightning.Trainer`` wherever the meaning is the same.

    Args:
        max_rounds: T, the total number of rounds; rounds before a resume count.
        clients_per_round: S, the clients sampled in a round: an int is a number, a float a fraction of N, 1.0 all.
        local_epochs: E, passes over a client's data per round; default 1 if ``local_steps`` is None.
        local_steps: Optimizer steps per client and round, instead of ``local_epochs``.
        local_schedules: ``"fresh"``: ``current_epoch``, ``global_step`` and schedulers of interval ``epoch`` or
            ``step`` start anew for each client and round. ``"continue"``: they continue over the rounds in which a
            client takes part, and ``max_epochs``, ``max_steps`` and ``estimated_stepping_batches`` are those of one
            round times ``max_rounds``. The epochs and steps that a client has taken are columns of ``clients.csv``; an
            epoch that is broken off counts by the fraction of its batches that were done. If a method trains a client
            twice in a round, its last training counts.
        sampler: Rule that samples the clients of a round; default uniform without replacement.
        stragglers: Simulation of sampled clients that do less work or drop out; None: there are none.
        engine: ``"sequential"`` trains one client after another, with any module. ``"vectorized"`` trains many clients
            at once, by ``torch.func`` over ``training_step``, for small models; it also evaluates clients with equal
            numbers of samples together, and raises an error that names what it cannot do. ``"auto"`` times both on a
            few steps of the first round's clients and takes the faster one; a resumed run keeps the choice.
        record_steps: Whether local steps that occur often are recorded and replayed, which gives the same numbers
            faster. ``"auto"``: if ``training_step`` is proven to be a function of weights and batch; one line names
            the obstacle if it is not. True: always; you guarantee that it is such a function. False: never.
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
        callbacks: Lightning callbacks, with the hooks of the README's event table.
        logger: None or True: TensorBoard in the run folder; False: no logger; or Lightning loggers.
        eval_every_n_rounds: Evaluate after every n-th round and after the last one; 0: never.
        eval_clients: Clients that are evaluated one by one: a number, a fraction, or ``all``; None: all clients up to
            1,000, or 1,000 of more, the same ones in every round.
        gradient_clip_val: Bound of the gradient, the algorithm's terms included; None: the gradient is not clipped.
        gradient_clip_algorithm: Clip by ``norm`` (default) or by ``value``.
        accumulate_grad_batches: Number of batches per optimizer step.
        buffers: Treatment of floating-point buffers such as BatchNorm's. ``average``: the server averages them like
            parameters (integer buffers take the maximum). ``local``: every client keeps its own, and the server's mean
            is for evaluation only. ``global``: they stay as in the initial model. The same holds for parameters with
            ``requires_grad=False`` that training writes, such as those of a teacher network.
        keep_local_models: Whether every client's last model is kept for the ``local/*`` metrics if the algorithm does
            not keep it; None: if all of them take at most 64 MiB.
        client_dtype: Data type in which the clients' vectors are kept between rounds: ``float32``, or ``bfloat16``,
            which rounds them and takes half the space; None: that of the model. If the vectors of all N clients take
            more than 64 MiB, they lie in ``checkpoints/clients.bin``.
        enable_checkpointing: Whether ``checkpoints/last.ckpt`` is written, from which a run resumes.
        checkpoint_every_n_rounds: Rounds between two checkpoints; None: as often as writing them takes at most 5 % of
            the time.
        enable_progress_bar: Whether to show progress over rounds and a final table.
        default_root_dir: Folder of all runs; a run is written to ``<default_root_dir>/<name>/version_k``.
        name: Name of the experiment; its runs are written to ``<default_root_dir>/<name>/version_k``.
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
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        accumulate_grad_batches: int = 1,
        buffers: BufferPolicy = "average",
        keep_local_models: bool | None = None,
        client_dtype: Literal["float32", "bfloat16"] | None = None,
        enable_checkpointing: bool = True,
        checkpoint_every_n_rounds: int | None = None,
        enable_progress_bar: bool = True,
        default_root_dir: str | os.PathLike = "runs",
        name: str = "default",
        seed: int | None = None,
    ) -> None:
        check_arguments(locals())
        self.max_rounds = max_rounds
        self.clients_per_round = clients_per_round
        self.local = LocalTraining(
            epochs=None if local_steps is not None else (local_epochs or 1),
            steps=local_steps,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm or "norm",
            record_steps=record_steps,
            schedule_rounds=max(1, max_rounds) if local_schedules == "continue" else None,
        )
        self.sampler = sampler or UniformSampler()
        self.stragglers = stragglers
        self._fabric_settings = (accelerator, strategy, devices, num_nodes, precision)
        self.precision, self.num_nodes = precision, num_nodes
        self.deterministic = deterministic
        determinism.prepare(deterministic)
        callbacks = [callbacks] if isinstance(callbacks, AnyCallback) else list(callbacks or [])
        check_callbacks(callbacks)
        self.callbacks: list[Callback] = default_callbacks(callbacks, enable_progress_bar)
        self.logger_setting = logger
        self.eval_every_n_rounds = eval_every_n_rounds
        self.eval_clients = eval_clients
        self.buffers = buffers
        self.keep_local_models = keep_local_models
        self.client_dtype = client_dtype
        self.engine: Literal["sequential", "vectorized", "auto"] = engine
        self.enable_checkpointing = enable_checkpointing
        self.checkpoint_every_n_rounds = checkpoint_every_n_rounds
        self.default_root_dir = Path(default_root_dir)
        self.name = name
        self._seed = seed
        self._fabric: Fabric = make_fabric(*self._fabric_settings)

        self.current_round = self.finished_round = 0
        self.should_stop = False
        self.callback_metrics: dict[str, Tensor] = {}
        self.result: Any = None
        self.recorder: Recorder
        self.run_lock: RunLock
        self.saved_rows: dict[str, int] = {}
        self._takes_other_seed = False
        self.evaluation = Evaluation()
        self.state = SimpleNamespace(fn=None, stage=None)
        self.log_dir: str | None = None
        self.loggers: list[Any] = []
        self.server: ServerState
        self.clients: ClientStore

    # what users call

    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: str | os.PathLike | None = None,
        other_seed: bool = False,
    ) -> None:
        """Train the model on the clients; it holds z afterwards.

        Args:
            model: Any LightningModule with automatic optimization.
            datamodule: A FederatedDataModule; wrap any other in PartitionedDataModule.
            algorithm: The federated algorithm, e.g. ``FedBC(dual_lr=1e-3)``.
            ckpt_path: Checkpoint from which to resume as if the run had never stopped; ``last``: that of the newest run
                of this name, or none if there is no such run. None: start a new run.
            other_seed: Whether the run may resume with another seed than that of the checkpoint. The later rounds are
                then not those of an uninterrupted run, so it is an error otherwise.

        Raises:
            ConfigurationError: A setting cannot be honoured.
        """
        self._takes_other_seed = other_seed
        self._launch(TrainerFn.FITTING, model, datamodule, algorithm, ckpt_path)

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
        return self._launch(TrainerFn.VALIDATING, model, datamodule, algorithm, ckpt_path)

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
        return self._launch(TrainerFn.TESTING, model, datamodule, algorithm, ckpt_path)

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
        return self._launch(TrainerFn.PREDICTING, model, datamodule, algorithm, ckpt_path, prediction.run)

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
            out: File to write; None: a file beside the checkpoint, e.g. ``round_50_client_17.ckpt``.
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
        fabric = self._fabric
        accelerator, _, devices, _, precision = self._fabric_settings
        self._fabric = make_fabric(accelerator, "auto", devices[:1] if isinstance(devices, list) else 1, 1, precision)
        self.num_nodes, self.log_dir = 1, None
        try:
            task = partial(make_plan, num_processes=fabric.world_size)
            self._launch(TrainerFn.FITTING, model, datamodule, algorithm, None, task)
        finally:
            self._fabric, self.num_nodes = fabric, self._fabric_settings[3]
        return self.result

    # the run

    def _launch(
        self, fn: TrainerFn, model: Any, datamodule: Any, algorithm: Any, ckpt_path: str | os.PathLike | None,
        task: Task | None = None,
    ) -> Any:  # fmt: skip
        model = unwrapped(model)
        check_module(model)
        check_datamodule(datamodule, model)
        if not isinstance(algorithm, FederatedAlgorithm):
            raise ConfigurationError(
                f"algorithm: got {algorithm!r}; give a FederatedAlgorithm, e.g. FedBC(dual_lr=1e-3)."
            )
        self.state.fn = fn
        self.current_round = self.finished_round = 0
        self.should_stop = False
        self.callback_metrics = {}
        try:
            with handover(self._fabric) as result:
                function: Any = _run_in_process
                self._fabric.launch(function, self, result, model, datamodule, algorithm, ckpt_path, task)
                if result is not None:
                    take_over(self, model, result)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise self._error_of(error) from None
        return self.result

    def _error_of(self, error: ProcessException) -> Exception:
        """Return the error to raise for a failed process: its own one if that has a message for the user."""
        if isinstance(error, ProcessExitedException):
            who = f"process {error.error_index} of {self._fabric.world_size} (counted from 0)"
            return LostProcessError(f"{who} {WAS_KILLED} {self.how_to_resume()}")
        module = re.escape(ConfigurationError.__module__)  # also of its subclasses for what an engine cannot do
        found = re.search(rf"^{module}\.\w+: (.*)", str(error), re.M | re.S)
        return ConfigurationError(found[1].strip()) if found else error

    def how_to_resume(self, folder: Path | None = None) -> str:
        """Return a sentence that tells the user how to resume a run that broke off.

        Args:
            folder: Run folder; None: that of ``log_dir``, or else of the newest run of this name.
        """
        folder = Path(self.log_dir) if folder is None and self.log_dir is not None else folder
        last = (
            run_folder.last_checkpoint(self.default_root_dir / self.name)
            if folder is None
            else folder / run_folder.LAST
        )
        if self.state.fn != TrainerFn.FITTING or last is None or not last.is_file():
            return "There is no checkpoint to go on from."
        return f"Go on by the same command with ckpt_path: {last}"

    def _resolve(self, ckpt_path: str | os.PathLike | None, fn: TrainerFn) -> Path | None:
        folder = self.default_root_dir / self.name
        before = slurm.checkpoint_before(folder) if fn == TrainerFn.FITTING else None
        if before is not None:
            rank_zero_info(f"SLURM: this job was requeued, and goes on from '{before}'.")
            return before
        if ckpt_path != "last":
            return None if ckpt_path is None else Path(ckpt_path)
        found = run_folder.last_checkpoint(folder)
        if found is None and fn != TrainerFn.FITTING:
            raise ConfigurationError(f"ckpt_path: there is no last.ckpt under '{folder}'.")
        if found is None:
            rank_zero_info(f"No last.ckpt under '{folder}': starting at round 0.")
        return found

    def _run(self, model: LightningModule, datamodule: FederatedDataModule, algorithm: FederatedAlgorithm,
             ckpt_path: str | os.PathLike | None, task: Task | None) -> None:  # fmt: skip
        """Set up and restore in this process, then run the task, or else train or evaluate."""
        path = self._fabric.broadcast(self._resolve(ckpt_path, self.state.fn))
        self.seed = global_seed() if self._seed is None else self._seed
        own = model.configure_callbacks()
        own = [own] if isinstance(own, AnyCallback) else list(own)
        check_callbacks(own)
        self.hooks = Hooks(self, model, [*self.callbacks, *own])
        previous = getattr(self, "federation", None)
        self.datamodule = datamodule
        run = None if path is None else run_folder.run_of(path)
        if run is not None and self.state.fn == TrainerFn.FITTING and self._fabric.is_global_zero:
            self.run_lock.take(run)  # first: another process could replace the checkpoint while this one reads it
        saved = None if path is None else checkpoint.load(path)
        fitting = self.state.fn == TrainerFn.FITTING
        stage = STAGES[self.state.fn]
        engine = self.engine
        if engine == "auto" and (saved is not None or not fitting):  # a run keeps the engine it chose
            engine = saved[checkpoint.KEY]["settings"]["trainer.engine"] if saved is not None else "sequential"
        is_of_last_run = previous is not None and previous.user.module is model
        with preserved_globals(self._fabric.device), _left_on_the_cpu(model):
            self._set_up(model, datamodule, algorithm, stage, engine, saved)
            try:
                if saved is not None:
                    self._restore(saved, path)
                elif not fitting and previous is not None and is_of_last_run:
                    checkpoint_content.adopt(self.federation, previous)
                    self.show_federation()
                elif not fitting:
                    rank_zero_info("No ckpt_path: the model is evaluated as it is, and stands for every client's too.")
                if task is not None:
                    self.result = task(self, path)
                elif fitting:
                    RoundLoop(self, path).run()
                    self.result = None
                else:
                    self.result = self._evaluate_only(stage, is_of_run=saved is not None or is_of_last_run)
            finally:
                self.user.detach()
                self.hooks.call("teardown", stage)
                datamodule.teardown(stage)

    def _set_up(self, model: LightningModule, datamodule: FederatedDataModule, algorithm: FederatedAlgorithm,
                stage: str, engine: Literal["sequential", "vectorized", "auto"],
                saved: dict[str, Any] | None) -> None:  # fmt: skip
        fabric = self._fabric
        self.shim = ModuleTrainer(
            max_rounds=self.max_rounds, current_round=0, datamodule=datamodule, logger=None, loggers=[],
            callback_metrics={}, callbacks=self.callbacks, is_global_zero=fabric.is_global_zero,
            # One process trains a client, so world_size is 1; the rank lets a module print or write on rank 0 only.
            global_rank=fabric.global_rank, local_rank=fabric.local_rank, world_size=1, num_nodes=1, num_devices=1,
            progress_bar_callback=None, precision=self.precision,
            default_root_dir=str(self.default_root_dir), log_dir=None,
            accumulate_grad_batches=self.local.accumulate_grad_batches,
            gradient_clip_val=self.local.gradient_clip_val,
            gradient_clip_algorithm=self.local.gradient_clip_algorithm,
        )  # fmt: skip
        self.shim.show_module(model, self, fabric)
        datamodule.trainer = self.shim  # type: ignore[assignment]
        if fabric.local_rank == 0:
            datamodule.prepare_data()
            model.prepare_data()
        fabric.barrier()
        datamodule.set_up(stage, saved)
        datamodule.validate_clients()
        model._trainer = self.shim  # type: ignore[assignment]
        model.setup(stage)
        self.hooks.call_module("configure_sharded_model")  # its older name, which Lightning calls, too
        model.configure_model()
        self.user = UserModule(model, fabric, self.hooks, self.shim, datamodule)
        self.user.attach()
        participation = Participation(
            datamodule, algorithm, self.local, self.sampler, self.clients_per_round, self.stragglers, self.seed
        )
        client_dtype = None if self.client_dtype is None else getattr(torch, self.client_dtype)
        self.federation = Federation(
            fabric, self.user, datamodule, algorithm, self.local, participation, self.buffers, self.keep_local_models,
            client_dtype, engine, self.max_rounds, self.seed,
        )  # fmt: skip
        self.layout = self.federation.layout
        self.evaluator = Evaluator(fabric, self.federation.engine, datamodule, self.eval_clients, self.seed)
        self.show_federation()
        if stage == "fit":
            check_what_schedulers_monitor(self)

    def show_federation(self) -> None:
        """Take over the federation's server, clients and engine, which it may have replaced by new ones."""
        self.server, self.clients = self.federation.server, self.federation.clients
        self.evaluator.engine = self.federation.engine

    def _restore(self, saved: dict[str, Any], path: Path | None) -> None:
        ours = saved[checkpoint.KEY]
        state = ours["federation"]
        checkpoint_content.prepare_for(self.federation, state, path or "")
        self.show_federation()
        self.user.module.on_load_checkpoint(saved)
        rows_path = None if path is None else path.with_name(row_file.NAME)
        checkpoint_content.load_state(self.federation, state, saved["state_dict"], path, rows_path)
        self.current_round = self.finished_round = ours["round"]
        self.should_stop = ours["should_stop"] and self.max_rounds <= ours["max_rounds"]
        self.saved_rows = ours.get("rows", {})
        if self.state.fn == TrainerFn.FITTING and not self._takes_other_seed:
            refuse_other_seed(ours["settings"], self.seed, path)
        warn_of_other_settings(ours["settings"], settings(self))
        self.callback_metrics = {name: torch.tensor(value) for name, value in ours["callback_metrics"].items()}
        for callback in self.hooks.callbacks:
            callback.on_load_checkpoint(self, self.user.module, saved)  # type: ignore[arg-type]
            if callback.state_key in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][callback.state_key])

    def has_split(self, split: str) -> bool:
        """Return whether there is data of the split, of any client or shared by all."""
        return bool(self.datamodule.num_samples(split).any()) or self.datamodule.pooled_dataset(split) is not None

    def evaluate(self, splits: list[str], round: int) -> Evaluation:
        """Evaluate the staged models on splits that exist; the module holds z again afterwards."""
        federation = self.federation
        evaluation = self.evaluator.run(splits, federation.models(), round)
        federation.load_global()
        return evaluation

    def _evaluate_only(self, stage: str, *, is_of_run: bool) -> dict[str, float]:
        split = "val" if stage == "validate" else "test"
        name: Literal["validation", "test"] = "validation" if stage == "validate" else "test"
        if not self.has_split(split):
            raise ConfigurationError(
                f"data: there is no validation data; {how_to_validate(self.datamodule, is_of_run=is_of_run)}."
                if split == "val" else "data: there is no test data to evaluate on."
            )  # fmt: skip
        self.shim.set(current_round=self.current_round)
        self.hooks.call_callbacks("setup", stage)
        self.evaluation = evaluate_with_hooks(self, [split], self.current_round, name)
        self.callback_metrics = {key: torch.tensor(value) for key, value in self.evaluation.metrics.items()}
        self.hooks.call(f"on_{name}_end")
        self.hooks.call_module(f"on_{name}_model_train")
        return self.evaluation.metrics


@contextmanager
def _left_on_the_cpu(model: LightningModule) -> Iterator[None]:
    """Move the model to the CPU at the end of the context, where ``lightning.Trainer`` leaves it, too."""
    try:
        yield
    finally:
        model.cpu()


def _run_in_process(fabric: Fabric, trainer: FederatedTrainer, result: Path | None, *arguments: Any) -> None:
    """Run the trainer in one of the launched processes.

    Args:
        fabric: Fabric of this process, which has been launched.
        trainer: Trainer of this process.
        result: File to which rank 0 writes its result for a caller that does not train itself; None: there is none.
        *arguments: Arguments of :meth:`FederatedTrainer._run`.
    """
    trainer._fabric = fabric
    alike = determinism.deterministic_algorithms(trainer.deterministic)
    told = missing_kernels_told(trainer.precision)
    lifeline = Lifeline(fabric, lambda: trainer.current_round).held(trainer.how_to_resume)
    with lifeline, slurm.requeued(trainer), told, alike, quiet_event_writers(), RunLock() as trainer.run_lock:
        trainer._run(*arguments)
    if result is not None and fabric.is_global_zero:
        leave(trainer, result)
