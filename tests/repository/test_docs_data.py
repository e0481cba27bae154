"""Every example of docs/data.md is run as it is written there, for 10 rounds at the most, each in an empty folder."""

import re
import shlex
from pathlib import Path

import pandas as pd
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
# In the form of the packages whose data nothing here can download: wilds 2.0, flamby 0.0.1 and medmnist 3.0
STUBS = {
    "wilds.py": """
import torch
from PIL import Image

class get_dataset:
    def __init__(self, dataset, download):
        self.y_array, self.metadata_fields = torch.arange(60) % 2, ["hospital", "slide", "y"]
        self.metadata_array = torch.stack([torch.arange(60) % 5, torch.arange(60), self.y_array], dim=1)
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return Image.new("RGB", (96, 96), (200 * (index % 2),) * 3), self.y_array[index], self.metadata_array[index]
""",
    "flamby/datasets/fed_heart_disease.py": """
import torch

class FedHeartDisease(torch.utils.data.Dataset):
    def __init__(self, center=0, train=True):
        self.features = list(torch.randn(30 if train else 10, 13, generator=torch.Generator().manual_seed(center)))
        self.labels = [(row[:1] > 0).float() for row in self.features]
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, index):
        return self.features[index], self.labels[index]
""",
    "medmnist.py": """
import numpy as np

class BreastMNIST:
    info = {"label": {"0": "malignant", "1": "normal, benign"}}
    def __init__(self, split, download):
        self.labels = np.arange(90, dtype=np.uint8)[:, None] % 2
        self.imgs = np.full((90, 28, 28), 60, dtype=np.uint8) + 99 * self.labels[:, :, None]
""",
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
    for name, text in STUBS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for language, text in SECTIONS[title]:
        if language == "bash":
            commands += text.splitlines()
        elif language in ("python", "yaml"):
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    for command in commands:
        run(command, tmp_path)
    runs = sorted((tmp_path / "runs").glob("*/*-*"))
    scripts = [(tmp_path / command[7:]).read_text() for command in commands if command.startswith("python ")]
    fits = [text for text in (*commands, *scripts) if "fedbc-cli fit" in text or "trainer.fit(" in text]
    assert len(runs) == len(fits)
    for folder in runs:
        losses = pd.read_csv(folder / "metrics.csv")["train/loss"]
        assert losses.iloc[-1] < losses[1]
        assert any(folder.glob("events.out.tfevents.*"))
