"""A partition as an object and as a file; partitions given by a file."""

import json

import numpy as np
import pytest
from helpers.refusals import refused

from fedbc_lightning.partition import IID, Dirichlet, Explicit, Partition
from fedbc_lightning.partition.dealing import count_labels

LABELS = np.arange(500) % 10


def refusal(action):
    with refused() as error:
        action()
    return str(error.value)


def histogram_of(partition, labels=LABELS):
    return count_labels(labels[partition.indices], partition.client_of_each(), len(partition))


def test_a_partition_is_a_sequence_of_index_arrays():
    partition = Partition.from_parts([np.array([4, 2]), [], np.array([0], dtype=np.uint8)])
    assert len(partition) == 3
    assert [part.tolist() for part in partition] == [[4, 2], [], [0]]
    assert partition[-1].tolist() == [0]
    assert partition.sizes.tolist() == [2, 0, 1]
    assert partition.client_of_each().tolist() == [0, 0, 2]
    assert partition.indices.dtype == partition.offsets.dtype == np.int64
    assert [part.tolist() for part in partition.keep(np.array([False, True, True]))] == [[2], [], [0]]
    assert [part.tolist() for part in partition.keep(np.zeros(3, dtype=bool))] == [[], [], []]
    assert Partition.from_parts(partition) is partition
    with pytest.raises(IndexError):
        partition[3]


def test_owners_keep_the_order_asked_for():
    owners = np.array([1, -1, 0, 1, 0])
    assert [part.tolist() for part in Partition.from_owners(owners, 3)] == [[2, 4], [0, 3], []]
    order = np.array([4, 3, 2, 1, 0])
    assert [part.tolist() for part in Partition.from_owners(owners, 3, order)] == [[2, 0], [4, 1], []]


def test_the_hash_is_of_who_has_what_in_which_order():
    partition = Partition.from_parts([np.array([4, 2]), np.array([0])])
    same = Partition.from_owners(np.array([0, 0, 1]), 2, order=np.array([4, 2, 0]))
    others = [[[2, 4], [0]], [[4], [2, 0]], [[4, 2], [0], []], [[4, 2], [1]]]
    assert partition.hash() == same.hash()
    assert len({partition.hash(), *(Partition.from_parts(other).hash() for other in others)}) == 5


@pytest.mark.parametrize("part", [np.array([0.0, 1.0]), np.array([True, False]), np.array([[0, 1]]), np.array(3)])
def test_parts_that_are_no_indices_are_refused(part):
    assert "client 1 was given" in refusal(lambda: Partition.from_parts([np.array([2]), part]))


def save_npy(path, *values):
    with path.open("wb") as file:
        np.save(file, np.array(values))


def swap_two(path):
    found = dict(np.load(path))
    found["indices"][:2] = found["indices"][1::-1].copy()
    np.savez(path, **found)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:500]),
    "text": lambda path: path.write_text("0,1,2\n"),
    "another npz": lambda path: np.savez(path, data=np.arange(3)),
    "another npy": lambda path: save_npy(path, 1, 2),
    "pickled": lambda path: save_npy(path, {}),
    "changed": swap_two,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_named(tmp_path, how):
    path = tmp_path / "p.npz"
    IID(3)(LABELS, 0).save(path, num_samples=500)
    DAMAGE[how](path)
    assert refusal(lambda: Explicit(path)).startswith(f"data.partitioner.path='{path}': cannot be read")


def test_a_saved_partition_is_used_again_with_its_data_alone(tmp_path):
    path = tmp_path / "p.npz"
    partition = Dirichlet(8, 0.5, 3)(LABELS, 4)
    partition.save(path, num_samples=500, label_histogram=histogram_of(partition))
    explicit = Explicit(str(path))
    assert (explicit.num_clients, explicit.complete, explicit.needs_labels) == (8, False, False)
    assert explicit(LABELS, 0).hash() == explicit(LABELS, 1).hash() == partition.hash()
    assert explicit(np.zeros(500, dtype=int), 0).hash() == partition.hash()  # data without classes
    for other in (LABELS[:400], np.arange(500) % 7, LABELS[::-1]):
        assert "it splits 500 samples of other data than these" in refusal(lambda other=other: explicit(other, 0))
    partition.save(path, num_samples=500)
    assert Explicit(path)(LABELS[::-1], 0).hash() == partition.hash()  # nothing known of the classes


def test_lists_written_by_hand(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps([[5, 0], [2]]))
    assert [part.tolist() for part in Explicit(path)(LABELS, 0)] == [[5, 0], [2]]
    assert Explicit(path).client_names is None
    path.write_text(json.dumps({"Romeo": [5, 0], "Juliet": [2]}))
    assert [part.tolist() for part in Explicit(path)(LABELS, 0)] == [[5, 0], [2]]
    assert Explicit(path).client_names == ["Romeo", "Juliet"]
    assert Explicit(path).num_clients == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *[(text, "cannot be read") for text in (
            b"3", b"[[0], 1]", b'{"Romeo": [0.5]}', b"[[true]]", b'{"num_clients": 2, "sizes": {}}',
            b"[[0, 1],\n [2", b"\xff\xfe\x00", b"[" * 100_000,
        )],
        (b"[[0, 500], [2]]", "a client holds sample 500, but the data has 500 samples"),
        (b"[[0, 1], [1]]", "1 of 500 samples are not given at most once: sample 1"),
    ],
)  # fmt: skip
def test_lists_with_mistakes_are_refused(tmp_path, content, words):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    message = refusal(lambda: Explicit(path)(LABELS, 0))
    assert message.startswith(f"data.partitioner.path='{path}': {words}")
