"""The results of an evaluation: metrics of the models, and measures of fairness among clients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from fedbc_lightning.core.metric_names import NUM_EVALUATED, Measured, has_value, is_lower_better
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.evaluation.measurement import Results


@dataclass
class Evaluation:
    """The results of one evaluation.

    Attributes:
        metrics: Value of each metric by its name (``accuracy/global``, ...).
        clients: Value of each metric at each client, by name (``accuracy/global``, ``accuracy/local``) and client.
        num_samples: Number of samples on which each client was evaluated, by name (``num_test_samples``) and client.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[int, float]] = field(default_factory=dict)
    num_samples: dict[str, dict[int, int]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, float]]:
        """Return one row per evaluated client: its number under ``client``, its samples, and its values by name."""
        columns = self.num_samples | self.clients
        found: dict[int, dict[str, float]] = {c: {"client": c} for c in sorted(set().union(*columns.values()))}
        for name, values in columns.items():
            for client, value in values.items():
                found[client][name] = value
        return list(found.values())


def summarise(evaluation: Evaluation, split: str, results: Results, datamodule: FederatedDataModule) -> None:
    """Add the results of a split to an evaluation.

    A metric that some clients do not log, or that is NaN (of a class that they do not have), is summarised over those
    that have it, and their number is a metric, too. Where no place has the data of all clients, the mean over their
    samples stands for the global model's metric on these.

    Args:
        evaluation: Evaluation to complete.
        split: Split of the data, ``"test"`` or ``"val"``.
        results: Values of tasks by name.
        datamodule: Data of the clients.
    """
    metrics, sizes = evaluation.metrics, datamodule.num_samples(split)
    train_sizes, heldout = datamodule.num_samples("train"), set(datamodule.heldout.tolist())
    for name, value in results.get(("global", -1), {}).items():
        metrics[Measured(name, split=split).name] = value
    measured = sorted({client for _, client in results if client >= 0})
    evaluation.num_samples[f"num_{split}_samples"] = {client: int(sizes[client]) for client in measured}
    # Of clients that are held out: z as it is, and after fine-tuning
    for which, place in (("global", "heldout"), ("finetuned", "heldout_finetuned")):
        for name, of_clients in _columns(results, which, heldout).items():
            having = _having(name, of_clients)
            averaged = having or of_clients  # NaN where nobody has a value
            what, values = Measured(name, place, split), np.array(list(averaged.values()))
            evaluation.clients[what.name] = of_clients
            metrics[what.name] = float(values.mean())
            if len(having) < len(heldout.intersection(measured)):
                metrics[what._replace(place="heldout_num_clients").name] = float(len(having))
            if split == "test":
                metrics[what._replace(place=f"{place}_std").name] = deviation(values)
                metrics[what._replace(place=f"{place}_worst10").name] = worst_tenth(name, values)
    # Fairness compares the clients under one model, as q-FedAvg's tables do. Where parameters stay with the clients
    # there is no such model, and their own models are compared.
    trained = set(measured) - heldout
    fair = "global" if any(("global", client) in results for client in trained) else "local"
    for which in ("local", "global"):
        for name, of_clients in _columns(results, which, trained).items():
            having = _having(name, of_clients)
            averaged = having or of_clients
            clients, values = list(averaged), np.array(list(averaged.values()))
            what = Measured(name, which, split)
            evaluation.clients[what.name] = of_clients
            if which == "local":
                weighted = what._replace(place="local_weighted")
                metrics[what.name] = float(values.mean())
                metrics[weighted.name] = float(np.average(values, weights=sizes[clients]))
                if split == "test":
                    metrics[what._replace(place="local_worst10").name] = worst_tenth(name, values)
            if which == "global" and ("global", -1) not in results:
                metrics[what.name] = float(np.average(values, weights=sizes[clients]))
            if which == fair and len(having) < len(trained):
                metrics[what._replace(place="num_clients").name] = float(len(having))
            if which == fair and split == "test":
                metrics |= fairness(name, values, train_sizes[clients])
                metrics[NUM_EVALUATED] = float(len(trained))


def _columns(results: Results, which: str, clients: Collection[int]) -> dict[str, dict[int, float]]:
    """Return the values of one kind of model at some of the clients, by name and client."""
    columns = defaultdict[str, dict[int, float]](dict)
    for (kind, client), named in results.items():
        if kind == which and client in clients:
            for name, value in named.items():
                columns[name][client] = value
    return columns


def _having(name: str, of_clients: dict[int, float]) -> dict[int, float]:
    """Return the values of those clients that have the metric."""
    return {client: value for client, value in of_clients.items() if has_value(name, value)}


def deviation(values: np.ndarray) -> float:
    """Return the population's standard deviation; that of infinite values is NaN, without a warning of NumPy.

    Example:
        >>> deviation(np.array([0.5, 1.0])), deviation(np.array([0.5, np.inf]))
        (0.25, nan)
    """
    # A diverged run has infinite losses; inf - inf is NaN, which is the answer, and no reason for a warning each round.
    with np.errstate(invalid="ignore"):
        return float(values.std())


def worst_tenth(name: str, values: np.ndarray) -> float:
    """Return the mean of the worst ceil(n/10) of n values of a metric.

    Example:
        >>> worst_tenth("accuracy", np.array([0.5, 1.0])), worst_tenth("loss", np.array([0.5, 1.0]))
        (0.5, 1.0)
    """
    ranked = np.sort(values)[::-1] if is_lower_better(name) else np.sort(values)
    return float(ranked[: math.ceil(len(values) / 10)].mean())


def fairness(name: str, values: np.ndarray, sizes: np.ndarray) -> dict[str, float]:
    """Measure how well and evenly the global model serves the clients, or own models where no model is everyone's.

    Args:
        name: Name of the metric, which tells whether smaller values are better, see
            :func:`~fedbc_lightning.core.metric_names.is_lower_better`.
        values: Value of the metric at each of the n clients.
        sizes: Number of training samples of each client.

    Returns:
        ``<name>/mean``, ``std`` (the population's standard deviation), ``worst10`` (the mean of the worst ceil(n/10)),
        ``least_data`` and ``most_data`` (the values of the clients with the fewest and the most samples).

    Example:
        >>> fairness("accuracy", np.array([0.5, 1.0]), np.array([10, 20]))["accuracy/worst10"]
        0.5
    """
    found = {
        "mean": float(values.mean()),
        "std": deviation(values),
        "worst10": worst_tenth(name, values),
        "least_data": float(values[sizes.argmin()]),
        "most_data": float(values[sizes.argmax()]),
    }
    return {Measured(name, place).name: value for place, value in found.items()}
