"""FederatedTrainer fits, validates and tests any LightningModule on many clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.checks import knows_arguments
from fedbc_lightning.core.clients import find_clients
from fedbc_lightning.core.devices import prepare_deterministic
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import AnyPath
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.data import SitesDataModule
from fedbc_lightning.federation.facts import ask_for_facts
from fedbc_lightning.module.adapter import check_module, forget_hooks, unwrapped
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.planning import Plan, make_plan
from fedbc_lightning.run.beginning import begin, prepare
from fedbc_lightning.run.evaluation_hooks import evaluate_once
from fedbc_lightning.run.folder import run_of
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.processes import run_in_processes
from fedbc_lightning.run.round_loop import RoundLoop
from fedbc_lightning.run.run import Request, Run
from fedbc_lightning.run.run_record import FitResult
from fedbc_lightning.run.run_writer import Recorder
from fedbc_lightning.run.set_up import make_shim, set_up
from fedbc_lightning.run.settings import RunSettings, with_arguments_of
from fedbc_lightning.run.trained_model import check_out, export, predict, write_predictions
from fedbc_lightning.run.trainer_attributes import RunView
from fedbc_lightning.trainer.arguments import (
    as_datamodule,
    callbacks_of_settings,
    check_algorithm,
    with_callbacks_of,
)
from fedbc_lightning.trainer.client_round import ClientRound, WorkerMaker, worker_settings
from fedbc_lightning.trainer.verification import verify

Data = LightningDataModule | Mapping[str, Any]

# Modules that a run of this process has trained
_TRAINED: WeakSet[LightningModule] = WeakSet()


class FederatedTrainer(RunView):
    """Trains a LightningModule on the clients of a FederatedDataModule with a federated algorithm.

    Names follow ``lightning.Trainer`` wherever the meaning is the same.

    Raises:
        ConfigurationError: Some values are impossible; the message names all of them.

    Example:
        >>> trainer = FederatedTrainer(max_rounds=2, clients_per_round=0.5, local_epochs=1)
        >>> trainer.max_rounds
        2
    """

    _given: tuple[Any, Any] = None, None  # data and algorithm of the last run

    @with_arguments_of(RunSettings)
    def __init__(self, settings: RunSettings) -> None:
        prepare_deterministic(settings.deterministic)
        super().__init__(settings)
        self.callbacks = callbacks_of_settings(settings)

    # what users call

    @knows_arguments
    def fit(
        self,
        model: LightningModule,
        datamodule: Data | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: AnyPath | None = None,
        other_seed: bool = False,
        strict: bool = False,
    ) -> FitResult:
        """Train the model on the clients; it holds z afterwards.

        Args:
            model: Any LightningModule with automatic optimization.
            datamodule: A FederatedDataModule; wrap any other in PartitionedDataModule. A dict from the clients' names
                to their data is ``SitesDataModule(dict)``; where all of them are Datasets, or DataLoaders of such,
                0.2 of each client's samples are its test data.
            algorithm: The federated algorithm, e.g. ``FedBC(dual_lr=1e-3)``.
            ckpt_path: Checkpoint from which to resume as if the run had never stopped; ``last``: that of this run, as
                settings and partition tell it; if there is none, a warning says so and a new run starts. None: start
                a new run.
            other_seed: Whether the run may resume with another seed than that of the checkpoint. The later rounds are
                then not those of an uninterrupted run, so it is an error otherwise.
            strict: Whether it is an error, and not a warning, if settings, data, the code of model, data or method, or
                the version of torch are not those of the checkpoint.

        Returns:
            What the run has recorded: tables, the best round, paths, and a plot. After Ctrl-C, ``trainer.result`` is
            that of the rounds that were finished.

        Raises:
            ConfigurationError: A setting cannot be honoured.
        """
        return self._launch(TrainerFn.FITTING, model, datamodule, algorithm, ckpt_path, self._train, other_seed, strict)

    @knows_arguments
    def validate(
        self,
        model: LightningModule,
        datamodule: Data | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: AnyPath | None = None,
    ) -> dict[str, float]:
        """Evaluate the global and local models on the validation data; see :meth:`fit` for the arguments.

        Data and algorithm are those of this trainer's last run where they are left out; :meth:`test`, :meth:`predict`
        and :meth:`export` do the same.

        Returns:
            The metrics by name, as in ``metrics.csv``.
        """
        return self._launch(TrainerFn.VALIDATING, model, datamodule, algorithm, ckpt_path, evaluate_once)

    @knows_arguments
    def test(
        self,
        model: LightningModule,
        datamodule: Data | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: AnyPath | None = None,
    ) -> dict[str, float]:
        """Evaluate the global and local models on the test data; see :meth:`fit` for the arguments.

        Returns:
            The metrics by name, as in ``metrics.csv``.
        """
        return self._launch(TrainerFn.TESTING, model, datamodule, algorithm, ckpt_path, evaluate_once)

    @knows_arguments
    def predict(
        self,
        model: LightningModule,
        datamodule: Data | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: AnyPath | None = None,
        dataloaders: Iterable[Any] | None = None,
        client: str | int | None = None,
        out: AnyPath | None = None,
        force: bool = False,
    ) -> list[Any]:
        """Run ``predict_step`` of the global model, or of a client's own, over batches; see :meth:`fit`.

        Each process of ``devices`` predicts on all batches, and one writes the files. Give ``devices=1``, which
        ``fedbc-cli predict`` takes by itself.

        Args:
            model: The LightningModule, as for :meth:`fit`.
            datamodule: The FederatedDataModule, as for :meth:`fit`.
            algorithm: The federated algorithm, as for :meth:`fit`.
            ckpt_path: Checkpoint whose models are used, or ``last``; None: those of this trainer's last run with the
                model, or else the model as it is.
            dataloaders: A DataLoader; None: ``predict_dataloader`` of the data module or the model, where one is
                overridden, else the test data of the client, or of all clients.
            client: Client whose own model is used, as for :meth:`export`; None: the global model.
            out: Folder for files such as ``round_50_client_3.pt``, of which ``torch.load`` gives ``client`` (its name,
                or its number where clients have no names) and ``predictions`` (the list) in a dict; None: the
                predictions are returned. Where neither ``client`` nor data to predict on are given, each client's test
                data have a file of their own there, and are given to its own model where the method has such (a head
                or buffers of its own count, too).
            force: Whether existing files are overwritten.

        Returns:
            The values that ``predict_step`` returned, one per batch, on the CPU; with ``out`` the files.

        Raises:
            ConfigurationError: The client or the model does not exist, or there is nothing to predict on.
        """
        task = partial(predict, client=client, dataloaders=dataloaders)
        if out is not None:
            task = partial(write_predictions, client=client, dataloaders=dataloaders, out=Path(out), force=force)
        return self._launch(TrainerFn.PREDICTING, model, datamodule, algorithm, ckpt_path, task)

    @knows_arguments
    def export(
        self,
        model: LightningModule,
        datamodule: Data | None = None,
        algorithm: FederatedAlgorithm | None = None,
        ckpt_path: AnyPath | None = None,
        client: str | int | None = None,
        out: AnyPath | None = None,
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
            client: Client whose own model is written: a name in ``partition.json``, or else a number from 0 to N - 1;
                None: the global model.
            out: File to write; None: a file beside the checkpoint, e.g. ``round_50_client_17.ckpt``. A name that ends
                in ``.safetensors`` gives the tensors alone; one without a dot, if the module has a ``PeftModel``, a
                folder with the adapter for ``PeftModel.from_pretrained``.
            force: Whether an existing file is overwritten.

        Returns:
            The path of the file.

        Raises:
            ConfigurationError: The client or the model does not exist, or the file cannot be written.
        """
        file, ckpt_path = None if out is None else Path(out), "last" if ckpt_path is None else ckpt_path
        if file is not None:
            check_out(file, force=force)
        task = partial(export, client=client, out=file, force=force)
        return self._launch(TrainerFn.TESTING, model, datamodule, algorithm, ckpt_path, task)

    @knows_arguments
    def verify(
        self,
        model: LightningModule,
        datamodule: Data,
        algorithm: FederatedAlgorithm,
        ckpt_path: AnyPath,
        client: str | int,
        round: int,
    ) -> str:
        """Work a client's round out again from the messages that a backend with ``keep_messages`` has kept.

        Args:
            model: The LightningModule, as for :meth:`fit`.
            datamodule: The FederatedDataModule, as for :meth:`fit`.
            algorithm: The federated algorithm, as for :meth:`fit`.
            ckpt_path: A checkpoint of the run (on the command line also its folder).
            client: The client: a name, or else a number from 0 to N - 1.
            round: The round.

        Returns:
            A line that says how the answer agrees with what the client has sent: bit for bit, or how well.

        Raises:
            ConfigurationError: There are no such messages, or the client has sent something else.
        """
        data = as_datamodule(datamodule, model)
        folder = run_of(Path(ckpt_path))
        if folder is None:
            raise ConfigurationError(f"ckpt_path: '{ckpt_path}' is in no run folder, which has the messages.")
        with preserved_globals(self._fabric.device):
            worker = ClientRound(model, data, algorithm, self.settings)
            try:
                names = worker.federation.datamodule.client_names
                (number,) = find_clients([client], worker.federation.datamodule.num_clients, names, "client")
                return verify(worker, folder, number, round)
            finally:
                worker.close()

    @knows_arguments
    def plan(
        self,
        model: LightningModule,
        datamodule: Data | None = None,
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
        RunView.__init__(alone, replace(settings, strategy="auto", devices=devices, num_nodes=1))
        task = partial(make_plan, num_processes=num_processes, started=started)
        return alone._launch(TrainerFn.FITTING, model, datamodule, algorithm, None, task)

    # the run

    def _launch(
        self,
        fn: TrainerFn,
        model: Any,
        datamodule: Any,
        algorithm: Any,
        ckpt_path: AnyPath | None,
        task: Callable[[Run], Any],
        takes_other_seed: bool = False,
        is_strict: bool = False,
    ) -> Any:
        """Run a task in all processes, and return its result."""
        if fn != TrainerFn.FITTING:  # as lightning.Trainer, whose other verbs find the data of its fit
            given = zip((datamodule, algorithm), self._given, strict=True)
            datamodule, algorithm = (last if mine is None else mine for mine, last in given)
        # Before anything is started or written: a mistake in what is given costs no process and no folder.
        model = unwrapped(model)
        check_module(model)
        datamodule = as_datamodule(datamodule, model)
        check_algorithm(algorithm)
        self._given = datamodule, algorithm
        request = Request(fn, model, datamodule, algorithm, ckpt_path, task, takes_other_seed, is_strict)
        if fn == TrainerFn.FITTING or ckpt_path is not None:
            forget_hooks(model, is_restored=ckpt_path is not None)
        # Lightning's callbacks ask trainer.state.fn whether they see a fit.
        self.state.fn = fn
        self.progress = self.progress.of_next_run()
        if fn == TrainerFn.FITTING and ckpt_path is None and model in _TRAINED:
            rank_zero_info(
                "model: an earlier run has trained this object, and this run starts at the weights that it holds now. "
                "Make a new one to train from its initial weights; to go on with the earlier run, give its ckpt_path."
            )
        with self._backend_open(request):
            result, outcome = run_in_processes(self, self._fabric, request, self._perform)
        if outcome is None:
            return result
        if fn == TrainerFn.FITTING:
            _TRAINED.add(model)
        self._run, self._outcome, self.progress = None, outcome, outcome.progress
        return outcome.result

    @contextmanager
    def _backend_open(self, request: Request) -> Iterator[None]:
        """Let the backend, if there is one, have the module, data and method as they were given."""
        backend = self.settings.chosen_backend if request.fn == TrainerFn.FITTING else None
        if backend is None:
            yield
            return
        given = request.model, request.datamodule, request.algorithm
        make_worker = WorkerMaker(ClientRound, *given, worker_settings(self.settings))
        backend.open(make_worker)
        make_worker.has_begun = True
        try:
            if isinstance(request.datamodule, SitesDataModule) and request.datamodule.elsewhere:
                if request.algorithm.trains_pooled:
                    raise ConfigurationError(
                        f"algorithm: {request.algorithm} trains on the data of all clients in one place, and those of "
                        "data.train are elsewhere; take FedAvg, FedBC, ..."
                    )
                ask_for_facts(backend, request.datamodule)
            yield
        finally:
            backend.close()

    def _perform(self, request: Request, lock: RunLock) -> tuple[Run, Any]:
        """Set a run up in this process and do its task; return both the run and the result."""
        settings, fabric, model = self.settings, self._fabric, request.model
        shim = make_shim(self, fabric, request)
        hooks = Hooks(shim, model, with_callbacks_of(model, self.callbacks))
        shim.set(callbacks=hooks.callbacks)
        with preserved_globals(fabric.device), ExitStack() as at_the_end:
            at_the_end.callback(model.cpu)  # where lightning.Trainer leaves it, too
            identity, beginning = prepare(request, settings, fabric, lock, self._run)
            run = self._run = set_up(request, settings, fabric, hooks, self.progress, lock, identity, beginning)
            at_the_end.callback(run.tear_down)
            begin(run, beginning, request)
            return run, request.task(run)

    def _train(self, run: Run) -> FitResult:
        """Train a run that was set up for :meth:`fit`."""
        self._recorder = Recorder(run)
        _TRAINED.add(run.user.module)
        RoundLoop(run, self._recorder).run()
        return self._recorder.result()
