"""Flower: an app of it has the bits of fit; a client that is lost, late or broken is one that drops out.

Flower's own messages and apps are used, and a grid that gives them to the apps in this process. Its simulation and its
deployment are tried by ``benchmarks/elsewhere.py``.
"""

from __future__ import annotations

import sys
from importlib import import_module

import pandas as pd
import pytest
import torch
from helpers.boring import assert_equal_trees
from helpers.command_line import run_cli

from fedbc_lightning.distributed.heartbeat import LostProcessError

flwr = pytest.importorskip("flwr.app", reason="the extra flower-deploy is not installed; it conflicts with twine")

identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
identity.task_id, identity.run_id, identity.node_id = 1, 7, 1  # as the process of an app sets them


class Loop:
    """A grid whose SuperNodes work in this process, when their answers are pulled.

    Args:
        app: The module of the app.
        nodes: Node-config of each SuperNode.
        losses: Pairs of a SuperNode and the number of a message to it that is never answered.
        run_config: Settings of the run.
    """

    def __init__(self, app, nodes, losses=(), run_config=None):
        self.app, self.losses, self.config = app, set(losses), {**(run_config or {})}
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
            if (node, self.counts[node]) in self.losses or (node, None) in self.losses:
                found.append(flwr.Message(flwr.Error(5, "the node\nis gone"), reply_to=message))
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


def state(run):
    last = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return {"z": last["state_dict"], "federation": last["fedbc_lightning"]["federation"]}


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


@pytest.mark.parametrize("name", METHODS)
def test_an_app_has_the_bits_of_fit(project, monkeypatch, name):
    words = [*BASE, *METHODS[name]]
    assert run_cli("fit", *words) == 0
    Loop(deploy(project, monkeypatch, *words), ALL).run()
    here, there = sorted((project / "runs" / "tiny").iterdir())
    assert_equal_trees(state(there), state(here))
    assert (there / "config.yaml").exists()
    assert (there / "metrics.csv").read_text().count("\n") == (here / "metrics.csv").read_text().count("\n")


def lines(caplog):
    """Return what was said of rounds and SuperNodes."""
    return [line for line in caplog.messages if line.startswith(("round ", "SuperNode "))]


def test_who_is_lost_or_broken_drops_out(project, monkeypatch, caplog):
    """SuperNode 1 is lost in round 2, the data module of SuperNode 2 fails, SuperNode 4 is nobody."""
    app = deploy(project, monkeypatch, *BASE, "--trainer.clients_per_round=1.0")
    nodes = [*ALL[:2], {"partition-id": 2, "data.val_fraction": 2.0}, ALL[3], {"client": "Bern"}]
    Loop(app, nodes, {(1, 3)}).run()
    no_data = "sent nothing that can be used: data.val_fraction: got 2.0; give a number in [0, 1)."
    assert lines(caplog) == [
        "SuperNode 4 is no client of this run: 'Bern'. Start it with --node-config 'client=...', the client's number.",
        f"round 1: client 2 {no_data}",
        "round 2: client 1 sent nothing that can be used: the node is gone.",
        f"round 2: client 2 {no_data}",
        f"round 3: client 2 {no_data}",
    ]
    table = pd.read_csv(project / "runs/tiny/FedAvg-0/clients.csv").dropna(subset="hash_up").sort_values("client")
    assert table.groupby("round")["client"].apply(list).tolist() == [[0, 1, 3], [0, 3], [0, 1, 3]]


def test_nobody_answers(project, monkeypatch):
    app = deploy(project, monkeypatch, *BASE, "--trainer.max_rounds=5")
    with pytest.raises(LostProcessError, match="no client has answered for 3 rounds; the last one: the node is gone"):
        Loop(app, ALL, {(k, j) for k in range(4) for j in range(2, 9)}).run()


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
    names: [Bern, Oslo]
    train:
      - {class_path: my_sites.Site, init_args: {number: 0}}
      - {class_path: my_sites.Site, init_args: {number: 1}}
"""


def test_a_client_has_its_own_data_alone(project, monkeypatch):
    (project / "my_sites.py").write_text(SITES)
    (project / "sites.yaml").write_text(CONFIG)
    words = [*BASE, "--config", "sites.yaml", "--algorithm=SCAFFOLD", "--trainer.clients_per_round=2"]
    assert run_cli("fit", *words) == 0
    app = deploy(project, monkeypatch, *words)
    made = import_module("my_sites").MADE
    made.clear()
    Loop(app, [{"client": "Oslo"}, {"client": 0}], run_config={"trainer.max_rounds": 2}).run()
    assert made == [0, 1]
    here, there = sorted((project / "runs" / "tiny").iterdir())
    columns = ["round", "client", "train_loss", "num_samples"]
    tables = [pd.read_csv(run / "clients.csv").query("round < 3")[columns] for run in (here, there)]
    pd.testing.assert_frame_equal(*tables)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["fit", "--trainer.logger=false", "--trainer.backend=Flower"],
            "trainer.backend: Flower: this run is started by `flwr run`",
        ),
        (["deploy"], "deploy what, and where to?"),
        (["deploy", "flower", "--folder=."], "--folder .: give the name of a new folder, on a disk"),
        (["deploy", "flower", "--folder=a", "--algorithm=Centralized"], "algorithm: Centralized cannot be deployed"),
        (["deploy", "flower", "--folder=a", "--trainer.devices=2"], "trainer.devices: got 2; with trainer.backend"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(project, capsys, words, message):
    assert run_cli(*words[:2], *BASE, *words[2:]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (project / "a").exists()
