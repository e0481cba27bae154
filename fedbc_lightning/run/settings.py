"""The settings of a run: the arguments of FederatedTrainer, each with its type, bounds and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, get_type_hints

from fedbc_lightning.core.checks import Count, NotNegative, Number, Positive, Share, checked, shown
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import AnyPath, refuse_url, url_of
from fedbc_lightning.core.lightning_arguments import advice
from fedbc_lightning.core.lightning_names import AnyCallback, AnyLogger
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.secret import hash_of_secret
from fedbc_lightning.distributed.backend import Backend
from fedbc_lightning.distributed.fabric import launched
from fedbc_lightning.distributed.ray_backend import Ray
from fedbc_lightning.federation.channel import ChannelPart
from fedbc_lightning.federation.coding import Codecs
from fedbc_lightning.federation.participation import ClientSampler, Stragglers, UniformSampler
from fedbc_lightning.federation.privacy import Privacy
from fedbc_lightning.federation.system import System
from fedbc_lightning.state.declaration import BufferPolicy

# Marks what changes no number of a run, such as its name: a resumed run may have another value without a warning.
FREE = "free"

Arguments = ParamSpec("Arguments")


# To add an option, add it here with its bounds, default and description, and use it: the trainer's arguments and
# attributes, the command line and the comparison on resume are made from this class.
@checked("trainer")
@dataclass(kw_only=True)
class RunSettings:
    """What the user chose for a run: the arguments of ``FederatedTrainer``.

    Args:
        max_rounds: T, the total number of rounds; rounds before a resume count.
        clients_per_round: S, the clients sampled in a round: an int is a number, a float a fraction of N, 1.0 all.
        local_epochs: E, passes over a client's data per round; default 1 if ``local_steps`` is None. Each client gets a
            new optimizer in every round, so momentum and Adam's moments start at zero.
        local_steps: Optimizer steps per client and round, instead of ``local_epochs``.
        local_schedules: ``"fresh"``: ``current_epoch``, ``global_step`` and schedulers of interval ``epoch`` or
            ``step`` start anew for each client and round. ``"continue"``: they continue over the rounds in which a
            client takes part, and ``max_epochs``, ``max_steps`` and ``estimated_stepping_batches`` are those of one
            round times ``max_rounds``. The epochs and steps that a client has taken are columns of ``clients.csv``; an
            epoch that is broken off counts by the fraction of its batches that were done. If a method trains a client
            twice in a round, its last training counts.
        sampler: Rule that samples the clients of a round; default uniform without replacement, or with ``privacy`` each
            client independently.
        stragglers: Simulation of sampled clients that do less work or drop out; None: there are none.
        privacy: Differential privacy of z for whole clients, by a bound of their updates and noise; None: there is
            none. See ``docs/howto/private_training.md``.
        codec: Codecs that shorten what clients send (``up``: ``TopK``, ``QSGD``, ``Sign``, ``BFloat16`` or ``Float8``)
            and receive (``down``: ``QSGD``, ``BFloat16`` or ``Float8``); None: all travels as it is. See
            ``docs/howto/coded_messages.md``.
        channel: Further parts that every message between clients and server passes, behind ``codec`` and before
            ``privacy``: objects of your own classes on
            :class:`~fedbc_lightning.federation.channel.ChannelPart`; None: there are none.
        system: A simulated clock: how fast clients compute and send, when they are there, and how long a round waits;
            None: there is none. See ``docs/howto/simulated_time.md``.
        engine: ``"sequential"`` trains one client after another, with any module. ``"vectorized"`` trains many clients
            at once, by ``torch.func`` over ``training_step``, for small models; it also evaluates clients with equal
            numbers of samples together, and raises an error that names what it cannot do. To choose it is to promise
            that the steps are functions of weights and batch; some are compared with the steps as written. ``"auto"``
            takes ``"vectorized"`` if ``training_step`` is promised to be such a function (see ``record_steps``), it
            can be mapped, the model has at most 2,000 parameters (on a CUDA GPU 2 million), and a process trains at
            least 50 clients in a round, else ``"sequential"``.
        record_steps: Whether local steps that occur often are recorded and replayed, which gives the same numbers
            faster. ``"auto"``: if ``training_step`` has the decorator :func:`fedbc_lightning.recordable`, as in all
            models of this package, by which you promise that it is a function of weights and batch. True: always,
            which is the same promise. False: never. Some steps are compared with the step as written in any case.
            Evaluations of several clients at once are recorded but for False.
        check_isolation: Whether two clients are trained in both orders before round 1, after each of which what clients
            share (attributes of module, callbacks and data) is put back, and compared bit for bit: no client's result
            may depend on who trained before it. A difference is an error that names what differed and what had changed.
        accelerator: Kind of device, as in Lightning: ``auto``, ``cpu``, ``gpu``, ...
        strategy: Way in which processes are started: ``auto``, ``ddp``, ``ddp_spawn``, ``ddp_fork`` or
            ``ddp_notebook``. Each process trains whole clients; gradients are never synchronised. A forked process
            (``ddp_fork``, and ``ddp_notebook``, which ``auto`` takes in a notebook) computes with one thread, because
            threads do not survive a fork.
        devices: Number of processes on the CPU, number of GPUs, or a list of GPU indices, as in Lightning. ``auto``: as
            many as torchrun or SLURM has started on each machine; without them one process, or all GPUs.
        num_nodes: Number of machines. ``auto``: as many as torchrun or SLURM uses; without them one.
        share_by: How processes share the clients of a round: by numbers of ``"steps"``, or by the ``"seconds"`` that
            each took for a step in the last round, so that a slower one trains fewer. The last bits of the sums over
            clients, which are float64, then depend on the clock, and hardly ever a bit of z. See
            ``docs/howto/clusters.md``.
        backend: Who trains the clients of rounds in place of this process: ``ray``, or
            :class:`~fedbc_lightning.distributed.ray_backend.Ray` with its options, or an object of your own class on
            :class:`~fedbc_lightning.distributed.backend.Backend`; None: this process, or those of ``devices``. The
            numbers are the same. See ``docs/howto/backends.md``.
        max_restarts: Number of times that a run of several processes on this machine goes on from its last checkpoint
            by itself after a process was killed or does not answer; ``strategy: auto`` is ``ddp_spawn`` then. It ends
            earlier if it is lost twice at the same checkpoint. See ``docs/howto/clusters.md``.
        precision: ``32-true``, ``64-true``, ``16-mixed``, ``bf16-mixed``, ``16-true`` or ``bf16-true``. The server's
            state is at least float32.
        deterministic: Whether runs on GPUs must repeat bit for bit. True: an operation without a deterministic
            algorithm raises an error; ``"warn"``: it gives a warning. None: cuDNN takes its deterministic algorithms,
            which suffices for most networks. False: torch's settings stay as they are.
        callbacks: Lightning callbacks, with the hooks of the table in ``docs/howto/hooks.md``.
        logger: None or True: TensorBoard in the run folder; False: no logger; or Lightning loggers.
        eval_every_n_rounds: Evaluate after every n-th round and after the last one; 0: never.
        eval_test: Whether rounds are evaluated on test data, too. False: on validation data alone, as while a study is
            tuned; ``test`` evaluates on test data in any case.
        eval_clients: Clients that are evaluated one by one: a number, a fraction, or ``all``; None: all clients up to
            1,000, or 1,000 of more, the same ones in every round. 0: none, and the global model is evaluated on the
            pooled data alone. The same number, fraction or ``all`` holds for clients that are held out.
        heldout_finetune_steps: Optimizer steps that a copy of the global model takes on each held-out client's training
            data before ``accuracy/heldout_finetuned`` is measured; 0: none, and only ``accuracy/heldout`` is measured.
            Who is held out is said by ``heldout_clients`` of the data module. It cannot be given together with
            ``local_parameters``.
        gradient_clip_val: Bound of the gradient, the algorithm's terms included; None: the gradient is not clipped.
        gradient_clip_algorithm: Clip by ``norm`` (default) or by ``value``.
        accumulate_grad_batches: Number of batches per optimizer step.
        buffers: Treatment of floating-point buffers such as BatchNorm's. ``average``: the server averages them like
            parameters (integer buffers take the maximum). ``local``: every client keeps its own, and the server's mean
            is for evaluation only. ``global``: they stay as in the initial model. The same holds for parameters with
            ``requires_grad=False`` that training writes, such as those of a teacher network. Buffers whose shape
            training changes, such as memory banks, have no mean: ``average`` refuses them in the first round.
        local_parameters: Names or patterns (``head.*``) of parameters that stay with each client, or ``batch_norm`` for
            those of all BatchNorm layers; the algorithm sees and sends the others alone. None: all are shared. See
            ``docs/howto/partial_sharing.md``.
        keep_local_models: Whether every client's last model is kept for metrics such as ``accuracy/local`` if the
            algorithm does not keep it; None: if all of them take at most 64 MiB and there are no ``local_parameters``.
        client_dtype: Data type in which the clients' vectors are kept between rounds: ``float32``, or ``bfloat16``,
            which rounds them and takes half the space; None: that of the model. If the vectors of all N clients take
            more than 64 MiB, they lie in ``checkpoints/clients.bin``.
        histogram_every_n_rounds: Rounds between two histograms over clients in TensorBoard, which stand behind all
            curves; 0: there are none.
        enable_checkpointing: Whether ``checkpoints/last.ckpt`` is written, from which a run resumes.
        checkpoint_every_n_rounds: Rounds between two checkpoints; None: as often as writing them takes at most 5 % of
            the time.
        checkpoint_every_minutes: Minutes after which the checkpoint is also written at the end of a round, since it was
            written last; None: no clock asks for one.
        enable_progress_bar: Whether to show progress over rounds and a final table.
        default_root_dir: Folder of all runs; a run is written to ``<default_root_dir>/<name>/<method>-<seed>``.
        name: Name of the experiment; its runs are written to ``<default_root_dir>/<name>/<method>-<seed>``.
        seed: Seed of everything random; None: that of ``seed_everything``, or else 0.
    """

    max_rounds: Annotated[Number, FREE] = 100
    clients_per_round: Count | Share = 1.0
    local_epochs: Count | None = None
    local_steps: Count | None = None
    local_schedules: Literal["fresh", "continue"] = "fresh"
    sampler: ClientSampler | None = None
    stragglers: Stragglers | None = None
    privacy: Privacy | None = None
    codec: Codecs | None = None
    channel: Annotated[list[ChannelPart] | None, FREE] = None  # its parts say in describe() what a resumed run needs
    system: System | None = None
    engine: Literal["sequential", "vectorized", "auto"] = "sequential"
    record_steps: bool | Literal["auto"] = "auto"
    check_isolation: Annotated[bool, FREE] = False
    accelerator: Annotated[str, FREE] = "auto"
    strategy: Annotated[str, FREE] = "auto"
    devices: Annotated[list[int] | str | int, FREE] = "auto"
    num_nodes: Annotated[Count | Literal["auto"], FREE] = "auto"
    share_by: Annotated[Literal["steps", "seconds"], FREE] = "steps"
    backend: Annotated[Backend | Literal["ray"] | None, FREE] = None
    max_restarts: Annotated[Number, FREE] = 0
    precision: Literal["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"] = "32-true"
    deterministic: bool | Literal["warn"] | None = None
    callbacks: Annotated[list[AnyCallback] | AnyCallback | None, FREE] = None
    logger: Annotated[AnyLogger | list[AnyLogger] | bool | None, FREE] = None
    eval_every_n_rounds: Number = 1
    eval_test: Annotated[bool, FREE] = True
    eval_clients: Number | Share | Literal["all"] | None = None
    heldout_finetune_steps: Number = 0
    gradient_clip_val: NotNegative | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    accumulate_grad_batches: Count = 1
    buffers: BufferPolicy = "average"
    local_parameters: list[str] | None = None
    keep_local_models: bool | None = None
    client_dtype: Literal["float32", "bfloat16"] | None = None
    histogram_every_n_rounds: Annotated[Number, FREE] = 10
    enable_checkpointing: Annotated[bool, FREE] = True
    checkpoint_every_n_rounds: Annotated[Count | None, FREE] = None
    checkpoint_every_minutes: Annotated[Positive | None, FREE] = None
    enable_progress_bar: Annotated[bool, FREE] = True
    default_root_dir: Annotated[AnyPath, FREE] = "runs"
    name: Annotated[str, FREE] = "default"
    seed: Annotated[int | None, FREE] = None

    def __post_init__(self) -> None:
        """Check all values, also those that are impossible only together."""
        refuse_url(self.default_root_dir, "trainer.default_root_dir: ")
        folder = Path(self.name)
        if self.local_epochs is not None and self.local_steps is not None:
            raise ConfigurationError("trainer.local_epochs and local_steps: give one of them, set the other to null.")
        if not self.name or url_of(self.name) or folder.is_absolute() or ".." in folder.parts:
            raise ConfigurationError(f"trainer.name: got '{self.name}'; give the name of a folder in default_root_dir.")
        if self.local_parameters and self.heldout_finetune_steps:
            raise ConfigurationError(
                "trainer.heldout_finetune_steps: clients that are held out have no part of their own to begin with, as "
                "trainer.local_parameters asks for; leave one out (a study: NAME.trainer.heldout_finetune_steps: 0)."
            )
        # ε is counted for clients that are sampled independently and whose updates are sent as they are clipped.
        availability = None if self.system is None else self.system.availability
        for name, value in {
            "stragglers": self.stragglers, "codec": self.codec, "system.availability": availability,
        }.items():  # fmt: skip
            if self.privacy is not None and value is not None:
                raise ConfigurationError(f"trainer.{name}: ε of trainer.privacy does not hold with it; leave one out.")
        if self.privacy is not None:
            self.privacy.sampler(self.sampler)  # raises unless it samples each client independently
        if self.local_steps is None:
            self.local_epochs = self.local_epochs or 1
        if self.backend is not None:
            self._check_backend()

    def _check_backend(self) -> None:
        """Check what it is, leave one process for the server, and refuse what asks for more."""
        assert self.chosen_backend is not None
        self.chosen_backend.check()
        started = launched() if self.devices == "auto" else None
        if started is not None and started[1:] != (1, 1):
            raise ConfigurationError(
                f"trainer.backend: {started[0]} has started several processes, and with a backend the run is one "
                "process; start it without, or give trainer.devices 1 and trainer.num_nodes 1 if only one of them runs."
            )
        self.devices = 1 if self.devices == "auto" else self.devices
        self.num_nodes = 1 if self.num_nodes == "auto" else self.num_nodes
        is_one = self.devices in (1, "1") or (isinstance(self.devices, list) and len(self.devices) == 1)
        used = {
            "devices": not is_one, "strategy": self.strategy != "auto", "num_nodes": self.num_nodes > 1,
            "max_restarts": self.max_restarts > 0, "share_by": self.share_by != "steps",
        }  # fmt: skip
        for name in (name for name, is_set in used.items() if is_set):
            raise ConfigurationError(
                f"trainer.{name}: got {getattr(self, name)}; with trainer.backend the run is one process, and the "
                "backend has the others. Leave it out."
            )

    @property
    def local(self) -> LocalTraining:
        """What tells how long and how a client trains."""
        return LocalTraining(
            epochs=self.local_epochs,
            steps=self.local_steps,
            accumulate_grad_batches=self.accumulate_grad_batches,
            gradient_clip_val=self.gradient_clip_val,
            gradient_clip_algorithm=self.gradient_clip_algorithm or "norm",
            record_steps=self.record_steps,
            schedule_rounds=max(1, self.max_rounds) if self.local_schedules == "continue" else None,
        )

    @property
    def chosen_sampler(self) -> ClientSampler:
        """The rule that samples the clients of a round: that of the user, of ``privacy``, or uniform sampling."""
        return self.privacy.sampler(self.sampler) if self.privacy is not None else self.sampler or UniformSampler()

    @cached_property
    def chosen_backend(self) -> Backend | None:
        """Who trains the clients of rounds in place of this process."""
        return Ray() if self.backend == "ray" else self.backend

    @property
    def keeps_rows(self) -> bool:
        """Whether the clients' vectors stay with clients elsewhere."""
        return self.chosen_backend is not None and self.chosen_backend.keeps_rows

    @property
    def experiment(self) -> Path:
        """Folder of all runs of this name."""
        return Path(self.default_root_dir, self.name)

    def has_histograms(self, round: int) -> bool:
        """Return whether an evaluated round is the first at or behind a multiple of their interval, or the last one."""
        every = self.histogram_every_n_rounds
        return bool(every) and (round % every < self.eval_every_n_rounds or round == self.max_rounds)

    def compared(self) -> dict[str, Any]:
        """Return the values by name that a resumed run is expected to share with the run before."""
        hints = get_type_hints(RunSettings, include_extras=True)
        names = [name for name, hint in hints.items() if FREE not in getattr(hint, "__metadata__", ())]
        values = {name: getattr(self, name) for name in names}
        sampler = type(self.chosen_sampler).__name__  # its attributes may be what it has drawn
        secret = {} if self.privacy is None else {"privacy.secret": hash_of_secret(self.privacy.secret)}
        schedules = f"continue (for max_rounds: {self.max_rounds})" if self.local_schedules == "continue" else "fresh"
        return values | {"sampler": sampler, "local_schedules": schedules} | secret


def with_arguments_of(
    settings: Callable[Arguments, RunSettings],
) -> Callable[[Callable[[Any, RunSettings], None]], Callable[Concatenate[Any, Arguments], None]]:
    """Let an ``__init__`` take the arguments of the settings and receive the settings.

    Type checkers see the arguments by the ParamSpec; jsonargparse, Sphinx and ``help`` see them by ``__signature__``
    and ``__doc__``. So an argument stands in one place.
    """

    def decorate(init: Callable[[Any, RunSettings], None]) -> Callable[Concatenate[Any, Arguments], None]:
        def with_settings(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            known = signature.parameters
            unknown = [f"{shown(value)}: give its name, too" for value in args]
            unknown += [f"{name}: {advice(name, known)}" for name in kwargs if name not in known]
            if unknown:
                raise ConfigurationError(f"trainer: it has no such arguments as {'; '.join(unknown)}")
            init(self, settings(*args, **kwargs))

        signature, hints = inspect.signature(settings), get_type_hints(settings)
        one_by_one = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        with_settings.__signature__ = inspect.Signature([first, *one_by_one])  # type: ignore[attr-defined]
        with_settings.__name__, with_settings.__doc__ = init.__name__, settings.__doc__
        return with_settings

    return decorate
