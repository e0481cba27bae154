"""The worker process: does runs of a study, one after another, and reports their progress."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbc_lightning.trainer.trainer import FederatedTrainer


@dataclass(frozen=True)
class Task:
    """A command line that a worker is to run.

    Attributes:
        words: Command line of ``fit``, with ``--ckpt_path`` if the run has a checkpoint to resume from.
        log: File to which the output of the run is appended.
    """

    words: list[str]
    log: Path


@dataclass(frozen=True)
class Progress:
    """Report of a worker that a round has finished.

    Attributes:
        round: Number of the finished round, from 1.
        max_rounds: T, the number of rounds of the run.
    """

    round: int
    max_rounds: int


@dataclass(frozen=True)
class Ended:
    """Report of a worker that a run has ended.

    Attributes:
        error: Reason why the run failed, in one sentence; None if it finished.
        seconds: Seconds that the run took.
    """

    error: str | None
    seconds: float


def work(tasks: Connection, threads: int, device: int | None) -> None:
    """Do the tasks that come from the connection until it closes, and send reports into it.

    Args:
        tasks: Connection to the scheduling process.
        threads: Number of torch threads.
        device: Index of the GPU that this worker may use; None: the config decides.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the scheduler decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # device counts within these, if the user has set them
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            task: Task = tasks.recv()
        except (EOFError, OSError):
            return
        _run(task, tasks)


def _end_with_parent() -> None:
    """End this process when its parent dies: a new scheduler would otherwise run its runs a second time."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(task: Task, connection: Connection) -> None:
    """Do one run and report its end."""
    started = time.perf_counter()
    error = _error_of(task, connection)
    with suppress(OSError):  # the scheduler is gone, or is stopping this process
        connection.send(Ended(error, time.perf_counter() - started))


def _error_of(task: Task, connection: Connection) -> str | None:
    """Do one run and return the error that ended it, or None."""
    from lightning.pytorch import Callback, LightningModule

    from fedbc_lightning.cli import FederatedCLI
    from fedbc_lightning.cli.arguments import PROG, UsageError
    from fedbc_lightning.core.errors import ConfigurationError, first_line
    from fedbc_lightning.core.places import notes_of, one_line, report

    class Reporter(Callback):
        """Reports every finished round to the scheduler."""

        def on_round_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
            with suppress(OSError):
                connection.send(Progress(trainer.current_round, trainer.max_rounds))

    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("a", buffering=1, encoding="utf-8") as log:
        print(f"$ {PROG} {' '.join(task.words)}", file=log)
        out, err = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = log
        try:
            options: dict[str, Any] = {"trainer_defaults": {"callbacks": [Reporter()]}}
            FederatedCLI(args=task.words, parser_kwargs={"prog": PROG}, **options)
        except (ConfigurationError, UsageError) as error:
            return one_line(error)
        except SystemExit as error:  # raised by the parser, which has written the reason to the log
            return None if not error.code else _last_line(task.log)
        except KeyboardInterrupt:
            return "stopped"
        except Exception as error:
            print(report(error), end="", file=log)
            return f"{type(error).__name__}: {first_line(error)}" + "".join(f" ({note})" for note in notes_of(error))
        finally:
            sys.stdout, sys.stderr = out, err
    return None


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").strip().splitlines()
    return lines[-1].removeprefix("fedbc-cli: error: ") if lines else "no reason given"
