"""What travels between server and clients elsewhere: its form as bytes, and what becomes of a bad message."""

from __future__ import annotations

import copy
import hashlib
import random
from dataclasses import replace

import pytest
import torch
from helpers.boring import BoringData, assert_equal_trees, make_model, make_trainer, read_csv, without_times
from helpers.messages_only import MessagesOnly
from torch.utils.data import TensorDataset

from fedbc_lightning import FedAvg, SitesDataModule
from fedbc_lightning.algorithms import SCAFFOLD, FedBC, FedPD
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.distributed.backend import Lost
from fedbc_lightning.federation.messages import Down, MessageError, RoundStart, Up, decode, encode
from fedbc_lightning.federation.participation import ClientSampler
from fedbc_lightning.server.codecs import QSGD, BFloat16, Float8, Sign, TopK
from fedbc_lightning.trainer.client_round import ClientRound

BAD = 2
"""The client whose answers are bad; it is sampled in each round."""


def changed(**fields):
    return lambda data, others: encode(replace(decode(data, Up), **fields))


BROKEN = {
    "never came": lambda data, others: Lost("its machine was lost"),
    "was never brought": lambda data, others: None,
    "cut off": lambda data, others: data[: len(data) // 2],
    "empty": lambda data, others: b"",
    "noise": lambda data, others: random.Random(0).randbytes(5000),
    "of another type": lambda data, others: encode(Down([BAD], [0], None, {}, {})),
    "of another version": lambda data, others: data.replace(b'[\\"1\\", ', b'[\\"2\\", ', 1),
    "of another run": changed(form="0" * 16),
    "of another round": changed(round=7),
    "of an unknown client": changed(clients=[99]),
    "of another client, twice": lambda data, others: others[0],
    "of another shape": changed(w=torch.zeros(1, 3)),
    "of another dtype": changed(w=torch.zeros(1, 147, dtype=torch.float64)),
}


class Garbling(MessagesOnly):
    def __init__(self, garble):
        super().__init__()
        self.garble = garble

    def work(self, start, asks):
        others = []
        for index, answer in super().work(start, asks):
            others.append(answer)
            brought = self.garble(answer, others) if asks[index].clients == [BAD] else answer
            if brought is not None:
                yield index, brought


class Others(ClientSampler):
    """Samples the same four clients in every round, without those that it leaves out."""

    def __init__(self, leaves_out):
        self.leaves_out = leaves_out

    def __call__(self, num_clients, num_sampled, seed, round):
        return [client for client in (0, BAD, 3, 5) if client not in self.leaves_out]


def fit(root, sampler, **options):
    trainer = make_trainer(root, sampler=sampler, clients_per_round=4, max_rounds=2, eval_every_n_rounds=0, **options)
    trainer.fit(make_model(), BoringData(), FedAvg())
    return trainer


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bad_message_is_a_client_that_dropped_out(tmp_path, caplog, kind):
    garbled = fit(tmp_path / "a", Others(()), backend=Garbling(BROKEN[kind]))
    lines = [line for line in caplog.messages if "sent nothing that can be used" in line]
    assert [line.partition(" sent")[0] for line in lines] == [f"round {k}: client {BAD}" for k in (1, 2)]
    without = fit(tmp_path / "b", Others((BAD,)))
    assert_equal_trees(garbled.server.z, without.server.z)
    rows = garbled.result.clients
    assert list(rows[rows["client"] == BAD]["status"]) == ["absent", "absent"]


class Watching(MessagesOnly):
    """Keeps the messages, and asks a worker for a round of another form, twice."""

    def __init__(self):
        super().__init__(num_workers=1)
        self.hashes = {}

    def work(self, start, asks):
        for index, answer in super().work(start, asks):
            messages = {"hash_down": start + asks[index].down, "hash_up": answer}
            for name, message in messages.items():
                place = name, decode(start, RoundStart).round, *asks[index].clients
                self.hashes[place] = f"sha256:{hashlib.sha256(message).hexdigest()[:16]}"
            yield index, answer
        other = encode(replace(decode(start, RoundStart), form="0" * 16))
        for _ in range(2):
            with pytest.raises(MessageError, match="give both the same config"):
                self._workers[0].answer(other, asks[0].down)


def test_hashes_of_messages_are_in_the_table_and_a_refused_round_stays_refused(tmp_path):
    backend = Watching()
    rows = fit(tmp_path, Others(()), backend=backend).result.clients
    for (name, *place), found in backend.hashes.items():
        assert [found] == list(rows.set_index(["round", "client"]).loc[[tuple(place)], name])
    assert len(backend.hashes) == 2 * len(rows)


def test_a_method_that_needs_all_clients_ends_with_their_names(tmp_path):
    trainer = make_trainer(tmp_path, clients_per_round=1.0, backend=Garbling(BROKEN["cut off"]), eval_every_n_rounds=0)
    with pytest.raises(ConfigurationError, match=f"clients {BAD} were lost, and FedPD needs all of them"):
        trainer.fit(make_model(), BoringData(), FedPD(rho=0.1))


SITES = [TensorDataset(torch.randn(n, 10), torch.arange(n) % 3) for n in (20, 35, 50)]


def sites(here):
    kept = [site if k in here else None for k, site in enumerate(SITES)]
    return SitesDataModule(kept, names=["A", "B", "C"], val_fraction=0.2, test_fraction=0.2, batch_size=8)


class AtSites(MessagesOnly):
    """Each client has a worker of its own, which has its data alone."""

    def open(self, make_worker):
        model, _, *others = copy.deepcopy(make_worker).args
        self._workers = [ClientRound(copy.deepcopy(model), sites([k]), *copy.deepcopy(others)) for k in range(3)]

    def work(self, start, asks):
        for index, ask in enumerate(asks):
            yield index, self._workers[ask.clients[0]].answer(start, ask.down)


@pytest.mark.parametrize("algorithm", [FedBC(dual_lr=0.1), SCAFFOLD()], ids=str)
def test_a_server_without_data_asks_the_clients_and_ends_with_the_same_bits(tmp_path, algorithm):
    ended, pooled = [], []
    for backend, data in ((None, sites(range(3))), (AtSites(), sites(()))):
        trainer = make_trainer(tmp_path / str(backend), backend=backend, clients_per_round=2)
        trainer.fit(make_model(), data, copy.deepcopy(algorithm))
        numbers = {split: data.num_samples(split).tolist() for split in ("train", "val", "test")}
        rows = trainer.result.clients.drop(columns=["hash_down", "hash_up"], errors="ignore").to_dict("list")
        tables = [without_times(read_csv(f"{trainer.log_dir}/{name}.csv")) for name in ("evaluation", "metrics")]
        whole = [f"{name}/{split}global" for split in ("", "val_") for name in ("accuracy", "loss")]
        pooled.append([float(row.pop(name)) for row in tables[1] for name in whole])
        ended.append((trainer.server.z, numbers, data.label_histogram().tolist(), rows, tables))
    assert_equal_trees(*ended)
    assert pooled[0] == pytest.approx(pooled[1], rel=1e-6)  # the mean over all samples


def test_a_client_that_never_says_what_it_has_ends_the_start(tmp_path):
    class Silent(AtSites):
        def work(self, start, asks):
            yield from list(super().work(start, asks))[:-1]

    with pytest.raises(ConfigurationError, match=r"client 2, whose data are elsewhere, does not say .*no answer"):
        make_trainer(tmp_path, backend=Silent()).fit(make_model(), sites(()), FedAvg())


def test_data_elsewhere_need_a_backend(tmp_path):
    with pytest.raises(ConfigurationError, match="data are elsewhere; give trainer"):
        make_trainer(tmp_path).fit(make_model(), sites([0, 1]), FedAvg())


@pytest.mark.parametrize(
    ("codec", "most"), [(TopK(0.1), 0.21), (QSGD(4), 0.28), (Sign(), 0.28), (BFloat16(), 0.52), (Float8(), 0.28)]
)
def test_a_coded_vector_is_short_and_comes_back_bit_for_bit(codec, most):
    draws = torch.Generator().manual_seed(0)
    vector = codec.decoded(torch.randn(50_000, generator=draws), draws)
    vector[5] = -0.0
    data = encode(RoundStart("form", 1, {"z": vector}, None, 1.0, [], [], {}))
    assert len(data) < most * vector.nbytes
    assert torch.equal(decode(data, RoundStart).server["z"].view(torch.int32), vector.view(torch.int32))


def test_messages_come_back_as_they_were():
    x = torch.arange(12, dtype=torch.float32)
    values = {"z": x[2:5], "turned": x.reshape(3, 4).T, "none": x[:0], "half": x.bfloat16(), "whole": x.long().sum()}
    hooks = {"attributes": {("", "lr"): 0.1, ("net", "sizes"): [1, (2, frozenset({"a"}))]}, "nan": float("inf")}
    start = RoundStart("form", 3, values, [0.1, 1 / 3], 65536.0, ["teacher"], [], hooks)
    assert_equal_trees(vars(decode(encode(start), RoundStart)), vars(start))
    for data in (encode(start)[:-1], encode(start)[: 8 + 20]):
        with pytest.raises(MessageError):
            decode(data, RoundStart)
    with pytest.raises(MessageError, match="cannot hold"):
        encode(replace(start, hooks={"model": object()}))
