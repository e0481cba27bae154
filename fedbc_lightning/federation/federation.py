"""The federation: server, clients and engine of one run, and the round that they take part in."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.metric_names import Metrics
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.datamodule import POOLED
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.engines import choice
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.evaluation.measurement import Models
from fedbc_lightning.federation import round_results as results
from fedbc_lightning.federation import user_methods as methods
from fedbc_lightning.federation.channel import Channel, Exchange
from fedbc_lightning.federation.kept_rows import TAKEN
from fedbc_lightning.federation.local_models import LocalModels, check_kept_parameters
from fedbc_lightning.federation.participation import Participants, deal, paces_after
from fedbc_lightning.federation.simulation import Simulation
from fedbc_lightning.module import schedulers
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.kept_parameters import kept_names
from fedbc_lightning.server import Sums
from fedbc_lightning.server.aggregation import AveragedBuffers
from fedbc_lightning.server.arrived_updates import forget_lost
from fedbc_lightning.state import BufferPolicy, ClientStore, Cohort, ServerState, Weights, WrittenParametersError
from fedbc_lightning.state.declaration import Record


class PlannedRound(NamedTuple):
    """What a round does if every loss is finite.

    Attributes:
        sampled: Indices of the clients that receive z.
        ids: Indices of the clients that train.
        steps: Number of local steps of each client in ``ids``.
        bytes_down: Bytes that all sampled clients together receive.
        bytes_up: Bytes that all clients in ``ids`` together send.
        ended: Simulated seconds from the start of the run to the end of the round; None without a simulated clock.
    """

    sampled: list[int]
    ids: list[int]
    steps: list[int]
    bytes_down: int
    bytes_up: int
    ended: float | None


class Federation:
    """Holds everything that a round reads or writes; a round is staged and then committed as a whole.

    Args:
        fabric: The Fabric, after its launch.
        user: The user's module, moved to its device and converted to its precision.
        datamodule: The data module, after its set-up.
        algorithm: The method.
        simulation: Draws the participants of rounds.
        buffers: Policy for buffers.
        keep_local_models: Whether every client's last w_i is kept if the method keeps no local model; None keeps them
            if all of them together take at most 64 MiB.
        client_dtype: Dtype in which the clients' vectors are kept; None takes the dtype of z.
        engine: The engine that does local training; ``"auto"`` takes the faster one.
        local_parameters: Patterns of the names of parameters that stay with each client.
        channel: What every message between clients and server passes.

    Attributes:
        server: :class:`~fedbc_lightning.state.declaration.ServerState`.
        clients: :class:`~fedbc_lightning.state.declaration.ClientStore`.
        layout: :class:`~fedbc_lightning.state.layout.ParameterLayout`.
        fingerprint: What must be equal for a checkpoint to be resumed.
        bench: The workbench of local steps.
        engine: Trains the clients on the workbench.
        engine_kind: Its kind.
        is_engine_by_rule: Whether ``engine: auto`` has chosen it.
        local_models: The clients' own models and buffers, as far as they are kept.
        server_parts: The algorithm's server callbacks, in order.
        channel: What every message between clients and server passes.
        agreed: Settings that servers and clients elsewhere must share, by name.
        train_elsewhere: Has the clients of a round trained in place of this process, if it is not None.
        is_shared_by_seconds: Whether processes share the clients of a round by how fast each was in the last one.
    """

    def __init__(
        self,
        fabric: Fabric,
        user: UserModule,
        datamodule: FederatedDataModule,
        algorithm: FederatedAlgorithm,
        simulation: Simulation,
        buffers: BufferPolicy,
        keep_local_models: bool | None,
        client_dtype: torch.dtype | None,
        engine: choice.Kind | Literal["auto"],
        local_parameters: Sequence[str],
        channel: Channel,
    ) -> None:
        self.fabric, self.user, self.datamodule, self.algorithm = fabric, user, datamodule, algorithm
        self.simulation, self.participation = simulation, simulation.participation
        self.local, self.channel = self.participation.local, channel
        self._num_samples = datamodule.num_samples("train")
        self.user.shim.leave_clients()
        # The clients get the optimizer itself; the schedulers that step once per round get a copy.
        configured, seed = schedulers.configure(user), self.participation.seed
        self.schedule = schedulers.RoundSchedulers(configured.copied())
        if self.local.schedule_rounds is not None:
            limits = self.local.limits(self.participation.most_batches)
            schedulers.check_schedules(user, configured, limits["max_epochs"], limits["estimated_stepping_batches"])
        kept = kept_names(user.module, local_parameters, buffers)
        self.bench = Workbench.of_module(user, configured, self.local, datamodule, seed, kept)
        self.layout = self.bench.layout
        self.bench.optimizer.learning_rates = self.schedule.learning_rates
        if kept:
            check_kept_parameters(algorithm, self.layout)
        # z⁰ is the model as the user made it, read before anything takes a step on the module.
        initial = self.layout.weights()
        self.is_engine_by_rule = engine == "auto"
        # By the expected number of clients per process: a Poisson sampler's own number depends on the seed.
        number = self.participation.num_sampled // fabric.world_size
        self.engine_kind: choice.Kind = choice.choose(self.bench, algorithm, number) if engine == "auto" else engine
        self.agreed: dict[str, Any] = {}
        self.train_elsewhere: Callable[[Participants, Tensor, list[str]], Iterator[Cohort]] | None = None
        self.is_shared_by_seconds, self._paces = False, [0.0] * fabric.world_size
        self._buffer_policy, self._client_dtype, self._keep_local_models = buffers, client_dtype, keep_local_models
        self._prepare(initial)

    def _prepare(self, initial: Weights) -> None:
        """Make the engine, the server parts and the declared state, which all depend on the layout."""
        algorithm = self.algorithm
        self.engine = choice.make_engine(self.engine_kind, self.bench, self.is_engine_by_rule)
        algorithm.check(self.engine)
        if algorithm.fine_tuning is not None:
            self.engine.check_losses(type(algorithm).__name__)
        # Everything below depends on the layout, which changes once if the first round writes frozen parameters
        # (take_as_buffers): then all of it is made again.
        self.server_parts = self.channel.server_parts(methods.server_parts(algorithm, self.engine), algorithm)
        # Behind the method's parts, because it steps in only where none of them has staged buffers for the new z.
        if self.layout.num_buffers and self._buffer_policy != "global":
            self.server_parts = [*self.server_parts, AveragedBuffers()]
        self._undeclared = methods.UndeclaredState(algorithm, self.server_parts)
        num_clients, size = self.datamodule.num_clients, initial.parameters.element_size()
        self.local_models = LocalModels(
            algorithm, self.layout, self._buffer_policy, self._keep_local_models, num_clients, size
        )
        declaration = methods.declare_state(algorithm, self.server_parts, self.engine, self.participation.num_sampled)
        # What a client keeps beside the method's state: its model, and where its own schedules stand.
        self._client_parts: list[Any] = [schedulers] if self.local.schedule_rounds is not None else []
        self._client_parts.append(self.local_models)
        for part in (*self._client_parts, self.simulation):
            part.declare(declaration)
        scaler = self.bench.scaler
        self.channel.open(
            Exchange(algorithm, self.server_parts, declaration, self.layout, self._buffer_policy, scaler is not None)
        )
        self.declaration = declaration
        self.make_state(initial)
        self.grad_scale = scaler.get_scale() if scaler is not None else 1.0
        self.simulation.start(self._costs)
        self.fingerprint = self._describe()

    def _describe(self) -> dict[str, Any]:
        """Return what must be equal in a checkpoint for this run to resume from it; this reads the whole partition."""
        datamodule, kept = self.datamodule, [entry.name for entry in self.layout.kept_entries]
        return {
            "model": self.layout.fingerprint(),
            "partition": {
                "number of clients": datamodule.num_clients,
                **{f"{s} samples": int(datamodule.num_samples(s).sum()) for s in ("train", "val", "test")},
                "sha256 of the indices": datamodule.partition_hash()[:16],
            },
            "algorithm": type(self.algorithm).__name__,
            "state": self.declaration.fingerprint(),
            **({"trainer.local_schedules": "continue"} if self.local.schedule_rounds is not None else {}),
            **self.channel.describe(),
            **({"trainer.local_parameters": ", ".join(kept)} if kept else {}),
        }

    def _costs(self, round: int, asked: list[int]) -> tuple[list[int], int, int]:
        """Return what a round costs a client, from (seed, round) alone."""
        server = self.server
        # The method may ask the server for its round (FedPD skips exchanges, L2GD throws its coins).
        present, server.round = server.round, round
        try:
            steps = (self.algorithm.num_steps(server, each) for each in asked)
            counts = [methods.checked_count(self.algorithm, "num_steps", each) for each in steps]
            return counts, *self._bytes_of_client()
        finally:
            server.round = present

    def _bytes_of_client(self) -> tuple[int, int]:
        """Return the bytes that each client receives in the server's round, and those that a message of it has."""
        algorithm, parts, size = self.algorithm, self.server_parts, self.server.z.element_size()
        num_parameters = self.layout.num_parameters
        buffers = self.server["buffers"].nbytes if self._buffer_policy == "average" else 0
        exchanges = 0
        if not algorithm.trains_pooled:
            exchanges = methods.checked_count(algorithm, "num_exchanges", algorithm.num_exchanges(self.server))
        first_down, first_up = self.channel.bytes(num_parameters, size)
        more_down = len(self.declaration.server_vectors.keys() & self.declaration.for_clients)
        more_up = algorithm.vectors_up - 1 + sum(part.vectors_up for part in parts)
        # Only the first vector passes the channel's codes, and it comes with the buffers; the others of a method
        # (SCAFFOLD's c) travel as they are.
        down = exchanges * (first_down + more_down * num_parameters * size + buffers)
        up = exchanges * (first_up + more_up * num_parameters * size + buffers + 4 * algorithm.scalars_up)
        return down, up

    def take_engine(self, kind: choice.Kind, is_by_rule: bool) -> None:
        """Train with an engine of this kind; call this before anything is trained.

        Raises:
            NotVectorizableError: That engine cannot train this module.
        """
        if (kind, is_by_rule) != (self.engine_kind, self.is_engine_by_rule):
            self.algorithm.check(choice.make_engine(kind, self.bench.renewed()))  # before anything changes
            self.engine_kind, self.is_engine_by_rule = kind, is_by_rule
            self._prepare_again(self.layout.weights())

    def take_as_buffers(self, names: Sequence[str]) -> None:
        """Treat frozen parameters that training writes as buffers, with their present values at server and clients.

        Rows of clients that lie in a file cannot be made longer: then call this before the first round is committed.
        """
        if not names:
            return
        server, clients, grad_scale = self.server, self.clients, self.grad_scale
        num_buffers, num_counters = server["buffers"].numel(), self.layout.num_counters
        self.layout.take_as_buffers([*self.layout.written, *names], self.layout.changing)
        buffers, more = self.layout.read_buffers(), self.layout.read_counters()[num_counters : self.layout.num_counters]
        buffers[:num_buffers] = server["buffers"]
        # Buffers whose shape changes lie behind the integer ones, and may be longer in the module.
        counters = torch.cat([server["counters"][:num_counters], more, server["counters"][num_counters:]])
        kept = self.layout.read_kept() if server.kept is None else server.kept
        self._prepare_again(Weights(server["z"], buffers, counters, kept))
        if server.round > 1:
            self.server.continue_from(server)
            self.clients.continue_from(clients, buffers[num_buffers:], more)
            self.grad_scale = grad_scale

    def take_as_changing(self, names: Sequence[str]) -> None:
        """Let the shapes of these buffers, which they have at present, change; call this before the first round ends.

        Raises:
            ConfigurationError: The clients' buffers are averaged, or a round is over.
        """
        if not names:
            return
        if self._buffer_policy == "average" or self.server.round > 1:
            when = f"for the first time in round {self.server.round}" if self.server.round > 1 else "in training"
            raise ConfigurationError(
                f"model: the shape or dtype of buffer '{names[0]}' changes {when}, so it has no mean over clients. Set "
                "trainer.buffers: local (each client keeps its own; let it change in the first round), register it "
                "with persistent=False (each client starts anew), or give it its last shape in __init__."
            )
        self.layout.take_as_buffers(self.layout.written, [*self.layout.changing, *names])
        self._prepare_again(self.layout.weights())

    def begin_anew(self, initial: Weights, frozen: dict[str, Tensor]) -> None:
        """Be as before the first round, when these were the initial model and ``FrozenParameters.copies``."""
        self.layout.take_as_buffers([], [])
        self.layout.write_buffers(initial.buffers, initial.counters)
        self.layout.take_as_buffers([], [])  # once more: what is counted are the buffers in their first shapes
        self._prepare_again(initial)
        self.layout.frozen.put_back(frozen)
        self.load_global()

    def _prepare_again(self, initial: Weights) -> None:
        self.bench = self.bench.renewed()
        self.make_state(initial)  # for whoever catches what an engine refuses below
        self._prepare(initial)

    def make_state(self, initial: Weights) -> None:
        """Make the state of server and clients anew, as before the first round, with this initial model."""
        self.server = ServerState(
            initial, self.declaration, self._buffer_policy, len(self.participation.clients), self.participation.seed
        )
        self.clients = ClientStore(self.datamodule.num_clients, self.declaration, initial, self._client_dtype)

    def run_round(self, round: int) -> Metrics:
        """Train the sampled clients and stage the next state; nothing is committed.

        Returns:
            The metrics of the round by name. The clients' rows are ``self.server.records``.

        Raises:
            ConfigurationError: The sampler returned impossible clients, or no client's loss and weights are finite.
            WrittenParametersError: A frozen parameter was written on some rank.
        """
        server = self.server
        server.round, server.metrics = round, {}
        self.user.shim.set(training=True)
        # S_t, and what each of them is asked to do; a function of (seed, round), the same on all ranks.
        participants = self.simulation.draw(round)
        self.simulation.stage(server, participants)
        self.start_local_steps(round)
        sums = Sums(self.user.device)
        # Each rank trains its share of S_t; the sums then are those of all ranks, in float64, so that z does not depend
        # on how many there are.
        trained = self._train_share(participants, sums)
        server.ids = participants.ids  # without those that were lost elsewhere
        if self.algorithm.buffer_size is not None:
            forget_lost(server, self.clients)
        server.records, counters = results.join_processes(self.fabric, trained, self.clients, sums)
        if server.buffer_policy != "global":
            server.stage("counters", counters)
        hides = self.channel.hides_participants
        needs_loss = not (hides or self.bench.optimizer.by_hand)
        results.check_records(server, self.algorithm, hides_participants=hides, needs_loss=needs_loss)
        # Before the parts run: those of asynchronous methods write weights into the rows of who arrives.
        results.record_arrivals(server, self._num_samples)
        # Whoever sees no noise in a round without clients would know that nobody took part.
        if server.ids or server.arrivals or hides:
            with self._rows_hidden():
                self.channel.receive(server, sums)
                methods.call_parts(self.server_parts, "on_aggregate", server, server, self.clients, sums)
                methods.call_parts(self.server_parts, "on_round_end", server, server, self.clients)
        results.record_missing(server, participants, self._num_samples)
        results.record_bytes(server, self.algorithm, *self._bytes_of_client())
        return results.round_metrics(server)

    def plan_round(self, round: int) -> PlannedRound:
        """Tell what a round will do; all of it is a function of (seed, round). The server is in that round afterwards.

        Args:
            round: Number of the round; the rounds are asked for in turn.
        """
        self.server.round = round
        drawn = self.simulation.draw(round)
        asked = self.participation.num_steps(drawn.ids, drawn.late)
        if self.algorithm.trains_pooled:
            asked = [self.local.num_steps(len(self.datamodule.client_train_dataloader(POOLED, seed=self.server.seed)))]
        steps, down, up = self._costs(round, asked)
        num_sent = len(drawn.ids if drawn.arrivals is None else drawn.arrivals)
        return PlannedRound(drawn.sampled, drawn.ids, steps, down * len(drawn.sampled), up * num_sent, drawn.ended)

    def start_local_steps(self, round: int, bench: Workbench | None = None) -> None:
        """Set a workbench, by default that of the run, to the rates and the scale of a round."""
        (bench or self.bench).start_round(round, self.grad_scale, self.schedule.learning_rates)

    def _train_share(self, participants: Participants, sums: Sums) -> results.TrainedShare:
        """Have this rank's clients of the round trained, here or elsewhere, and take what they send into the sums."""
        server, written = self.server, list[str]()
        counters, records = server["counters"].clone(), list[tuple[int, Record]]()
        # Once per round: a random code of z must be the same for all clients.
        received, started = self.channel.broadcast(server), time.perf_counter()
        for cohort in (self.train_elsewhere or self._train_here)(participants, received, written):
            self.take(cohort, sums)
            cohort.write_back(self.clients)
            records.extend(zip(cohort.positions, cohort.records, strict=True))
            if counters.numel() and cohort.valid.any():
                # Integer buffers count batches; their mean has no meaning, and the maximum needs no weights.
                some = slice(self.layout.num_counters)
                counters[some] = torch.maximum(counters[some], cohort.of_valid(cohort.counters)[:, some].amax(dim=0))
            del cohort  # its vectors of d numbers would stay in memory until the next one has trained
        if self.is_shared_by_seconds:
            taken = time.perf_counter() - started, sum(record["num_steps"] for _, record in records)
            self._paces = paces_after(self._paces, gather_objects(self.fabric, taken))
        return results.TrainedShare(records, counters, list(dict.fromkeys(written)))

    def _train_here(self, participants: Participants, received: Tensor, written: list[str]) -> Iterator[Cohort]:
        """Train this rank's clients of the round, cohort by cohort; some of them train for less than the others.

        Args:
            participants: The clients of the round.
            received: The z (d,) that they have received.
            written: Names of the frozen parameters that they write are added to it, for all ranks to hear of.
        """
        server, late, there = self.server, participants.late, participants.positions
        share = deal(self.participation.num_steps(server.ids), self._paces)[self.fabric.global_rank]

        def trained(positions: list[int]) -> Cohort:
            ids = [server.sampled[position] for position in positions]
            cohort = self.make_cohort(ids, positions, late.get(ids[0]))
            # The method's terms refer to the z that the client knows, not to the server's exact one.
            with self.channel.received(server, received):
                self.train_clients(cohort)
            return cohort

        return self.noting_writes(map(trained, self.cohorts([there[k] for k in share], late)), len(share), written)

    def cohorts(self, positions: Sequence[int], late: Collection[int]) -> list[list[int]]:
        """Return the clients of the round that are trained together, by their places among those that are sampled.

        Args:
            positions: Places of the clients that are asked for.
            late: The clients that train for less than the others.
        """
        ids = self.server.sampled
        # A straggler takes fewer steps than a cohort could share, and the pooled data has a loader of its own.
        alone = {position for position, client in enumerate(ids) if client in late or client == POOLED}
        return self.engine.group(positions, self.participation.num_steps(ids), alone)

    def noting_writes(self, trained: Iterator[Any], num_clients: int, written: list[str]) -> Iterator[Any]:
        """Pass on what trains clients of the round in this process; add the frozen parameters it writes to a list."""
        self.bench.work.start_round(num_clients)
        if self.server.round == 1:
            self.user.shim.reads.clear()
        self.engine.start_round()
        try:
            self.layout.check_trainable(f"a hook before round {self.server.round}")
            yield from trained
            self.layout.check_trainable(is_round_over=True)
        except WrittenParametersError as error:
            written += error.names

    def train_clients(self, cohort: Cohort) -> None:
        """Do the clients' half of a round: train a cohort, stage what it keeps, and replace its w by what it sends."""
        server = self.server
        with methods.trained(self.algorithm, cohort, server.round):
            self.algorithm.client_update(self.engine, cohort, server)
        for part in self._client_parts:
            part.end(cohort)
        methods.call_parts(self.server_parts, "on_client_end", server, cohort, server)
        cohort.check_finite()
        # Behind the stores: a client keeps the model that it has trained, not what the server reads of it.
        self.channel.send(cohort, server)

    def take(self, cohort: Cohort, sums: Sums) -> None:
        """Do the server's half with what a cohort has sent: work out its scalars, and add it to the round's sums."""
        self.channel.read(cohort, self.server)
        for record, is_valid in zip(cohort.records, cohort.valid.tolist(), strict=True):
            record["status"] = "ok" if is_valid else "nonfinite"
        with self._rows_hidden():
            methods.call_parts(self.server_parts, "on_cohort_end", self.server, cohort, self.server, sums)
        # A scalar is a column of clients.csv; that of an invalid client is the value it keeps.
        is_all_valid = cohort.is_all_valid
        for name in self.clients.scalar_names:
            staged = cohort.staged(name)
            cohort.record(name, staged if is_all_valid else torch.where(cohort.valid, staged, cohort[name]))

    @contextmanager
    def _rows_hidden(self) -> Iterator[None]:
        """Refuse in this context that the server reads or writes vectors of clients that it does not have."""
        self.clients.are_rows_elsewhere = TAKEN in self.clients.scalar_names
        try:
            yield
        finally:
            self.clients.are_rows_elsewhere = False

    def sizes(self, clients: list[int]) -> list[int]:
        """Return the numbers of training samples of clients."""
        if POOLED in clients:
            return [int(self._num_samples[self.participation.clients].sum())]
        return self._num_samples[clients].tolist()

    def make_cohort(self, clients: list[int], positions: list[int], local: LocalTraining | None = None) -> Cohort:
        """Clients of this round that are trained together; ``local``: their training if it is less than the others'."""
        cohort = Cohort(clients, positions, self.sizes(clients), self.clients, self.user.device)
        cohort.local = local
        cohort.start_counters = self.server["counters"].expand(len(clients), -1)
        for part in self._client_parts:
            part.begin(cohort)
        return cohort

    @contextmanager
    def restored_on_error(self, *others: Any) -> Iterator[None]:
        """Take back what is committed in this context, and the attributes of other objects, if an error leaves it."""
        with ExitStack() as stack:
            stack.callback(self.schedule.load_state_dict, self.schedule.state_dict())
            for holder in (self, self.server, *self.clients.storages, self.user.best_metrics, *others):
                stack.callback(vars(holder).update, dict(vars(holder)))
            yield
            stack.pop_all()  # there was no error

    def commit(self, round: int, metrics: Metrics) -> None:
        """Make the staged state the current one; ``metrics`` are the round's, for schedulers of interval ``round``."""
        self.schedule.step(round, metrics)
        valid = self.server.valid_records
        # float16 only: the smallest scale at which some client's gradients were finite starts the next round.
        scales = [record["grad_scale"] for record in valid if "grad_scale" in record]
        self.grad_scale = min(scales, default=self.grad_scale)
        self.server.commit()
        self.clients.commit()
        self._undeclared.compare()

    def rollback(self) -> None:
        """Forget the staged state."""
        self.layout.put_frozen_back()
        self.user.best_metrics.rollback()
        self.server.rollback()
        self.clients.rollback()

    def load_global(self) -> None:
        """Write the staged global model into the user's module."""
        self.bench.optimizer.put_attributes_back()
        self.bench.load(self.server.staged_model, self.server.staged("counters"), kept=self.server.kept)
        self.user.shim.leave_clients()

    def models(self) -> Models:
        """Return what is evaluated after this round, as staged."""
        size = self.layout.num_parameters + self.layout.num_buffers
        z = methods.checked_model(self.algorithm, "global_model", self.algorithm.global_model(self.server), size)
        models = self.models_beside(z, self.server.staged("counters"))
        # Vectors that stay with clients elsewhere are not those of this store.
        return replace(models, local=None, local_weights=None) if TAKEN in self.clients.scalar_names else models

    def models_beside(self, z: Tensor, counters: Tensor) -> Models:
        """Return a global model (d + b,) and its integer buffers, and the clients' own models, as staged."""
        local = self.local_models.staged(z, counters, self.clients)
        weights = self.local_models.staged_weights(self.clients)
        stamps = self.local_models.stamps(self.clients)
        return Models(z, counters, local, weights, self.algorithm.fine_tuning, self.server.kept, stamps)
