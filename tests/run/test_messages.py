"""What travels between server and clients elsewhere: its form as bytes, and what becomes of a bad message."""

import copy
import json
from dataclasses import fields, replace
from functools import partial

import pandas as pd
import pytest
import safetensors.torch as safetensors
import torch
from helpers.bad_messages import NO_VALUE, filled, of_another_kind
from helpers.boring import BoringData, assert_equal_trees, make_model, make_trainer, read_csv, without_times
from helpers.messages_only import MessagesOnly
from lightning.pytorch import Callback
from torch.utils.data import TensorDataset

from fedbc_lightning import FedAvg, SitesDataModule
from fedbc_lightning.algorithms import SCAFFOLD, Centralized, FedAsync, FedBC, FedBuff, FedPD
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.distributed.backend import Ask, Lost, in_order
from fedbc_lightning.distributed.heartbeat import LostProcessError
from fedbc_lightning.federation.expected import check_facts
from fedbc_lightning.federation.messages import Down, Facts, MessageError, RoundStart, Up, decode, encode
from fedbc_lightning.federation.participation import ClientSampler, Stragglers, UniformSampler
from fedbc_lightning.server.codecs import QSGD, BFloat16, Float8, Sign, TopK
from fedbc_lightning.trainer.client_round import ClientRound

BAD = 2
"""The client whose answers are bad; it is sampled in each round."""


BROKEN = {
    "never came": lambda data, others: Lost("its machine was lost"),
    "was never brought": lambda data, others: None,
    "cut off": lambda data, others: data[: len(data) // 2],
    "of another version": lambda data, others: data.replace(b'[\\"3\\", ', b'[\\"1\\", ', 1),
    "of another client, twice": lambda data, others: others[0],
    "zeros out of nothing": lambda data, others: inflated(data),
}
OF_LISTS = {
    "steps": [[-1], [10**30], [True], [1.0], [9 * 10**18]],
    "written": [["evil"], ["net.0.weight"], ["net.1.running_mean"], ["net.1.running_mean"] * 2],
    "records": [[{name: 1.0}] for name in ("client", "num_samples", "status", "grad_scale", "seconds", "=cmd()")]
    + [[{"train_loss": "x"}], [{"num_steps": 1.5}], [{"num_steps": 9 * 10**18}], [{"train_" + "x" * 1001: 1.0}],
                [{f"train_{k}": 1.0 for k in range(10_001)}]],
}  # fmt: skip


def inflated(data):
    """A message of few bytes with 40 GB of zeros in it."""
    whole = encode(replace(decode(data, Up), w=torch.zeros(1, 1024)))
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    text = header["__metadata__"]["message"]
    return safetensors.save(safetensors.load(whole), {"message": text.replace("[1, 1024]", f"[1, {10**10}]")})


def corrupted(up):
    """Yield what can be wrong with a message, each with the status of its client then."""
    for name, garble in BROKEN.items():
        yield name, garble, "absent"
    for field in fields(Up):
        value = getattr(up, field.name)
        for k, other in enumerate([*NO_VALUE, *of_another_kind(value), *OF_LISTS.get(field.name, ())]):
            if repr(other) != repr(value):
                yield f"{field.name} {k}", changed(**{field.name: other}), "absent"
        for number in (float("nan"), 3e38):
            if repr(filled(value, number)) != repr(value):
                yield f"{field.name} of {number}", changed(**{field.name: filled(value, number)}), "nonfinite"


def changed(**values):
    return lambda data, others: encode(replace(decode(data, Up), **values))


class Garbling(MessagesOnly):
    """Garbles the answers of a client, in each round in the next way, over and over."""

    def __init__(self, *ways):
        super().__init__()
        self.ways, self.honest = ways, []

    def work(self, start, asks):
        others, way = [], self.ways[(decode(start, RoundStart).round - 1) % len(self.ways)]
        for index, answer in super().work(start, asks):
            others.append(answer)
            if asks[index].clients == [BAD]:
                self.honest.append(answer)
                answer = way(answer, others)
            if answer is not None:
                yield index, answer


class Four(ClientSampler):
    """Samples the same four clients in every round."""

    def __call__(self, num_clients, num_sampled, seed, round):
        return [0, BAD, 3, 5]


def fit(root, algorithm=None, **options):
    settings = {"sampler": Four(), "clients_per_round": 4, "max_rounds": 2, "eval_every_n_rounds": 0} | options
    trainer = make_trainer(root, **settings)
    trainer.fit(make_model(), BoringData(), algorithm or FedAvg())
    return trainer


HINTS = {
    "answers": ": it answers messages of another client, round or run",
    "scalars": "; one that a part of the server declares is staged in on_cohort_end",
    "records": "; a method declares by client_message, in declare_state, what its clients send",
}


def test_a_bad_message_is_one_line_and_a_client_that_dropped_out(tmp_path, caplog, monkeypatch):
    honest = Garbling(lambda data, others: data)
    fit(tmp_path / "honest", SCAFFOLD(), backend=honest, max_rounds=1)
    names, ways, statuses = zip(*corrupted(decode(honest.honest[0], Up)), strict=True)
    rounds = {"max_rounds": len(ways) + 1}
    # And one of another run
    ways, names, statuses = (*ways, lambda *_: honest.honest[0]), (*names, "replayed"), (*statuses, "absent")
    caplog.clear()
    garbled = fit(tmp_path / "a", SCAFFOLD(), backend=Garbling(*ways), **rounds)
    rows = garbled.result.clients
    found = dict(zip(names, rows[rows["client"] == BAD]["status"], strict=True))
    assert found == dict(zip(names, statuses, strict=True))
    lines = [line for line in caplog.messages if "sent nothing that can be used" in line or "became NaN" in line]
    assert [line.partition(":")[0] for line in lines] == [f"round {k + 1}" for k in range(len(names))]
    for name, line in zip(names, lines, strict=True):
        assert HINTS.get(name.split()[0], "") in line or "became NaN" in line
    monkeypatch.setattr(Stragglers, "draw", lambda *_: (set(), {BAD}))
    without = fit(tmp_path / "b", SCAFFOLD(), stragglers=Stragglers(), **rounds)
    assert_equal_trees(garbled.server.values, without.server.values)


@pytest.mark.parametrize("algorithm", [FedBC(0.1, dual_momentum=0.5, dual_momentum_style="public"), FedAvg()], ids=str)
def test_a_lost_client_is_one_that_has_dropped_out_in_the_simulation(tmp_path, monkeypatch, algorithm):
    """It is lost in rounds 2, 3 and 5; with a momentum of all clients, the turn of each counts."""
    honest, lost = (lambda data, others: data), BROKEN["never came"]
    monkeypatch.setattr(Stragglers, "draw", lambda _, ids, seed, round: (set(), {BAD} if round in (2, 3, 5) else set()))
    ways = {"backend": Garbling(honest, lost, lost, honest, lost)}, {"stragglers": Stragglers()}
    ended = [fit(tmp_path / str(k), copy.deepcopy(algorithm), max_rounds=5, **how) for k, how in enumerate(ways)]
    assert_equal_trees(*(one.server.values | {k: one.clients.gather(k) for k in one.clients.names} for one in ended))
    rows = [one.result.clients.drop(columns=["hash_down", "hash_up"], errors="ignore") for one in ended]
    pd.testing.assert_frame_equal(*rows)


@pytest.mark.parametrize("algorithm", [FedBuff(buffer_size=2), FedAsync()], ids=str)
def test_an_update_that_is_lost_never_arrives(tmp_path, algorithm):
    """Without a client's answers, it has one row in each round in which it starts, and has sent no byte."""
    options = {"max_rounds": 8, "sampler": UniformSampler(), "backend": Garbling(BROKEN["never came"])}
    rows = fit(tmp_path, algorithm, **options).result.clients
    assert not rows.duplicated(["round", "client"]).any()
    bad = rows[rows["client"] == BAD]
    assert ({*bad["status"]}, {*bad["bytes_up"]}, {*bad["weight"]}) == ({"absent"}, {0}, {0})


GOOD = {"train": [5], "val": [0], "test": [0]}


@pytest.mark.parametrize("counts", [[], [{}], "x", None, *([GOOD | {"train": k}] for k in ([-5], ["x"], [10**13], []))])
def test_facts_that_cannot_be_are_refused(counts):
    with pytest.raises(MessageError, match="its counts"):
        decode(encode(Facts([1], counts)), Facts, partial(check_facts, client=1))


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("num_answers", [0, 1])
def test_a_run_ends_if_as_many_messages_as_there_are_clients_are_lost_one_after_another(tmp_path, num_answers, every):
    backend = Garbling(*[lambda data, others: data] * num_answers, *[BROKEN["cut off"]] * 9)
    one = type("One", (ClientSampler,), {"__call__": lambda *_: [BAD]})()
    with pytest.raises(LostProcessError, match=f"round {6 + num_answers}: 6 messages in a row have no answer"):
        fit(tmp_path, sampler=one, clients_per_round=1, max_rounds=9, backend=backend, eval_every_n_rounds=every)


def test_the_first_answer_to_a_message_counts_and_one_line_says_of_others_that_they_do_not(caplog):
    asks = [Ask([client], 1, b"") for client in (4, 7)]
    come = [(1, b"b"), (99, b"x"), (1, b"y"), (0, b"a"), (0, b"z"), (-1, b"u")]
    assert [*in_order(come, asks, "round 3")] == [b"a", b"b"]
    who = ["an answer 99", "a second answer of clients [7]", "a second answer of clients [4]", "an answer -1"]
    assert [line.partition(" brought ")[2].partition(",")[0] for line in caplog.messages] == who


@pytest.mark.parametrize("come", [None, [b"a"], [(0, None)], [(0, "a")], [[0, b"a"]], [([0], b"a")], [("0", b"a")]])
def test_what_is_no_answer_is_refused_by_what_a_backend_yields(come):
    with pytest.raises(ConfigurationError, match=r"trainer\.backend: work must yield .* e\.g\. \(0, answer\); got"):
        list(in_order(come, [Ask([4], 1, b"")], "round 3"))


def test_a_worker_that_is_made_of_the_running_module_itself_is_refused(tmp_path):
    class Careless(MessagesOnly):
        def open(self, make_worker):
            super().open(make_worker)
            self.make = make_worker

        def work(self, start, asks):
            self.make()

    with pytest.raises(ConfigurationError, match=r"let open keep copy\.deepcopy\(make_worker\), and call that"):
        fit(tmp_path, backend=Careless())


def test_workers_are_asked_for_once_for_rounds_and_evaluations(tmp_path):
    """Neither those of an evaluation of one client nor data that are all here start too few."""
    asked = []

    class Counting(MessagesOnly):
        def num_workers(self, num_clients):
            asked.append(num_clients)
            return 1

        def work(self, start, asks):
            assert asks
            return super().work(start, asks)

    trainer = make_trainer(tmp_path, backend=Counting(), eval_clients=1, clients_per_round=2, max_rounds=1)
    trainer.fit(make_model(), sites(range(3)), FedAvg())
    assert {*asked} == {2}


OUT_OF_RANGE = {"local": [{"epochs": 3, "steps": None}, {"epochs": None, "steps": 10**9}], "ids": [[99]]}


class Asking(MessagesOnly):
    """Asks a worker a message of a round, if there is one to a straggler, with each field changed, then as it was."""

    def work(self, start, asks):
        yield from super().work(start, asks)
        worker, down = self._workers[0], max((ask.down for ask in asks), key=lambda down: b"epochs" in down)
        begun, asked, answer = decode(start, RoundStart), decode(down, Down), worker.answer(start, down)
        for message, name in [(one, field.name) for one in (begun, asked) for field in fields(one)]:
            value = getattr(message, name)
            others = () if name in ("sampled", "ids") else of_another_kind(value)
            for other in [*NO_VALUE, *others, *OUT_OF_RANGE.get(name, ())]:
                if repr(other) in (repr(value), {"grad_scale": "7.5", "local": "None"}.get(name)):
                    continue
                bad = encode(replace(message, **{name: other}))
                with pytest.raises(MessageError, match=f"its {name} cannot be"):
                    worker.answer(*((bad, down) if message is begun else (start, bad)))
        with pytest.raises(ConfigurationError, match="cannot train with"):
            worker.answer(encode(replace(begun, engine=["vectorized", False])), down)
        with pytest.raises(MessageError, match="its form cannot be"):
            worker.answer(encode(replace(begun, form="another run", engine=["vectorized", False])), down)
        assert worker.answer(start, down) == answer


@pytest.mark.parametrize("algorithm", [SCAFFOLD(), FedAvg()], ids=str)
def test_a_worker_refuses_what_its_server_cannot_send(tmp_path, algorithm):
    options = {"eval_every_n_rounds": 1, "stragglers": Stragglers(fraction=0.5, partial_work="used"), "local_epochs": 3}
    hooked = type("Hooked", (Callback,), {"on_train_batch_end": lambda *_: None})()  # which one engine refuses
    fit(tmp_path, algorithm, backend=Asking(num_workers=1), max_rounds=1, callbacks=[hooked], **options)


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


def test_what_cannot_be_done_elsewhere_is_refused_before_round_1(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Centralized trains on the data of all clients .* are elsewhere"):
        make_trainer(tmp_path, backend=AtSites()).fit(make_model(), sites(()), Centralized())
    for name in ("clients_per_message", "num_workers", "keeps_rows"):
        backend = MessagesOnly()
        setattr(backend, name, 0)
        with pytest.raises(ConfigurationError, match=rf"trainer\.backend\.{name}: got 0; give"):
            make_trainer(tmp_path, backend=backend).fit(make_model(), BoringData(), FedAvg())
    with pytest.raises(ConfigurationError, match="data are elsewhere; give trainer"):
        make_trainer(tmp_path).fit(make_model(), sites([0, 1]), FedAvg())


class Scales(Callback):
    """A hook of rounds sets what a hook at clients reads, and that one writes a large frozen parameter."""

    factor = 1.0

    def on_round_start(self, trainer, pl_module):
        self.factor += 1

    def on_after_backward(self, trainer, pl_module):
        pl_module.teacher.data.add_(self.factor)


def test_what_hooks_set_here_and_steps_write_there_is_told(tmp_path, caplog):
    model = make_model()
    model.teacher = torch.nn.Parameter(torch.zeros(70_000), requires_grad=False)
    with pytest.raises(ConfigurationError, match="'teacher' has requires_grad=False and was written during training"):
        make_trainer(tmp_path, backend=MessagesOnly(), callbacks=Scales()).fit(model, BoringData(), FedAvg())
    told = "trainer.backend: Scales.on_round_start is called here"
    assert sum(line.startswith(told) for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("codec", "most"), [(TopK(0.1), 0.21), (QSGD(4), 0.28), (Sign(), 0.28), (BFloat16(), 0.52), (Float8(), 0.28)]
)
def test_a_coded_vector_is_short_and_comes_back_bit_for_bit(codec, most):
    draws = torch.Generator().manual_seed(0)
    vector = codec.decoded(torch.randn(50_000, generator=draws), draws)
    vector[5] = -0.0
    data = encode(RoundStart("form", "train", 1, [], {"z": vector}, None, 1.0, [], [], {}))
    assert len(data) < most * vector.nbytes
    assert torch.equal(decode(data, RoundStart).server["z"].view(torch.int32), vector.view(torch.int32))


def test_messages_come_back_as_they_were():
    x = torch.arange(12, dtype=torch.float32)
    values = {"z": x[2:5], "turned": x.reshape(3, 4).T, "none": x[:0], "half": x.bfloat16(), "whole": x.long().sum()}
    hooks = {"attributes": {("", "lr"): 0.1, ("net", "sizes"): [1, (2, frozenset({"a"}))]}, "nan": float("inf")}
    start = RoundStart("form", "train", 3, [], values, [0.1, 1 / 3], 65536.0, ["teacher"], [], hooks)
    assert_equal_trees(vars(decode(encode(start), RoundStart)), vars(start))
    for data in (encode(start)[:-1], encode(start)[: 8 + 20]):
        with pytest.raises(MessageError):
            decode(data, RoundStart)
    with pytest.raises(MessageError, match="cannot hold"):
        encode(replace(start, hooks={"model": object()}))
