"""What every partitioner keeps: each sample once, seeded, nobody empty, the impossible refused by name."""

import numpy as np
import pytest
import yaml
from helpers.traced import traced_peak
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
    IID(7), PowerLaw(7, 1, 1.3), PowerLaw(7, 2, 1.0), PowerLaw(3, 4, 3.0), Dirichlet(7, 0.1, min_samples=1),
    InnerDirichlet(9, 0.05), InnerDirichlet(9, 10.0, size_spread=1.0), InnerDirichlet(3, 0.5, sizes=[1, 233, 1000]),
    Shards(10), Shards(11, shards_per_client=1), ClassesPerClient(10, 2), ClassesPerClient(3, 5),
    ClassesPerClient(5, 1), ClassesPerClient(40, 3, size_spread=2.0), LogNormalSizes(30, 2.0),
    LogNormalSizes(30, 0.0, min_samples=41), LinearSizes(30), ExponentialSizes(30, 2.0), ExponentialSizes(8, 1.0),
    Natural(),
]  # fmt: skip


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
    classes = {each for each in vars(partition).values() if isinstance(each, type) and issubclass(each, Partitioner)}
    elsewhere = {Partitioner, partition.Explicit, partition.Flower}
    assert classes - elsewhere == {type(partitioner) for partitioner in PARTITIONERS}


@pytest.mark.parametrize("partitioner", {type(one): one for one in PARTITIONERS}.values(), ids=name_of)
def test_in_a_configuration_file(partitioner):
    """Written with its short name and read, it splits as before; the file that is saved names the package."""
    arguments = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(partitioner).items()
    }
    path = f"fedbc_lightning.partition.{type(partitioner).__name__}"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--partitioner", type=Partitioner)
    config = parser.parse_object({"partitioner": {"class_path": path, "init_args": arguments}})
    made = parser.instantiate(config).partitioner
    labels = np.random.default_rng(0).integers(0, 5, 1234)
    assert made(labels, 1).hash() == partitioner(labels, 1).hash()
    assert yaml.safe_load(parser.dump(config))["partitioner"]["class_path"] == path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: InnerDirichlet(2, sizes=[3]), "sizes: got .3.; give num_clients=2"),
        (lambda: InnerDirichlet(2, sizes=[3, 1], size_spread=1.0), "sizes: got .* and no size_spread"),
        (lambda: InnerDirichlet(2, sizes=[3, 1])(np.zeros(5, int), 0), "sizes: they sum to 4, the data has 5 samples"),
        (lambda: Shards(4, 30)(np.zeros(100, int), 0), "num_clients=4: with 30 .* need 120 .* at most 3 clients"),
        (lambda: Dirichlet(300, 0.01, 10)(np.arange(6000) % 2, 0), "min_samples=10: .*1000 draws with alpha=0.01"),
        (lambda: PowerLaw(5, 11, style="public")(CIFAR10, 0), "classes_per_client=11: the data has 10 classes"),
        (lambda: ClassesPerClient(4, 2)(CIFAR10, 0), "classes_per_client=2: .*hold 8 .*10 to 40; give 3 to 10"),
        (lambda: Natural(3, 2)(np.array([0, 0, 1, 2, 2, 2]), 0), "num_clients=3: of the data's 3 natural clients 2"),
        (lambda: PowerLaw(5000, 1, 1.5)(CIFAR10, 0), "exponent=1.5: .*num_clients=5000"),
        *[
            (lambda one=one: one(np.zeros(100, int), 0), "num_clients=200: .*100 samples; give at most (100|50)")
            for one in (IID(200), Shards(200), ClassesPerClient(200), InnerDirichlet(200), PowerLaw(200))
        ],
    ],
)  # fmt: skip
def test_the_impossible_is_refused_by_name(make, words):
    with pytest.raises(ConfigurationError, match=rf"^data\.partitioner\.{words}"):
        make()


SAMPLES, CLIENTS = 60_000, 20_000


@pytest.mark.parametrize(
    "partitioner",
    [
        IID(CLIENTS), PowerLaw(CLIENTS, 2, 1.0), Dirichlet(CLIENTS, 100.0, 1),
        InnerDirichlet(CLIENTS, 0.5, size_spread=0.5), Shards(CLIENTS, 2), ClassesPerClient(CLIENTS, 2, 1.0),
        LogNormalSizes(CLIENTS, 1.0), LinearSizes(CLIENTS), ExponentialSizes(CLIENTS, 1.0001), Natural(CLIENTS),
    ],
    ids=name_of,
)  # fmt: skip
def test_memory_is_proportional_to_the_data(partitioner):
    """At 20,000 clients: a few arrays of M + N numbers, no Python object per client, no table of N x classes."""
    values = np.random.default_rng(0).permutation(SAMPLES) % (CLIENTS if partitioner.needs_clients else 100)
    if isinstance(partitioner, Dirichlet):
        values %= 2  # with 3 samples each, the shares of more classes hardly ever leave nobody without
    made = []

    def make():
        parts = partitioner(values, seed=0)
        made.extend((parts, *split_partition(parts, values, 0.2, "shuffled", np.random.default_rng(0))))

    assert traced_peak(make) < 12 * 8 * (SAMPLES + CLIENTS)
    assert [len(part) for part in made] == [CLIENTS] * 3
    assert len(made[1].indices) + len(made[2].indices) == SAMPLES
