"""The clients' half of rounds and evaluations, on the federation of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.federation.agreement import EVALUATED
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.messages import Down, Measured, RoundStart, Up


def take_start(federation: Federation, start: RoundStart) -> None:
    """Let the federation of a worker take over what the server has sent to all clients of a round."""
    server = federation.server
    server.values |= {name: value.to(federation.user.device) for name, value in start.server.items()}
    server.round, server.sampled, server.ids, server.is_at_clients = start.round, start.sampled, start.ids, True
    federation.load_global()
    federation.user.shim.set(training=True)


def _take_down(federation: Federation, down: Down) -> None:
    """Let the federation of a worker take over what clients keep."""
    store = federation.clients
    for name, scalars in down.scalars.items():
        store.stage(name, down.clients, scalars)
    store.hold(down.clients, down.rows)
    store.commit()


def work(federation: Federation, down: Down) -> Up:
    """Train clients as a message asks for."""
    store, written = federation.clients, list[str]()
    _take_down(federation, down)
    local = None if down.local is None else replace(federation.local, **down.local)
    cohort = federation.make_cohort(down.clients, down.positions, local)
    for _ in federation.noting_writes(map(federation.train_clients, [cohort]), len(down.clients), written):
        pass
    staged_scalars = {name: cohort.staged(name) for name in store.scalar_names if cohort.is_staged(name)}
    staged_rows = {name: [*cohort.staged(name)] for name in down.rows if cohort.is_staged(name)}
    # Who the client is and how many samples it has, the server writes into the row itself.
    records = [{k: v for k, v in each.items() if k not in ("client", "num_samples")} for each in cohort.records]
    return Up(
        cohort.valid.tolist(), cohort.w, cohort.buffers, cohort.counters, cohort.messages, staged_scalars, staged_rows,
        cohort.step_size, cohort.steps, cohort.losses, records, written,
    )  # fmt: skip


def evaluate(
    federation: Federation, evaluator: Evaluator, splits: Sequence[str], start: RoundStart, down: Down
) -> Measured:
    """Evaluate the global model and own models of clients on these splits, as a message asks for."""
    _take_down(federation, down)
    best = federation.user.best_metrics
    best.values = down.best_metrics
    z, counters, *own = (start.server[name].to(federation.user.device) for name in EVALUATED)
    models = replace(federation.models_beside(*own), z=z, counters=counters, stamps=None)
    results = evaluator.measure(splits, models, start.round, down.clients)
    staged, best.staged = best.staged, {}
    return Measured(results, staged)
