"""A word of the command line that is no option, and a wrong line of a config: what was meant, and where it stands."""

from pathlib import Path

import pytest
from helpers.command_line import run_cli

MEANT = {
    "fit tiny.yaml": "'tiny.yaml' stands alone; did you mean --config tiny.yaml?",
    "fit digits": "'digits' stands alone; did you mean --config digits?",
    "compare tiny.yaml": "'tiny.yaml' stands alone; did you mean --config tiny.yaml?",
    "tiny.yaml": "no command given: did you mean fedbc-cli fit --config tiny.yaml?",
    "fit --config tiny.yaml --max_rounds 3": "no option '--max_rounds'; did you mean --trainer.max_rounds 3?",
    "fit --config tiny.yaml --max_round 3": "no option '--max_round'; did you mean --trainer.max_rounds 3?",
    "fit --config tiny.yaml --max_rounds=3": "did you mean --trainer.max_rounds=3?",
    "fit --config tiny.yaml --seed 3": "no option '--seed'; did you mean --seed_everything 3?",
    "fit --config tiny.yaml --lr 0.1": "no option '--lr'; did you mean --model.lr 0.1 or --algorithm.lr 0.1?",
    "fit --config tiny.yaml --dual_lr 0.1": "did you mean --algorithm.dual_lr 0.1?",
    "fit --config tiny.yaml --datamodule X": "no option '--datamodule'; did you mean --data X?",
    "fit --config tiny.yaml --num_clients 5": "did you mean --data.partitioner.num_clients 5?",
    "fit --config tiny.yaml --epochs 5": "did you mean --trainer.local_epochs 5?",
    "fit --config tiny.yaml max_rounds=3": "'max_rounds=3' is no option; did you mean --trainer.max_rounds=3?",
    "fit --config tiny.yaml trainer.max_rounds=3": "did you mean --trainer.max_rounds=3?",
    "fit --config tiny.yaml -trainer.max_rounds 3": "is no option; did you mean --trainer.max_rounds 3?",
    "fit --config tiny.yaml --trainer.max_rounds": "--trainer.max_rounds needs a value",
    "fit --config digits.yaml --data.num_clients 5": "has no argument 'num_clients'; "
    "did you mean --data.partitioner.num_clients?",
    "fit --config tiny.yaml --data Digits": "data: no class 'Digits'; did you mean 'DigitsDataModule'?",
    "fit --data.help Digits": "data: no class 'Digits'; did you mean 'DigitsDataModule'?",
    "compare --config tiny.yaml": "tiny.yaml is the config of one run (trainer: ...), not of a study: "
    "fedbc-cli fit --config tiny.yaml; a study names it: {base: tiny.yaml, algorithms: {FedAvg: {}, FedBC: {}}}",
    "fit --config studies/digits.yaml": "--config studies/digits.yaml is a study, which fit does not take: "
    "fedbc-cli compare --config studies/digits.yaml",
}


@pytest.mark.parametrize(("line", "said"), MEANT.items(), ids=MEANT)
def test_what_was_meant(project, line, said, capsys):
    assert run_cli(*line.split()) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert said in err
    assert not Path("runs").exists()


FEDBC = "algorithm:\n  class_path: FedBC\n  init_args:\n    dual_lr: 0.1\n    dual_ir: 0.1\n"
WRONG = {
    "a key": ("# mine\ntrainer:\n  max_rounds: 3\n\n  local_epoch: 2\n", "mine.yaml, line 5: 'trainer' has no key"),
    "a value": ("trainer:\n  local_epochs: 1\n  max_rounds: many\n", "mine.yaml, line 3: trainer.max_rounds: many"),
    "an argument": (FEDBC, "mine.yaml, line 5: algorithm: fedbc_lightning.FedBC has no argument 'dual_ir'"),
    "a section": ("trainer: {max_rounds: 3}\n\nmodle:\n  class_path: M\n", "mine.yaml, line 3: no section or"),
}  # fmt: skip


@pytest.mark.parametrize("others", [(), ("other.yaml",)], ids=["last", "between"])
@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_the_line_of_a_mistake_in_layered_configs(project, text, said, others, capsys):
    Path("mine.yaml").write_text(text)
    Path("other.yaml").write_text("trainer:\n  max_rounds: 3\n")
    layers = [word for name in ("tiny.yaml", "mine.yaml", *others) for word in ("--config", name)]
    assert run_cli("fit", *layers) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fedbc-cli: error: {said}")
    assert len(err.splitlines()) == 1


def test_a_mistake_of_the_command_line_names_no_file(project, capsys):
    assert run_cli("fit", "--config", "tiny.yaml", "--trainer.max_rounds", "many") == 2
    assert capsys.readouterr().err == "fedbc-cli: error: trainer.max_rounds: many is not an int\n"


def test_the_line_of_a_wrong_key_of_a_study(project, capsys):
    Path("study.yaml").write_text("base: tiny.yaml\nalgorithms: [FedAvg]\nsedes: 3\n")
    assert run_cli("compare", "--config", "study.yaml") == 2
    assert "study.yaml, line 3: unknown key 'sedes': did you mean 'seeds'?" in capsys.readouterr().err


def test_help_of_data_and_models_is_plain_text(project, capsys):
    for words in (["--data.help"], ["--data.help", "DigitsDataModule"], ["--model.help", "MLP"]):
        assert run_cli("fit", *words) == 0
        said = capsys.readouterr().out
        assert "``" not in said
        assert ":class:`" not in said
        assert ":func:`" not in said
        assert not any(line.endswith(" ") for line in said.splitlines())
    assert "FederatedDataModule" not in said


def test_a_list_of_classes_is_one_line_each_when_piped(project, capsys):
    assert run_cli("fit", "--data.help") == 0
    lines = capsys.readouterr().out.splitlines()
    (digits,) = [line for line in lines if line.startswith("DigitsDataModule")]
    assert digits.endswith("over 10 unequal clients.")
    assert not any(line.startswith(("FederatedDataModule", "IndexedDataModule")) for line in lines)
