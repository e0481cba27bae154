"""Statistics over seeds: means, and paired differences taken seed by seed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

KEYS = ["variant", "algorithm", "seed"]


def summarise(results: pd.DataFrame, metrics: list[str]) -> pd.DataFrame:
    """Compute number of seeds, mean and standard deviation (n - 1) per variant, algorithm and metric.

    Args:
        results: Tidy table with one row per run; only finished runs count.
        metrics: Names of the metrics' columns.
    """
    finished = results[results["status"] == "finished"]
    long = finished.melt(id_vars=KEYS, value_vars=metrics, var_name="metric", value_name="value").dropna()
    grouped = long.groupby(["variant", "algorithm", "metric"], sort=False)["value"]
    return grouped.agg(num_seeds="count", mean="mean", std="std").reset_index()


def paired_differences(
    results: pd.DataFrame, metrics: list[str], reference: str, confidence: float = 0.95
) -> pd.DataFrame:
    """Compute per variant, algorithm and metric the mean difference to the reference algorithm of the same seed.

    Runs of one seed share partition, initial model and sampled clients, so the effects of these on the numbers cancel.
    The interval is Student's for the mean of n differences, t with n - 1 degrees of freedom; one seed has none.

    Args:
        results: Tidy table with one row per run; only finished runs count.
        metrics: Names of the metrics' columns.
        reference: Name of the algorithm that the others are compared with.
        confidence: Confidence level of the interval, in (0, 1).
    """
    finished = results[results["status"] == "finished"]
    rows = []
    for variant, runs in finished.groupby("variant", sort=False):
        # Pairs are taken seed by seed: what partition, initial model and sampled clients do to a number is most of its
        # variance over seeds, and it cancels in the difference.
        for metric in metrics:
            values = runs.pivot(index="seed", columns="algorithm", values=metric)
            if reference not in values:
                continue
            for name in dict.fromkeys(runs["algorithm"]):
                if name == reference:
                    continue
                differences = (values[name] - values[reference]).dropna().to_numpy()
                low, high = interval(differences, confidence)
                mean = float(differences.mean()) if len(differences) else math.nan
                rows.append((variant, name, metric, len(differences), mean, low, high))
    columns = ["variant", "algorithm", "metric", "num_pairs", "difference", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def interval(differences: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return the ends of Student's t interval for the mean of differences (n,); NaN if n < 2.

    Example:
        >>> [round(end, 3) for end in interval(np.array([1.0, 2.0, 3.0]), 0.95)]
        [-0.484, 4.484]
        >>> interval(np.zeros(3), 0.95)
        (0.0, 0.0)
    """
    count = len(differences)
    if count < 2:
        return math.nan, math.nan
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(count)
    # Student's t, not a normal quantile: studies have 3 to 5 seeds, where t is 4.3 to 2.8 in place of 1.96.
    reach = float(stats.t.ppf((1 + confidence) / 2, count - 1)) * error
    return mean - reach, mean + reach
