"""How the processes of a run find each other at its start."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric.strategies import DDPStrategy

from fedbc_lightning.core.errors import ConfigurationError

SECONDS_TO_ADVISE = 5.0
"""Seconds that processes of several machines may take before a warning explains how to start the others."""

SECONDS_OF_SILENCE = 60.0
"""Seconds that a process waits before it prints a message; it prints again each time its waiting time has doubled."""

SECONDS_TO_MEET = 600.0
"""Seconds that a process waits for the others before the run ends."""


@contextmanager
def joining(strategy: DDPStrategy) -> Iterator[None]:
    """Watch over the start of the process group, inside the context.

    Messages say that this process waits, Ctrl-C ends it, and after :data:`SECONDS_TO_MEET` it gives up.

    Raises:
        ConfigurationError: Not all processes came in time.
    """
    is_over = threading.Event()
    threading.Thread(target=_tell, args=(strategy, is_over), daemon=True).start()
    # While torch waits, no Python code runs, so Python's handler of Ctrl-C would not run: the system must end us.
    is_ours = threading.current_thread() is threading.main_thread()
    is_ours &= signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    except (torch.distributed.DistError, TimeoutError) as error:
        raise ConfigurationError(
            f"trainer.devices: {_who(strategy)} waited {SECONDS_TO_MEET:g} s for the others, and not all came. "
            "See what those say that ended, and start all of them again."
        ) from error
    finally:
        is_over.set()
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _tell(strategy: DDPStrategy, is_over: threading.Event) -> None:
    if strategy.local_rank:
        return
    if not is_over.wait(SECONDS_TO_ADVISE) and strategy.num_nodes > 1:
        _advise(strategy)
    waited, pause = SECONDS_TO_ADVISE, SECONDS_OF_SILENCE - SECONDS_TO_ADVISE
    while not is_over.wait(pause):
        waited += pause
        pause = waited
        print(f"Waiting for the other processes since {waited:g} s: {_who(strategy)}.", file=sys.stderr, flush=True)


def _who(strategy: DDPStrategy) -> str:
    environment = strategy.cluster_environment
    assert environment is not None
    rank = strategy.node_rank * strategy.num_processes + strategy.local_rank
    address = f"{environment.main_address}:{environment.main_port}"
    return f"process {rank} of {strategy.num_nodes * strategy.num_processes} (counted from 0) at {address}"


def _advise(strategy: DDPStrategy) -> None:
    environment = strategy.cluster_environment
    assert environment is not None
    address = f"{environment.main_address}:{environment.main_port}"
    warnings.warn(
        f"trainer.num_nodes: {strategy.num_nodes}: this is node {strategy.node_rank}, waiting at {address} for the "
        f"others, {strategy.num_nodes * strategy.num_processes} processes in all. Start the same command on each "
        f"machine with MASTER_ADDR={environment.main_address} MASTER_PORT={environment.main_port} and NODE_RANK=0, 1, "
        "...",
        stacklevel=2,
    )
