"""How long a round takes, by either engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.engines import choice
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.federation.federation import PlannedRound
from fedbc_lightning.federation.participation import deal

if TYPE_CHECKING:
    from fedbc_lightning.trainer.trainer import FederatedTrainer

SLOW_STEP = 0.1
"""Seconds: a step that takes longer is timed once."""
MAX_TRIAL_SECONDS = 2.0
"""The engine that was not asked for is timed if a step of all clients of a round takes less."""
MAX_ROUND_SECONDS = 3.0
"""The first round is taken as a whole, so long and ``MAX_ROUNDS`` times at most; not if it takes longer."""
MAX_ROUNDS = 10

Seconds = dict[choice.Kind, float]
"""Engine -> seconds of a round, without evaluation."""


class WholeRounds(NamedTuple):
    """What rounds that were taken as a whole have shown; none were, where they would take long.

    Attributes:
        seconds: Of a round; 0: none was taken.
        num_metrics: That a round logs.
        record_bytes: Of a client's row in ``clients.csv``.
    """

    seconds: float = 0.0
    num_metrics: int = 0
    record_bytes: int = 0


class RoundTimer:
    """Times rounds of a trainer that is set up; the module holds z of round 0 afterwards.

    Args:
        trainer: Set up, in one process.
        num_processes: That will train.

    Attributes:
        whole: What whole rounds have shown.
        table_bytes: Of a row of the clients' tables, which have one for each batch; 0: there are none.
        not_timed: Why the engine that was not asked for was not timed; empty: it was.
    """

    def __init__(self, trainer: FederatedTrainer, num_processes: int) -> None:
        self._trainer, self._federation, self._num_processes = trainer, trainer.federation, num_processes
        self.whole, self.table_bytes, self.not_timed = WholeRounds(), 0, ""

    def time(self, rounds: Sequence[PlannedRound]) -> Seconds:
        """The mean over rounds, by the engine that would train, and by the other one if it can be timed."""
        federation, kind = self._federation, self._federation.engine_kind
        other: choice.Kind = "sequential" if kind == "vectorized" else "vectorized"
        trained = [(number, round) for number, round in enumerate(rounds, 1) if round.ids]
        if not trained:
            self.not_timed = "no client of the first rounds trains"
            return {kind: 0.0}
        self._begin(federation.engine, *trained[0])
        shares = [choice.Share(round.ids, round.steps) for _, round in trained]
        trial = choice.Trial(
            federation.engine, self._train, is_mapped=kind == "vectorized" and len(shares[0].ids) > 1,
            slow_step=SLOW_STEP,
        )  # fmt: skip
        trial.measure(shares)
        of_kinds = trial.predict(shares[0])
        predicted = of_kinds.get(kind, of_kinds["sequential"])
        self.whole = self._take_rounds(trained[0][0], predicted)
        seconds = self._local_seconds(trial, shares, len(rounds))
        if kind == "sequential":
            seconds |= self._try_vectorized(trained[0], shares, len(rounds), seconds["sequential"])
        seconds.setdefault(kind, seconds["sequential"])  # one client at a time: it is the sequential one
        measured = self.whole.seconds
        rest, scale = max(measured - predicted, 0.0), min(measured / predicted, 1.0) if measured and predicted else 1.0
        found = {kind: seconds[kind] * scale + rest}
        return found | ({other: seconds[other] + rest} if other in seconds else {})

    def _begin(self, engine: SequentialEngine, number: int, round: PlannedRound) -> None:
        server = self._federation.server
        server.round, server.ids, server.metrics = number, round.ids, {}
        self._trainer.user.shim.set(training=True)
        self._federation.start_round(engine)

    def _train(self, engine: SequentialEngine, ids: list[int], num_steps: int) -> list[int]:
        """The clients' part of a round in so many steps; nothing is kept."""
        federation, server = self._federation, self._federation.server
        cohort = federation.make_cohort(ids, [server.ids.index(client) for client in ids])
        if len(ids) == 1:
            cohort.local = engine.local  # also a second training of its own takes a share of its steps
        federation.algorithm.client_update(engine, cohort, server)
        tables = federation.declaration.table_names
        if tables and not self.table_bytes:
            num_batches = int(self._trainer.datamodule.num_batches()[ids].sum())
            self.table_bytes = sum(cohort.staged(name).nbytes for name in tables) // num_batches
        return cohort.steps

    def _take_rounds(self, number: int, expected: float) -> WholeRounds:
        """Take a whole round again and again from the initial state; none, if it would take long."""
        federation, device, whole = self._federation, self._trainer.user.device, WholeRounds()
        if federation.clients.file_rows is not None and federation.clients.row_bytes:
            return whole  # there is no file
        measured, until = list[float](), time.perf_counter() + MAX_ROUND_SECONDS
        while len(measured) < MAX_ROUNDS and time.perf_counter() + expected < until:
            seed_globals(derive(self._trainer.seed, "round", number), device)
            started = time.perf_counter()
            try:
                federation.run_round(number)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                measured.append(time.perf_counter() - started)
                last = measured[len(measured) // 2 :]  # in the first ones data may be made, and steps are recorded
                record_bytes = sum(len(str(value)) + 1 for value in federation.server.records[0].values())
                whole = WholeRounds(statistics.median(last), len(federation.server.metrics) + 5, record_bytes)
            finally:
                federation.rollback()
                federation.load_global()
        return whole

    def _local_seconds(self, trial: choice.Trial, shares: Sequence[choice.Share], num_rounds: int) -> Seconds:
        """Of the process that has most to do."""
        totals: Seconds = {}
        for share in shares:
            parts = [
                trial.predict(choice.Share([share.ids[p] for p in part], [share.steps[p] for p in part]))
                for part in deal(share.steps, self._num_processes) if part
            ]  # fmt: skip
            for kind in parts[0]:
                totals[kind] = totals.get(kind, 0.0) + max(part[kind] for part in parts)
        return {kind: total / num_rounds for kind, total in totals.items()}

    def _try_vectorized(
        self, begun: tuple[int, PlannedRound], shares: Sequence[choice.Share], num_rounds: int, sequential: float
    ) -> Seconds:
        """What the vectorized engine takes beside so many seconds of the sequential one, if it can be timed."""
        federation = self._federation
        if federation.algorithm.trains_pooled:
            self.not_timed = "there is one model, trained on all data"
            return {}
        steps = sum(sum(share.steps) for share in shares) / sum(len(share.ids) for share in shares)
        if sequential / max(steps, 1) > MAX_TRIAL_SECONDS:
            self.not_timed = "steps are slow"
            return {}
        try:
            engine = choice.make_trial_engine(federation.engine_args, federation.algorithm, len(shares[0].ids))
            self._begin(engine, *begun)
            trial = choice.Trial(engine, self._train, slow_step=SLOW_STEP)
            trial.measure(shares)
        except ConfigurationError as error:
            self.not_timed = choice.reason_of(error)
            return {}
        finally:
            federation.algorithm.server_callbacks(federation.engine)  # should it keep them
            federation.load_global()
        both = self._local_seconds(trial, shares, num_rounds)  # in turn, so their ratio is better than either
        return {"vectorized": sequential * both["vectorized"] / max(both["sequential"], 1e-9)}
