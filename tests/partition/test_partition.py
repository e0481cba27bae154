"""What every partitioner keeps: each sample once, seeded, nobody empty, the impossible refused by name."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import yaml
from jsonargparse import ArgumentParser

from fedbc_lightning import partition
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data.splits import split_partition
from fedbc_lightning.partition import (
    IID,
    ClassesPerClient,
    Dirichlet,
    ExponentialSizes,
    InnerDirichlet,
    LinearSizes,
    LogNormalSizes,
    Natural,
    Partition,
    Partitioner,
    PowerLaw,
    Shards,
)

CIFAR10 = np.arange(60_000) % 10
PARTITIONERS = [
    IID(7),
    IID(1),
    PowerLaw(7, 1, 1.3),
    PowerLaw(7, 2, 1.0),
    PowerLaw(3, 4, 3.0),
    PowerLaw(1, 1, 1.5),
    Dirichlet(7, 0.1, min_samples=1),
    Dirichlet(20, 100.0),
    InnerDirichlet(9, 0.05),
    InnerDirichlet(9, 10.0, size_spread=1.0),
    InnerDirichlet(3, 0.5, sizes=[1, 233, 1000]),
    InnerDirichlet(1),
    Shards(10),
    Shards(11, shards_per_client=1),
    Shards(1, 1),
    ClassesPerClient(10, 2),
    ClassesPerClient(3, 5),
    ClassesPerClient(5, 1),
    ClassesPerClient(40, 3, size_spread=2.0),
    LogNormalSizes(30, 2.0),
    LogNormalSizes(30, 0.0, min_samples=41),
    LinearSizes(30),
    LinearSizes(1234),
    ExponentialSizes(30, 2.0),
    ExponentialSizes(8, 1.0),
    Natural(),
]


def name_of(partitioner):
    return f"{type(partitioner).__name__}{partitioner.num_clients}"


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=name_of)
def test_every_sample_once_seeded_and_nobody_empty(partitioner):
    labels = np.random.default_rng(0).integers(0, 5, 1234)
    parts = partitioner(labels, seed=3)
    assert isinstance(parts, Partition)
    assert partitioner.num_clients in (None, len(parts))
    assert min(map(len, parts)) > 0
    assert np.array_equal(np.sort(np.concatenate(list(parts))), np.arange(1234))
    assert all(part.dtype == np.int64 for part in parts)
    parts.check(1234, complete=True)
    again, other = partitioner(labels, seed=3), partitioner(labels, seed=4)
    assert parts.hash() == again.hash()
    assert (parts.hash() == other.hash()) == isinstance(partitioner, Natural)


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=name_of)
def test_one_class_is_enough(partitioner):
    if getattr(partitioner, "classes_per_client", 1) > 1:
        with pytest.raises(ConfigurationError, match="the data has 1 classes; give 1 to 1"):
            partitioner(np.zeros(1234, dtype=int), seed=0)
    else:
        partitioner(np.zeros(1234, dtype=int), seed=0).check(1234, complete=True)


@pytest.mark.parametrize(
    "partitioner",
    [PowerLaw(5, 1, 1.0), Dirichlet(5, 1.0, 1), InnerDirichlet(5), Shards(5), ClassesPerClient(5, 1)],
    ids=name_of,
)
def test_classes_may_be_any_integers(partitioner):
    labels = np.array([-1, 7] * 50)
    renamed = np.array([0, 1] * 50)
    assert partitioner(labels, 0).hash() == partitioner(renamed, 0).hash()


def test_every_partitioner_is_in_the_list_or_has_tests_of_its_own():
    classes = {
        found for found in vars(partition).values() if isinstance(found, type) and issubclass(found, Partitioner)
    }
    elsewhere = {Partitioner, partition.Explicit, partition.Flower}
    assert classes - elsewhere == {type(partitioner) for partitioner in PARTITIONERS}


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=name_of)
def test_in_a_configuration_file(partitioner):
    """Written with its short name and read, it splits as before; the file that is saved names the package."""
    arguments = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(partitioner).items()
    }
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--partitioner", type=Partitioner)
    config = parser.parse_object(
        {
            "partitioner": {
                "class_path": f"fedbc_lightning.partition.{type(partitioner).__name__}",
                "init_args": arguments,
            }
        }
    )
    made = parser.instantiate(config).partitioner
    labels = np.random.default_rng(0).integers(0, 5, 1234)
    assert made(labels, 1).hash() == partitioner(labels, 1).hash()
    saved = yaml.safe_load(parser.dump(config))["partitioner"]["class_path"]
    assert saved == f"fedbc_lightning.partition.{type(partitioner).__name__}"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IID(0), ["num_clients=0"]),
        (lambda: IID(2.5), ["num_clients=2.5", "whole number"]),
        (lambda: IID(True), ["num_clients=True", "whole number"]),
        (lambda: PowerLaw(5, 0), ["classes_per_client=0"]),
        (lambda: PowerLaw(5, 1, 0.9), ["exponent=0.9"]),
        (lambda: PowerLaw(5, 1, float("nan")), ["exponent=nan"]),
        (lambda: Dirichlet(5, 0.0), ["alpha=0.0"]),
        (lambda: Dirichlet(5, 0.1, 0), ["min_samples=0"]),
        (lambda: InnerDirichlet(5, -1.0), ["alpha=-1.0"]),
        (lambda: InnerDirichlet(2, sizes=[3]), ["sizes", "num_clients=2"]),
        (lambda: InnerDirichlet(2, sizes=[3, 0]), ["sizes=0"]),
        (lambda: InnerDirichlet(2, sizes=[3, 1], size_spread=1.0), ["size_spread=1.0", "sizes"]),
        (lambda: InnerDirichlet(2, sizes=[3, 1])(np.zeros(5, int), 0), ["sum to 4", "5 samples"]),
        (lambda: LogNormalSizes(2, -0.1), ["sigma=-0.1"]),
        (lambda: LogNormalSizes(2, 1.0, 3)(np.zeros(5, int), 0), ["min_samples=3", "at most 2"]),
        (lambda: ExponentialSizes(2, 0.5), ["base=0.5"]),
        (lambda: Shards(2, 0), ["shards_per_client=0"]),
        (lambda: Shards(4, 30)(np.zeros(100, int), 0), ["shards_per_client=30", "120 shards", "at most 25"]),
        (lambda: ClassesPerClient(2, 1, 11.0), ["size_spread=11.0"]),
        (lambda: ClassesPerClient(4, 11)(CIFAR10, 0), ["classes_per_client=11", "10 classes"]),
        (lambda: ClassesPerClient(4, 2)(CIFAR10, 0), ["classes_per_client=2", "8 of the data's 10", "at least 3"]),
        (lambda: ClassesPerClient(6, 2)(np.arange(11) // 9, 0), ["classes_per_client=2", "12", "8", "at most 1"]),
        (lambda: Natural(0), ["num_clients=0"]),
        (lambda: Natural(3, 2)(np.array([0, 0, 1, 2, 2, 2]), 0), ["num_clients=3", "3 natural clients 2 have"]),
        (lambda: Natural(None, 9)(np.array([0, 0, 1]), 0), ["min_samples=9", "2 natural clients", "at most 2"]),
        (lambda: IID(200)(np.zeros(100, int), 0), ["num_clients=200", "100 samples"]),
        (lambda: PowerLaw(200)(np.arange(100) % 10, 0), ["num_clients=200", "100 samples"]),
        (lambda: PowerLaw(1000, 1, 1.5)(CIFAR10, 0), ["exponent=1.5", "num_clients=1000"]),
        (lambda: PowerLaw(5000, 1, 1.5)(CIFAR10, 0), ["exponent=1.5", "num_clients=5000"]),
        (lambda: PowerLaw(5, 11)(CIFAR10, 0), ["classes_per_client=11", "10 classes"]),
        (lambda: Dirichlet(200, 1.0)(np.zeros(100, int), 0), ["num_clients=200"]),
        (lambda: Dirichlet(20, 1.0, 6)(np.zeros(100, int), 0), ["min_samples=6", "at most 5"]),
        (lambda: Dirichlet(300, 0.01, 10)(np.arange(6000) % 2, 0), ["min_samples=10", "alpha=0.01", "1000 draws"]),
        *[
            (lambda one=one: one(np.zeros(100, int), 0), ["num_clients=200", "100 samples; give at most 100"])
            for one in (Shards(200), ClassesPerClient(200), LinearSizes(200), ExponentialSizes(200))
        ],
    ],
)  # fmt: skip
def test_the_impossible_is_refused_by_name(make, words):
    with pytest.raises(ConfigurationError) as error:
        make()
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


SAMPLES, CLIENTS = 300_000, 100_000


@pytest.mark.parametrize(
    "partitioner",
    [
        IID(CLIENTS),
        PowerLaw(CLIENTS, 2, 1.0),
        Dirichlet(CLIENTS, 100.0, 1),
        InnerDirichlet(CLIENTS, 0.5, size_spread=0.5),
        Shards(CLIENTS, 2),
        ClassesPerClient(CLIENTS, 2, 1.0),
        LogNormalSizes(CLIENTS, 1.0),
        LinearSizes(CLIENTS),
        ExponentialSizes(CLIENTS, 1.00002),
        Natural(CLIENTS),
    ],
    ids=name_of,
)
def test_memory_is_proportional_to_the_data(partitioner):
    """At 100,000 clients: a few arrays of M + N numbers, no Python object per client, no table of N x classes."""
    values = np.random.default_rng(0).permutation(SAMPLES) % (CLIENTS if partitioner.needs_clients else 100)
    if isinstance(partitioner, Dirichlet):
        values %= 2  # with 3 samples each, the shares of more classes hardly ever leave nobody without
    tracemalloc.start()
    parts = partitioner(values, seed=0)
    train, test = split_partition(parts, values, 0.2, "shuffled", np.random.default_rng(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(parts) == len(train) == len(test) == CLIENTS
    assert len(train.indices) + len(test.indices) == SAMPLES
    assert peak < 12 * 8 * (SAMPLES + CLIENTS)


def test_flower_is_not_imported_unless_it_is_used():
    code = (
        "import sys, fedbc_lightning.partition; sys.exit('flwr_datasets' in sys.modules or 'datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
