"""The picture of a partition and its numbers."""

import json

import numpy as np
import pytest
import torch
from helpers.programs import PICTURE_OF
from matplotlib import pyplot
from torch.utils.data import TensorDataset

from fedbc_lightning.cli.printed_tables import show_partition
from fedbc_lightning.data import FederatedDataModule, PartitionedDataModule, partition_report
from fedbc_lightning.partition import IID, ClassesPerClient, Dirichlet, Explicit, Partition


@pytest.fixture(autouse=True)
def with_pictures(monkeypatch):
    """Other tests do without."""
    monkeypatch.setattr(partition_report, "partition_png", PICTURE_OF)


def partitioned(num_clients, num_samples=4000, num_classes=10, labelled=True, partitioner=None, **kwargs):
    labels = torch.arange(num_samples) % num_classes
    dataset = TensorDataset(torch.zeros(num_samples, 1), labels if labelled else torch.randn(num_samples))
    data = PartitionedDataModule(dataset, partitioner or IID(num_clients), seed=5, **kwargs)
    data.setup()
    return data


def test_numbers():
    data = partitioned(4, 400, partitioner=Dirichlet(4, 0.5))
    numbers = partition_report.describe_partition(data)
    assert numbers["num_clients"] == 4
    assert numbers["num_samples"]["total"] == numbers["num_train"] + numbers["num_test"] == 400
    assert numbers["num_samples"]["mean"] == 100
    assert numbers["hash"] == data.partition_hash()
    assert numbers["num_classes"] == 10
    assert "label_emd" not in partition_report.describe_partition(partitioned(4, labelled=False))


def test_label_distances_by_hand():
    disjoint = partition_report.describe_labels(np.array([[4, 0], [0, 4]]))
    assert disjoint == {
        "num_classes": 2,
        "classes_per_client": {"min": 1, "max": 1, "mean": 1.0},
        "label_emd": 1.0,
    }
    assert partition_report.describe_labels(np.array([[3, 3], [5, 5]]))["label_emd"] == 0
    mixed = partition_report.describe_labels(np.array([[1, 3], [0, 4], [0, 0]]))
    assert mixed["label_emd"] == pytest.approx((0.25 + 0.25 + 1) / 3)


@pytest.mark.parametrize(
    "data",
    [
        partitioned(10),
        partitioned(100, partitioner=Dirichlet(100, 0.3, 2), val_fraction=0.2),
        partitioned(1000, 20_000, partitioner=ClassesPerClient(1000, 1, 2.0)),
        partitioned(20_000, 40_000),
        partitioned(1, num_classes=62),
        partitioned(12, labelled=False),
    ],
    ids=lambda data: str(data.num_clients),
)
def test_every_kind_of_picture_is_drawn(data, tmp_path):
    before = pyplot.get_fignums()
    figure = partition_report.draw_partition(data)
    assert f"{data.num_clients:,} clients" in figure.get_suptitle()
    partition_report.save_partition_report(data, tmp_path)
    assert (tmp_path / "partition.png").stat().st_size > 5000
    if data.num_clients == 10:
        figure.savefig(tmp_path / "expected.png", dpi=150)
        np.testing.assert_array_equal(*(pyplot.imread(tmp_path / f"{name}.png") for name in ("partition", "expected")))
    assert pyplot.get_fignums() == before


class Named(FederatedDataModule):
    """Clients and classes with names."""

    num_clients = 2
    client_names = ("$a_{$", "[/b]")  # matplotlib would read the first one as a formula
    classes = ("[/b]", "$ill_{$")

    def client_train_dataset(self, client):
        return TensorDataset(torch.zeros(4 + client, 2), torch.tensor([0, 1, 1, 1, 0])[: 4 + client])

    def client_test_dataset(self, client):
        return None


def test_saved_report(tmp_path, capsys):
    report = partition_report.save_partition_report(Named(seed=3), tmp_path / "new" / "folder")
    saved = json.loads((tmp_path / "new" / "folder" / "partition.json").read_text())
    assert saved == json.loads(json.dumps(report))
    assert (saved["client_names"], saved["class_names"]) == (["$a_{$", "[/b]"], ["[/b]", "$ill_{$"])
    figure = partition_report.draw_partition(Named(seed=3))
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == saved["class_names"]
    show_partition(Named(seed=3), tmp_path)
    assert "client  train  [/b]  $ill_{$" in capsys.readouterr().out
    assert saved["sizes"] == {"train": [4, 5], "val": [0, 0], "test": [0, 0]}
    assert saved["label_histogram"] == [[1, 3], [2, 3]]
    assert saved["seed"] == 3
    assert (tmp_path / "new" / "folder" / "partition.png").read_bytes().startswith(b"\x89PNG")


def test_the_exact_split_is_saved_and_can_be_used_again(tmp_path):
    data = partitioned(6, partitioner=Dirichlet(6, 0.5))
    partition_report.save_partition_report(data, tmp_path)
    saved = Partition.load(tmp_path / "partition.npz")
    assert saved.partition.hash() == data.parts.hash()
    assert saved.num_samples == 4000
    assert np.array_equal(saved.label_histogram, data.label_histogram())
    again = partitioned(6, partitioner=Explicit(tmp_path / "partition.npz"))
    assert again.partition_hash() == data.partition_hash()


def test_lists_of_very_many_clients_are_left_to_the_exact_file(tmp_path):
    report = partition_report.save_partition_report(partitioned(10_001, 20_000), tmp_path)
    assert report["sizes"] is report["label_histogram"] is None
    assert report["num_samples"]["total"] == 20_000
    assert (tmp_path / "partition.json").stat().st_size < 2000
    assert len(Partition.load(tmp_path / "partition.npz").partition) == 10_001
