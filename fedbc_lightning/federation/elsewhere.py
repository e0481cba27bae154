"""Clients that are trained elsewhere: the messages that a federation sends to them, and what it does with theirs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
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
from fedbc_lightning.federation import checkpoint_content
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.kept_rows import TAKEN
from fedbc_lightning.federation.messages import (
    Down,
    Facts,
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


def form(federation: Federation, frozen: dict[str, str]) -> str:
    """Return the hash of what the federation at the server and those at the clients must have in common.

    Args:
        federation: One of them.
        frozen: Hashes of its frozen parameters as they were before round 1.
    """
    found, layout = federation.fingerprint, federation.layout
    data = found["partition"]["number of clients"], found["partition"]["sha256 of the indices"]
    own = {name: value for name, value in frozen.items() if name not in layout.written}
    return form_of(data, found["model"], found["algorithm"], found["state"], layout.written, layout.changing, own)


def _values_for_clients(federation: Federation) -> dict[str, Tensor]:
    return {name: federation.server[name] for name in (*ALWAYS, *federation.declaration.for_clients)}


def start_of(federation: Federation, received: Tensor, form: str) -> RoundStart:
    """Return what all clients of the server's round are sent, with the z (d,) that they receive."""
    layout, values = federation.layout, _values_for_clients(federation) | {"z": received}
    return RoundStart(
        form, federation.server.round, values, federation.schedule.learning_rates, federation.grad_scale,
        layout.written, layout.changing, checkpoint_content.set_by_hooks(federation),
    )  # fmt: skip


def down_of(federation: Federation, positions: list[int], local: LocalTraining | None) -> Down:
    """Return the message to clients of the round, by their positions in it."""
    store, clients = federation.clients, [federation.server.ids[position] for position in positions]
    scalars = {name: store.gather(name, clients) for name in store.scalar_names}
    taken = scalars.pop(TAKEN).int().tolist() if TAKEN in scalars else []
    vectors = [] if taken else [name for name in store.names if name not in store.scalar_names]
    rows = {name: [store.vector(name, i) for i in clients] for name in vectors}
    return Down(clients, positions, None if local is None else asdict(local), scalars, rows, taken=taken)


def ask_for_facts(backend: Backend, datamodule: SitesDataModule) -> None:
    """Ask the clients whose data are elsewhere how many samples they have, before the data module is set up.

    Raises:
        ConfigurationError: A client does not answer.
    """
    clients = datamodule.elsewhere
    asks = [Ask([client], 1, encode(Down([client], [0], None, {}, {}, "facts"))) for client in clients]
    for index, answer in backend.work(b"", asks):
        client = clients[index]
        try:
            if isinstance(answer, Lost):
                raise MessageError(answer.reason)
            facts = decode(answer, Facts)
            if facts.clients != [client]:
                raise MessageError(f"it is one of clients {facts.clients}")
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


def work(federation: Federation, start: RoundStart, down: Down) -> Up:
    """Train clients as a message asks for, on the federation of a worker; this is the clients' half.

    Args:
        federation: The federation of this worker.
        start: What all clients of the round were sent.
        down: The message.
    """
    server, store = federation.server, federation.clients
    server.ids = down.clients
    for name, scalars in down.scalars.items():
        store.stage(name, down.clients, scalars)
    for name, rows in down.rows.items():
        for client, row in zip(down.clients, rows, strict=True):
            store.stage(name, [client], row[None])
    store.commit()
    cohort = federation.make_cohort(down.clients, down.positions)
    cohort.local = None if down.local is None else LocalTraining(**down.local)
    written = federation.written_by(lambda: federation.train_clients(cohort), len(down.clients))
    staged_scalars = {name: cohort.staged(name) for name in store.scalar_names if cohort.is_staged(name)}
    staged_rows = {name: [*cohort.staged(name)] for name in down.rows if cohort.is_staged(name)}
    return Up(
        start.form, start.round, down.clients, down.positions, cohort.valid.tolist(), cohort.w, cohort.buffers,
        cohort.counters, cohort.messages, staged_scalars, staged_rows, cohort.step_size, cohort.steps, cohort.losses,
        cohort.records, written,
    )  # fmt: skip


def cohort_of(federation: Federation, up: Up) -> Cohort:
    """Return the clients of a message as the server sees them: what they have sent, and no more."""
    device, store = federation.user.device, federation.clients
    cohort = Cohort(up.clients, up.positions, federation.sizes(up.clients), store, device)
    cohort.w, cohort.buffers, cohort.counters = up.w.to(device), up.buffers.to(device), up.counters.to(device)
    cohort.step_size, cohort.steps, cohort.losses = up.step_size.to(device), up.steps, up.losses
    cohort.messages = {name: value.to(device) for name, value in up.messages.items()}
    cohort.records, cohort.valid = up.records, torch.tensor(up.valid)
    for values in (cohort.w, cohort.buffers, *cohort.messages.values()):
        cohort.require_finite(values)
    if TAKEN in store.scalar_names:
        cohort.stage(TAKEN, torch.full((len(up.clients),), float(up.round)))
    for name, values in up.scalars.items():
        cohort.stage(name, values)
    for name, rows in up.rows.items():
        cohort.stage(name, torch.stack(rows))
    return cohort


def folder_of(run_folder: str | Path, round: int) -> Path:
    """Return the folder in which the messages of a round are kept."""
    return Path(run_folder, "messages", f"{round:06d}")


def in_order(answers: Iterable[tuple[int, bytes | Lost]]) -> Iterator[tuple[int, bytes | Lost]]:
    """Yield answers by their index, from 0 on, however they come.

    Example:
        >>> [index for index, _ in in_order([(1, b""), (0, b""), (2, b"")])]
        [0, 1, 2]
    """
    waiting, index = dict[int, bytes | Lost](), 0
    for come, answer in answers:
        waiting[come] = answer
        while index in waiting:
            yield index, waiting.pop(index)
            index += 1


class Elsewhere:
    """Has the clients of rounds trained by a backend.

    Args:
        federation: The federation at the server.
        backend: It carries the messages.
        run_folder: Tells the run folder, where messages are kept if the backend asks for that.
    """

    def __init__(self, federation: Federation, backend: Backend, run_folder: Callable[[], str | None]) -> None:
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
        if self._frozen is None:  # hooks of the start may have written them
            self._frozen = federation.layout.frozen.hashes()
        form_here = form(federation, self._frozen)
        # Once per round: a random code of z must be the same for all clients.
        start = encode(start_of(federation, federation.channel.broadcast(server), form_here))
        groups, started = self._groups(participants), MessageHash(start)
        asks = [self._ask(group, participants) for group in groups]
        self._keep(start=start, **{f"{index}.down": ask.down for index, ask in enumerate(asks)})
        federation.bench.work.start_round(len(server.ids))
        counters, records = server["counters"].clone(), list[tuple[int, dict[str, Any]]]()
        written = list[str]()
        # In the order of the clients, as one process takes them: then the sums have the same bits.
        for index, answer in in_order(self._backend.work(start, asks)):
            ask = asks[index]
            up = self._read(ask, groups[index], answer, form_here)
            if up is None or isinstance(answer, Lost):
                participants.missing.update(dict.fromkeys(ask.clients, "absent"))
                continue
            federation.bench.work.begin(ask.clients, ask.num_steps)
            federation.bench.work.num_steps += sum(up.steps)
            written += up.written
            if not up.written:
                self._keep(**{f"{index}.up": answer})
                cohort = cohort_of(federation, up)
                hashes = {"hash_down": started.then(ask.down), "hash_up": hash_of(answer)}
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

    def _ask(self, positions: list[int], participants: Participants) -> Ask:
        """Return the message to clients of the round, by their positions in it."""
        federation, clients = self._federation, [self._federation.server.ids[position] for position in positions]
        down = down_of(federation, positions, participants.late.get(clients[0]))
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

    def _read(self, ask: Ask, positions: list[int], answer: bytes | Lost, form: str) -> Up | None:
        """Return the message that a backend has brought, or say why it is not used."""
        federation, server = self._federation, self._federation.server
        try:
            if isinstance(answer, Lost):
                raise MessageError(answer.reason)
            up = decode(answer, Up)
            if (up.form, up.round, up.clients, up.positions) != (form, server.round, ask.clients, positions):
                raise MessageError(f"it is one of clients {up.clients} in round {up.round} of form {up.form}")
            size, num_buffers = federation.layout.num_parameters, federation.layout.num_buffers
            if not up.written:
                whole = up.w.new_empty(len(ask.clients), size)
                check_shapes({"w": up.w}, {"w": whole}, "the clients'")
                check_shapes({"b": up.buffers}, {"b": up.buffers.new_empty(len(ask.clients), num_buffers)}, "buffers")
        except MessageError as error:
            names = federation.datamodule.client_names
            who = ", ".join(str(client if names is None else names[client]) for client in ask.clients)
            rank_zero_only(log.warning)(f"round {server.round}: client {who} sent nothing that can be used: {error}.")
            return None
        return up
