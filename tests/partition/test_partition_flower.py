"""The partitioners of flwr-datasets in our place."""

import numpy as np
import pytest
from helpers.refusals import refused
from jsonargparse import ArgumentParser

from fedbc_lightning.partition import Flower, Partitioner

flwr = pytest.importorskip("flwr_datasets.partitioner", reason="the extra `flower` is not installed")

LABELS = np.random.default_rng(0).integers(0, 10, 2000)


PARTITIONERS = [
    flwr.IidPartitioner(7),
    flwr.DirichletPartitioner(7, "label", 0.5),
    flwr.InnerDirichletPartitioner([500, 700, 800], "digit", 0.3),
    flwr.PathologicalPartitioner(20, "label", 2, class_assignment_mode="first-deterministic"),
    flwr.ShardPartitioner(7, "label", 3),
    flwr.DistributionPartitioner(np.full((10, 10), 0.1), 10, 10, "label", 5),
    flwr.GroupedNaturalIdPartitioner("label", 5),
]


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=lambda p: type(p).__name__)
def test_every_partitioner_by_class_or_number(partitioner):
    flower = Flower(partitioner)
    parts = flower(LABELS, seed=1)
    leaves_some = isinstance(partitioner, (flwr.DistributionPartitioner, flwr.ShardPartitioner))
    parts.check(2000, complete=not leaves_some)
    assert not flower.complete
    assert parts.sizes.min() > 0
    assert parts.hash() == flower(LABELS, seed=1).hash() == Flower(partitioner)(LABELS, seed=1).hash()
    assert parts.hash() != flower(LABELS, seed=2).hash()


def test_a_seed_of_its_own_fixes_the_shares_and_none_leaves_them_to_ours():
    def sizes(own, ours):
        return Flower(flwr.DirichletPartitioner(7, "label", 0.5, seed=own))(LABELS, ours).sizes.tolist()

    assert sizes(42, 0) == sizes(42, 1) != sizes(43, 0)
    assert sizes(None, 0) == sizes(None, 0) != sizes(None, 1)


def test_built_from_a_configuration():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--partitioner", type=Partitioner)
    inner = {
        "class_path": "flwr_datasets.partitioner.DirichletPartitioner",
        "init_args": {"num_partitions": 10, "partition_by": "label", "alpha": 0.5, "seed": None},
    }
    config = parser.parse_object(
        {"partitioner": {"class_path": "fedbc_lightning.partition.Flower", "init_args": {"partitioner": inner}}}
    )
    flower = parser.instantiate(config).partitioner
    assert len(flower(LABELS, 0)) == 10
    assert "seed: null" in parser.dump(config, skip_none=False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Flower("IidPartitioner"), ["Flower got str", "pip install 'fedbc-lightning[flower]'"]),
        (lambda: Flower(flwr.VerticalEvenPartitioner(2))(LABELS, 0), ["VerticalEvenPartitioner", "another"]),
        (lambda: Flower(flwr.IidPartitioner(3000))(LABELS, 0), ["IidPartitioner", "num_clients=3000", "2000 samples"]),
        (lambda: Flower(flwr.PathologicalPartitioner(5, "label", 11))(LABELS, 0), ["PathologicalPartitioner", "11"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, words):
    with refused() as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
