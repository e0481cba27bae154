"""What a user does wrong is answered in one line, before anything is run."""

from pathlib import Path

import pytest
from helpers.command_line import run_cli

FIT = "fit --config tiny.yaml"
# Status and the line, by command line; status 1: the settings can be read but not be used
MISTAKES = {
    "fti --config tiny.yaml": "unknown command 'fti': did you mean 'fit'?",
    "--config tiny.yaml fit": "the command goes first: fedbc-cli fit --config ...",
    # configs
    "fit --config cifr.yaml": "no config file 'cifr.yaml' here or among the shipped ones; did you mean 'cifar.yaml'?",
    "fit --config nofile.yaml": "among the shipped ones; fedbc-cli configs lists these",  # nothing is near
    "fit --config fedprox": "did you mean 'algorithms/fedprox.yaml'?",
    "compare": "missing: base, algorithms. Give a --config, such as --config studies/digits.yaml, or --base ...",
    "compare --config tiny.yaml": "tiny.yaml is the config of one run (trainer: ...), not of a study: fedbc-cli fit",
    "fit --config studies/digits.yaml": "fit takes no study: fedbc-cli compare --config studies/digits.yaml",
    "fit --config broken.yaml": "broken.yaml: not YAML: ",
    "fit --config twice.yaml": "twice.yaml, lines 1 and 3: 'trainer' is there twice; the last would replace",
    "fit --config dotted.yaml": "dotted.yaml, lines 1 and 2: 'trainer.max_rounds' stands beside its section, of",
    "fit": "missing: ",
    "fit tiny.yaml": "'tiny.yaml' stands alone; did you mean --config tiny.yaml?",
    # keys
    f"{FIT} --trainer.max_round 3": "unknown key 'trainer.max_round': did you mean --trainer.max_rounds?",
    f"{FIT} --config misspelt.yaml": "misspelt.yaml, line 2: unknown key 'trainer.max_rouds': did you mean",
    f"{FIT} --trainer.limit_train_batches 3": "'trainer.limit_train_batches', an argument of lightning.Trainer: use",
    f"{FIT} --max_epochs 3": "unknown key 'max_epochs', an argument of lightning.Trainer: use max_rounds and local_ep",
    f"{FIT} --seed 3": "did you mean --seed_everything?",
    f"{FIT} --lr 0.1": "did you mean --model.lr or --algorithm.lr?",
    f"{FIT} --algorithm.rho 3": "unknown key 'algorithm.rho': there is algorithm.weighting",
    f"{FIT} --trainer.rounds 3": "unknown key 'trainer.rounds': did you mean --trainer.max_rounds?",
    f"{FIT} trainer.max_rounds=3": "'trainer.max_rounds=3' is no option; did you mean --trainer.max_rounds 3?",
    "fit --config digits.yaml --data.num_clients 5": "did you mean --data.partitioner.num_clients?",
    # values
    f"{FIT} --trainer.max_rounds many": "error: trainer.max_rounds: got 'many'; give int\n",
    f"{FIT} --trainer.deterministic maybe": "deterministic: got 'maybe'; give warn or bool or null\n",
    f"{FIT} --data PartitionedDataModule --data.clients domain": "data.clients: got 'domain'; give a list or null",
    f"{FIT} --trainer.max_rounds": "--trainer.max_rounds: expected one argument",
    f"{FIT} --trainer.stragglers 0.5": "got '0.5'; give {fraction: ..., dropout: ..., partial_work: ...}",
    f"{FIT} --trainer.backend.num_actors 2": "nothing says whose option num_actors is; give --trainer.backend and",
    f"{FIT} --trainer.backend ray --trainer.backend.num_actors many": "num_actors: got 'many'",
    # classes
    f"{FIT} --algorithm FedPox": "algorithm: no class 'FedPox'; did you mean 'FedProx'?",
    "fit --algorithm.help FedPox": "algorithm: no class 'FedPox'; did you mean 'FedProx'?",
    f"{FIT} --data Digits": "data: no class 'Digits'; did you mean 'DigitsDataModule'?",
    "fit --config digits.yaml --data.partitioner 10": "data.partitioner: no class '10'; there are",
    f"{FIT} --algorithm Xyzzy": "no class 'Xyzzy'; there are APFL, Centralized, Composed, Ditto, FedADMM,",
    f"{FIT} --config rule.yaml": "algorithm.server_callbacks.rule: no class 'Krumm'; did you mean 'Krum'?",
    f"{FIT} --model torch.nn.Linear": "model: torch.nn.Linear is not a LightningModule",
    f"{FIT} --config linear.yaml": "linear.yaml, line 1: model: torch.nn.Linear is not a LightningModule",
    f"{FIT} --model nowhere.Net": "model: cannot import it: No module named 'nowhere'\n",
    f"{FIT} --model unnamed.Net": "unnamed.py, line 2: NameError: name 'lr' is not defined\n",
    f"{FIT} --model silent.Net": "silent.py, line 1: ValueError",
    f"{FIT} --data leaving.Data": "leaving.py, line 2: SystemExit: 3",
    f"{FIT} --trainer.callbacks unclosed.Stop": "callbacks: cannot import it: ",
    f"{FIT} --algorithm FedBC": "error: algorithm: FedBC needs dual_lr: give --algorithm.dual_lr ...",
    f"{FIT} --config needing.yaml": "needing.py, line 1: ModuleNotFoundError: No module named 'nowhere'\n",
    f"{FIT} --trainer.codec.up TopK": "trainer.codec.up: TopK needs fraction: give --trainer.codec.up.fraction ...",
    # checkpoints
    "test --ckpt_path nowhere.ckpt": "no checkpoint at --ckpt_path nowhere.ckpt",
    "test --ckpt_path last": "--ckpt_path last: there is no last.ckpt under runs/default; give the run's --config",
}
UNUSABLE = {
    f"{FIT} --model CIFARCNN --model.image_size 8": "image_size=8 is too small",
    f"{FIT} --algorithm FedProx --algorithm.mu=-1": "algorithm.mu: got -1.0; give a number >= 0",
    f"{FIT} --lr_scheduler StepLR --lr_scheduler.step_size 1": "lr_scheduler needs an optimizer",
    f"{FIT} --trainer.clients_per_round 9": "clients_per_round",
    f"{FIT} --trainer.default_root_dir memory://runs": "default_root_dir: 'memory://runs' is in an object store",
    f"{FIT} --ckpt_path memory://none.ckpt": "'memory://none.ckpt' cannot be found and read (",
    f"{FIT} --ckpt_path xyz://none.ckpt": "(Protocol not known: xyz).",
    'compare --base tiny.yaml --algorithms {"FedAvg":{}} --out memory://s': "out: 'memory://s' is in an object store",
}


RULE = """\
algorithm:
  class_path: ComposedAlgorithm
  init_args:
    terms: [{class_path: ProximalTerm, init_args: {coefficient: 1.0}}]
    server_callbacks: [{class_path: WeightedAverage, init_args: {rule: Krumm}}]
"""


@pytest.mark.parametrize(("line", "said"), [*MISTAKES.items(), *UNUSABLE.items()], ids=[*MISTAKES, *UNUSABLE])
def test_a_mistake_is_one_clear_line(project, line, said, capsys):
    Path("misspelt.yaml").write_text("trainer:\n  max_rouds: 3\n")
    Path("broken.yaml").write_text("trainer:\n  max_rounds: [3\n")
    Path("twice.yaml").write_text("trainer:\n  max_rounds: 3\ntrainer:\n  name: mine\n")
    Path("dotted.yaml").write_text("trainer.max_rounds: 9\ntrainer:\n  name: mine\n")
    Path("silent.py").write_text("raise ValueError\n")
    Path("leaving.py").write_text("import sys\nsys.exit(3)\n")
    Path("rule.yaml").write_text(RULE)
    Path("unnamed.py").write_text("import torch\nrate = lr\n")
    Path("unclosed.py").write_text("def f(:\n")
    Path("needing.py").write_text("import nowhere\n")
    Path("linear.yaml").write_text("model: {class_path: torch.nn.Linear, init_args: {in_features: 3}}\n")
    Path("needing.yaml").write_text("model: {class_path: needing.Net, init_args: {lr: 0.1}}\n")
    assert run_cli(*line.split()) == (1 if line in UNUSABLE else 2)
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("fedbc-cli: error: ")
    assert said in err
    assert not Path("runs").exists()


FEDBC = "algorithm:\n  class_path: FedBC\n  init_args:\n    dual_lr: 0.1\n    dual_ir: 0.1\n"
WRONG = {
    "# mine\ntrainer:\n  max_rounds: 3\n\n  local_epoch: 2\n": "line 5: unknown key 'trainer.local_epoch'",
    "trainer:\n  local_epochs: 1\n  max_rounds: many\n": "line 3: trainer.max_rounds: got 'many'",
    FEDBC: "line 5: unknown key 'algorithm.dual_ir'",
    "algorithm:\n  class_path: fedbc_lightning.FedB\n": "line 2: algorithm: cannot import it: module",
    "trainer: {max_rounds: 3}\n\nmodle:\n  class_path: M\n": "line 3: unknown key 'modle': did you mean --model",
}


@pytest.mark.parametrize("others", [(), ("other.yaml",)], ids=["last", "between"])
@pytest.mark.parametrize(("text", "said"), WRONG.items(), ids=["key", "value", "argument", "class", "section"])
def test_the_line_of_a_mistake_in_layered_configs(project, text, said, others, capsys):
    Path("mine.yaml").write_text(text)
    Path("other.yaml").write_text("trainer:\n  max_rounds: 3\n")
    layers = [word for name in ("tiny.yaml", "mine.yaml", *others) for word in ("--config", name)]
    assert run_cli("fit", *layers) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fedbc-cli: error: mine.yaml, {said}")
    assert len(err.splitlines()) == 1


def test_the_line_of_a_wrong_key_of_a_study(project, capsys):
    Path("study.yaml").write_text("base: tiny.yaml\nalgorithms: {FedAvg: {}}\nsedes: 3\n")
    assert run_cli("compare", "--config", "study.yaml") == 2
    assert "study.yaml, line 3: unknown key 'sedes': did you mean --seeds?" in capsys.readouterr().err


def test_help_of_data_and_models_is_plain_text(project, capsys):
    for words in (["--data.help"], ["--data.help", "DigitsDataModule"], ["--model.help", "MLP"]):
        assert run_cli("fit", *words) == 0
        said = capsys.readouterr().out
        assert not any(mark in said for mark in ("``", ":class:`", ":func:`", "torch.nn.Linear"))
        lines = said.splitlines()
        assert not any(line.endswith(" ") or "  FederatedDataModule " in line for line in lines)
