"""Every shipped config names what differs from the defaults, is parsed, and runs for a round."""

import inspect
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.command_line import run_cli
from helpers.data_formats import write_cifar10, write_cifar100, write_emnist, write_image_folder, write_mnist
from helpers.folders import only_run
from helpers.text_formats import write_leaf, write_sent140

from fedbc_lightning.cli.classes import import_object
from fedbc_lightning.cli.command_arguments import shipped_configs
from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.studies.parsed_runs import check_runs
from fedbc_lightning.studies.study import Study
from fedbc_lightning.trainer.trainer import FederatedTrainer

CONFIGS = shipped_configs()
STUDIES = [name for name in CONFIGS if name.startswith("studies/")]
EXPERIMENTS = [name for name in CONFIGS if "/" not in name]
OVERLAYS = [name for name in CONFIGS if name.startswith("algorithms/")]
SHARING = [name for name in CONFIGS if name.startswith("sharing/")]
PRIVATE = "privacy/fedavg.yaml"
SHAPE = ("num_features", "num_classes")
"""What the data ask of a model, which stays in a config: ``--model`` may replace its own model."""
SHORT = ["--trainer.max_rounds=1", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
QUICK = [*SHORT, "--trainer.logger=false", "--trainer.local_epochs=1"]


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
def test_all_runs_of_a_study_can_be_parsed(name, place):
    second = CONFIGS[name].read_text(encoding="utf-8").splitlines()[1]
    assert f"fedbc-cli compare --config {name}" in second
    study = read_study("compare", ["--config", str(CONFIGS[name])])
    for method in study.methods:  # the ends of a list of numbers stand for all: no setting refuses one in between
        for key, tried in method.tuned.items():
            if tried.grid and {type(value) for value in tried.grid} == {float}:
                method.tuned[key] = replace(tried, grid=[min(tried.grid), max(tried.grid)])
    seen: set[str] = set()
    for variant, levels in study.levels.items():  # each level once
        if not set(levels) - seen:
            del study.variants[variant]
        seen |= set(levels)
    # Keys of variants and of methods are merged one by one: each variant with a method, and each method in a variant.
    methods = study.methods
    methods += [methods[0].untuned()] * (len(study.variants) - len(methods))
    for variant, method in zip(itertools.cycle(study.variants.items()), methods):
        study.variants, study.methods = dict([variant]), [method]
        check_runs(study)


def at_default(given: dict, defaults: Mapping[str, object], where: str) -> list[str]:
    """The keys of a mapping whose values are the defaults, by their full names."""
    as_in_yaml = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    return [f"{where}.{key}" for key, v in given.items() if key in as_in_yaml and repr(as_in_yaml[key]) == repr(v)]


def defaults_of(cls: type) -> dict[str, object]:
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_names_what_differs_from_the_defaults_and_nothing_else(name):
    config = read(name)
    if name in STUDIES:
        repeated = at_default(config, {**defaults_of(Study), "variants": {"all": {}}}, "study")
    else:
        repeated = at_default(config.get("trainer", {}), defaults_of(FederatedTrainer), "trainer")
        for entry in classes(config):
            cls = import_object(entry["class_path"])
            given = {key: value for key, value in entry.get("init_args", {}).items() if key not in SHAPE}
            repeated += at_default(given, defaults_of(cls), cls.__name__)
    assert repeated == []
    lines = CONFIGS[name].read_text(encoding="utf-8").splitlines()
    assert re.match(r"# \S", lines[0])
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 35 or name in STUDIES


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
    assert run_cli("fit", "--config", name, *SHORT, *words) == 0
    run = only_run(Path("runs") / name.removesuffix(".yaml"))
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + 2
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "clients.csv", "partition.json", "checkpoints"}


def holds(ran: object, asked: object) -> bool:
    """Whether a complete config has all values of another one, whose classes may have longer paths."""
    if isinstance(asked, dict):
        return isinstance(ran, dict) and all(
            str(ran[key]).rpartition(".")[2] == value.rpartition(".")[2]
            if key == "class_path"
            else holds(ran[key], value)
            for key, value in asked.items()
        )
    if isinstance(asked, list):
        return isinstance(ran, list) and len(ran) == len(asked) and all(map(holds, ran, asked))
    return ran == asked


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_replaces_the_algorithm_and_runs(name, place):
    assert list(read(name)) == ["algorithm"]
    first, second = CONFIGS[name].read_text(encoding="utf-8").splitlines()[:2]
    assert re.match(r"# overlay: [^,]+, \S", first)
    command = re.fullmatch(rf"# fedbc-cli fit --config (synthetic|digits)\.yaml --config {name}(.*)", second)
    assert command
    assert run_cli("fit", "--config", "digits.yaml", "--config", name, *QUICK, *command[2].split()) == 0
    assert holds(yaml.safe_load((only_run("runs/digits") / "config.yaml").read_text()), read(name))


@pytest.mark.parametrize("name", [*SHARING, PRIVATE])
def test_an_overlay_of_other_sections_says_what_it_is_and_runs(name, place):
    if name == PRIVATE:
        pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    first, second = CONFIGS[name].read_text(encoding="utf-8").splitlines()[:2]
    assert re.match(r"# overlay: [^,]+, \S", first)
    base = "mnist_1000.yaml" if name == PRIVATE else "digits.yaml"
    assert second == f"# fedbc-cli fit --config {base} --config {name}"
    few = ["--trainer.clients_per_round=4"]
    assert run_cli("fit", "--config", "digits.yaml", "--config", name, *QUICK, *few) == 0
    run = only_run("runs/digits")
    asked = read(name)
    asked["trainer"].pop("clients_per_round", None)
    assert holds(yaml.safe_load((run / "config.yaml").read_text()), asked)
    assert ("privacy/epsilon" if name == PRIVATE else "accuracy/local") in (run / "metrics.csv").read_text()
