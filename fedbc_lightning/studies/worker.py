"""A process that does runs of a study, one after another or several at once, and tells how far they are."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbc_lightning.engines.stacked.lockstep import Member
    from fedbc_lightning.trainer.trainer import FederatedTrainer


@dataclass(frozen=True)
class Task:
    """A command line to be run.

    Attributes:
        words: Of ``fit``, with ``--ckpt_path`` where there is something to go on from.
        log: File for what the run prints.
        is_beside: Whether its numbers are to be those that it has beside runs of its kind, though it may be alone.
    """

    words: list[str]
    log: Path
    is_beside: bool


@dataclass(frozen=True)
class Progress:
    """A round was finished.

    Attributes:
        place: Of the run among those that were sent together.
        round: Of ``max_rounds``.
        max_rounds: See there.
    """

    place: int
    round: int
    max_rounds: int


@dataclass(frozen=True)
class Ended:
    """A run ended.

    Attributes:
        place: See :class:`Progress`.
        error: What went wrong, in a sentence; None: nothing.
        seconds: It took, without start-up.
    """

    place: int
    error: str | None
    seconds: float


def work(tasks: Connection, threads: int, device: int | None) -> None:
    """The life of a worker: tasks from the connection until it closes, reports into it.

    Args:
        tasks: To the process that schedules.
        threads: Of torch.
        device: Index of the GPU that it may use; None: as the config says.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the scheduler decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # of this machine, where it is not all of them
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            together: list[Task] = tasks.recv()
        except (EOFError, OSError):
            return
        if not together[0].is_beside:
            _run(together[0], tasks, 0, None)
        else:
            from fedbc_lightning.engines.stacked.lockstep import Lockstep

            Lockstep().run([partial(_run, task, tasks, place) for place, task in enumerate(together)])


def _end_with_parent() -> None:
    """A scheduler that was killed must not leave runs behind: the next one would run them a second time."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(task: Task, connection: Connection, place: int, beside: Member | None) -> None:
    """One run, and the report of its end."""
    started = time.perf_counter()
    error = _error_of(task, connection, place, beside)
    seconds = time.perf_counter() - started - (beside.seconds_elsewhere if beside is not None else 0.0)
    with suppress(OSError):  # the scheduler is gone, or stops us
        connection.send(Ended(place, error, seconds))


def _error_of(task: Task, connection: Connection, place: int, beside: Member | None) -> str | None:
    """One run; the error that ended it, or None."""
    from lightning.pytorch import Callback, LightningModule

    from fedbc_lightning.cli import FederatedCLI
    from fedbc_lightning.cli.arguments import PROG, UsageError
    from fedbc_lightning.core.errors import ConfigurationError, first_line
    from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine

    class Reporter(Callback):
        """Tells the scheduler of every finished round, and the engine who is beside it."""

        def on_fit_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
            engine = trainer.federation.engine
            if isinstance(engine, VectorizedEngine):
                engine.beside = beside

        def on_round_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
            with suppress(OSError):
                connection.send(Progress(place, trainer.current_round, trainer.max_rounds))

    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("a", buffering=1, encoding="utf-8") as log:
        print(f"$ {PROG} {' '.join(task.words)}", file=log)
        out, err = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = log
        try:
            options: dict[str, Any] = {"trainer_defaults": {"callbacks": [Reporter()]}}
            FederatedCLI(args=task.words, parser_kwargs={"prog": PROG}, **options)
        except (ConfigurationError, UsageError) as error:
            return str(error)
        except SystemExit as error:  # of the parser, which has written why
            return None if not error.code else _last_line(task.log)
        except KeyboardInterrupt:
            return "stopped"
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {first_line(error)}"
        finally:
            sys.stdout, sys.stderr = out, err
    return None


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").strip().splitlines()
    return lines[-1].removeprefix("fedbc-cli: error: ") if lines else "no reason given"
