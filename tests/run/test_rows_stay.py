"""Clients elsewhere that keep their vectors: equal bits, whatever is lost, comes twice or begins again."""

from pathlib import Path

import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_model, make_trainer
from helpers.messages_only import RowsStay

from fedbc_lightning import Codecs, FedAvg, FedBC
from fedbc_lightning.algorithms import SCAFFOLD, Centralized, Ditto, FedAsync, FedAvgPlus, FedBABU, FedBuff, FedPD
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.distributed.backend import Lost
from fedbc_lightning.federation.kept_rows import TAKEN
from fedbc_lightning.federation.messages import RoundStart, Rows, decode
from fedbc_lightning.federation.participation import ClientSampler
from fedbc_lightning.server import ServerCallback, WeightedAverage
from fedbc_lightning.server.codecs import TopK

CASES = {
    "FedBC": (lambda: FedBC(dual_lr=0.1), {}),
    "SCAFFOLD": (lambda: SCAFFOLD(), {"buffers": "local"}),
    "FedAvg": (lambda: FedAvg(), {}),
    "Ditto": (lambda: Ditto(), {"clients_per_round": 2}),
    "partial": (lambda: FedAvg(), {"local_parameters": ["net.3.*"], "local_schedules": "continue"}),
    "untrained": (lambda: FedBABU(), {"local_parameters": ["net.3.*"], "client_dtype": "bfloat16"}),
    "coded": (lambda: FedAvg(), {"codec": Codecs(up=TopK(0.1)), "client_dtype": "bfloat16"}),
}
LOST = {(2, 0), (3, 0), (4, 5)}
"""(round, client) whose answer is lost after the client has trained."""


class Some(ClientSampler):
    """Clients 0 and 5, and one more, in each round; some of them are left out."""

    def __init__(self, leaves_out=()):
        self.leaves_out = leaves_out

    def __call__(self, num_clients, num_sampled, seed, round):
        return [client for client in (0, 1 + round % 4, 5) if (round, client) not in self.leaves_out]


class Losing(RowsStay):
    """Loses answers, asks twice, and breaks off in round 5 after all clients have trained."""

    def __init__(self, places, breaks_off=False):
        super().__init__(places)
        self.breaks_off = breaks_off

    def open(self, make_worker):
        super().open(make_worker)
        self._round = 0

    def work(self, start, asks):
        round = decode(start, RoundStart).round
        list(super().work(start, asks))
        for index, answer in list(super().work(start, asks)):
            if round == 5 and self.breaks_off:
                raise KeyboardInterrupt
            yield index, Lost("it was lost") if (round, *asks[index].clients) in LOST else answer


def fit(root, case, sampler, *, rounds=6, ckpt_path=None, **more):
    make, options = CASES[case]
    trainer = make_trainer(root, sampler=sampler, max_rounds=rounds, **options | more)
    trainer.fit(make_model(), BoringData(), make(), ckpt_path)
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_lost_answers_and_a_resumed_server_leave_no_trace(tmp_path, case):
    here = fit(tmp_path / "here", case, Some(LOST))
    places = {}
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "there", case, Some(), backend=Losing(places, breaks_off=True))
    there = fit(tmp_path / "there", case, Some(), backend=Losing(places), ckpt_path="last")
    assert torch.equal(there.server.z, here.server.z)
    for name in here.clients.scalar_names:
        assert torch.equal(there.clients.scalar(name), here.clients.scalar(name))
    taken = there.clients.scalar(TAKEN).int().tolist()
    assert (taken[0], taken[5]) == (6, 6)
    names = set(here.clients.names) - set(here.clients.scalar_names)
    for client in range(6):
        rows = decode(places[str(client)], Rows).versions[taken[client]]
        assert_equal_trees(rows, {name: here.clients.vector(name, client) for name in names})


def test_what_only_the_clients_have_is_said_in_one_line(tmp_path, caplog):
    backend = RowsStay()
    backend.keep_messages = True
    ended = fit(tmp_path, "FedBC", Some(), rounds=2, backend=backend)
    last, given = Path(ended.log_dir, "checkpoints", "last.ckpt"), (make_model(), BoringData(), FedBC(dual_lr=0.1))
    trainer = make_trainer(tmp_path, sampler=Some(), backend=RowsStay())
    with pytest.raises(ConfigurationError, match="client 0 goes on from the vectors that it kept in round 1, and"):
        trainer.verify(*given, last, 0, 2)
    with pytest.raises(ConfigurationError, match=r"stayed with the clients \(trainer\.backend\)"):
        trainer.export(*given, ckpt_path=last, client=0)
    # Without what they kept, clients 0 and 5 are lost, and client 4 begins as always.
    resumed = fit(tmp_path, "FedBC", Some(), rounds=3, backend=RowsStay(), ckpt_path="last")
    lines = [line for line in caplog.messages if "kept in round 2, and those that are kept here" in line]
    # First those that are to train, then those that are to be evaluated.
    assert [line.partition(" sent")[0] for line in lines] == [f"round 3: client {k}" for k in (0, 5, 0, 3, 5)]
    rows = resumed.result.clients.query("round == 3").set_index("client")
    assert dict(rows["status"]) == {0: "absent", 4: "ok", 5: "absent"}


@pytest.mark.parametrize("case", ["Ditto", "SCAFFOLD", "untrained"])
def test_clients_begin_as_the_run_did_also_where_their_module_begins_with_other_weights(tmp_path, case):
    """Two of them train for the first time after the run was resumed with such a module."""
    ends = []
    for folder, backend in (("here", None), ("there", RowsStay())):
        fit(tmp_path / folder, case, Some(), rounds=2, backend=backend)
        trainer = make_trainer(tmp_path / folder, sampler=Some(), backend=backend, max_rounds=4, **CASES[case][1])
        torch.manual_seed(7)
        trainer.fit(BoringModel(), BoringData(), CASES[case][0](), "last")
        ends.append(trainer.server.z)
    assert torch.equal(*ends)
    with pytest.raises(ConfigurationError, match=r"trainer\.backend is clients keep their vectors there, None here"):
        fit(tmp_path / "there", case, Some(), ckpt_path="last")


def test_a_run_whose_clients_keep_nothing_goes_on_without_the_backend(tmp_path):
    options = {"keep_local_models": False, "buffers": "global"}
    fit(tmp_path, "FedAvg", Some(), rounds=2, backend=RowsStay(), **options)
    assert fit(tmp_path, "FedAvg", Some(), ckpt_path="last", **options).finished_round == 6


REFUSED = [FedPD(rho=0.1), FedBuff(), FedAsync(), FedAvgPlus(sigma=0.1, over="all"), Centralized()]


@pytest.mark.parametrize("algorithm", REFUSED, ids=str)
def test_a_method_that_cannot_leave_its_vectors_there_is_refused(tmp_path, algorithm):
    trainer = make_trainer(tmp_path, backend=RowsStay(), clients_per_round=1.0)
    with pytest.raises(ConfigurationError, match=r"the server of .* they stay with the clients"):
        trainer.fit(make_model(), BoringData(), algorithm)
    assert not any(tmp_path.iterdir())


USES = [
    ("on_cohort_end", lambda cohort, *_: cohort["local_model"]),
    ("on_aggregate", lambda server, clients, sums: clients.gather("local_model", staged=True)),
    ("on_round_end", lambda server, clients: clients.vector("local_model", 0)),
    ("on_cohort_end", lambda cohort, *_: cohort.stage("local_model", cohort.model)),
    ("on_round_end", lambda server, clients: clients.stage("local_model", [0], server.model[None])),
]


@pytest.mark.parametrize(("hook", "use"), USES)
def test_a_part_that_uses_vectors_without_a_word_is_refused_as_soon_as_it_does(tmp_path, hook, use):
    part = ServerCallback()
    setattr(part, hook, use)
    method = type("Own", (Ditto,), {"server_callbacks": lambda *_: [WeightedAverage(), part]})()
    make_trainer(tmp_path / "here", max_rounds=1).fit(make_model(), BoringData(), method)
    with pytest.raises(ConfigurationError, match=r"uses 'local_model' of clients, which stays .* needs_rows = True"):
        make_trainer(tmp_path, max_rounds=1, backend=RowsStay()).fit(make_model(), BoringData(), method)
