"""Every shipped config: complete, commented, parsed, dumped back unchanged, and run for two rounds."""

import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.command_line import run_cli
from helpers.data_formats import write_cifar10, write_cifar100, write_emnist, write_image_folder, write_mnist
from helpers.folders import only_run
from helpers.text_formats import write_leaf, write_sent140

from fedbc_lightning.cli.command_arguments import shipped_configs
from fedbc_lightning.cli.messages import class_arguments
from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.studies.compare import Comparison
from fedbc_lightning.studies.study import Study
from fedbc_lightning.trainer.trainer import FederatedTrainer

CONFIGS = shipped_configs()
STUDIES = [name for name in CONFIGS if name.startswith("studies/")]
EXPERIMENTS = [name for name in CONFIGS if "/" not in name]
OVERLAYS = [name for name in CONFIGS if name.startswith("algorithms/")]
SHARING = [name for name in CONFIGS if name.startswith("sharing/")]
PRIVATE = "privacy/fedavg.yaml"
SECTIONS = [
    "seed_everything",
    "trainer",
    "algorithm",
    "model",
    "data",
    "optimizer",
    "lr_scheduler",
    "ckpt_path",
    "other_seed",
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def read(name: str) -> dict:
    return yaml.safe_load(CONFIGS[name].read_text(encoding="utf-8"))


def classes(content: object) -> list[dict]:
    """All ``class_path`` entries of a config, nested ones too."""
    if isinstance(content, list):
        return [found for item in content for found in classes(item)]
    if not isinstance(content, dict):
        return []
    inner = [found for value in content.values() for found in classes(value)]
    return [content, *inner] if "class_path" in content else inner


def test_the_promised_configs_are_shipped():
    assert EXPERIMENTS == [
        "a1a.yaml", "cifar.yaml", "cifar100.yaml", "cifar_folder.yaml", "cifar_resnet.yaml", "digits.yaml",
        "femnist.yaml", "femnist_writers.yaml", "lora_shakespeare.yaml", "mnist.yaml", "mnist_1000.yaml",
        "mnist_personal.yaml", "mnist_robust.yaml", "regression.yaml", "sent140.yaml", "shakespeare.yaml",
        "synthetic.yaml",
    ]  # fmt: skip
    assert {f"algorithms/{name}.yaml" for name in ("fedavg", "fedbc", "fedprox", "scaffold")} <= set(OVERLAYS)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_complete_and_all_its_runs_can_be_parsed(name, place):
    content = read(name)
    assert list(content) == list(Study.__dataclass_fields__)
    first = CONFIGS[name].read_text(encoding="utf-8").splitlines()
    assert first[0].startswith("# ")
    assert f"fedbc-cli compare --config {name}" in first[1]
    study = read_study("compare", ["--config", str(CONFIGS[name])])
    seen: set[str] = set()
    for variant, levels in study.levels.items():  # each level once
        if not set(levels) - seen:
            del study.variants[variant]
        seen |= set(levels)
    Comparison(study).check()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_complete(name):
    config = read(name)
    assert list(config) == SECTIONS
    trainer = set(inspect.signature(FederatedTrainer.__init__).parameters) - {"self"}
    assert set(config["trainer"]) <= trainer
    assert config["trainer"]["name"] == name.removesuffix(".yaml")


@pytest.mark.parametrize("name", [*EXPERIMENTS, *OVERLAYS, *SHARING, PRIVATE])
def test_every_argument_of_every_class_is_there(name):
    for entry in classes(read(name)):
        assert set(entry["init_args"]) == set(class_arguments(entry["class_path"])), entry["class_path"]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_has_a_comment(name):
    lines = CONFIGS[name].read_text(encoding="utf-8").splitlines()
    assert re.match(r"# \S", lines[0])
    for above, line in pairwise(lines):
        key = line.strip().partition(":")[0]
        if name in STUDIES and line.startswith(" "):  # inside are settings, explained where they are defined
            continue
        if line.strip() and not line.lstrip().startswith("#") and key not in ("class_path", "init_args"):
            assert above.lstrip().startswith("#") or line.rstrip() in ("algorithm:", "trainer:", "model:"), line
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_holds_an_algorithm_and_nothing_else(name):
    assert list(read(name)) == ["algorithm"]


def command_of(name: str) -> list[str]:
    """The words of the command in a config's second line, after the config itself."""
    second = CONFIGS[name].read_text(encoding="utf-8").splitlines()[1]
    command = re.match(rf"# fedbc-cli fit --config (synthetic|digits)\.yaml --config {name}(.*)", second)
    assert command
    return command[2].split()


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_says_what_it_is_and_how_to_run_it(name):
    assert re.match(r"# overlay: [^,]+, \S", CONFIGS[name].read_text(encoding="utf-8"))
    assert not [word for word in command_of(name)[::2] if not word.startswith("--")]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_dumped_back_unchanged(name, place, capsys):
    assert run_cli("fit", "--config", name, "--print_config") == 0
    dumped = yaml.safe_load(capsys.readouterr().out)
    expected = read(name)
    dumped["trainer"] = {key: value for key, value in dumped["trainer"].items() if key in expected["trainer"]}
    for entry in classes(expected) + classes(dumped):
        entry["class_path"] = entry["class_path"].rpartition(".")[2]  # dumped by its shortest path
    assert dumped == expected


def prepare(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write the data that a config reads, in their original format; returns what to add to the command line."""
    data, rng = Path("data"), np.random.default_rng(0)
    few = ["--data.partitioner.num_clients=4", "--data.partitioner.min_samples=2", "--trainer.clients_per_round=2"]
    if name == "mnist_1000.yaml":
        write_mnist(data, num_train=2500, num_test=500)
    elif name.startswith("mnist"):
        write_mnist(data)
    elif name == "cifar.yaml":
        write_cifar10(data, monkeypatch)
    elif name == "cifar_resnet.yaml":
        write_cifar10(data, monkeypatch, num_train=35, num_test=5)
        return few
    elif name == "cifar100.yaml":
        write_cifar100(data, monkeypatch, num_train=35, num_test=5)
        return few
    elif name == "cifar_folder.yaml":
        write_image_folder(data / "cifar10", num_per_class=40, num_classes=10, size=32)
    elif name == "femnist.yaml":
        write_emnist(data, num_train=8060, num_test=1240)
    elif name == "femnist_writers.yaml":
        users = {f"writer{k}": (rng.random((20, 784)).round(3).tolist(), list(range(20))) for k in range(12)}
        write_leaf(data / "femnist" / "all_data_0.json", users)
        return ["--trainer.eval_clients=5"]
    elif name in ("shakespeare.yaml", "lora_shakespeare.yaml"):
        if name.startswith("lora"):
            pytest.importorskip("peft", reason="the extra llm is not installed")
        data.mkdir()
        speeches = (f"ROLE {k}:\n{'To be, or not to be, that is the question. ' * 25}\n" for k in range(12))
        (data / "shakespeare.txt").write_text("\n".join(speeches))
    elif name == "sent140.yaml":
        data.mkdir()
        tweets = [(4 * (k % 2), f"user{k // 60}", "good day" if k % 2 else "so sad today") for k in range(720)]
        write_sent140(data / "training.1600000.processed.noemoticon.csv", tweets)
        return ["--data.partitioner.num_clients=12", "--trainer.clients_per_round=3"]
    elif name == "a1a.yaml":
        data.mkdir()
        rows = (sorted(rng.choice(np.arange(1, 120), 14, replace=False)) for _ in range(200))
        lines = (f"{'+1' if k % 4 else '-1'} {' '.join(f'{j}:1' for j in row)}" for k, row in enumerate(rows))
        (data / "a1a").write_text("\n".join(lines) + "\n")
    return []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs(name, place, monkeypatch):
    words = prepare(name, monkeypatch)
    short = ["--trainer.max_rounds=2", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    assert run_cli("fit", "--config", name, *short, *words) == 0
    run = only_run(Path("runs") / name.removesuffix(".yaml"))
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + 3
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "clients.csv", "partition.json", "checkpoints"}


def without_paths(content: object) -> object:
    """A config with the short names of its classes, which all have ``init_args``."""
    if isinstance(content, list):
        return [without_paths(item) for item in content]
    if not isinstance(content, dict):
        return content
    plain = {key: without_paths(value) for key, value in content.items()}
    if "class_path" in plain:
        plain = {"init_args": {}, **plain, "class_path": plain["class_path"].rpartition(".")[2]}
    return plain


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_replaces_the_algorithm_and_runs(name, place):
    short = ["--trainer.max_rounds=2", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    quick = ["--trainer.logger=false", "--trainer.local_epochs=1"]
    assert run_cli("fit", "--config", "digits.yaml", "--config", name, *short, *quick, *command_of(name)) == 0
    ran = yaml.safe_load((only_run("runs/digits") / "config.yaml").read_text())["algorithm"]
    assert without_paths(ran) == without_paths(read(name)["algorithm"])


@pytest.mark.parametrize("name", SHARING)
def test_a_config_of_partial_sharing_says_what_it_is_and_runs(name, place):
    first, second = CONFIGS[name].read_text(encoding="utf-8").splitlines()[:2]
    assert re.match(r"# overlay: [^,]+, \S", first)
    assert second == f"# fedbc-cli fit --config digits.yaml --config {name}"
    short = ["--trainer.max_rounds=2", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    quick = ["--trainer.logger=false", "--trainer.local_epochs=1"]
    assert run_cli("fit", "--config", "digits.yaml", "--config", name, *short, *quick) == 0
    run = only_run("runs/digits")
    ran, asked = yaml.safe_load((run / "config.yaml").read_text()), read(name)
    assert without_paths(ran["algorithm"]) == without_paths(asked["algorithm"])
    assert asked["trainer"].items() <= ran["trainer"].items()
    assert "accuracy/local" in (run / "metrics.csv").read_text()


def test_the_private_config_says_what_it_is_and_runs(place):
    pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    first, second = CONFIGS[PRIVATE].read_text(encoding="utf-8").splitlines()[:2]
    assert re.match(r"# overlay: [^,]+, \S", first)
    assert second == f"# fedbc-cli fit --config mnist_1000.yaml --config {PRIVATE}"
    short = ["--trainer.max_rounds=2", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    few = ["--trainer.logger=false", "--trainer.local_epochs=1", "--trainer.clients_per_round=4"]
    assert run_cli("fit", "--config", "digits.yaml", "--config", PRIVATE, *short, *few) == 0
    run = only_run("runs/digits")
    ran, asked = yaml.safe_load((run / "config.yaml").read_text()), read(PRIVATE)
    assert without_paths(ran["algorithm"]) == without_paths(asked["algorithm"])
    assert ran["trainer"]["privacy"] == asked["trainer"]["privacy"]
    assert "privacy/epsilon" in (run / "metrics.csv").read_text()
