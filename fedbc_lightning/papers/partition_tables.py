"""Computes FedBC's Tables 4 and 5, the split of MNIST and CIFAR-10 over 20 clients, without reading the data."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fedbc_lightning.partition import PowerLaw, power_law_sizes
from fedbc_lightning.studies.numbers import Rows

NUM_CLIENTS = 20
EXPONENTS = (1.1, 1.2, 1.3, 1.4, 1.5)
# Number of samples of each class, train and test data together.
CLASS_SIZES = {"MNIST": (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958), "CIFAR-10": (6000,) * 10}

# The paper's numbers of samples of the smallest and the largest client, one pair per exponent.
TABLE_5 = {
    "MNIST": ((1222, 7486), (374, 12057), (110, 16444), (32, 21197), (10, 23410)),
    "CIFAR-10": ((1047, 6433), (320, 10398), (94, 14032), (28, 17814), (9, 20067)),
}

_MNIST_2, _MNIST_3 = "1×6, 1×4, 1×3, 17×2", "1×8, 2×4, 17×3"
# The paper's cells as printed, one per exponent: clients × their number of classes. They are one random draw, that of
# the public code with seed 1, except for three cells of CIFAR-10: C = 1 with e = 1.2 and 1.3, which give the clients 31
# and 28 classes in all, whereas C = 1 always gives N + 9 = 29, and C = 3 with e = 1.1.
TABLE_4 = {
    ("MNIST", 1): ("2×3, 5×2, 13×1", "1×4, 1×3, 4×2, 14×1", "1×4, 1×3, 4×2, 14×1", "1×6, 1×3, 2×2, 16×1",
                   "1×6, 1×3, 2×2, 16×1"),
    ("CIFAR-10", 1): ("2×3, 5×2, 13×1", "1×6, 1×3, 4×2, 14×1", "1×5, 1×3, 2×2, 16×1", "1×6, 1×3, 2×2, 16×1",
                      "1×6, 1×3, 2×2, 16×1"),
    ("MNIST", 2): ("1×5, 1×4, 3×3, 15×2", _MNIST_2, _MNIST_2, _MNIST_2, _MNIST_2),
    ("CIFAR-10", 2): ("1×5, 1×4, 3×3, 15×2", "1×5, 2×4, 17×2", _MNIST_2, _MNIST_2, _MNIST_2),
    ("MNIST", 3): ("1×7, 2×4, 17×3", "1×7, 2×4, 17×3", _MNIST_3, _MNIST_3, _MNIST_3),
    ("CIFAR-10", 3): ("2×5, 1×4, 17×3", "1×7, 2×4, 17×3", _MNIST_3, _MNIST_3, "1×9, 1×4, 18×3"),
}  # fmt: skip
# Seed of the partition in the public code's scripts.
PUBLIC_SEED = 1


def table_5() -> tuple[str, Rows]:
    """Return caption and rows: the sizes of the smallest and largest client, and whether they equal the paper's."""
    rows = [["", *(f"e = {exponent}" for exponent in EXPONENTS)]]
    for name, class_sizes in CLASS_SIZES.items():
        row = [name]
        for exponent, theirs in zip(EXPONENTS, TABLE_5[name], strict=True):
            sizes = power_law_sizes(sum(class_sizes), NUM_CLIENTS, exponent)
            ours = (int(sizes.min()), int(sizes.max()))
            row.append(f"{ours[0]}-{ours[1]} " + ("= paper" if ours == theirs else f"(paper {theirs[0]}-{theirs[1]})"))
        rows.append(row)
    return f"FedBC, Table 5: samples of the smallest and the largest of {NUM_CLIENTS} clients", rows


def table_4() -> tuple[str, Rows]:
    """Return caption and rows: numbers of clients × numbers of classes, ours above the paper's."""
    rows = [["", *(f"e = {exponent}" for exponent in EXPONENTS)]]
    for (name, per_client), theirs in TABLE_4.items():
        labels = np.repeat(np.arange(len(CLASS_SIZES[name])), CLASS_SIZES[name])
        ours = [classes_held(labels, per_client, exponent) for exponent in EXPONENTS]
        paper = ["the same" if own == their else their for own, their in zip(ours, theirs, strict=True)]
        rows += [[f"C = {per_client}, {name}", *ours], ["    paper", *paper]]
    text = (
        f"FedBC, Table 4: clients × their number of classes, by the draws of the public code with seed {PUBLIC_SEED}. "
        "With C = 1 every draw has N + 9 = 29 parts; the paper's for CIFAR-10 and e = 1.2 and 1.3 have 31 and 28"
    )
    return text, rows


def classes_held(labels: np.ndarray, per_client: int, exponent: float, seed: int = PUBLIC_SEED) -> str:
    """Return how many clients hold how many classes under the public draws, in the paper's notation.

    Args:
        labels: Class of each sample, ``(M,)``.
        per_client: Number of classes per client C.
        exponent: e of the paper.
        seed: Seed of the draws.

    Example:
        >>> classes_held(np.arange(60_000) % 10, 1, 1.1)
        '2×3, 5×2, 13×1'
    """
    parts = PowerLaw(NUM_CLIENTS, per_client, exponent, style="public", seed=seed)(labels, seed=0)
    counts = Counter(len(np.unique(labels[part])) for part in parts)
    return ", ".join(f"{clients}×{classes}" for classes, clients in sorted(counts.items(), reverse=True))
