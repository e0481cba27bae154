"""Every example of docs/data.md is run as it is written there, for 10 rounds at the most, each in an empty folder."""

import csv
import re
import shlex
from pathlib import Path

import pytest
from helpers.programs import run_python
from helpers.scripts import ROOT

PAGE = ROOT / "docs" / "data.md"
SECTIONS = {
    title: re.findall(r"```(\w+)\n(.*?)```", re.sub(r"(max_rounds\W+)30", r"\g<1>10", text), re.DOTALL)
    for title, text in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
}
EXAMPLES = [title for title, blocks in SECTIONS.items() if any(language == "bash" for language, _ in blocks)]


def run(command: str, folder: Path) -> str:
    program, *words = shlex.split(command)
    done = run_python(["-m", "fedbc_lightning", *words] if program == "fedbc-cli" else words, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs_and_leaves_curves(title, tmp_path):
    commands = []
    for language, text in SECTIONS[title]:
        if language == "bash":
            commands += text.splitlines()
        elif language in ("python", "yaml"):
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    for command in commands:
        run(command, tmp_path)
    runs = sorted((tmp_path / "runs").glob("*/*-*"))
    scripts = ("python arrays.py", "python writers.py")
    assert len(runs) == sum("fedbc-cli fit" in command or command in scripts for command in commands)
    for folder in runs:
        with (folder / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) > 2
        assert float(rows[-1]["train/loss"]) < float(rows[1]["train/loss"])
        assert any(folder.glob("events.out.tfevents.*"))


def test_all_six_doors_have_an_example():
    text = "".join(block for title in EXAMPLES for _, block in SECTIONS[title])
    doors = "ImageFolder", "Table", "HuggingFace", "Arrays", "Partitioned", "Sites"
    for name in doors:
        assert f"{name}DataModule" in text
