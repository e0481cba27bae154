"""What the README and the pages of docs/ show works as it is written there; docs/data.md has tests of its own."""

import re
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers.folders import only_run
from helpers.programs import run_fresh, run_python
from helpers.scripts import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("[!m]*/*.md"))]  # those of methods show configs and their commands
BLOCKS: dict[str, list[str]] = {language: [] for language in ("bash", "python", "yaml")}
for page in PAGES:
    for language, text in re.findall(
        r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        BLOCKS.get(language, []).append(text)
LINES = [line.split("#")[0].strip() for text in BLOCKS["bash"] for line in text.splitlines()]
COMMANDS = sorted({line for line in LINES if line.startswith("fedbc-cli")})


def run(command: str, folder: Path, *more: str) -> str:
    done = run_python(["-m", "fedbc_lightning", *shlex.split(command)[1:], *more], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").split()) <= 700


def test_a_module_in_python_trains(tmp_path):
    (source,) = [text for text in BLOCKS["python"] if "class Net" in text]
    (tmp_path / "net.py").write_text(source)
    done = run_fresh(["net.py"], tmp_path)  # what it uses it must import
    accuracy = re.findall(r"^accuracy/global .* ([\d.]+) +[\d.]+$", done.stdout, re.MULTILINE)[-1]
    assert float(accuracy) > 0.7, done.stderr


def test_own_module_and_data_in_30_lines(tmp_path):
    (source,) = [text for text in BLOCKS["python"] if "class Iris" in text]
    (command,) = [c for c in COMMANDS if "mine.Iris" in c]
    assert len([line for line in source.splitlines() if line.strip()]) <= 35
    (tmp_path / "mine.py").write_text(source)
    assert "accuracy/global" in run(command, tmp_path)
    (metrics,) = (tmp_path / "runs").rglob("metrics.csv")
    assert pd.read_csv(metrics)["accuracy/global"].iloc[-1] > 0.9  # it learns


def test_a_new_method_trains(tmp_path):
    from helpers.boring import BoringData, make_model, make_trainer

    (source,) = [text for text in BLOCKS["python"] if "class SlowProx" in text]
    names: dict = {}
    exec(source, names)
    trainer = make_trainer(tmp_path)
    trainer.fit(make_model(), BoringData(), names["SlowProx"]())
    assert trainer.current_round == 3


def test_a_server_vector_is_declared_as_the_page_says(tmp_path, caplog):
    from helpers.boring import BoringData, make_model, make_trainer

    from fedbc_lightning.algorithms import ComposedAlgorithm
    from fedbc_lightning.server import WeightedAverage

    (source,) = [text for text in BLOCKS["python"] if "class Heavy" in text]
    names: dict = {}
    exec(source, names)
    trainer = make_trainer(tmp_path)
    trainer.fit(make_model(), BoringData(), ComposedAlgorithm([WeightedAverage(by="samples"), names["Heavy"]()]))
    assert trainer.server["velocity"].abs().sum() > 0
    assert "is not declared" not in caplog.text


def test_a_method_from_parts_trains(tmp_path):
    (source,) = [text for text in BLOCKS["yaml"] if "ComposedAlgorithm" in text]
    (command,) = [c for c in COMMANDS if "mixed.yaml" in c]
    (tmp_path / "mixed.yaml").write_text(source)
    assert (
        "dual/max"
        in run(command, tmp_path, "--trainer.max_rounds", "2")
        + (only_run(tmp_path / "runs/digits") / "metrics.csv").read_text()
    )


def test_a_gan_trains(tmp_path):
    """The two files of the page about manual optimization, by the command that stands there."""
    for language, name in (("python", "gan.py"), ("yaml", "gan.yaml")):
        (source,) = [text for text in BLOCKS[language] if text.startswith(f"# {name}")]
        (tmp_path / name).write_text(source)
    run("fedbc-cli fit --config gan.yaml", tmp_path, "--trainer.max_rounds", "1")
    row = pd.read_csv(only_run(tmp_path / "runs/gan") / "metrics.csv").iloc[-1]
    both = row["train/generator_loss"] + row["train/discriminator_loss"]
    assert both == pytest.approx(row["train/loss"], rel=1e-4)


def test_a_data_set_that_is_dealt_out_trains(tmp_path):
    """As it stands on the start page: a script beside the file of the section before."""
    for name, mark in (("mine", "class Iris"), ("dealt", "# dealt.py")):
        (source,) = [text for text in BLOCKS["python"] if mark in text]
        (tmp_path / f"{name}.py").write_text(source)
    done = run_python(["dealt.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = pd.read_csv(only_run(tmp_path / "runs/dealt") / "metrics.csv")
    assert metrics["accuracy/global"].iloc[-1] > 0.85


def test_the_result_of_a_run_is_read_as_the_page_says(tmp_path, monkeypatch):
    (source,) = [text for text in BLOCKS["python"] if "FitResult.read" in text]
    run("fedbc-cli fit --config digits.yaml --trainer.max_rounds 2", tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(source, names)
    assert len(names["result"].history) == 3


ELSEWHERE = "adopt|gan|ours.yaml|mine|mixed|nova|runs/digits|RUN|compare|reproduce|report|completion"
"""What is tried above, or needs a run or hours."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if not re.search(ELSEWHERE, c)])
def test_every_other_command_line_parses(command, tmp_path, monkeypatch, capsys):
    """Their runs have tests of their own; here the configuration is parsed and printed."""
    from fedbc_lightning.commands.main import main

    monkeypatch.chdir(tmp_path)
    for text in BLOCKS["yaml"]:
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    arguments = shlex.split(command)[1:]
    monkeypatch.setattr(sys, "argv", ["fedbc-cli", *arguments])
    shows_help = ".help" in command
    if not shows_help and not command.endswith("--print_config"):
        arguments.append("--print_config")
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "lipschitz" in printed if shows_help else "algorithm:" in printed
