"""Flower: an app of it has the bits of fit; a client that is lost, late or broken is one that drops out.

Flower's own messages and apps are used, and a grid that gives them to the apps in this process. Its simulation and its
deployment are tried by ``benchmarks/elsewhere.py``.
"""

import signal
import sys
from importlib import import_module

import pandas as pd
import pytest
import torch
from helpers.boring import assert_equal_trees
from helpers.command_line import run_cli

from fedbc_lightning.distributed.flower_messages import content_of

flwr = pytest.importorskip("flwr.app", reason="the extra flower-deploy is not installed; it conflicts with twine")

identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
validate = pytest.importorskip("flwr.common.config").validate_fields_in_config
identity.task_id, identity.run_id, identity.node_id = 1, 7, 1  # as the process of an app sets them


class Loop:
    """A grid whose SuperNodes work in this process, when their answers are pulled.

    Args:
        app: The module of the app.
        nodes: Node-config of each SuperNode.
        answers: What comes in place of an answer, for pairs of a SuperNode and the number of a message to it: a record,
            which comes twice, a code of Flower's errors, or "late" for nothing.
        run_config: Settings of the run.
    """

    def __init__(self, app, nodes, answers=None, run_config=None):
        self.app, self.answers, self.config = app, answers or {}, run_config or {}
        self.contexts = [self.context(k, config) for k, config in enumerate(nodes)]
        self.messages, self.counts = {}, [0] * len(nodes)

    def context(self, node, config):
        return flwr.Context(7, node, config, flwr.RecordDict(), self.config)

    def run(self):
        self.app.server(self, self.context(-1, {}))

    def get_node_ids(self):
        return range(len(self.contexts))

    def push_messages(self, messages):
        (message,) = messages
        name = str(len(self.messages))
        vars(message.metadata).update(_message_id=name, _run_id=7)
        self.messages[name] = message
        return [name]

    def pull_messages(self, names):
        found = []
        for name in names:
            message = self.messages[name]
            node = message.metadata.dst_node_id
            self.counts[node] += 1
            answer = self.answers.get((node, self.counts[node]), self)
            if isinstance(answer, int):
                found.append(flwr.Message(flwr.Error(answer, "the node\nis gone."), reply_to=message))
            elif isinstance(answer, flwr.RecordDict):
                found += [flwr.Message(answer, reply_to=message)] * 2
            elif answer == "late":
                self.counts[node] -= 1
            else:
                found.append(self.app.client(message, self.contexts[node]))
        return found[::-1]


def deploy(project, monkeypatch, *words):
    """Write the app of a run, and import it."""
    assert run_cli("deploy", "flower", "--folder", "app", *words) == 0
    sys.modules.pop("tiny_data", None)
    sys.modules.pop("federated_app", None)
    monkeypatch.syspath_prepend(str(project / "app"))
    return import_module("federated_app")


def state(run, whole):
    """Return what a run has trained: at the server, and if its clients keep no vectors of their own, at the clients."""
    last = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    federation = last["fedbc_lightning"]["federation"]
    return {"z": last["state_dict"], "federation": federation if whole else federation["server"]}


ALL = [{"partition-id": k} for k in range(4)]
BASE = ["--config", "tiny.yaml", "--trainer.max_rounds=3", "--trainer.clients_per_round=3"]
METHODS = {
    "FedBC": ["--algorithm=FedBC", "--algorithm.dual_lr=0.1"],
    "SCAFFOLD": ["--algorithm=SCAFFOLD"],
    "BatchNorm": ["--model=BatchNormMLP", "--model.num_features=4", "--model.hidden=5", "--model.num_classes=3"],
    "Ditto": ["--algorithm=Ditto"],
    "own head": ['--trainer.local_parameters=["*bias"]'],
    "TopK": ["--trainer.codec.up=TopK", "--trainer.codec.up.fraction=0.5"],
}


@pytest.mark.parametrize("keeps_rows", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_an_app_has_the_bits_of_fit(project, monkeypatch, name, keeps_rows):
    """Also where processes of a SuperNode crash (code 8), twice for the same message."""
    words = [*BASE, *METHODS[name]]
    assert run_cli("fit", *words) == 0
    words += ["--trainer.backend=Flower", f"--trainer.backend.keeps_rows={keeps_rows}"]
    loop = Loop(deploy(project, monkeypatch, *words), ALL, dict.fromkeys([(0, 1), (0, 2), (0, 4), (0, 5)], 8))
    loop.run()
    here, there = sorted((project / "runs" / "tiny").iterdir())
    assert_equal_trees(state(there, not keeps_rows), state(here, not keeps_rows))
    for name in ("clients.csv", "evaluation.csv"):
        tables = [pd.read_csv(run / name) for run in (here, there)]
        pd.testing.assert_frame_equal(*(table[[*tables[0]]] for table in tables))
    assert "fedbc" in loop.contexts[0].state


def lines(caplog):
    """Return what was said of rounds and SuperNodes."""
    return [line for line in caplog.messages if line.startswith(("round ", "SuperNode "))]


def test_who_is_lost_or_broken_drops_out(project, monkeypatch, caplog):
    """SuperNodes 1, 3 and 4 are lost, broken, strange and late, data of SuperNode 2 fail, and 5 and 6 are nobody.

    The first query of SuperNode 4 fails: it is asked again.
    """
    backend = [f"--trainer.backend{rest}" for rest in ("=Flower", ".timeout=0.2", ".wait=0")]
    options = [*backend, "--data.num_clients=6", "--trainer.eval_every_n_rounds=0"]
    app = deploy(project, monkeypatch, *BASE, "--trainer.clients_per_round=1.0", *options)
    named = ({"client": client} for client in (4, "Bern", "9" * 5000))
    nodes = [*ALL[:2], {"partition-id": 2, "data.val_fraction": 2.0}, ALL[3], *named]
    junk, foreign = content_of({"up": b"junk"}), flwr.RecordDict({"x": flwr.ConfigRecord({"y": 1})})
    Loop(app, nodes, {(1, 3): 5, (3, 2): junk, (3, 3): foreign, (4, 1): 5, (4, 4): "late"}).run()
    lost = {
        "client 1 sent nothing that can be used: the node is gone.": [2],
        "client 2 sent nothing that can be used: data.val_fraction: got 2.0; give a number in [0, 1).": [1, 2, 3],
        "client 3 sent nothing that can be used: no message of this kind (JSONDecodeError).": [1],
        "client 3 sent nothing that can be used: it has sent a message of another program.": [2],
        "client 5 sent nothing that can be used: none of the SuperNodes that are connected is this client.": [1, 2, 3],
        "client 4 sent nothing that can be used: none of the SuperNodes that are connected is this client.": [1],
        "client 4 sent nothing that can be used: there was no answer in 0.2 s.": [3],
    }
    nobody = [
        "SuperNode 5 is no client of this run: 'Bern'. Start it with --node-config 'client=...', the client's number.",
        "SuperNode 4 does not tell which client it is, and is asked again: the node is gone.",
    ]
    assert sorted(lines(caplog)) == sorted([*nobody, *[f"round {k}: {line}" for line in lost for k in lost[line]]])
    table = pd.read_csv(project / "runs/tiny/FedAvg-0/clients.csv").dropna(subset="hash_up").sort_values("client")
    assert table.groupby("round")["client"].apply(list).tolist() == [[0, 1], [0, 4], [0, 1, 3]]


def test_a_supernode_that_starts_again_goes_on(project, monkeypatch, caplog):
    """All start again after two rounds, and the server resumes: what the clients keep lies in a folder of each."""
    words = [*BASE, "--algorithm=SCAFFOLD", "--trainer.max_rounds=4"]
    assert run_cli("fit", *words) == 0
    app = deploy(project, monkeypatch, *words, "--trainer.name=there")
    for k, options in enumerate(({"trainer.max_rounds": 2}, {"ckpt_path": "last"})):
        monkeypatch.setattr(identity, "_run_id", 7 + k)
        Loop(app, [{**node, "rows": str(project / "rows" / str(k))} for k, node in enumerate(ALL)], {}, options).run()
    here, there = (next((project / "runs" / name).iterdir()) for name in ("tiny", "there"))
    assert_equal_trees(state(there, False)["z"], state(here, False)["z"])
    assert not lines(caplog)


def test_a_signal_ends_a_run_whose_superlink_has_gone(project, monkeypatch):
    """Flower waits for it without end."""
    loop = Loop(deploy(project, monkeypatch, *BASE), ALL)
    loop.get_node_ids = lambda: signal.raise_signal(signal.SIGINT) or pytest.fail("it waits")
    with pytest.raises(KeyboardInterrupt):
        loop.run()


SITES = """\
import torch
from torch.utils.data import TensorDataset

MADE = []


class Site(TensorDataset):
    def __init__(self, number: int):
        MADE.append(number)
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
        super().__init__(x, torch.arange(12) % 3)
"""
CONFIG = """\
data:
  class_path: SitesDataModule
  init_args:
    test_fraction: 0.25
    train:
      Bern: {class_path: my_sites.Site, init_args: {number: 0}}
      Oslo: {class_path: my_sites.Site, init_args: {number: 1}}
"""


def test_a_client_has_its_own_data_alone(project, monkeypatch):
    (project / "my_sites.py").write_text(SITES)
    (project / "sites.yaml").write_text(CONFIG)
    words = [*BASE, "--config", "sites.yaml", "--algorithm=SCAFFOLD", "--trainer.clients_per_round=2"]
    assert run_cli("fit", *words) == 0
    app = deploy(project, monkeypatch, *words)
    written = import_module("tomli").loads((project / "app" / "pyproject.toml").read_text())
    assert validate(written) == (True, [], [])
    made = import_module("my_sites").MADE
    made.clear()
    Loop(app, [{"client": "Oslo"}, {"client": 0}], run_config={"trainer.max_rounds": 2}).run()
    assert made == [0, 1]
    here, there = sorted((project / "runs" / "tiny").iterdir())
    for name in ("clients.csv", "evaluation.csv"):
        tables = [pd.read_csv(run / name).query("round < 3") for run in (here, there)]
        pd.testing.assert_frame_equal(*(table[[*tables[0]]] for table in tables))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--trainer.logger=false", "--trainer.backend=Flower"], "Flower: this run is started by `flwr run`"),
        (["deploy"], "deploy what, and where to?"),
        (["deploy", "flower", "--folder=."], "--folder .: give the name of a new folder, on a disk"),
        (["deploy", "flower", "--folder=a", "--algorithm=Centralized"], "algorithm: Centralized cannot be deployed"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(project, capsys, words, message):
    assert run_cli(*words[:2], *BASE, *words[2:]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (project / "a").exists()
