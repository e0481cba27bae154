"""The server's half of rounds and evaluations whose clients are elsewhere: what it sends, and what it takes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from torch import Tensor

from fedbc_lightning.core.checks import Count, check_types
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import make_folder, write
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.core.text import shorten
from fedbc_lightning.distributed.backend import Ask, Backend, Lost, in_order
from fedbc_lightning.distributed.heartbeat import LostProcessError
from fedbc_lightning.evaluation.measurement import Models, Results
from fedbc_lightning.federation import checkpoint_content, messages
from fedbc_lightning.federation.agreement import EVALUATED, form, values_for_clients
from fedbc_lightning.federation.expected import check_answer
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.kept_rows import TAKEN
from fedbc_lightning.federation.messages import Answer, Down, MessageError, RoundStart, Up, decode, encode
from fedbc_lightning.federation.participation import Participants
from fedbc_lightning.module.hooks import CLIENT_HOOKS, STEP_HOOKS
from fedbc_lightning.state import Cohort
from fedbc_lightning.state.cohort import LocalResult

log = logging.getLogger(__name__)

# A run ends if no answer can be used to so many messages in a row (or as many as there are clients), in so many rounds
# and evaluations, or in the first one
MOST_LOSSES, MOST_MESSAGES = 3, 10
# Hooks that are called in the process of the run alone
ROUND_HOOKS = ("on_round_start", "on_round_end", "on_validation_start", "on_validation_end", "on_validation_epoch_end")
# Messages of an evaluation for each worker, where a backend leaves their number open; some take longer than others
MESSAGES_PER_WORKER = 4


def folder_of(run_folder: str | Path, round: int) -> Path:
    """Return the folder in which the messages of a round are kept."""
    return Path(run_folder, "messages", f"{round:06d}")


class Elsewhere:
    """Has the clients of rounds trained and evaluated by a backend.

    Args:
        federation: The federation at the server.
        backend: It carries the messages.
        run_folder: Tells the run folder, where messages are kept if the backend asks for that.
    """

    def __init__(self, federation: Federation, backend: Backend, run_folder: Callable[[], str | None]) -> None:
        self._federation, self._backend, self._run_folder = federation, backend, run_folder
        self._frozen: dict[str, str] | None = None
        # For what is asked: rounds or evaluations, and messages, in a row without an answer that can be used
        self._losses: dict[type, tuple[int, int]] = {}

    def train(self, participants: Participants, received: Tensor, written: list[str]) -> Iterator[Cohort]:
        """Have the clients of the server's round trained, and yield them as the server sees them.

        A client whose answer is lost or cannot be used is one that has dropped out of the round.

        Args:
            participants: The clients of the round; who is lost becomes one of those that are missing.
            received: The z (d,) that they receive.
            written: Names of the frozen parameters that they, or hooks before the round, have written are added to it.
        """
        num_clients = len(self._federation.server.ids)
        return self._federation.noting_writes(self._trained(participants, received, written), num_clients, written)

    def _trained(self, participants: Participants, received: Tensor, written: list[str]) -> Iterator[Cohort]:
        federation, server = self._federation, self._federation.server
        with federation.channel.received(server, received):
            begun = self._start("train", server.round, values_for_clients(federation), server.sampled, server.ids)
        start, groups = encode(begun), self._groups(participants)
        asks = [self._ask(group, participants) for group in groups]
        self._keep(start=start, **{f"{index}.down": ask.down for index, ask in enumerate(asks)})
        progress = federation.bench.work
        claims, lost = list[tuple[Ask, list[str]]](), list[Ask]()
        # In the order of the clients, as one process takes them: then the sums have the same bits.
        for index, (up, answer) in enumerate(self._answers(Up, start, asks, server.round)):
            ask = asks[index]
            if up is None or isinstance(answer, Lost):
                lost.append(ask)
            elif up.written:
                claims.append((ask, up.written))
            else:
                progress.begin(ask.clients, ask.num_steps)
                progress.num_steps += sum(up.steps)
                self._keep(**{f"{index}.up": answer})
                yield self._cohort(up, ask.clients, groups[index], messages.hash_of(answer))
        # What training writes is the module's doing, which all have: nobody is believed against all others.
        said = Counter(name for _, names in claims for name in dict.fromkeys(names))
        written += [name for name, number in said.items() if number > 1 or len(claims) + len(lost) == len(asks)]
        for ask, names in () if written else claims:
            self._refuse(server.round, ask, f"its written {names} is what no other client of the round has found")
            lost.append(ask)
        for ask in lost:
            for client in ask.clients:
                participants.missing[client] = "absent"
                participants.seconds.pop(client, None)
        if participants.missing and federation.algorithm.needs_all_clients:
            raise ConfigurationError(
                f"round {server.round}: clients {shorten([*participants.missing])} were lost, and "
                f"{federation.algorithm} needs all of them; the state of the round before is kept."
            )

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
        # Workers that a backend starts once are enough for the rounds, too.
        num_workers = self._num_workers(max(federation.participation.num_sampled, len(clients), len(heldout)))
        values = dict(zip(EVALUATED, (models.z, models.counters, own.z, own.counters), strict=True))
        start, asks = self._start("evaluate", round, values), list[Ask]()
        sizes = federation.datamodule.num_samples("test") + federation.datamodule.num_samples("val")
        for of in filter(None, (clients, heldout)):
            most = self._backend.clients_per_message
            most = most or math.ceil(len(of) / MESSAGES_PER_WORKER / num_workers)
            for group in (of[k : k + most] for k in range(0, len(of), most)):
                best = federation.user.best_metrics.values
                best = {key: held for key, held in best.items() if int(key.split()[-1]) in group}
                down = Down(group, [], None, **self._state(group, is_evaluated=True), best_metrics=best)
                asks.append(Ask(group, int(sizes[group].sum()), encode(down)))
        for measured, _ in self._answers(messages.Measured, encode(start), asks, round):
            if measured is not None:
                federation.user.best_metrics.staged |= measured.best_metrics
                for split, results in measured.results.items():
                    found[split] = found.get(split, {}) | results
        return found

    def _start(
        self, task: Literal["train", "evaluate"], round: int, values: dict[str, Tensor], *who: list[int]
    ) -> RoundStart:
        """Return what all clients of a round or an evaluation are sent, with values of the server, and who trains."""
        federation, layout = self._federation, self._federation.layout
        if self._frozen is None:
            self._frozen = layout.frozen.hashes()  # hooks of the start may have written them
            self._tell_of_hooks()
        return RoundStart(
            form(federation, self._frozen), task, round, [federation.engine_kind, federation.is_engine_by_rule], values,
            federation.schedule.learning_rates, federation.grad_scale, layout.written, layout.changing,
            checkpoint_content.set_by_hooks(federation), *who,
        )  # fmt: skip

    def _tell_of_hooks(self) -> None:
        """Tell of callbacks whose hooks of rounds may set something in them that their hooks at clients read."""
        for callback in self._federation.user.hooks.callbacks:
            here, there = (
                next((name for name in names if overrides(callback, name, Callback)), None)
                for names in (ROUND_HOOKS, (*CLIENT_HOOKS, *STEP_HOOKS))
            )
            if here and there and not is_ours(callback):
                log.warning(
                    f"trainer.backend: {type(callback).__name__}.{here} is called here, and {there} where clients "
                    "train: nothing that the first sets in the callback reaches the second. Numbers, texts and lists "
                    "of these that it sets in the module do."
                )

    def _ask(self, positions: list[int], participants: Participants) -> Ask:
        """Return the message to clients of the round, by their places among those that are sampled."""
        federation, clients = self._federation, [participants.sampled[position] for position in positions]
        local = participants.late.get(clients[0])
        less = None if local is None else {"epochs": local.epochs, "steps": local.steps}
        down = Down(clients, positions, less, **self._state(clients))
        return Ask(clients, sum(federation.participation.num_steps(clients, participants.late)), encode(down))

    def _state(self, clients: list[int], *, is_evaluated: bool = False) -> dict[str, Any]:
        """Return what clients have, or if they are evaluated, of what their own models are made after the round."""
        store, staged = self._federation.clients, is_evaluated
        scalars = {name: store.gather(name, clients, staged=staged) for name in store.scalar_names}
        taken = scalars.pop(TAKEN).int().tolist() if TAKEN in scalars else []
        # Where they stay, a client is sent those from which it begins: its own module may begin with others.
        vectors = store.vector_names if min(taken, default=-1) < 0 else []
        vectors = self._federation.local_models.read_from(vectors) if is_evaluated else vectors
        rows = {name: [store.vector(name, i, staged=staged) for i in clients] for name in vectors}
        return {"scalars": scalars, "rows": rows, "taken": taken}

    def _keep(self, **kept: Any) -> None:
        """Write messages of the round into the run folder, by their names, if that is asked for."""
        folder = self._run_folder()
        if self._backend.keep_messages and folder is not None:
            place = folder_of(folder, self._federation.server.round)
            make_folder(place)
            for name, message in kept.items():
                write(place / name, message)

    def _num_workers(self, num_clients: int) -> int:
        number: Any = self._backend.num_workers
        number = number(num_clients) if callable(number) else number  # as many hold a number under such a name
        check_types({"num_workers": Count}, {"num_workers": number}, "trainer.backend")
        return number

    def _groups(self, participants: Participants) -> list[list[int]]:
        """Return the clients of each message, by their places among those that are sampled."""
        federation, there, most = self._federation, participants.positions, self._backend.clients_per_message
        cohorts = federation.cohorts(there, participants.late)
        if most is None:
            most, num_workers = 1, self._num_workers(len(there))
            if federation.engine_kind == "vectorized":
                most = math.ceil(max(map(len, cohorts), default=1) / num_workers)
        return [cohort[k : k + most] for cohort in cohorts for k in range(0, len(cohort), most)]

    def _answers(
        self, kind: type[Answer], start: bytes, asks: list[Ask], round: int
    ) -> Iterator[tuple[Answer | None, bytes | Lost]]:
        """Yield what the backend has brought as the answer to each message, and the same as it came.

        What cannot be used is None, and one line says why.

        Raises:
            LostProcessError: None can be used, the first time, or several times in a row.
        """
        if not asks:
            return
        # The first round of a resumed run is not the first.
        losses, num_lost = self._losses.get(kind, (MOST_LOSSES - 1 if round <= 1 else 0, 0))
        losses += 1
        started, answers, reason = sha256(start), self._backend.work(start, asks), ""
        for ask, answer in zip(asks, in_order(answers, asks, f"round {round}"), strict=True):
            found, hashed = None, messages.hash_of(ask.down, started)
            num_lost += 1
            try:
                if isinstance(answer, Lost):
                    raise MessageError(answer.reason)
                check = partial(check_answer, answers=hashed, clients=ask.clients, federation=self._federation)
                found, losses, num_lost = decode(answer, kind, check), 0, 0
            except MessageError as error:
                reason = str(error)
                self._refuse(round, ask, reason)
            yield found, answer
        self._losses[kind] = losses, num_lost
        if losses >= MOST_LOSSES and num_lost >= min(MOST_MESSAGES, self._federation.datamodule.num_clients):
            raise LostProcessError(
                f"trainer.backend: round {round}: {num_lost} messages in a row have no answer that can be used; "
                f"the last one: {reason}"
            )

    def _refuse(self, round: int, ask: Ask, reason: str) -> None:
        """Say why the answer to a message is not used."""
        names = self._federation.datamodule.client_names
        who = shorten(ask.clients if names is None else [names[client] for client in ask.clients])
        log.warning(f"round {round}: client {who} sent nothing that can be used: {reason}.")

    def _cohort(self, up: Up, clients: list[int], positions: list[int], hash_up: str) -> Cohort:
        """Return the clients of a message as the server sees them: what they have sent, and no more."""
        federation, store, device = self._federation, self._federation.clients, self._federation.user.device
        cohort = Cohort(clients, positions, federation.sizes(clients), store, device)
        cohort.valid, cohort.start_buffers = torch.tensor(up.valid), federation.server["buffers"]
        w, buffers, counters, step_size = (t.to(device) for t in (up.w, up.buffers, up.counters, up.step_size))
        # The first hash has been compared.
        records = [record | {"hash_down": up.answers, "hash_up": hash_up} for record in up.records]
        cohort.take(LocalResult(w, buffers, counters, up.steps, up.losses, step_size, [], records))
        cohort.messages = {name: value.to(device) for name, value in up.messages.items()}
        staged = up.scalars | {name: torch.stack(rows) for name, rows in up.rows.items()}
        if TAKEN in store.scalar_names:
            staged[TAKEN] = torch.full((len(clients),), float(federation.server.round))
        for name, values in staged.items():
            cohort.stage(name, values)
        # As clients that train here are judged by what they send and keep.
        cohort.require_finite(cohort.step_size)
        cohort.check_finite()
        return cohort
