"""Measures how long an evaluation and a round take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.data.datasets import num_items
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.evaluation.measurement import Measurement, Task
from fedbc_lightning.federation.federation import Federation, PlannedRound
from fedbc_lightning.federation.participation import deal
from fedbc_lightning.server import Sums

MAX_EVALUATION_SECONDS = 1.5
"""Time limit for evaluating clients, per split and kind of model; the rest is estimated by numbers of samples."""


def time_evaluation(federation: Federation, evaluator: Evaluator, splits: list[str], num_processes: int) -> float:
    """Return the seconds of an evaluation of z of round 0; the module holds z afterwards, too.

    Args:
        federation: A federation that has been set up, in one process.
        evaluator: Evaluates its models.
        splits: The splits for which there are data.
        num_processes: Number of processes that will share the clients in the run.
    """
    datamodule, models = federation.datamodule, federation.models()
    total = longest = 0.0
    wanted = evaluator.measurements(splits, models, 0)
    for what in wanted:
        tasks = evaluator.tasks(what.split, models)
        sizes, rate = datamodule.num_samples(what.split), None
        # Both kinds of models are timed: a local one is loaded for each client, and may be fine-tuned first.
        for which in ("global", "local"):
            mine = [task for task in tasks if task[0] == which and task[1] >= 0]
            if mine:
                seconds, samples = _evaluate_some(evaluator, mine, what)
                rate = seconds / samples if rate is None else rate
                total += seconds / samples * int(sizes[[client for _, client in mine]].sum())
        pooled = datamodule.pooled_dataset(what.split)
        if pooled is not None and ("global", -1) in tasks:
            seconds = (rate or 0.0) * num_items(pooled)
            if seconds < MAX_EVALUATION_SECONDS:
                started = time.perf_counter()
                evaluator.one_by_one([("global", -1)], what)
                seconds = time.perf_counter() - started
            total, longest = total + seconds, max(longest, seconds)
    total += _time_fine_tuning(evaluator, wanted)
    if total < MAX_EVALUATION_SECONDS and federation.engine.mapped_evaluation("test") is not None:
        for _ in range(2):  # the first mapped evaluation does the clients one after another as well
            started = time.perf_counter()
            evaluator.run(splits, models, 0)
        total = min(total, time.perf_counter() - started)
    federation.load_global()
    # Clients are dealt to the processes, but the pooled data are evaluated by one of them.
    return max(total / num_processes, longest)


def _time_fine_tuning(evaluator: Evaluator, wanted: Sequence[Measurement]) -> float:
    """Estimate the seconds of fine-tuning on held-out clients, from the first of the clients that train together."""
    # Ten steps on each of 200 held-out clients are often more than all steps of a round.
    seconds, count = 0.0, 0
    for cohort in evaluator.fine_tuned_cohorts() if wanted else ():
        started = time.perf_counter()
        evaluator.fine_tune(cohort, wanted)
        seconds, count = seconds + time.perf_counter() - started, count + len(cohort)
        if seconds > MAX_EVALUATION_SECONDS:
            break
    return seconds * len(evaluator.heldout_ids) / max(count, 1)


def _evaluate_some(evaluator: Evaluator, tasks: Sequence[Task], what: Measurement) -> tuple[float, int]:
    """Evaluate the first tasks, and return their seconds and their number of samples."""
    sizes, samples = evaluator.datamodule.num_samples(what.split), 0
    started = time.perf_counter()
    for task in tasks:
        evaluator.one_by_one([task], what)
        samples += int(sizes[task[1]])
        if time.perf_counter() - started > MAX_EVALUATION_SECONDS:
            break
    return time.perf_counter() - started, samples


NUM_STEPS = 20
"""Largest number of steps of each client in one timing."""
NUM_TIMINGS = 3
"""Number of timings; the shortest is used, since other programs of the machine make timings longer only."""
SLOW_STEPS = 0.5
"""Seconds of a first timing above which nothing is timed again."""
MAX_ROUND_SECONDS = 3.0
"""Time limit for running the first round as a whole again and again; it is not run if it would take longer."""
MAX_ROUNDS = 10
"""Largest number of times that the first round is run as a whole."""


class Cost(NamedTuple):
    """Seconds that training takes for each client apart from its steps, and for each step of a client."""

    client: float
    step: float

    def of(self, round: PlannedRound, num_processes: int) -> float:
        """Return the seconds of a round's local training, in the process that has the most to do."""
        shares = deal(round.steps, [1] * num_processes)
        return max(len(share) * self.client + sum(round.steps[p] for p in share) * self.step for share in shares)


class RoundTimer:
    """Times rounds of a run; the module holds z of round 0 afterwards.

    Args:
        federation: A federation that has been set up, in one process.
        seed: The seed of the run.
        num_processes: Number of processes that will train.

    Attributes:
        table_bytes: Bytes of a row of the clients' tables, which have a row per batch; 0 if there are no tables.
    """

    def __init__(self, federation: Federation, seed: int, num_processes: int) -> None:
        self._federation, self._seed, self._num_processes = federation, seed, num_processes
        self.table_bytes = 0

    def time(self, rounds: Sequence[PlannedRound]) -> float:
        """Return the mean seconds of the given rounds, without evaluation."""
        trained = [(number, round) for number, round in enumerate(rounds, 1) if round.ids]
        if not trained:
            return 0.0
        number, first = trained[0]
        self._begin(number, first)
        cost = self._measure(first)
        predicted = cost.of(first, 1)
        measured = self._take_rounds(number, predicted)
        self._federation.load_global()
        # What a whole round takes beyond its clients' steps is the server's, which processes do not share.
        rest, scale = max(measured - predicted, 0.0), min(measured / predicted, 1.0) if measured and predicted else 1.0
        return rest + scale * sum(cost.of(round, self._num_processes) for _, round in trained) / len(rounds)

    def _measure(self, round: PlannedRound) -> Cost:
        """Time a few steps of the largest group of clients that the engine trains together."""
        engine = self._federation.engine
        recorder, asked = engine.bench.recorder, engine.bench.local
        recorder.record_after = {"single": 2, "mapped": 2}  # most steps of a long run are recorded
        ids = [round.ids[p] for p in max(engine.group(range(len(round.ids)), round.steps, ()), key=len)]
        self._sums = Sums(engine.bench.user.device)
        try:
            first, num_steps = self._timed(ids, 2)
            if first > SLOW_STEPS:  # this may include making the data
                seconds, num_steps = self._timed(ids, 1)
                return Cost(0.0, seconds / num_steps)
            self._timed(ids, NUM_STEPS)
            turns = [(self._timed(ids, 1), self._timed(ids, NUM_STEPS)) for _ in range(NUM_TIMINGS)]
        finally:
            engine.bench.local = asked
            del self._sums  # a whole round has its own
        (short, few), (long, many) = (min(column) for column in zip(*turns, strict=True))
        if many == few:  # some methods take as many steps as they like
            return Cost(0.0, short / few)
        step = max(long - short, 0.0) / (many - few)
        return Cost(max(short - few * step, 0.0) / len(ids), step)

    def _timed(self, ids: list[int], num_steps: int) -> tuple[float, int]:
        """Return the seconds of training these clients for so many steps each, and the sum of their steps."""
        bench = self._federation.engine.bench
        bench.local = replace(bench.local, epochs=None, steps=num_steps)
        started = time.perf_counter()
        steps = self._train(ids)
        if bench.user.device.type == "cuda":
            torch.cuda.synchronize(bench.user.device)
        return time.perf_counter() - started, max(1, sum(steps))

    def _begin(self, number: int, round: PlannedRound) -> None:
        server = self._federation.server
        server.round, server.sampled, server.ids, server.metrics = number, round.sampled, round.ids, {}
        self._federation.user.shim.set(training=True)
        self._federation.start_local_steps(number, self._federation.engine.bench)

    def _train(self, ids: list[int]) -> list[int]:
        """Do all that a round does for these clients, keep nothing of it, and return their numbers of steps."""
        federation, server, engine = self._federation, self._federation.server, self._federation.engine
        cohort = federation.make_cohort(ids, [server.sampled.index(client) for client in ids])
        if len(ids) == 1:
            cohort.local = engine.bench.local  # so that a method's second training takes its part of the steps, too
        federation.train_clients(cohort)
        federation.take(cohort, self._sums)
        tables = federation.declaration.table_names
        if tables and not self.table_bytes:
            num_batches = int(federation.datamodule.num_batches()[ids].sum())
            self.table_bytes = sum(cohort.staged(name).nbytes for name in tables) // num_batches
        return cohort.steps

    def _take_rounds(self, number: int, expected: float) -> float:
        """Run a whole round again and again from the initial state; return its seconds, 0 if it would take too long."""
        federation, device = self._federation, self._federation.user.device
        if federation.clients.file_rows is not None and federation.clients.row_bytes:
            return 0.0  # the clients' rows belong into clients.bin, which a plan does not create
        measured, until = list[float](), time.perf_counter() + MAX_ROUND_SECONDS
        while len(measured) < MAX_ROUNDS and time.perf_counter() + expected < until:
            seed_globals(derive(self._seed, "round", number), device)
            started = time.perf_counter()
            try:
                federation.run_round(number)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                measured.append(time.perf_counter() - started)
            finally:
                federation.rollback()
                federation.load_global()
        # The first ones may make data and record steps.
        return statistics.median(measured[len(measured) // 2 :]) if measured else 0.0
