"""The clients' half of rounds, elsewhere: a function from the server's messages to those of the clients."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from functools import partial
from hashlib import sha256

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.devices import prepare_deterministic
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import derive, global_seed, seed_globals
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.federation import checkpoint_content, worker
from fedbc_lightning.federation.agreement import form
from fedbc_lightning.federation.expected import check_down, check_start, check_values
from fedbc_lightning.federation.facts import facts_of
from fedbc_lightning.federation.hook_writes import kept_from_start_hooks
from fedbc_lightning.federation.kept_rows import keep_rows, rows_before
from fedbc_lightning.federation.messages import Down, Measured, RoundStart, Up, decode, encode, hash_of
from fedbc_lightning.module.adapter import plain_attributes, put_plain_attributes
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.run.beginning import Beginning, set_data_up
from fedbc_lightning.run.identity import Identity, settings_of
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run import Request
from fedbc_lightning.run.set_up import make_shim, set_up
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.run.trainer_attributes import RunView
from fedbc_lightning.trainer.arguments import check_callbacks, with_callbacks_of


def worker_settings(settings: RunSettings) -> RunSettings:
    """Return the settings of a run as its workers have them: its seed, one process, nothing written or shown."""
    seed = global_seed() if settings.seed is None else settings.seed
    # Where vectors stay with the clients, server and clients declare the same state for that.
    backend = settings.chosen_backend if settings.keeps_rows else None
    return replace(
        settings, seed=seed, backend=backend, devices=1, num_nodes=1, strategy="auto", max_restarts=0, logger=False,
        enable_progress_bar=False,
    )  # fmt: skip


class WorkerMaker(partial["ClientRound"]):
    """Makes workers from module, data and method as they were given: once a run has begun on these, a copy does."""

    has_begun = False

    def __call__(self) -> ClientRound:
        """Make a worker."""
        if self.has_begun:
            raise ConfigurationError(
                "trainer.backend: the run has begun on the module of which open was given a maker; let open keep "
                "copy.deepcopy(make_worker), and call that."
            )
        return super().__call__()


class ClientRound(RunView):
    """Trains and evaluates clients as messages of a server ask for, with the user's module, data and method.

    What it answers is a function of the messages, with the bits that :meth:`FederatedTrainer.fit` has: module, data
    and method are those of the server's run, and so are all settings but those of devices, loggers and backends.

    Args:
        model: The user's module, as it is given to ``fit``.
        datamodule: The data.
        algorithm: The method.
        settings: The settings of the run.

    Attributes:
        rows: What clients keep of their vectors where these stay with them, by the client's number as text; give it
            another mapping for what is to outlive this process.
    """

    is_global_zero = False  # as a process beside the first one: callbacks write no files of the run here

    def __init__(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        algorithm: FederatedAlgorithm,
        settings: RunSettings,
    ) -> None:
        settings = worker_settings(settings)
        seed = settings.seed or 0
        prepare_deterministic(settings.deterministic)
        super().__init__(settings)
        fabric, self.state.fn = self._fabric, TrainerFn.FITTING
        fabric.launch()
        request = Request(TrainerFn.FITTING, model, datamodule, algorithm, None, lambda run: None)
        shim = make_shim(self, fabric, request)
        self.callbacks = with_callbacks_of(model, check_callbacks(settings.callbacks))
        hooks = Hooks(shim, model, self.callbacks)
        shim.set(callbacks=hooks.callbacks)
        seed_globals(derive(seed, "init"), fabric.device)
        self.progress.loggers = [DummyLogger()]  # for steps that draw on self.logger.experiment
        set_data_up(request, fabric, None)
        identity = Identity(settings_of(model, datamodule, algorithm, settings, seed), "", {}, {}, {})
        run = self._run = set_up(
            request, settings, fabric, hooks, self.progress, RunLock(), identity, Beginning(None, None, None)
        )
        with kept_from_start_hooks(run.federation, is_resumed=False):
            hooks.call("on_fit_start")
            hooks.call("on_train_start")
        layout = run.federation.layout
        self._initial, self._frozen, self._hashes = layout.weights(), layout.frozen.copies(), layout.frozen.hashes()
        self._form, self._attributes = form(run.federation, self._hashes), plain_attributes(model)
        self.rows: MutableMapping[str, bytes] = {}
        self._round: RoundStart | None = None
        self._has_trained = False
        self._decoded: tuple = (b"",)

    def work(self, start: RoundStart, down: Down) -> Up | Measured:
        """Train the clients of a message, or evaluate the global model and own models of theirs.

        Args:
            start: What the server sends to all clients of a round or an evaluation.
            down: What it sends to these clients.

        Returns:
            What they send to the server. Its tensors are valid until the next call.

        Raises:
            MessageError: The messages are of another run, or a field cannot be what it is.
        """
        federation, run = self.federation, self._run
        assert run is not None
        if start is not self._round:
            self._agree(start)
            self._begin(start)
        check_down(down, federation, start.task)
        down = rows_before(self.rows, federation.clients, self._form, down)
        if start.task == "evaluate":
            return worker.evaluate(federation, run.evaluator, run.splits, start, down)
        self._has_trained = True
        up = worker.work(federation, down)
        if up.written:
            federation.layout.frozen.put_back(self._frozen)
        return keep_rows(self.rows, federation.clients, self._form, start.round, down, up) if down.taken else up

    def _begin(self, start: RoundStart) -> None:
        """Begin a round or an evaluation; if it is refused, so is every message of it."""
        federation, progress = self.federation, self.progress
        progress.current_round, progress.finished_round = start.round, max(0, start.round - 1)
        if self._has_trained:
            federation.layout.frozen.hashes()  # as before each last.ckpt, raises if a step has written large ones
        self._has_trained = False
        seed_globals(derive(self.settings.seed or 0, "round", start.round), federation.user.device)
        checkpoint_content.put_back(federation, start.hooks)
        federation.bench.start_round(start.round, start.grad_scale, start.learning_rates)
        if start.task == "train":
            worker.take_start(federation, start)
        self._round = start

    def _agree(self, start: RoundStart) -> None:
        """Take over by which engine and with which buffers clients train; raise unless all else fits this worker."""
        self._round = None  # what is refused may have changed buffers: the next message begins its round anew
        federation, layout = self.federation, self.federation.layout
        check_start(start, federation)
        has_other_buffers = (start.written, start.changing) != (layout.written, layout.changing)
        # A message of another run, or of one whose clients have found more that training writes.
        if start.round < self.progress.current_round or has_other_buffers:
            federation.begin_anew(self._initial, self._frozen)
            put_plain_attributes(federation.user.module, self._attributes, are_all=True)
            federation.take_as_changing(start.changing)
            federation.take_as_buffers(start.written)
        check_values(start, federation, form(federation, self._hashes))
        federation.take_engine(*start.engine)  # after the rest, so that it is never that of another run

    def answer(self, start: bytes, down: bytes) -> bytes:
        """Do :meth:`work` with messages as bytes; without a first message, tell facts about the clients' data."""
        if not start:
            asked = decode(down, Down, partial(check_down, federation=self.federation, task=None))
            return encode(facts_of(self.federation.datamodule, asked.clients))
        # A round has one start for many messages: it is read once.
        if start != self._decoded[0]:
            self._decoded = start, decode(start, RoundStart, self._agree), sha256(start)
        _, begun, started = self._decoded
        asked = decode(down, Down, partial(check_down, federation=self.federation, task=begun.task))
        return encode(replace(self.work(begun, asked), answers=hash_of(down, started)))

    def close(self) -> None:
        """Call the hooks ``teardown``, and give the module back."""
        if self._run is not None:
            self._run.tear_down()
