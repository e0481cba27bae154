"""What train_dataloader may return trains with the bits of Lightning: streams, several loaders, samplers."""

from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from helpers.boring import make_trainer
from helpers.model_cases import plain_trainer
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from fedbc_lightning import ConfigurationError, FedAvg, FederatedDataModule, PartitionedDataModule, SitesDataModule
from fedbc_lightning.algorithms import QFedAvg
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.partition import IID

lightnings_advice = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|goes on from pass|length|yielded None|IterableDataset|ambiguous|before .optimizer.step)"
)
SEED, EPOCHS = 3, 3
CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def rows(size, start=0):
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(size + start))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Stream(IterableDataset):
    """Rows in an order of torch's global generator, or of one of its own that goes on from epoch to epoch."""

    def __init__(self, size, own=None):
        self.data, self.own = rows(size), own

    def __iter__(self):
        return (self.data[i] for i in torch.randperm(len(self.data), generator=self.own).tolist())


class SizedStream(Stream):
    def __len__(self):
        return len(self.data)


class BatchStream(Stream):
    """Makes its batches by itself, every third of which is None."""

    def __iter__(self):
        for k, sample in enumerate(super().__iter__()):
            yield None if k % 3 == 1 else default_collate([sample, sample])


class Endless(Stream):
    def __iter__(self):
        return cycle(self.data)


class Rolled(Sampler):
    """A sampler of the user's."""

    epoch = 0

    def __init__(self, size):
        self.size = size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter([(i + self.epoch) % self.size for i in torch.randperm(self.size).tolist()])


def loader(size, **options):
    return DataLoader(rows(size), **{"batch_size": 4, "shuffle": True} | options)


def skips(samples):
    return None if samples[0][1] > 0 else default_collate(samples)


LOADERS: dict[str, Any] = {
    "stream": lambda: DataLoader(Stream(10), batch_size=4),
    "stream that drops": lambda: DataLoader(Stream(10), batch_size=4, drop_last=True),
    "stream with a generator": lambda: DataLoader(Stream(10, torch.Generator()), batch_size=4),
    "stream with a length": lambda: DataLoader(SizedStream(10), batch_size=4),
    "stream in a worker": lambda: DataLoader(Stream(10), batch_size=4, num_workers=1),
    "stream of batches, some None": lambda: DataLoader(BatchStream(7), batch_size=None),
    "stream in the place of a loader": lambda: BatchStream(7),
    "collate_fn that returns None": lambda: DataLoader(rows(17), batch_size=2, collate_fn=skips),
    "weighted sampler": lambda: loader(9, shuffle=False, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 3, 7)),
    "own sampler": lambda: loader(9, shuffle=False, sampler=Rolled(9)),
    "own batch sampler": lambda: DataLoader(rows(9), batch_sampler=[[0, 1], [2, 3, 4], [8]]),
    "batches without a DataLoader": lambda: {"a": rows(3)[:], "b": rows(5)[:]}.values(),
    "list": lambda: [loader(10), loader(5)],
    "dict": lambda: {"a": loader(10), "b": loader(7, batch_size=2)},
    "dict with a stream": lambda: {"a": loader(10), "b": DataLoader(Stream(5), batch_size=2)},
    **{mode: lambda mode=mode: CombinedLoader({"a": loader(10), "b": [loader(5)]}, mode)
       for mode in ("min_size", "max_size", "max_size_cycle")},
}  # fmt: skip


class Net(LightningModule):
    """Any batch that holds pairs of tensors; dropout shares the global generator with the loaders."""

    dropout = 0.2

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(self.dropout), nn.Linear(8, 1))
        self.seen = []

    def loss(self, batch):
        if isinstance(batch, dict):
            return sum(self.loss(each) for each in batch.values() if each is not None and each != [None])
        if isinstance(batch[0], (list, tuple)):
            return sum(self.loss(each) for each in batch)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.seen.append((batch_idx, loss.item()))
        self.log("train_loss", loss, batch_size=1)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(("end", batch_idx, batch is None))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.5)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.9, 0.8)]
        intervals = zip(schedulers, ("step", "epoch"), strict=True)
        return [optimizer], [{"scheduler": each, "interval": interval} for each, interval in intervals]


class Certain(Net):
    dropout = 0.0


class Unwatched(Certain):
    """Nobody listens to its steps, so that they are plain ones."""

    on_train_batch_end = LightningModule.on_train_batch_end

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


class OneSite(LightningDataModule):
    def __init__(self, make, seeds=False):
        super().__init__()
        self.make, self.seeds = make, seeds

    def train_dataloader(self):
        found = self.make()
        if self.seeds:  # Lightning makes the first epoch's iterators next
            seed_globals(derive(SEED, "client", 1, 0), CPU)
        return found


def fresh(cls=Net):
    torch.manual_seed(0)
    return cls()


def federated(tmp_path, data, cls=Net, algorithm=None, **options):
    settings = {"max_rounds": 1, "clients_per_round": 1.0, "seed": SEED, **options}
    if "local_steps" not in options:
        settings.setdefault("local_epochs", EPOCHS)
    model, trainer = fresh(cls), make_trainer(tmp_path / "federated", **settings)
    trainer.fit(model, data, algorithm or FedAvg())
    return model


def lightning(tmp_path, make, cls=Net, **options):
    model = fresh(cls)
    plain_trainer(tmp_path, max_epochs=EPOCHS, **options).fit(model, OneSite(make, seeds=True))
    return model


def assert_same(found, expected):
    assert found.seen == expected.seen
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@lightnings_advice
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("form", LOADERS)
def test_one_site_equals_lightning(tmp_path, form, accumulate):
    make, options = LOADERS[form], {"accumulate_grad_batches": accumulate}
    # Samples of a plain loader are dealt here: nothing is drawn for it from the generator of dropout.
    cls = Certain if form.startswith("collate_fn") else Net
    expected = lightning(tmp_path, make, cls, **options)
    assert_same(federated(tmp_path, SitesDataModule([OneSite(make)]), cls, **options), expected)
    assert len(expected.seen) > EPOCHS


@lightnings_advice
@pytest.mark.parametrize("form", ["stream", "stream of batches, some None", "collate_fn that returns None", "dict"])
def test_plain_steps_equal_lightnings_too(tmp_path, form):
    make = LOADERS[form]
    assert_same(federated(tmp_path, SitesDataModule([OneSite(make)]), Unwatched), lightning(tmp_path, make, Unwatched))


# what a stream may rely on


class Told(IterableDataset):
    """An order that depends on what set_epoch was told and on torch's generator, and says which samples were read."""

    def __init__(self, size, read):
        self.size, self.read, self.epoch = size, read, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in torch.randperm(self.size).tolist():
            self.read.append((self.size, self.epoch, i))
            yield rows(self.size)[i]


class StreamingClients(FederatedDataModule):
    """Streams from the methods of a subclass, one more sample for each client."""

    num_clients = 3

    def __init__(self, read):
        super().__init__(batch_size=2)
        self.read = read

    def client_train_dataset(self, client):
        return Told(4 + client, self.read)

    def client_test_dataset(self, client):
        return Told(3, [])


class Log(list):
    """What copies of a stream read, too."""

    def __deepcopy__(self, memo):
        return self


def reads(tmp_path, data, read, **options):
    """Train, and return the samples that were read for training."""
    data.setup("fit")
    assert data.num_samples("train").tolist() == [4, 5, 6]
    assert data.num_batches().tolist() == [2, 3, 3]
    del read[:]
    return federated(tmp_path, data, Certain, **options), list(read)


def test_the_order_of_a_stream_is_a_function_of_seed_round_client_and_epoch(tmp_path):
    read = []
    _, told = reads(tmp_path, StreamingClients(read), read, max_rounds=2, local_epochs=2)
    per_client = {size: [(epoch, i) for n, epoch, i in told if n == size] for size in (4, 5, 6)}
    for size, pairs in per_client.items():
        assert [epoch for epoch, _ in pairs[::size]] == [0, 1, 2, 3]  # over both rounds
        orders = [[i for epoch, i in pairs if epoch == e] for e in range(4)]
        assert all(sorted(order) == list(range(size)) for order in orders)
        assert orders[0] != orders[1] or orders[2] != orders[3]
    # Another client's stream is read in its own order whoever trains before it, and so is one that goes on.
    _, alone = reads(tmp_path / "b", StreamingClients(read), read, max_rounds=2, local_epochs=2, clients_per_round=1)
    assert set(alone) < set(told)


def test_streams_stop_after_local_steps_and_begin_anew(tmp_path):
    read = []
    _, told = reads(tmp_path, StreamingClients(read), read, max_rounds=2, local_steps=1, clients_per_round=1.0)
    assert {epoch for _, epoch, _ in told} == {0, 1}
    assert len(told) == 2 * sum((4, 4, 4))  # the batch of the step, and one ahead


def test_a_resumed_run_reads_the_same(tmp_path):
    read = []
    options = {"local_epochs": 2, "clients_per_round": 2}
    whole, _ = reads(tmp_path / "a", StreamingClients(read), read, max_rounds=2, **options)
    trainer = make_trainer(tmp_path / "b", seed=SEED, max_rounds=1, **options)
    trainer.fit(fresh(Certain), StreamingClients(read), FedAvg())
    model = fresh(Certain)
    path = f"{trainer.log_dir}/checkpoints/last.ckpt"
    make_trainer(tmp_path / "b", seed=SEED, max_rounds=2, **options).fit(
        model, StreamingClients(read), FedAvg(), ckpt_path=path
    )
    assert all(map(torch.equal, model.parameters(), whole.parameters()))


def test_sizes_of_streams_are_given_or_counted_once(tmp_path):
    read = Log()
    data = SitesDataModule([Told(n, read) for n in (4, 5)], sizes=[4, 5], batch_size=2)
    data.setup()
    assert data.num_samples("train").tolist() == [4, 5]
    assert not read
    data = SitesDataModule([DataLoader(Told(n, read), batch_size=2) for n in (4, 5)])
    data.setup()
    assert [data.num_samples("train").tolist() for _ in range(2)] == [[4, 5]] * 2
    assert len(read) == 9
    assert data.label_histogram() is None


@lightnings_advice
@pytest.mark.parametrize(("stream", "options"), [(Endless(5), {"local_steps": 4}), (Stream(5), {"local_epochs": 1})])
def test_steps_may_go_on_and_workers_fill_batches_of_their_own(tmp_path, stream, options):
    data = SitesDataModule([stream], sizes=[10], batch_size=4, num_workers=2)  # each worker reads all: 4 batches, not 3
    assert len(federated(tmp_path, data, Certain, **options).seen) == 2 * 4  # steps and their hooks


class Ordered(Stream):
    def __iter__(self):
        return iter([self.data[i] for i in range(len(self.data))])


def test_a_stream_in_the_order_of_the_data_gives_the_numbers_of_a_data_set(tmp_path):
    class InOrder(SitesDataModule):
        def __init__(self, train):
            super().__init__(train, batch_size=4)
            self.shuffle = False

    expected = federated(tmp_path / "a", InOrder([rows(6), rows(9)]), Unwatched, QFedAvg(q=1.0), max_rounds=2)
    found = federated(tmp_path / "b", InOrder([Ordered(6), Ordered(9)]), Unwatched, QFedAvg(q=1.0), max_rounds=2)
    assert all(map(torch.equal, found.parameters(), expected.parameters()))


def seeded(generator):
    return loader(8, generator=generator)


def test_a_generator_of_a_loader_does_not_go_from_client_to_client(tmp_path):
    generator = torch.Generator()
    make = [lambda: {"a": seeded(generator), "b": loader(3)}] * 2
    both = federated(tmp_path / "a", SitesDataModule([OneSite(m) for m in make]), Certain, max_rounds=1)
    again = federated(tmp_path / "b", SitesDataModule([OneSite(m) for m in make]), Certain, max_rounds=1)
    assert both.seen == again.seen


@pytest.mark.parametrize(
    ("make", "words", "options"),
    [
        (lambda: SitesDataModule([Stream(4)], val_fraction=0.5), "val_fraction: nothing can be cut", {}),
        (lambda: SitesDataModule([Stream(4)], test_fraction=0.5), r"test_fraction: data.train\[0\] is a", {}),
        (lambda: SitesDataModule([Stream(4)], sizes=[4, 5]), "data.sizes: 2 entries for 1 sites", {}),
        (lambda: SitesDataModule([CombinedLoader([loader(4)], "sequential")]), "mode 'sequential' cannot train", {}),
        (lambda: SitesDataModule([[rows(4), rows(5)]]), "TensorDataset is no loader of batches", {}),
        (lambda: SitesDataModule([Stream(4), rows(5)]), "streams, or loaders", {"engine": "vectorized"}),
        (lambda: SitesDataModule([(b for b in loader(4))]), r"data.train\[0\]: generator can be read once", {}),
        (lambda: SitesDataModule(["rows.csv"]), "str is no loader of batches", {}),
        (lambda: PartitionedDataModule(Stream(4), IID(1)), "got Stream; .* fedbc_lightning.SitesDataModule", {}),
        (lambda: SitesDataModule([Stream(4)], sizes=[99]), r"set\(0\): data.sizes says 99 samples, .* has 1;", {}),
        (lambda: SitesDataModule([Stream(4)], sizes=[99]), "says 99 .* 4 batches, .* has 1;", {"local_steps": 7}),
        (lambda: SitesDataModule([Stream(99)], sizes=[4]), "says 4 .* 1 batches, .* has 4;", {"local_steps": 7}),
        (lambda: SitesDataModule([Endless(4)]), "counted in 0 s, and .* give data.sizes", {"local_steps": 7}),
        (lambda: SitesDataModule([Stream(4, (x for x in ()))]), "cannot be copied to count it; give data.sizes", {}),
        (lambda: SitesDataModule([Endless(4)], sizes=[4]), "says 4 samples, .* has more;", {}),
    ],
)  # fmt: skip
def test_what_streams_cannot_give_is_refused_by_name(tmp_path, monkeypatch, make, words, options):
    monkeypatch.setattr("fedbc_lightning.data.own_batches.COUNT_SECONDS", 0.1)
    with pytest.raises(ConfigurationError, match=words):
        federated(tmp_path, make(), Unwatched, **options)


class Pairs(Dataset):
    """Samples that are named tuples."""

    def __init__(self, size):
        self.data = rows(size)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return Pair(*self.data[index])


class Named(Unwatched):
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch.x), batch.y)
        self.log("train_loss", loss)
        return loss


@pytest.mark.parametrize("algorithm", [FedAvg, lambda: QFedAvg(q=1.0)])
def test_named_tuples_are_batches_in_both_engines(tmp_path, algorithm):
    def trained(engine):
        data = SitesDataModule([Pairs(n) for n in (6, 9, 9)], batch_size=4)
        return federated(tmp_path / engine, data, Named, algorithm(), max_rounds=2, engine=engine, local_epochs=2)

    found, expected = trained("vectorized"), trained("sequential")
    torch.testing.assert_close([*found.parameters()], [*expected.parameters()], rtol=1e-5, atol=1e-6)


# several loaders in an evaluation


class Measured(Certain):
    """Logs numbers and Metrics, by loader and over all."""

    def __init__(self):
        super().__init__()
        self.error, self.calls = torchmetrics.MeanSquaredError(), []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch)
        self.calls.append((batch_idx, dataloader_idx, loss.item()))
        self.error(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log("val_error", self.error)
        self.log(f"val_of_{dataloader_idx}", loss, add_dataloader_idx=False, reduce_fx="max")

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("end", batch_idx, dataloader_idx))

    def on_validation_epoch_end(self):
        self.log("val_calls", float(len(self.calls)))


class OneIndex(Measured):
    def validation_step(self, batch, batch_idx):
        return super().validation_step(batch, batch_idx)


class Combined(Measured):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), batch_size=3)


class Evaluated(OneSite):
    def __init__(self, make_val):
        super().__init__(lambda: DataLoader(rows(8), batch_size=4))
        self.make_val = make_val

    def val_dataloader(self):
        return self.make_val()


VAL: dict[str, Any] = {
    "list": (Measured, lambda: [DataLoader(rows(9), batch_size=4), DataLoader(rows(5), batch_size=2)]),
    "dict": (Measured, lambda: {"a": DataLoader(rows(9), batch_size=4), "b": DataLoader(Ordered(5), batch_size=2)}),
    "stream": (OneIndex, lambda: DataLoader(Ordered(7), batch_size=3)),
    "batch sampler": (OneIndex, lambda: DataLoader(rows(9), batch_sampler=BatchSampler(range(3, 8), 2, False))),
    "together": (Combined, lambda: CombinedLoader([DataLoader(rows(9), 4), DataLoader(rows(5), 2)], "max_size_cycle")),
}  # fmt: skip


@lightnings_advice
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("form", VAL)
def test_validation_equals_lightnings(tmp_path, form, wrapped):
    cls, make = VAL[form]
    model, expected = fresh(cls), plain_trainer(tmp_path)
    (values, *more) = expected.validate(model, Evaluated(make), verbose=False)
    values = dict(values) | {name: value for each in more for name, value in each.items()}
    data = PartitionedDataModule(Evaluated(make), IID(1)) if wrapped else SitesDataModule([Evaluated(make)])
    found, trainer = fresh(cls), make_trainer(tmp_path / "f", seed=SEED, max_rounds=1, clients_per_round=1.0)
    measured = trainer.validate(found, data, FedAvg())
    assert {name[: -len("/val_global")]: value for name, value in measured.items() if name.endswith("/val_global")} == {
        name.removeprefix("val_"): value for name, value in values.items()
    }
    assert found.calls[: len(model.calls)] == model.calls


@pytest.mark.parametrize(
    ("cls", "form", "words"),
    [(OneIndex, "list", "multiple `val_dataloader`.* `OneIndex.validation_step"), (Measured, "stream", None)],
)
def test_steps_take_the_number_of_the_loader_where_there_are_several(tmp_path, cls, form, words):
    data = SitesDataModule([Evaluated(VAL[form][1])])
    if words is None:
        federated(tmp_path, data, cls)
        return
    with pytest.raises(ConfigurationError, match=words):
        federated(tmp_path, data, cls)
