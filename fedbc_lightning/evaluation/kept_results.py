"""Keeps what evaluation gave for the clients' own models, and returns it while it would give the same again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedbc_lightning.core.private_torch import numeric_settings, storage_key
from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.engines.recorded.proof import Proof
from fedbc_lightning.engines.recorded.recording import NotRecordableError
from fedbc_lightning.engines.step_function import StepFunction
from fedbc_lightning.engines.workbench import Workbench

if TYPE_CHECKING:
    from fedbc_lightning.evaluation.measurement import Models, Task

PROVE_AFTER = 10
"""Number of repeated evaluations on batches of one form after which the step is proven for that form.

A proof takes 2 to 4 ms, as long as the evaluation of 5 to 20 clients with small models.
"""
MAX_FORMS, MAX_KEPT, MAX_LOST = 100, 100_000, 3
"""Largest numbers of proven forms and of kept results, and of proofs that are lost before no more are made."""
MAX_OUTSIDE = 2**22
"""Most bytes of tensors outside of the client's model that are compared before each use: they take 1 ms."""

Form = tuple[Any, ...]
Content = tuple[tuple[Form, int], ...]
"""Form and hash of each batch of a client."""


class _ProvenStep:
    """An evaluation step that is proven for one form of a batch, with all that its result depends on apart from both.

    Args:
        proof: The proof.
        own: Keys of the storages that belong to a client's model.
    """

    def __init__(self, proof: Proof, own: set[int]) -> None:
        self._proof = proof
        self._outside = [tensor for tensor in proof.outside if storage_key(tensor) not in own]
        if proof.draws_random_numbers:
            raise NotRecordableError("it draws random numbers")
        if sum(tensor.untyped_storage().nbytes() for tensor in self._outside) > MAX_OUTSIDE:
            raise NotRecordableError("it uses large tensors that are not part of the client's model")
        self._then = self._now()

    def holds(self) -> bool:
        """Return whether the same weights and batch give the same result as when the step was proven."""
        return self._proof.holds() and self._proof.holds_for_torch() and self._now() == self._then

    def _now(self) -> tuple[Any, ...]:
        return numeric_settings(), [_hash_of(tensor) for tensor in self._outside]


class _Kept(NamedTuple):
    """The result of one evaluation of a client's own model.

    Attributes:
        version: Version of the model.
        content: What the batches held.
        steps: The proven step of each batch; None for batches whose form was not proven.
        values: The values by name.
    """

    version: object
    content: Content
    steps: tuple[_ProvenStep | None, ...]
    values: dict[str, float]


class KeptResults:
    """Keeps the values of clients' own models of one stage, where the step is proven to give them again.

    A value is returned in place of an evaluation if the client's rows were not staged since, its batches hold the same
    bytes, and the proof of the step holds. All else is evaluated as written. Nothing is kept where code of the user's
    is called for each client or batch, such as hooks, metrics, transforms and transfer hooks.

    Args:
        bench: The workbench.
        stage: ``"validation"`` or ``"test"``.

    Attributes:
        bench: The workbench.
        reason: Why nothing is kept, or None.
        num_used: Number of evaluations that were not made.
    """

    def __init__(self, bench: Workbench, stage: str) -> None:
        self.bench, self.num_used = bench, 0
        self._function = StepFunction(bench.user, bench.layout, f"{stage}_step")
        self._steps: dict[Form, _ProvenStep] = {}
        self._repeats: Counter[Form] = Counter()
        self._num_lost = 0
        self._results: dict[tuple[str, int], _Kept] = {}
        self.reason = bench.user.per_client_code(stage)
        if bench.local.record_steps is False:
            self.reason = "trainer.record_steps is false"
        elif bench.user.has_transfer_hooks:
            self.reason = "batches go through transfer hooks"

    def start(self, split: str, models: Models) -> None:
        """Begin a pass over the clients of a split."""
        self._split = split
        # None where own models are not rows of the clients that are evaluated as they are.
        self._version = models.versions if models.fine_tuning is None and self.reason is None else None
        self._contents: dict[int, Content] = {}
        self._checked: set[Form] = set()
        self._seen: list[tuple[Form, int]] | None = None
        self._used: list[_ProvenStep | None] | None = None

    # around one evaluation

    def result(self, client: int, loader: Callable[[], Any]) -> dict[str, float] | None:
        """Return the values of a client's own model if its evaluation would give the kept ones, else None.

        Args:
            client: The client.
            loader: Makes the loader of the client's data.
        """
        kept = self._results.get((self._split, client))
        if kept is None or self._version is None or kept.version != self._version(client):
            return None
        content = self._contents.get(client)
        if content is None:
            content = self._content_of(loader())
        if content != kept.content:
            return None
        forms = [form for form, _ in kept.content]
        if not all(map(self._is_as_then, forms, kept.steps)):
            self._repeats.update(forms)
            return None
        self.num_used += 1
        return kept.values

    def begin(self, task: Task, loader: Any) -> None:
        """Begin an evaluation, whose batches are given to :meth:`before_step`."""
        self._checked.clear()  # the loader may come from code of the user's
        is_followed = self._version is not None and task[1] >= 0 and _is_plain(loader)
        self._seen = [] if is_followed else None
        self._used = [] if is_followed and task[0] == "local" else None

    def before_step(self, batch: Any) -> None:
        """Note what a batch holds, and whether the step on it is proven; prove it if its form was often repeated."""
        if self._seen is None:
            return
        form = _form_of(batch)
        if form is None:
            self._seen = self._used = None
            return
        self._seen.append((form, hash(tuple(map(_hash_of, batch)))))
        if self._used is not None:
            if self._repeats[form] >= PROVE_AFTER and form not in self._steps:
                self._prove(form, batch)
            self._used.append(self._holding(form))

    def keep(self, client: int, values: dict[str, float]) -> None:
        """Keep the values of the evaluation that was begun last, if it was one of a client's own model."""
        if self._used is None or None in self._used:
            self._checked.clear()  # a step that is not proven may have changed anything
        if self._seen is None:
            return
        self._contents[client] = content = tuple(self._seen)
        if self._used is None or self._version is None:
            return
        self._results.pop((self._split, client), None)
        if len(self._results) < MAX_KEPT:
            self._results[self._split, client] = _Kept(self._version(client), content, tuple(self._used), values)

    # parts

    def _content_of(self, loader: Any) -> Content | None:
        self._checked.clear()
        if not _is_plain(loader):
            return None
        batches = [self.bench.user.to_device(batch) for batch in loader]
        return tuple((_form_of(batch) or (), hash(tuple(map(_hash_of, batch)))) for batch in batches)

    def _is_as_then(self, form: Form, then: _ProvenStep | None) -> bool:
        return then is not None and self._holding(form) is then

    def _holding(self, form: Form) -> _ProvenStep | None:
        """Return the proven step on batches of a form, or None if there is none or its proof does not hold."""
        step = self._steps.get(form)
        if step is None or form in self._checked:
            return step
        with self.bench.user.autocast():  # as when it was proven: it sets the default dtype for double precision
            if step.holds():
                self._checked.add(form)
                return step
        del self._steps[form]
        self._num_lost += 1
        if self._num_lost >= MAX_LOST:
            self._stop("what it reads changes")
        return None

    def _prove(self, form: Form, batch: Sequence[Tensor]) -> None:
        if len(self._steps) >= MAX_FORMS:
            return
        layout = self.bench.layout
        own = {storage_key(tensor) for tensor in (*layout.parameters, *layout.buffers)}
        try:
            proof = self._function.prove(batch)
            with self.bench.user.autocast():
                self._steps[form] = _ProvenStep(proof, own)
        except NotRecordableError as obstacle:
            self._stop(str(obstacle))

    def _stop(self, reason: str) -> None:
        self.reason = reason
        self._version = None
        self._results.clear()
        self._steps.clear()


def _is_plain(loader: Any) -> bool:
    """Return whether no code of the user's runs when a loader makes its batches."""
    return type(loader) is ClientLoader and loader.gathers_plainly


def _form_of(batch: Any) -> Form | None:
    """Return what a proof depends on of a batch; None if it is not a list or tuple of ordinary tensors."""
    if type(batch) not in (list, tuple) or any(type(part) is not Tensor for part in batch):
        return None
    if any(part.layout is not torch.strided for part in batch):
        return None
    return type(batch), *[(part.shape, part.stride(), part.dtype) for part in batch]


def _hash_of(tensor: Tensor) -> int:
    """Return a hash of a tensor's bytes: 5 GB/s, of which the evaluation of a small network takes a fifth."""
    return hash(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
