"""What a user does wrong is answered in one line, before anything is run."""

import sys
from pathlib import Path

import pytest
from helpers.command_line import run_cli

from fedbc_lightning.cli.command_arguments import UsageError, find_checkpoint

MISTAKES = [
    ("fti --config tiny.yaml", 2, "unknown command 'fti': did you mean 'fit'?"),
    ("--config tiny.yaml fit", 2, "the command goes first: fedbc-cli fit --config ..."),
    (
        "fit --config cifr.yaml",
        2,
        "no config file 'cifr.yaml' here or among the shipped ones. did you mean 'cifar.yaml'?",
    ),
    ("fit --config nofile.yaml", 2, "among the shipped ones. Shipped: a1a.yaml"),  # nothing is near
    ("compare --config studies/nofile.yaml", 2, "Shipped: studies/codecs.yaml, studies/digits.yaml"),
    ("compare", 2, "missing: base, algorithms. Give a --config, such as --config studies/digits.yaml, or --base ..."),
    ("fit --config broken.yaml", 2, "broken.yaml, line 3: not YAML"),
    ("fit --config list.yaml", 2, "list.yaml: no sections in it"),
    ("fit", 2, "missing: "),
    (
        "fit --config tiny.yaml --trainer.max_round 3",
        2,
        "'trainer' has no key 'max_round'; did you mean 'trainer.max_rounds'?",
    ),
    ("fit --config tiny.yaml --trainer.max_rounds many", 2, "trainer.max_rounds: many is not an int"),
    ("fit --config tiny.yaml --trianer.max_rounds 3", 2, "no section or option 'trianer'; did you mean 'trainer'?"),
    (
        "fit --config tiny.yaml --config misspelt.yaml",
        2,
        "'trainer' has no key 'max_rouds'; did you mean 'trainer.max_rounds'?",
    ),
    ("fit --config tiny.yaml --model.learning 3", 2, "LogisticRegression has no argument 'learning'"),
    ("fit --config tiny.yaml --model.num_feature 3", 2, "did you mean 'num_features'?"),
    ("fit --config tiny.yaml --algorithm FedPox", 2, "algorithm: no class 'FedPox'; did you mean 'FedProx'?"),
    ("fit --algorithm.help FedPox", 2, "algorithm: no class 'FedPox'; did you mean 'FedProx'?"),
    ("fit --algorithm.help nowhere.Method", 2, "algorithm: cannot import it: No module named 'nowhere'"),
    *[
        (f"fit --config tiny.yaml --algorithm {name}", 2, f"{said}\n")
        for name, said in {
            "Krum": "algorithm: Krum is a robust rule: --algorithm FedAvg --algorithm.robust_rule Krum, "
            "or --config algorithms/krum.yaml",
            "norm-bound": "NormBound is a robust rule: --algorithm FedAvg --algorithm.robust_rule NormBound, "
            "or --config algorithms/norm_bound.yaml",
            "GeometricMedian": "--algorithm FedAvg --algorithm.robust_rule GeometricMedian",
            "fedbc_lightning.server.Krum": "algorithm: Krum is a robust rule: --algorithm FedAvg "
            "--algorithm.robust_rule Krum, or --config algorithms/krum.yaml",
            "DualAscent": "DualAscent is a server part of --algorithm Composed: see --config algorithms/composed.yaml",
            "Norm": "Norm is a penalty of --algorithm Fed+: see --config algorithms/fedplus_layerwise.yaml",
            "FedGeoMad+": "algorithm: no class 'FedGeoMad+'; did you mean 'FedGeoMed+'?",
            "L2GD": "algorithm: L2GD needs penalty, probability, lr: give --algorithm.penalty ... "
            "--algorithm.probability ... --algorithm.lr ...",
            "FedExP --algorithm.style pubic": "algorithm.style: got 'pubic'; use paper or public",
            "FedBC --algorithm.tolerance much": "algorithm.tolerance: got 'much'; use a float, a list or learned",
            "Fed+ --algorithm.sigma 1 --algorithm.penalty Norm": "algorithm.penalty: Norm needs delta: "
            "give --algorithm.penalty.delta ...",
            "FedAvg --algorithm.robust_rule Krumm": "algorithm.robust_rule: no class 'Krumm'; did you mean 'Krum'?",
            "FedAvg --algorithm.robust_rule FedBC": "algorithm.robust_rule: FedBC is a method, not a robust rule",
            "FedAvg --algorithm.robust_rule nowhere.X": "algorithm.robust_rule: cannot import it: "
            "No module named 'nowhere': no package of that name is installed, and there is no nowhere.py in the "
            "current folder",
            "FedAvg --algorithm.robust_rule Krum --algorithm.robust_rule.num_byzantine x": "x is not an int",
            "Composed --algorithm.server_callbacks WeightedAverage": "algorithm.server_callbacks: "
            "WeightedAverage is not a list: give a list: [WeightedAverage]",
            "Composed --algorithm.server_callbacks [WeightedAverge]": "algorithm.server_callbacks: "
            "no class 'WeightedAverge'; did you mean 'WeightedAverage'?",
            "Composed --algorithm.server_callbacks [WeightedAverage,DualAscent]": "algorithm.server_callbacks: "
            "DualAscent needs dual_lr: give {class_path: DualAscent, init_args: {dual_lr: ...}}",
        }.items()
    ],
    (
        "fit --config tiny.yaml --algorithm Nothing",
        2,
        "no class 'Nothing'; there are APFL, Centralized, Composed, Ditto, FedADMM, FedAdagrad, FedAdam, FedAsync, "
        "FedAvg, FedAvgM, FedAvg+, FedBABU, FedBC, FedBC-FineTune, FedBuff,",
    ),
    (
        "fit --config tiny.yaml --config parts.yaml",
        2,
        "algorithm.terms: no class 'ProximalTrem'; did you mean 'ProximalTerm'?",
    ),
    (
        "fit --config tiny.yaml --config kinds.yaml",
        2,
        "algorithm.server_callbacks: ServerAdaptive.kind: got 'adamw'; use adam, adagrad or yogi",
    ),
    (
        "fit --config tiny.yaml --config rule.yaml",
        2,
        "algorithm.server_callbacks: WeightedAverage.rule: no class 'Krumm'; did you mean 'Krum'?",
    ),
    (
        "fit --config tiny.yaml --config penalty.yaml",
        2,
        "algorithm.server_callbacks: SmoothedAverage.penalty: Norm needs delta: "
        "give {class_path: Norm, init_args: {delta: ...}}",
    ),
    (
        "fit --config tiny.yaml --trainer.stragglers 0.5",
        2,
        "trainer.stragglers: got '0.5'; give {fraction: ..., dropout: ..., partial_work: ...}",
    ),
    (
        "fit --config tiny.yaml --trainer.codec.up TopK",
        2,
        "trainer.codec.up: TopK needs fraction: give --trainer.codec.up.fraction ...",
    ),
    ("fit --config tiny.yaml --trainer.codec.down Float9", 2, "codec.down: no class 'Float9'; did you mean 'Float8'?"),
    (
        "fit --config tiny.yaml --trainer.system fast",
        2,
        "trainer.system: got 'fast'; give {compute: ..., bandwidth_up: ..., bandwidth_down: ..., availability: ..., "
        "deadline: ..., late: ...}",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks EarlyStopping",
        2,
        "trainer.callbacks: EarlyStopping needs monitor: give --trainer.callbacks.monitor ...",
    ),
    ("fit --config tiny.yaml --trainer.clients_per_round few", 2, "clients_per_round: few is not an int or a float"),
    (
        "fit --config tiny.yaml --trainer.deterministic maybe",
        2,
        "trainer.deterministic: got 'maybe'; use true, false, warn or null\n",
    ),
    ("fit --config tiny.yaml --trainer.buffers avg", 2, "trainer.buffers: got 'avg'; use average, local or global"),
    (
        "fit --config tiny.yaml --trainer.callbacks Xyzzy",
        2,
        "trainer.callbacks: no class 'Xyzzy'; there are AggregationMoves, ByzantineClients, "
        "RoundCheckpoint, RoundProgressBar\n",
    ),
    *[
        (
            f"fit --config tiny.yaml --trainer.callbacks{plus} {path}ByzantineClients --trainer.callbacks.attack evil",
            2,
            "trainer.callbacks: ByzantineClients.attack: got 'evil'; use sign_flip or random\n",
        )
        for plus in ("", "+")
        for path in ("", "fedbc_lightning.callbacks.")
    ],
    ("fit --config fedprox", 2, "did you mean 'algorithms/fedprox.yaml'?"),
    ("fit --config tiny.yaml --algorithm FedBC", 2, "FedBC needs dual_lr: give --algorithm.dual_lr"),
    ("fit --config tiny.yaml --model nowhere.Net", 2, "model: cannot import it: No module named 'nowhere'"),
    ("fit --config tiny.yaml --model torch.nn.Linear", 2, "model: what is given is not a LightningModule"),
    ("fit --config tiny.yaml --optimizer SDG", 2, "optimizer: no class 'SDG'; did you mean 'SGD'?"),
    ("fit --config tiny.yaml --seed_everything true", 2, "seed_everything: True is not an int"),
    ("test --ckpt_path nowhere.ckpt", 2, "no checkpoint at --ckpt_path nowhere.ckpt"),
    (
        "test --ckpt_path last",
        2,
        "--ckpt_path last: there is no last.ckpt under runs/default; give --trainer.",
    ),
    ("test --ckpt_path .", 2, "no checkpoints/last.ckpt in --ckpt_path ."),
    ("fit --config tiny.yaml --model CIFARCNN --model.image_size 8", 1, "image_size=8 is too small"),
    ("fit --config tiny.yaml --algorithm FedProx --algorithm.mu=-1", 1, "algorithm.mu: got -1.0; give a number >= 0"),
    ("fit --config tiny.yaml --lr_scheduler StepLR --lr_scheduler.step_size 1", 1, "lr_scheduler needs an optimizer"),
    ("fit --config tiny.yaml --trainer.clients_per_round 9", 1, "clients_per_round"),
]


def composed(term: str, part: str) -> str:
    arguments = f"{{terms: [{{class_path: {term}, init_args: {{coefficient: 1.0}}}}], server_callbacks: [{part}]}}"
    return f"algorithm:\n  class_path: ComposedAlgorithm\n  init_args: {arguments}\n"


@pytest.mark.parametrize(("line", "status", "said"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_one_clear_line(project, line, status, said, capsys):
    Path("misspelt.yaml").write_text("trainer:\n  max_rouds: 3\n")
    Path("broken.yaml").write_text("trainer:\n  max_rounds: [3\n")
    Path("list.yaml").write_text("- 1\n")
    Path("parts.yaml").write_text(composed("ProximalTrem", "{class_path: WeightedAverage}"))
    Path("rule.yaml").write_text(composed("ProximalTerm", "{class_path: WeightedAverage, init_args: {rule: Krumm}}"))
    Path("penalty.yaml").write_text(
        composed("ProximalTerm", "{class_path: SmoothedAverage, init_args: {penalty: Norm}}")
    )
    Path("kinds.yaml").write_text(composed("ProximalTerm", "{class_path: ServerAdaptive, init_args: {kind: adamw}}"))
    assert run_cli(*line.split()) == status
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("fedbc-cli: error: ")
    assert said in err
    assert not Path("runs").exists()


def test_a_package_that_is_not_installed_is_named_with_its_extra(project, monkeypatch, capsys):
    class NotInstalled:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "flwr_datasets":
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "flwr_datasets"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    inner = "{class_path: flwr_datasets.partitioner.IidPartitioner, init_args: {num_partitions: 3}}"
    Path("flower.yaml").write_text(
        f"data:\n  class_path: DigitsDataModule\n  init_args:\n    partitioner:\n      class_path: Flower\n"
        f"      init_args: {{partitioner: {inner}}}\n"
    )
    assert run_cli("fit", "--config", "digits.yaml", "--config", "flower.yaml") == 2
    assert "pip install 'fedbc-lightning[flower]'" in capsys.readouterr().err
    assert run_cli("fit", "--config", "digits.yaml", "--data.partitioner", "Flower") == 2
    assert "data.partitioner: Flower needs the package flwr_datasets, which is not installed; pip install" in (
        capsys.readouterr().err
    )


def test_a_module_that_is_not_found_is_looked_for_in_the_folder(project, capsys):
    Path("cnn_of_mine.py").write_text("class CNN: ...\n")
    assert run_cli("fit", "--config", "tiny.yaml", "--model", "cnn_of_mime.CNN") == 2
    said = capsys.readouterr().err
    assert "there is no cnn_of_mime.py in the current folder; did you mean 'cnn_of_mine'?" in said
    assert run_cli("fit", "--config", "tiny.yaml", "--model", "cnn_of_mine.CMN") == 2
    assert "module 'cnn_of_mine' has no attribute 'CMN'; did you mean 'CNN'?" in capsys.readouterr().err


def test_a_folder_of_runs_names_one_of_them(tmp_path):
    last = tmp_path / "digits" / "FedBC-0" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    with pytest.raises(UsageError, match=r"give a run folder, such as \S+FedBC-0, or a .ckpt file"):
        find_checkpoint(str(tmp_path / "digits"))
