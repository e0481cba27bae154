"""What a user does wrong is answered in one line, before anything is run."""

from pathlib import Path

import pytest
from helpers.command_line import run_cli

MISTAKES = [
    ("fti --config tiny.yaml", 2, "unknown command 'fti': did you mean 'fit'?"),
    ("--config tiny.yaml fit", 2, "the command goes first: fedbc-cli fit --config ..."),
    (
        "fit --config cifr.yaml",
        2,
        "no config file 'cifr.yaml' here or among the shipped ones. did you mean 'cifar.yaml'?",
    ),
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
    ("fit --config fedprox", 2, "did you mean 'algorithms/fedprox.yaml'?"),
    ("fit --config tiny.yaml --algorithm FedBC", 2, "FedBC needs dual_lr: give --algorithm.dual_lr"),
    ("fit --config tiny.yaml --model nowhere.Net", 2, "model: cannot import it: No module named 'nowhere'"),
    ("fit --config tiny.yaml --model torch.nn.Linear", 2, "model: what is given is not a LightningModule"),
    ("fit --config tiny.yaml --optimizer SDG", 2, "optimizer: no class 'SDG'; did you mean 'SGD'?"),
    ("fit --config tiny.yaml --seed_everything true", 2, "seed_everything: True is not an int"),
    ("test --ckpt_path nowhere.ckpt", 2, "no checkpoint at --ckpt_path nowhere.ckpt"),
    ("test --ckpt_path last", 2, "--ckpt_path last needs a --config"),
    ("test --ckpt_path .", 2, "no checkpoints/last.ckpt in --ckpt_path ."),
    ("fit --config tiny.yaml --model CIFARCNN --model.image_size 8", 1, "image_size=8 is too small"),
    ("fit --config tiny.yaml --algorithm FedProx --algorithm.mu=-1", 1, "algorithm.mu: got -1.0; it must be >= 0"),
    ("fit --config tiny.yaml --lr_scheduler StepLR --lr_scheduler.step_size 1", 1, "lr_scheduler needs an optimizer"),
    ("fit --config tiny.yaml --trainer.clients_per_round 9", 1, "clients_per_round"),
]


@pytest.mark.parametrize(("line", "status", "said"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_one_clear_line(project, line, status, said, capsys):
    Path("misspelt.yaml").write_text("trainer:\n  max_rouds: 3\n")
    Path("broken.yaml").write_text("trainer:\n  max_rounds: [3\n")
    Path("list.yaml").write_text("- 1\n")
    assert run_cli(*line.split()) == status
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("fedbc-cli: error: ")
    assert said in lines[0]
    assert not Path("runs").exists()
