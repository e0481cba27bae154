"""Measures how long a round takes in either engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fedbc_lightning.core.errors import NotVectorizableError
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.engines import choice
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.engines.trial import Kind, Trial, Workload
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.participation import deal
from fedbc_lightning.federation.planned_round import PlannedRound

SLOW_STEP = 0.1
"""Seconds of a step above which it is timed once only."""
MAX_TRIAL_SECONDS = 2.0
"""Seconds that one step of each client of a round may take for the other engine to be timed as well."""
MAX_ROUND_SECONDS = 3.0
"""Time limit for running the first round as a whole again and again; it is not run if it would take longer."""
MAX_ROUNDS = 10
"""Largest number of times that the first round is run as a whole."""

Seconds = dict[Kind, float]
"""Map from engine to seconds of a round without evaluation."""


class WholeRounds(NamedTuple):
    """Measurements of rounds that were run as a whole; all are 0 if none was run because it would take too long.

    Attributes:
        seconds: Seconds of a round.
        num_metrics: Number of metrics that a round logs.
        record_bytes: Bytes of a client's row in ``clients.csv``.
    """

    seconds: float = 0.0
    num_metrics: int = 0
    record_bytes: int = 0


class RoundTimer:
    """Times rounds of a run; the module holds z of round 0 afterwards.

    Args:
        federation: A federation that has been set up, in one process.
        seed: The seed of the run.
        num_processes: Number of processes that will train.

    Attributes:
        whole: Measurements of whole rounds.
        table_bytes: Bytes of a row of the clients' tables, which have a row per batch; 0 if there are no tables.
        not_timed: Reason why the other engine was not timed; empty if it was.
    """

    def __init__(self, federation: Federation, seed: int, num_processes: int) -> None:
        self._federation, self._seed, self._num_processes = federation, seed, num_processes
        self.whole, self.table_bytes, self.not_timed = WholeRounds(), 0, ""

    def time(self, rounds: Sequence[PlannedRound]) -> Seconds:
        """Return the mean seconds of the given rounds in the run's engine, and in the other one if possible."""
        federation, kind = self._federation, self._federation.engine_kind
        other: Kind = "sequential" if kind == "vectorized" else "vectorized"
        trained = [(number, round) for number, round in enumerate(rounds, 1) if round.ids]
        if not trained:
            self.not_timed = "no client of the first rounds trains"
            return {kind: 0.0}
        self._begin(federation.engine, *trained[0])
        shares = [Workload(round.ids, round.steps) for _, round in trained]
        trial = Trial(
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
        seconds.setdefault(kind, seconds["sequential"])  # one client at a time is trained sequentially
        measured = self.whole.seconds
        rest, scale = max(measured - predicted, 0.0), min(measured / predicted, 1.0) if measured and predicted else 1.0
        found = {kind: seconds[kind] * scale + rest}
        return found | ({other: seconds[other] + rest} if other in seconds else {})

    def _begin(self, engine: BaseEngine, number: int, round: PlannedRound) -> None:
        server = self._federation.server
        server.round, server.ids, server.metrics = number, round.ids, {}
        self._federation.user.shim.set(training=True)
        self._federation.start_round(engine.bench)

    def _train(self, engine: BaseEngine, ids: list[int], num_steps: int) -> list[int]:
        """Do the clients' part of a round, keep nothing of it, and return the clients' numbers of steps."""
        federation, server = self._federation, self._federation.server
        cohort = federation.make_cohort(ids, [server.ids.index(client) for client in ids])
        if len(ids) == 1:
            cohort.local = engine.bench.local  # so that a method's second training takes its part of the steps, too
        federation.algorithm.client_update(engine, cohort, server)
        tables = federation.declaration.table_names
        if tables and not self.table_bytes:
            num_batches = int(federation.datamodule.num_batches()[ids].sum())
            self.table_bytes = sum(cohort.staged(name).nbytes for name in tables) // num_batches
        return cohort.steps

    def _take_rounds(self, number: int, expected: float) -> WholeRounds:
        """Run a whole round again and again from the initial state; run none if it would take too long."""
        federation, device, whole = self._federation, self._federation.user.device, WholeRounds()
        if federation.clients.file_rows is not None and federation.clients.row_bytes:
            return whole  # the clients' rows belong into clients.bin, which a plan does not create
        measured, until = list[float](), time.perf_counter() + MAX_ROUND_SECONDS
        while len(measured) < MAX_ROUNDS and time.perf_counter() + expected < until:
            seed_globals(derive(self._seed, "round", number), device)
            started = time.perf_counter()
            try:
                federation.run_round(number)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                measured.append(time.perf_counter() - started)
                last = measured[len(measured) // 2 :]  # the first ones may make data and record steps
                record_bytes = sum(len(str(value)) + 1 for value in federation.server.records[0].values())
                whole = WholeRounds(statistics.median(last), len(federation.server.metrics) + 5, record_bytes)
            finally:
                federation.rollback()
                federation.load_global()
        return whole

    def _local_seconds(self, trial: Trial, shares: Sequence[Workload], num_rounds: int) -> Seconds:
        """Predict the seconds of local training per round, in the process that has the most to do."""
        totals: Seconds = {}
        for share in shares:
            parts = [
                trial.predict(Workload([share.ids[p] for p in part], [share.steps[p] for p in part]))
                for part in deal(share.steps, self._num_processes) if part
            ]  # fmt: skip
            for kind in parts[0]:
                totals[kind] = totals.get(kind, 0.0) + max(part[kind] for part in parts)
        return {kind: total / num_rounds for kind, total in totals.items()}

    def _try_vectorized(
        self, begun: tuple[int, PlannedRound], shares: Sequence[Workload], num_rounds: int, sequential: float
    ) -> Seconds:
        """Return the seconds of a round in the vectorized engine, if it can be timed; else set ``not_timed``.

        The two engines are timed in turn, and the ratio scales ``sequential``, the seconds of the sequential engine.
        """
        federation = self._federation
        if federation.algorithm.trains_pooled:
            self.not_timed = "there is one model, trained on all data"
            return {}
        steps = sum(sum(share.steps) for share in shares) / sum(len(share.ids) for share in shares)
        if sequential / max(steps, 1) > MAX_TRIAL_SECONDS:
            self.not_timed = "steps are slow"
            return {}
        try:
            engine = choice.make_trial_engine(federation.bench, federation.algorithm, len(shares[0].ids))
            self._begin(engine, *begun)
            trial = Trial(engine, self._train, slow_step=SLOW_STEP)
            trial.measure(shares)
        except NotVectorizableError as error:
            self.not_timed = error.reason
            return {}
        finally:
            federation.algorithm.server_callbacks(federation.engine)  # for a method that keeps its parts
            federation.load_global()
        both = self._local_seconds(trial, shares, num_rounds)  # timed in turn: their ratio is surer than either
        return {"vectorized": sequential * both["vectorized"] / max(both["sequential"], 1e-9)}
