"""A run is its content: what ``last`` goes on with, and what a resumed run says of other settings, code and data."""

import importlib
import importlib.util
import re
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, assert_equal_trees, make_model, make_trainer
from torch.utils.data import Dataset, Subset

from fedbc_lightning import ConfigurationError, FedAvg, FedBC
from fedbc_lightning.callbacks import ByzantineClients
from fedbc_lightning.core.described import content_hash
from fedbc_lightning.core.origin import source_hash
from fedbc_lightning.run import slurm
from fedbc_lightning.run.folder import LAST
from fedbc_lightning.run.identity import read, samples_of

PROGRAM = """\
import torch
from lightning.pytorch import LightningModule
from torch.nn.functional import cross_entropy as criterion
from torch.utils.data import TensorDataset
from fedbc_lightning import FedAvg, FederatedTrainer, PartitionedDataModule, UniformSampler
from fedbc_lightning.partition import IID

scale = [1.0]

def activation(inputs):
    return inputs.tanh()

class Given(torch.nn.Tanh): slope = 1.5
class Sampler(UniformSampler): share = 0.5

class Net(LightningModule):
    def __init__(self, rate=0.1):
        super().__init__()
        self._rate = rate
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))

    def training_step(self, batch, batch_idx):
        # the loss
        return scale[0] * criterion(activation(self.layers(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self._rate)

def fit(root, rounds, **options):
    torch.manual_seed(0)
    values, labels = torch.randn(40, 4), torch.arange(40) % 3
    order = torch.arange(40)
    data = TensorDataset(values[order], labels[order])
    data = PartitionedDataModule(data, IID(num_clients=2), batch_size=8, seed=0)
    trainer = FederatedTrainer(max_rounds=rounds, accelerator="cpu", devices=1, logger=False, seed=0,
                               enable_progress_bar=False, default_root_dir=root, sampler=Sampler())
    model = Net()
    model.layers.append(Given())
    return trainer.fit(model, data, FedAvg(), **options)
"""

CHANGES = {
    "values": ("torch.randn(40, 4)", "torch.rand(40, 4)", "data: train data of client 0"),
    "labels": ("torch.arange(40) % 3\n", "torch.arange(40) % 3 + 1\n", "data: train data of client 0"),
    "order": ("order = torch.arange(40)", "order = torch.arange(40).flip(0)", "data: train data of client 0"),
    "activation": ("inputs.tanh()", "inputs.sigmoid()", "code: the class Net"),
    "layer": ("nn.ReLU()", "nn.GELU()", "code: the class Net and 1 more"),
    "loss": ("cross_entropy as", "multi_margin_loss as", "code: the class Net"),
    "constant": ("scale = [1.0]", "scale = [2.0]", "code: the class Net"),
    "a layer that is given": ("slope = 1.5", "slope = 2.5", "code: the class Given"),
    "a sampler": ("share = 0.5", "share = 0.7", "code: the class Sampler"),
    "optimizer": ("optim.SGD", "optim.Adagrad", "code: the class Net"),
    "an argument that nothing keeps": ("Net()", "Net(0.2)", r"configure_optimizers\.0\.lr was 0\.1 "),
    "comment": ("# the loss", "# a loss", None),
}


def program(tmp_path, text):
    path = tmp_path / f"program_{content_hash(text)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    return program(folder, PROGRAM).fit(folder, 1)


@pytest.mark.parametrize("change", CHANGES)
def test_other_code_and_data_are_told_or_refused(tmp_path, begun, change, caplog):
    old, new, expected = CHANGES[change]
    assert old in PROGRAM
    changed = program(tmp_path, PROGRAM.replace(old, new))
    if expected is None:
        changed.fit(tmp_path, 1, ckpt_path=begun.checkpoint, strict=True)
        return
    with pytest.raises(ConfigurationError, match=f"is refused, as strict asks for it: {expected}"):
        changed.fit(tmp_path, 1, ckpt_path=begun.checkpoint, strict=True)
    with pytest.warns(UserWarning, match="the run goes on as it is now") as said:
        mixed = changed.fit(tmp_path, 2, ckpt_path=shutil.copy(begun.checkpoint, tmp_path))
    assert re.match(expected, str(said[0].message))
    with pytest.raises(ConfigurationError, match=f"strict asks for it: after round 1: {expected}"):
        changed.fit(tmp_path, 3, ckpt_path=mixed.checkpoint, strict=True)
    assert read(mixed.folder)[0].changes == [f"after round 1: {one.message}".partition(";")[0] for one in said]


FILES = {
    "inner/net.py": """\
import lazy
from .made import *
from .constants import scale, start

class Net(Base):
    def step(self, trainer):
        from .steps import act, os
        import far.away.below
        return act(lazy.heavy.x, scale, cached, partly, called, table["a"], asks, far.away.below.steep, start)

trainer = 19
""",
    "inner/steps.py": "import nowhere_at_all\ndef act(*a):\n    return a, 10\n",
    "inner/constants.py": """\
import os, time
scale = 11
other = 12
start = time.time(), os.getpid(), os.path.abspath(__file__), object(), 20
""",
    "inner/made.py": """\
from functools import lru_cache, partial
@lru_cache
def cached(x): return x + 13
def given(x, y): return x + 14
partly = partial(given, y=15)
class Called:
    def __call__(self, x): return x + 16
class Asks:
    def __getattr__(self, name): raise RuntimeError(name)
called, asks, table = Called(), Asks(), {}
table["a"] = lambda x: x + 17
def shifted(x): return x + 22
def counting():
    count = 0
    class Counting:
        def steps(self):
            nonlocal count
            count += 23
            return shifted(count)
    return Counting
Base = counting()
if table:
    table.update(b=24)
@table.setdefault
def key(x): return x + 25
""",
    "lazy/__init__.py": "def __getattr__(name):\n    raise ImportError(name)\n",
    "far/__init__.py": "raise SystemExit\n",
    "far/away/below.py": "def steep(x): return x + 18\ndef flat(x): 21\n",  # in a folder without an __init__.py
}


def test_all_code_that_a_class_names_counts_and_none_is_run(tmp_path, monkeypatch):
    """The same files lie in a folder for each change, as on other machines, and a value is another at each start."""

    def hash_of(change):
        folder = tmp_path / content_hash(change)
        for name, text in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text.replace(change, change + change[-1]))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("inner", "lazy", "far")]:
            del sys.modules[name]
        with monkeypatch.context() as patched:
            patched.syspath_prepend(folder)
            kind, before = importlib.import_module("inner.net").Net, {*sys.modules}
            found = source_hash(kind)
        assert {*sys.modules} == before
        return found

    first = hash_of("nothing")
    assert [k for k in range(10, 26) if hash_of(f"{k}") == first] == [12, 19, 21]


def smoothed(smoothing):
    model = make_model()
    model.criterion = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    return model


def test_last_is_that_of_the_same_content(tmp_path, caplog):
    """As many lines of one script, each of which is given ``last``; each goes on with its own run, in any order."""
    asked = {
        "FedAvg-1": (FedAvg(), {}, make_model, {}),
        "FedAvg-1-1": (FedAvg(), {}, make_model, {"heldout_clients": [0]}),
        "FedAvg-1-2": (FedAvg(), {}, partial(make_model, lr=0.2), {}),
        "FedAvg-1-3": (FedAvg(), {"local_epochs": 2}, make_model, {}),
        "FedAvg-1-4": (FedAvg(), {}, partial(smoothed, 0.1), {}),  # no setting tells these
        "FedAvg-1-5": (FedAvg(), {}, partial(smoothed, 0.2), {}),
        "FedAvg-1-6": (FedAvg(), {"callbacks": [ByzantineClients(0.5)]}, make_model, {}),
        "FedAvg-2": (FedAvg(), {"seed": 2}, make_model, {}),
        "FedBC-1": (FedBC(dual_lr=0.1), {}, make_model, {}),
        "FedBC-1-1": (FedBC(dual_lr=0.2), {}, make_model, {}),
    }

    def last_round_of(name, rounds):
        algorithm, settings, make, data = asked[name]
        trainer = make_trainer(tmp_path, **{"local_epochs": 1, **settings, "max_rounds": rounds})
        found = trainer.fit(make(), BoringData(**data), algorithm, ckpt_path="last")
        return found.folder.name, found.last_round

    for rounds, names in ((1, [*asked]), (2, [*reversed(asked)])):
        assert [last_round_of(name, rounds) for name in names] == [(name, rounds) for name in names]
    with pytest.warns(UserWarning, match="lr was 0.2"):  # it has the settings of another one from here on
        make_trainer(tmp_path, local_epochs=1, max_rounds=3).fit(
            make_model(), BoringData(), FedAvg(), tmp_path / "default" / "FedAvg-1-2" / LAST
        )
    assert last_round_of("FedAvg-1", 3) == ("FedAvg-1", 3)
    said = [message for message in caplog.messages if "is another run" in message]
    assert len(said) == len(asked) - 1
    assert "its data or code differ" in said[0]
    assert "model.lr was 0.1 when the run began and is 0.2 now" in said[1]


def test_a_job_that_is_started_again_goes_on_with_its_own_runs(tmp_path, monkeypatch):
    for agent, rounds, name in (("a", 1, "FedAvg-1"), ("b", 1, "FedAvg-1-1"), ("a", 2, "FedAvg-1")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{agent}/attempt_0/0/error.json")
        monkeypatch.setattr(slurm, "begun", set())
        found = make_trainer(tmp_path, max_rounds=rounds).fit(make_model(), BoringData(), FedAvg())
        assert (found.folder.name, found.last_round) == (name, rounds)


def test_a_finished_run_says_so_and_changes_nothing(tmp_path, caplog):
    def fit():
        trainer, model = make_trainer(tmp_path, max_rounds=1, logger=True), make_model()
        return trainer.fit(model, BoringData(), FedAvg(), ckpt_path="last"), model.state_dict()

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}

    found, state = fit()
    before = files()
    again, same = fit()
    assert again == found
    assert_equal_trees(same, state)
    assert files() == before
    assert f"'{found.folder}' has finished: 1 rounds." in caplog.text


class OnDemand(Dataset):
    """Notes in this process which samples were read."""

    def __init__(self, seen):
        self.seen = seen

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.seen.append(index)
        return torch.full((6,), float(index)), index


class Drawing(Dataset):
    """Samples of a random generator of its own: to read one would change the run."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.from_numpy(self.rng.normal(size=6)).float(), index % 3


def test_samples_are_read_without_a_trace():
    data = BoringData()
    data.client_train_dataset = lambda client: Subset(Drawing(), range(4))
    assert not [name for name in samples_of(data) if name.startswith("train")]
    assert [name for name in samples_of(data) if name.startswith("test")]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_are_read_where_the_run_reads_them(num_workers):
    """A file that is opened before the workers start cannot be read by them."""
    data, seen = BoringData(num_workers=num_workers), []
    data.client_test_dataset = lambda client: OnDemand(seen)
    assert len(samples_of(data)) == 2 * data.num_clients
    assert bool(seen) == (num_workers == 0)
