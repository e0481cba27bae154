"""Clients that are trained elsewhere: the messages that a federation sends to them, and what it does with theirs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import make_folder, write
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.data import FederatedDataModule, SitesDataModule
from fedbc_lightning.data.datamodule import SPLITS
from fedbc_lightning.data.datasets import labels_of, num_items
from fedbc_lightning.distributed.backend import Ask, Backend, Lost
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.evaluation.measurement import Models, Results
from fedbc_lightning.federation import checkpoint_content
from fedbc_lightning.federation.expected import Expected, check_answer, check_facts
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.kept_rows import TAKEN
from fedbc_lightning.federation.messages import (
    Answer,
    Down,
    Facts,
    Measured,
    MessageError,
    MessageHash,
    RoundStart,
    Up,
    check_shapes,
    decode,
    encode,
    form_of,
    hash_of,
)
from fedbc_lightning.federation.participation import Participants
from fedbc_lightning.federation.round_results import TrainedShare
from fedbc_lightning.server import Sums
from fedbc_lightning.state import Cohort

log = logging.getLogger(__name__)

# Values of the server that clients of every method read
ALWAYS = ("z", "buffers", "counters")

# What clients are sent to evaluate: the global model, and the one of which their own are made, as hooks around an
# evaluation may change the first
EVALUATED = ("z", "counters", "own z", "own counters")

# Messages of an evaluation for each worker, where a backend leaves their number open; some take longer than others
MESSAGES_PER_WORKER = 4


def form(federation: Federation, frozen: dict[str, str]) -> str:
    """Return the hash of what the federation at the server and those at the clients must have in common.

    Args:
        federation: One of them.
        frozen: Hashes of its frozen parameters as they were before round 1.
    """
    found, layout = federation.fingerprint, federation.layout
    data = found["partition"]["number of clients"], found["partition"]["sha256 of the indices"]
    own = {name: value for name, value in frozen.items() if name not in layout.written}
    # Noise of privacy is the server's; that secret is none of the clients'.
    rest = {name: value for name, value in found.items() if name not in ("partition", "trainer.privacy")}
    return form_of(data, rest, federation.agreed, layout.written, layout.changing, own)


def _values_for_clients(federation: Federation) -> dict[str, Tensor]:
    return {name: federation.server[name] for name in (*ALWAYS, *federation.declaration.for_clients)}


def start_of(federation: Federation, form: str, round: int, values: dict[str, Tensor]) -> RoundStart:
    """Return what all clients of a round are sent, with these values of the server."""
    layout = federation.layout
    return RoundStart(
        form, round, values, federation.schedule.learning_rates, federation.grad_scale,
        layout.written, layout.changing, checkpoint_content.set_by_hooks(federation),
    )  # fmt: skip


def evaluation_of(federation: Federation, clients: list[int]) -> Down:
    """Return the message to clients that evaluate the global model and their own."""
    best = {key: held for key, held in federation.user.best_metrics.values.items() if int(key.split()[-1]) in clients}
    state = _state_of(federation, clients, is_evaluated=True)
    return Down(clients, [], None, **state, task="evaluate", best_metrics=best)


def _state_of(federation: Federation, clients: list[int], *, is_evaluated: bool = False) -> dict[str, Any]:
    """Return what clients have, or if they are evaluated, of what their own models are made after the round."""
    store, staged = federation.clients, is_evaluated
    scalars = {name: store.gather(name, clients, staged=staged) for name in store.scalar_names}
    taken = scalars.pop(TAKEN).int().tolist() if TAKEN in scalars else []
    vectors = [] if taken else [name for name in store.names if name not in store.scalar_names]
    vectors = federation.local_models.read_from(vectors) if is_evaluated else vectors
    rows = {name: [store.vector(name, i, staged=staged) for i in clients] for name in vectors}
    return {"scalars": scalars, "rows": rows, "taken": taken}


def ask_for_facts(backend: Backend, datamodule: SitesDataModule) -> None:
    """Ask the clients whose data are elsewhere how many samples they have, before the data module is set up.

    Raises:
        ConfigurationError: A client does not answer.
    """
    clients = datamodule.elsewhere
    asks = [Ask([client], 1, encode(Down([client], [0], None, {}, {}, "facts"))) for client in clients]
    for index, answer in in_order(backend.work(b"", asks), asks, "data elsewhere"):
        client = clients[index]
        try:
            if isinstance(answer, Lost):
                raise MessageError(answer.reason)
            facts = decode(answer, Facts, partial(check_facts, client=client))
        except MessageError as error:
            raise ConfigurationError(
                f"trainer.backend: client {client}, whose data are elsewhere, does not say what it has: {error}"
            ) from None
        datamodule.take_facts(client, facts.counts[0])


def facts_of(datamodule: FederatedDataModule, clients: list[int]) -> Facts:
    """Return what clients tell of their data."""
    counts = []
    for client in clients:
        found: dict[str, list[int]] = {}
        for split in SPLITS:
            dataset = datamodule.client_dataset(client, split)
            labels = None if dataset is None else labels_of(dataset)
            size = [0 if dataset is None else num_items(dataset)]
            found[split] = size if labels is None else np.bincount(labels).tolist()
        counts.append(found)
    return Facts(clients, counts)


def take_start(federation: Federation, start: RoundStart) -> None:
    """Let the federation of a worker take over what the server has sent to all clients of a round.

    Raises:
        MessageError: The values do not fit this federation.
    """
    server = federation.server
    like = _values_for_clients(federation)
    if federation.layout.changing:
        like["counters"] = start.server.get("counters", like["counters"])  # buffers whose shape changes lie there
    check_shapes(start.server, like, "the server's value")
    server.values |= {name: value.to(federation.user.device) for name, value in start.server.items()}
    server.round = start.round


def _take_down(federation: Federation, down: Down) -> None:
    """Let the federation of a worker take over what clients keep."""
    store = federation.clients
    for name, scalars in down.scalars.items():
        store.stage(name, down.clients, scalars)
    for name, rows in down.rows.items():
        for client, row in zip(down.clients, rows, strict=True):
            store.stage(name, [client], row[None])
    store.commit()


def evaluate(federation: Federation, evaluator: Evaluator, start: RoundStart, down: Down) -> Measured:
    """Evaluate the global model and own models of clients as a message asks for, on the federation of a worker."""
    _take_down(federation, down)
    best = federation.user.best_metrics
    best.values = down.best_metrics
    z, counters, *own = (start.server[name].to(federation.user.device) for name in EVALUATED)
    models = replace(federation.models_beside(*own), z=z, counters=counters, stamps=None)
    results = evaluator.measure(("test", "val"), models, start.round, down.clients)
    staged, best.staged = best.staged, {}
    return Measured(start.form, start.round, down.clients, results, staged)


def work(federation: Federation, start: RoundStart, down: Down) -> Up:
    """Train clients as a message asks for, on the federation of a worker; this is the clients' half.

    Args:
        federation: The federation of this worker.
        start: What all clients of the round were sent.
        down: The message.
    """
    store, federation.server.ids = federation.clients, down.clients
    _take_down(federation, down)
    cohort = federation.make_cohort(down.clients, down.positions)
    cohort.local = None if down.local is None else LocalTraining(**down.local)
    written = federation.written_by(lambda: federation.train_clients(cohort), len(down.clients))
    staged_scalars = {name: cohort.staged(name) for name in store.scalar_names if cohort.is_staged(name)}
    staged_rows = {name: [*cohort.staged(name)] for name in down.rows if cohort.is_staged(name)}
    # Who the client is and how many samples it has, the server writes into the row itself.
    records = [{k: v for k, v in each.items() if k not in ("client", "num_samples")} for each in cohort.records]
    return Up(
        start.form, start.round, down.clients, down.positions, cohort.valid.tolist(), cohort.w, cohort.buffers,
        cohort.counters, cohort.messages, staged_scalars, staged_rows, cohort.step_size, cohort.steps, cohort.losses,
        records, written,
    )  # fmt: skip


def cohort_of(federation: Federation, up: Up) -> Cohort:
    """Return the clients of a message as the server sees them: what they have sent, and no more."""
    device, store = federation.user.device, federation.clients
    cohort = Cohort(up.clients, up.positions, federation.sizes(up.clients), store, device)
    cohort.w, cohort.buffers, cohort.counters = up.w.to(device), up.buffers.to(device), up.counters.to(device)
    cohort.step_size, cohort.steps, cohort.losses = up.step_size.to(device), up.steps, up.losses
    cohort.messages = {name: value.to(device) for name, value in up.messages.items()}
    cohort.valid = torch.tensor(up.valid)
    for record, more in zip(cohort.records, up.records, strict=True):
        record.update(more)
    if TAKEN in store.scalar_names:
        cohort.stage(TAKEN, torch.full((len(up.clients),), float(up.round)))
    for name, values in up.scalars.items():
        cohort.stage(name, values)
    for name, rows in up.rows.items():
        cohort.stage(name, torch.stack(rows))
    # As clients that train here are judged by what they send and keep.
    cohort.require_finite(cohort.w)
    cohort.require_finite(cohort.buffers, federation.server["buffers"])
    cohort.require_finite(cohort.step_size)
    cohort.check_finite()
    return cohort


def folder_of(run_folder: str | Path, round: int) -> Path:
    """Return the folder in which the messages of a round are kept."""
    return Path(run_folder, "messages", f"{round:06d}")


def in_order(
    answers: Iterable[tuple[int, bytes | Lost]], asks: Sequence[Ask], where: str
) -> Iterator[tuple[int, bytes | Lost]]:
    """Yield the first answer to each message in the order of the messages, however they come.

    A message without one is lost; one line says of any other answer that it is not used.

    Args:
        answers: The answers of a backend, each with the index of its message.
        asks: The messages.
        where: Where in the run that is, for the log.

    Example:
        >>> asks = [Ask([client], 1, b"") for client in range(4)]
        >>> [answer for _, answer in in_order([(3, b"d"), (0, b"a"), (2, b"c")], asks, "round 1")]
        [b'a', Lost(reason='trainer.backend brought no answer'), b'c', b'd']
    """
    waiting, index, seen = dict[int, bytes | Lost](), 0, set[int]()
    for come, answer in answers:
        if come in seen or come not in range(len(asks)):
            what = f"a second answer of client {_listed(asks[come].clients)}" if come in seen else f"an answer {come!r}"
            rank_zero_only(log.warning)(f"{where}: trainer.backend brought {what}, which nobody asked: it is not used.")
            continue
        seen.add(come)
        waiting[come] = answer
        while index in waiting:
            yield index, waiting.pop(index)
            index += 1
    for left in range(index, len(asks)):
        yield left, waiting.get(left, Lost("trainer.backend brought no answer"))


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


class Elsewhere:
    """Has the clients of rounds trained and evaluated by a backend.

    Args:
        federation: The federation at the server.
        backend: It carries the messages.
        run_folder: Tells the run folder, where messages are kept if the backend asks for that.
    """

    def __init__(self, federation: Federation, backend: Backend, run_folder: Callable[[], str | None]) -> None:
        most = backend.clients_per_message
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigurationError(
                f"trainer.backend: {type(backend).__name__}.clients_per_message is {most!r}; give a whole number from "
                "1 on, or None"
            )
        self._federation, self._backend, self._run_folder = federation, backend, run_folder
        self._frozen: dict[str, str] | None = None

    def train(self, participants: Participants, sums: Sums) -> TrainedShare:
        """Have the clients of the server's round trained, and take what they send into the sums.

        A client whose answer is lost or cannot be used is one that has dropped out of the round.

        Args:
            participants: The clients of the round; who is lost becomes one of those that are missing.
            sums: The sums of the round.
        """
        federation, server = self._federation, self._federation.server
        # Once per round: a random code of z must be the same for all clients.
        values = _values_for_clients(federation) | {"z": federation.channel.broadcast(server)}
        begun = start_of(federation, self._form(), server.round, values)
        start = encode(begun)
        groups, started = self._groups(participants), MessageHash(start)
        asks = [self._ask(group, participants) for group in groups]
        self._keep(start=start, **{f"{index}.down": ask.down for index, ask in enumerate(asks)})
        federation.bench.work.start_round(len(server.ids))
        counters, records = server["counters"].clone(), list[tuple[int, dict[str, Any]]]()
        written = list[str]()
        # In the order of the clients, as one process takes them: then the sums have the same bits.
        for index, answer in in_order(self._backend.work(start, asks), asks, f"round {server.round}"):
            ask = asks[index]
            up = self._read(Up, ask, answer, begun, started, groups[index])
            if up is None or isinstance(answer, Lost):
                participants.missing.update(dict.fromkeys(ask.clients, "absent"))
                continue
            federation.bench.work.begin(ask.clients, ask.num_steps)
            federation.bench.work.num_steps += sum(up.steps)
            written += up.written
            if not up.written:
                self._keep(**{f"{index}.up": answer})
                cohort = cohort_of(federation, up)
                hashes = {"hash_down": up.answers, "hash_up": hash_of(answer)}  # the first one has been compared
                for record in cohort.records:
                    record |= hashes
                federation.take(cohort, sums)
                records += zip(up.positions, cohort.records, strict=True)
                federation.take_counters(counters, cohort)
        server.ids = participants.ids
        if participants.missing and federation.algorithm.needs_all_clients:
            raise ConfigurationError(
                f"round {server.round}: clients {', '.join(map(str, participants.missing))} were lost, and "
                f"{federation.algorithm} needs all of them; the state of the round before is kept."
            )
        return TrainedShare(records, counters, list(dict.fromkeys(written)))

    def evaluate(self, clients: list[int], heldout: list[int], models: Models, round: int) -> dict[str, Results]:
        """Have clients evaluated; one whose answer is lost is left out.

        Args:
            clients: Clients that train.
            heldout: Clients that are held out.
            models: The global model that is evaluated; own models are those of the federation.
            round: Number of the round.

        Returns:
            Values of tasks by split, in the order of the clients.
        """
        federation, found, own = self._federation, dict[str, Results](), self._federation.models()
        values = dict(zip(EVALUATED, (models.z, models.counters, own.z, own.counters), strict=True))
        start, asks = start_of(federation, self._form(), round, values), list[Ask]()
        sizes = federation.datamodule.num_samples("test") + federation.datamodule.num_samples("val")
        for of in filter(None, (clients, heldout)):
            most = self._backend.clients_per_message
            most = most or math.ceil(len(of) / MESSAGES_PER_WORKER / self._backend.num_workers(len(of)))
            for group in (of[k : k + most] for k in range(0, len(of), most)):
                asks.append(Ask(group, int(sizes[group].sum()), encode(evaluation_of(federation, group))))
        begun = encode(start)
        started, answers = MessageHash(begun), self._backend.work(begun, asks) if asks else ()
        for index, answer in in_order(answers, asks, f"round {round}"):
            measured = self._read(Measured, asks[index], answer, start, started)
            if measured is not None:
                federation.user.best_metrics.staged |= measured.best_metrics
                for split, results in measured.results.items():
                    found[split] = found.get(split, {}) | results
        return found

    def _form(self) -> str:
        """Return what clients compare with theirs."""
        if self._frozen is None:  # hooks of the start may have written them
            self._frozen = self._federation.layout.frozen.hashes()
        return form(self._federation, self._frozen)

    def _ask(self, positions: list[int], participants: Participants) -> Ask:
        """Return the message to clients of the round, by their positions in it."""
        federation, clients = self._federation, [self._federation.server.ids[position] for position in positions]
        local = participants.late.get(clients[0])
        down = Down(clients, positions, None if local is None else asdict(local), **_state_of(federation, clients))
        return Ask(clients, sum(federation.participation.num_steps(clients)), encode(down))

    def _keep(self, **messages: Any) -> None:
        """Write messages of the round into the run folder, by their names, if that is asked for."""
        folder = self._run_folder()
        if self._backend.keep_messages and folder is not None:
            place = folder_of(folder, self._federation.server.round)
            make_folder(place)
            for name, message in messages.items():
                write(place / name, message)

    def _groups(self, participants: Participants) -> list[list[int]]:
        """Return the positions of the clients of each message."""
        federation, num_clients = self._federation, len(self._federation.server.ids)
        cohorts, most = federation.cohorts(range(num_clients), participants.late), self._backend.clients_per_message
        if most is None:
            most, num_workers = 1, self._backend.num_workers(num_clients)
            if federation.engine_kind == "vectorized":
                most = math.ceil(max(map(len, cohorts)) / num_workers)
        return [cohort[k : k + most] for cohort in cohorts for k in range(0, len(cohort), most)]

    def _read(
        self, kind: type[Answer], ask: Ask, answer: bytes | Lost, start: RoundStart, started: MessageHash,
        positions: list[int] | None = None,
    ) -> Answer | None:  # fmt: skip
        """Return the message that a backend has brought, or say why it is not used."""
        expected = Expected(start.form, start.round, ask.clients, positions, started.then(ask.down))
        try:
            if isinstance(answer, Lost):
                raise MessageError(answer.reason)
            return decode(answer, kind, partial(check_answer, expected=expected, federation=self._federation))
        except MessageError as error:
            names = self._federation.datamodule.client_names
            who = _listed(client if names is None else names[client] for client in ask.clients)
            rank_zero_only(log.warning)(f"round {start.round}: client {who} sent nothing that can be used: {error}.")
            return None
