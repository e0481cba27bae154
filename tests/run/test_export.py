"""One model of a run as an ordinary Lightning checkpoint: it is the one that the run's evaluation measured."""

import importlib
import os
import shutil
from pathlib import Path

import lightning
import pytest
import torch
import yaml
from fedbc_lightning.models import LogisticRegression
from helpers.boring import BoringData, BoringModel, NamedData, assert_equal_trees, make_model, make_trainer, read_csv
from helpers.command_line import run_cli
from torch.utils.data import DataLoader

from fedbc_lightning import FedAvg, FedBC
from fedbc_lightning.algorithms import APFL, Centralized, FedBCFineTune, PerFedAvg
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.run.folder import how_to_go_on
from fedbc_lightning.state import client_rows
from fedbc_lightning.state.checkpoint import SOURCE

RUN = Path("runs/tiny/FedBC-0")
BORING = {
    "trainer": {
        "max_rounds": 2, "clients_per_round": 3, "name": "tiny", "accelerator": "cpu", "devices": 1, "logger": False,
        "enable_progress_bar": False,
    },
    "algorithm": {"class_path": "FedBC", "init_args": {"dual_lr": 0.1}},
    "model": {"class_path": "helpers.boring.BoringModel", "init_args": {"lr": 0.05}},
    "data": {"class_path": "helpers.boring.BoringData"},
}  # fmt: skip


def train(folder, algorithm, model=None, data=None, **options):
    trainer, model, data = make_trainer(folder, **options), model or make_model(lr=0.05), data or BoringData()
    trainer.fit(model, data, algorithm)
    return trainer, model, data, algorithm


def measure(path, client, model_class=BoringModel):
    """What ``lightning.Trainer`` finds for an exported model on a client's test data."""
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    loader = DataLoader(BoringData().client_test_dataset(client), batch_size=16)
    (found,) = trainer.test(model_class.load_from_checkpoint(path), loader, verbose=False)
    return found


def recorded(log_dir, client):
    """The last row of ``evaluation.csv`` for a client."""
    rows = [row for row in read_csv(Path(log_dir, "evaluation.csv")) if int(row["client"]) == client]
    return {name: float(value) for name, value in rows[-1].items()}


CASES = {
    "fedbc, local buffers": (lambda: FedBC(dual_lr=0.1), {"buffers": "local"}),
    "fedbc, fine-tuned": (lambda: FedBCFineTune(dual_lr=0.1, finetune_lr=0.3), {}),
    "fedavg, bfloat16": (FedAvg, {"client_dtype": "bfloat16"}),
    "per-fedavg": (lambda: PerFedAvg(inner_lr=0.3), {}),
    "apfl": (lambda: APFL(mixture=0.3), {}),
}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("case", CASES)
def test_lightning_finds_what_the_run_found(tmp_path, case):
    make, options = CASES[case]
    run = train(tmp_path, make(), **options)
    expected = recorded(run[0].log_dir, 5)
    for which, name in ((5, "local"), (None, "global")):
        found = measure(run[0].export(*run[1:], client=which, out=tmp_path / f"{name}.ckpt"), 5)
        assert found["test_loss"] == pytest.approx(expected[f"loss/{name}"], rel=1e-6)
        assert found["test_accuracy"] == pytest.approx(expected[f"accuracy/{name}"], rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_rows_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    best = RoundCheckpoint("loss/global", "min")
    run = train(tmp_path, FedBC(dual_lr=0.1), callbacks=[best], buffers="local")
    folder = Path(run[0].log_dir, "checkpoints")
    assert (folder / "clients.bin").is_file()
    path = run[0].export(*run[1:], client=4)
    assert path == folder / "round_3_client_4.ckpt"
    assert how_to_go_on(folder.parent, 5).endswith(f'(max_rounds=5, ...).fit(..., ckpt_path="{folder}/last.ckpt")')
    assert measure(path, 4)["test_loss"] == pytest.approx(recorded(run[0].log_dir, 4)["loss/local"], rel=1e-6)

    assert run[0].export(*run[1:], ckpt_path=folder / "best.ckpt") == folder / f"round_{best.best_round}_global.ckpt"
    with pytest.raises(ConfigurationError, match=r"clients\.bin beside the last\.ckpt of the run folder"):
        run[0].export(*run[1:], ckpt_path=folder / "best.ckpt", client=3)
    shutil.copy(folder / "last.ckpt", tmp_path / "last.ckpt")
    with pytest.raises(ConfigurationError, match=r"copy clients\.bin along with last\.ckpt"):
        run[0].export(*run[1:], ckpt_path=tmp_path / "last.ckpt", client=3)


def counter(path):
    return int(torch.load(path, weights_only=True)["state_dict"]["net.1.num_batches_tracked"])


def test_integer_buffers_are_the_clients_own_where_buffers_are(tmp_path):
    largest = {}
    for buffers in ("average", "local"):
        run = train(tmp_path / buffers, FedAvg(), buffers=buffers, clients_per_round=1.0)
        own = [counter(run[0].export(*run[1:], client=client)) for client in range(6)]
        largest[buffers] = counter(run[0].export(*run[1:]))
        if buffers == "local":  # client i has 16 + 24 i samples in batches of 16, three rounds
            assert own == [3 * -(-(16 + 24 * client) // 16) for client in range(6)]
        else:
            assert own == [largest["average"]] * 6
    assert largest["local"] == own[-1] == 27


class Remembering(BoringModel):
    """Has something of its own in its checkpoints."""

    def __init__(self, lr: float = 0.1, shape: tuple[int, ...] = (1,)) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.frozen = torch.nn.Parameter(torch.full(shape, 7.0), requires_grad=False)
        self.remembered = 0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["remembered"] = self.remembered

    def on_load_checkpoint(self, checkpoint):
        self.remembered = checkpoint["remembered"]


def test_the_file_is_a_checkpoint_of_the_module_and_no_more(tmp_path):
    model = make_model(Remembering, lr=0.05, shape=(2, 3))
    model.remembered = 5
    run = train(tmp_path, FedBC(dual_lr=0.1), model)
    ours = torch.load(Path(run[0].log_dir, "checkpoints/last.ckpt"), weights_only=True)
    paths = [run[0].export(*run[1:], client=client) for client in (None, 2)]
    for path, client in zip(paths, (None, 2), strict=True):
        content = torch.load(path, weights_only=True)
        assert content[SOURCE] == {
            "run": "default/FedBC-1", "checkpoint": "last.ckpt", "round": 3, "algorithm": "FedBC", "client": client,
            "client_name": None, "fine_tuned_on": None,
        }  # fmt: skip
        assert content.keys() ^ ours.keys() == {SOURCE, "callbacks", "fedbc_lightning"}
        same = content.keys() - {SOURCE, "state_dict"}
        assert {key: content[key] for key in same} == {key: ours[key] for key in same}
        assert list(content["state_dict"]) == list(ours["state_dict"])
        loaded = Remembering.load_from_checkpoint(path)
        assert (loaded.hparams["lr"], tuple(loaded.hparams["shape"]), loaded.remembered) == (0.05, (2, 3), 5)
        assert torch.equal(loaded.frozen, torch.full((2, 3), 7.0))
    z, own = (torch.load(path, weights_only=True)["state_dict"] for path in paths)
    for name, value in ours["state_dict"].items():
        assert torch.equal(z[name], value)
        assert torch.equal(model.state_dict()[name], value)  # the module holds z again
    assert not torch.equal(own["net.0.weight"], z["net.0.weight"])


class Tied(BoringModel):
    """A weight, and a whole layer with BatchNorm's buffers, under second names that are loaded last."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.same = torch.nn.Linear(8, 3, bias=False)
        self.same.weight = self.net[3].weight
        self.twin = self.net[1]

    def forward(self, inputs):
        return self.net(inputs) + self.same(self.twin(self.net[0](inputs)))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_all_names_of_a_shared_tensor_are_the_clients(tmp_path, buffers):
    run = train(tmp_path, FedAvg(), make_model(Tied, lr=0.05), buffers=buffers)
    path = run[0].export(*run[1:], client=3)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(state["same.weight"], state["net.3.weight"])
    for name in ("weight", "running_mean", "num_batches_tracked"):
        assert torch.equal(state[f"twin.{name}"], state[f"net.1.{name}"])
    assert measure(path, 3, Tied)["test_loss"] == pytest.approx(recorded(run[0].log_dir, 3)["loss/local"])


def test_models_that_a_run_has_not(tmp_path):
    run = train(tmp_path, FedAvg(), keep_local_models=False)
    with pytest.raises(ConfigurationError, match=r"FedAvg has no models of clients.*trainer.keep_local_models: true"):
        run[0].export(*run[1:], client=0)
    pooled = train(tmp_path / "pooled", Centralized(), clients_per_round=1.0)
    with pytest.raises(ConfigurationError, match="trains one model on all data; leave client out"):
        pooled[0].export(*pooled[1:], client=0)
    without = make_trainer(tmp_path / "none", name="none")
    with pytest.raises(ConfigurationError, match=r"there is no last\.ckpt under"):
        without.export(make_model(), BoringData(), FedAvg())


class Remembers(BoringModel):
    """Has an extra state that is no tensor."""

    def get_extra_state(self):
        return {"seen": 1}

    def set_extra_state(self, state):
        assert state == {"seen": 1}


def test_an_extra_state_is_exported_where_the_file_can_hold_it(tmp_path):
    run = train(tmp_path, FedAvg(), make_model(Remembers))
    assert torch.load(run[0].export(*run[1:]), weights_only=True)["state_dict"]["_extra_state"] == {"seen": 1}
    with pytest.raises(ConfigurationError, match=r"'_extra_state' is no tensor"):
        run[0].export(*run[1:], out=tmp_path / "m.safetensors")


# the command


@pytest.fixture
def run(project):
    """A finished run of a user's own module and data."""
    config = BORING | {"data": {"class_path": "helpers.boring.NamedData"}}
    Path("boring.yaml").write_text(yaml.safe_dump(config))
    assert run_cli("fit", "--config", "boring.yaml") == 0
    return RUN


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_command_writes_a_client_and_z(run, capsys):
    capsys.readouterr()
    assert run_cli("export", "--ckpt_path", run, "--client", "dan", "--out", "models/m.ckpt") == 0
    assert capsys.readouterr() == ("models/m.ckpt\n", "")
    source = torch.load("models/m.ckpt", weights_only=True)[SOURCE]
    assert (source["run"], source["round"]) == ("tiny/FedBC-0", 2)
    assert (source["client"], source["client_name"]) == (3, "dan")
    assert measure("models/m.ckpt", 3)["test_loss"] == pytest.approx(recorded(run, 3)["loss/local"], rel=1e-6)

    assert run_cli("export", "--ckpt_path", run / "checkpoints/last.ckpt") == 0
    path = run / "checkpoints/round_2_global.ckpt"
    assert capsys.readouterr().out == f"{path}\n"
    assert measure(path, 3)["test_loss"] == pytest.approx(recorded(run, 3)["loss/global"], rel=1e-6)
    assert sorted(path.name for path in Path("runs/tiny").iterdir()) == ["FedBC-0"]

    # settings of another machine: one process on the CPU does it, without callbacks; an empty ckpt_path is no matter
    another = {"accelerator": "gpu", "devices": 2, "strategy": "ddp", "logger": True, "callbacks": {}}
    another["callbacks"] = [{"class_path": "RoundCheckpoint", "init_args": {"monitor": "nothing"}}]
    Path("gpu.yaml").write_text(yaml.safe_dump({"ckpt_path": None, "trainer": another}))
    words = ("--ckpt_path", run, "--config", "boring.yaml", "--config", "gpu.yaml")
    assert run_cli("export", *words, "--client", "2", "--out", "m.ckpt") == 0
    assert run_cli("export", "--config", "boring.yaml", "--client", "2", "--out", "n.ckpt") == 0  # the newest run
    one, two = (torch.load(path, weights_only=True)["state_dict"] for path in ("m.ckpt", "n.ckpt"))
    assert_equal_trees(one, two)


@pytest.mark.parametrize(("method", "has_own"), [("FedAvg", False), ("Ditto", True)])
def test_predictions_are_those_of_the_models_that_export_writes(project, capsys, method, has_own):
    assert run_cli("fit", "--config", "tiny.yaml", "--algorithm", method) == 0
    predict = "predict", "--ckpt_path", f"runs/tiny/{method}-0"
    capsys.readouterr()
    assert run_cli(*predict, "--trainer.devices", "2", "--trainer.num_nodes", "2", "--trainer.strategy", "ddp") == 0
    assert capsys.readouterr().out == "predictions\n"  # of one process
    assert sorted(os.listdir("predictions")) == [f"round_2_client_{client}.pt" for client in range(4)]
    for client in range(4):
        which = ("--client", client) if has_own else ()
        assert run_cli("export", *predict[1:], *which, "--out", "model.ckpt", "--force") == 0
        model = LogisticRegression.load_from_checkpoint("model.ckpt")
        inputs = importlib.import_module("tiny_data").TinyData().client_test_dataset(client).tensors[0]
        found = torch.load(f"predictions/round_2_client_{client}.pt", weights_only=True)
        assert found["client"] == client
        assert torch.equal(found["predictions"][0], model(inputs))
    assert run_cli(*predict, "--client", "2") == 1
    assert "'predictions/round_2_client_2.pt' is there already" in capsys.readouterr().err
    assert run_cli(*predict, "--client", "2", "--force") == 0
    Path("predictions/round_2_client_0.pt").unlink()
    assert run_cli(*predict) == 1  # before anything is predicted
    assert not Path("predictions/round_2_client_0.pt").exists()


class Predicting(BoringModel):
    """Has predict data, counts how often they are asked for, and may return an object."""

    num_asked, found = 0, None

    def predict_dataloader(self):
        self.num_asked += 1
        return DataLoader(torch.zeros(4, 10), batch_size=2)

    def predict_step(self, batch):
        return self.found or self(batch)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_loaders_of_ones_own_are_predicted_into_one_file(tmp_path):
    run = train(tmp_path, FedAvg(), make_model(Predicting), data=NamedData())
    model, own = run[1], DataLoader(torch.ones(3, 10))
    (path,) = run[0].predict(*run[1:], dataloaders=own, out=tmp_path / "own")
    found = torch.load(path, weights_only=True)
    assert (model.num_asked, found["client"], len(found["predictions"])) == (0, None, 3)

    (path,) = run[0].predict(*run[1:], out=tmp_path / "users", client="cyd")
    found = torch.load(path, weights_only=True)
    assert (model.num_asked, found["client"], len(found["predictions"])) == (1, "cyd", 2)

    model.found = {"one": slice(2)}
    with pytest.raises(ConfigurationError, match=r"predict_step: the value\['one'\] is a builtins.slice, which a file"):
        run[0].predict(*run[1:], dataloaders=own, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


MISTAKES = [
    (f"--ckpt_path {RUN} --client eva", 1, "client: there is no client 'eva'; did you mean 'eve'?"),
    (f"--ckpt_path {RUN} --out there.ckpt", 1, "out: 'there.ckpt' is there already; give another file, or --force"),
    (f"--ckpt_path {RUN} --force --out {RUN}/checkpoints/last.ckpt", 1, "is the checkpoint itself; give another file"),
    ("", 2, "which run? fedbc-cli export --ckpt_path RUN [--client CLIENT] [--out PATH] [--force]"),
    ("--ckpt_path there.ckpt", 2, "no config.yaml beside the run of --ckpt_path there.ckpt"),
    ("--ckpt_path there.ckpt --config boring.yaml", 1, "ckpt_path: 'there.ckpt' was not written by fedbc_lightning."),
    (f"--ckpt_path {RUN} --config tiny.yaml", 1, f"ckpt_path: '{RUN}/checkpoints/last.ckpt' is of another run"),
]


def test_a_mistake_is_one_clear_line(run, capsys):
    torch.save({"state_dict": {}}, "there.ckpt")
    before = Path("there.ckpt").read_bytes(), (run / "checkpoints/last.ckpt").read_bytes()
    capsys.readouterr()
    for line, status, said in MISTAKES:
        assert run_cli("export", *line.split()) == status, line
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1), err
        assert err.startswith("fedbc-cli: error: ")
        assert said in err
    assert before == (Path("there.ckpt").read_bytes(), (run / "checkpoints/last.ckpt").read_bytes())

    assert run_cli("export", "--ckpt_path", run, "--out", "there.ckpt", "--force") == 0
    assert SOURCE in torch.load("there.ckpt", weights_only=True)
    for command in ("export", "test", "fit"):
        assert run_cli(command, "--ckpt_path", "there.ckpt", "--config", "boring.yaml") == 1
        assert "'there.ckpt' is an exported model; give the run that it comes from" in capsys.readouterr().err


@pytest.mark.distributed
def test_several_processes_write_the_same(tmp_path):
    run = train(tmp_path, FedBC(dual_lr=0.1))
    one = run[0].export(*run[1:], client=2, out=tmp_path / "one.ckpt")
    forking = make_trainer(tmp_path, devices=2, strategy="ddp_fork")
    two = forking.export(make_model(lr=0.05), BoringData(), FedBC(dual_lr=0.1), client=2, out=tmp_path / "two.ckpt")
    assert_equal_trees(*(torch.load(path, weights_only=True) for path in (one, two)))
