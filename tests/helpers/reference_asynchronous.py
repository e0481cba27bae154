"""NumPy loops for FedBuff and FedAsync on quadratics, from the papers' algorithms alone; no code of the package."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.reference import Clients, Local, Logged, Run, outer_loop, train

Choose = Callable[[int, int, list[int], int], list[int]]
"""(version of z, draws from this version so far, who may start, how many) -> who starts."""


@outer_loop
def fedbuff_fresh(run: Run, z: np.ndarray, server_lr: float) -> Logged:
    """With equal speeds and a buffer of all places, everybody starts and arrives together."""
    version = np.full(len(run.clients), -1.0)
    for t, sampled in run.rounds:
        updates = [run.train(t, i, z).w - z for i in sampled]
        z = z + server_lr / len(sampled) * sum(updates)
        version[sampled] = t - 1
        yield {"z": z, "version": version}


@outer_loop
def fedasync_alone(run: Run, z: np.ndarray, mixing: float, rho: float) -> Logged:
    """With one place, z mixes with one fresh model after the other."""
    for t, sampled in run.rounds:
        for i in sampled:  # one, or nobody
            z = (1 - mixing) * z + mixing * run.train(t, i, z, lambda w, z=z: rho * (w - z)).w
        yield {"z": z}


def asynchronous(
    clients: Clients,
    num_rounds: int,
    z: np.ndarray,
    local: Local,
    seconds: np.ndarray,
    num_places: int,
    buffer_size: int,
    choose: Choose,
    step: Callable[[np.ndarray, list[tuple[np.ndarray, np.ndarray, int]]], np.ndarray],
    rho: float = 0.0,
) -> dict[str, Any]:
    """One loop over events of a heap: models arrive, z changes, free places are taken.

    Args:
        clients: Their quadratics.
        num_rounds: Number of changes of z.
        z: Initial model.
        local: Local training.
        seconds: Seconds that each client takes from its start to its arrival.
        num_places: Clients in training at a time.
        buffer_size: Models that change z once.
        choose: Draws who starts.
        step: (z, [(model, z of its start, staleness), ...]) -> new z.
        rho: Strength of the pull to z in local training.
    """
    heap: list[tuple[float, int, int, int, np.ndarray, np.ndarray]] = []
    time, version, draws, order = 0.0, 0, 0, 0
    started: set[int] = set()
    buffer: list[tuple[np.ndarray, np.ndarray, int]] = []
    log: dict[str, list[Any]] = {"z": [], "time": [], "staleness": []}
    late: dict[int, int] = {}
    while version < num_rounds:
        while heap and heap[0][0] == time and version < num_rounds:
            _, _, client, received, model, start = heapq.heappop(heap)
            buffer.append((model, start, version - received))
            late.setdefault(client, version - received)
            if len(buffer) == buffer_size:
                z = step(z, buffer)
                version, draws, started, buffer = version + 1, 0, set(), []
                log["z"].append(z)
                log["time"].append(time)
                log["staleness"].append(late)
                late = {}
        flying = {entry[2] for entry in heap}
        idle = [client for client in range(len(clients)) if client not in flying | started]
        free = min(num_places - len(heap), len(idle))
        if free:
            for client in choose(version, draws, idle, free):
                out = train(clients, local, version + 1, client, z, lambda w, z=z: rho * (w - z))
                heapq.heappush(heap, (time + seconds[client], order, client, version, out.w, z))
                order += 1
                started.add(client)
            draws += 1
        time = heap[0][0]
    return log
