"""A user's files and configs, broken in many ways by a seeded program."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from PIL import Image

from fedbc_lightning.cli.command_arguments import shipped_configs

MODULE = """\
import torch
from lightning.pytorch import LightningModule

RATE = 0.1


class Net(LightningModule):
    def __init__(self, num_features: int = 3, num_classes: int = 2):
        super().__init__()
        self.layer = torch.nn.Linear(num_features, num_classes)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.layer(inputs), targets)

    def test_step(self, batch, batch_idx):
        inputs, targets = batch
        found = self.layer(inputs).argmax(1)
        self.log("test_accuracy", (found == targets).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)
"""
IMAGES = "class_path: ImageFolderDataModule, init_args: {root: images, image_size: 4, partitioner: "
DATA = {
    "table.csv": "class_path: TableDataModule, init_args: {path: table.csv, target: y, client: site}",
    "table.parquet": "class_path: TableDataModule, init_args: {path: table.parquet, target: y, client: site}",
    "images/a/1.png": f"{IMAGES}{{class_path: IID, init_args: {{num_clients: 2}}}}}}",
    "x.npz": "class_path: ArraysDataModule, init_args: {inputs: x.npz, targets: y.npy, partitioner: "
    "{class_path: IID, init_args: {num_clients: 2}}}",
    "parts.json": "class_path: ArraysDataModule, init_args: {inputs: x.npz, targets: y.npy, partitioner: "
    "{class_path: Explicit, init_args: {path: parts.json}}}",
}
"""A config's data by the file that is broken."""
WRONG_STEP = r"(client \d+( \('.+'\))?|data of all clients), .*batch \d+"
"""What is said of the place of a step that fails."""
RUN = """\
trainer: {max_rounds: 2, clients_per_round: 2, name: broken, accelerator: cpu, devices: 1, logger: false,
          enable_progress_bar: false, enable_checkpointing: false}
algorithm: {class_path: FedAvg}
model: {class_path: mine.Net, init_args: {num_features: %d}}
data: {%s}
"""


class Case(NamedTuple):
    """A file that is broken.

    Attributes:
        name: What is broken, and how.
        files: Contents by the names of files, which are added to those of :func:`write_files`.
        words: The command line.
        place: Pattern of the place that the message has to name.
    """

    name: str
    files: dict[str, bytes]
    words: list[str]
    place: str


def write_files(folder: Path) -> None:
    """Write a module and data in every form, on which two clients can train."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(24, 3)).astype(np.float32), np.arange(24) % 2
    rows = [f"{','.join(f'{x:.3f}' for x in row)},{'no' if y else 'yes'},{k // 12}"
            for k, (row, y) in enumerate(zip(inputs, targets, strict=True))]  # fmt: skip
    (folder / "mine.py").write_text(MODULE)
    (folder / "table.csv").write_text("\n".join(["a,b,c,y,site", *rows, ""]))
    import pandas

    pandas.read_csv(folder / "table.csv").to_parquet(folder / "table.parquet")
    np.savez(folder / "x.npz", inputs)
    np.save(folder / "y.npy", targets)
    (folder / "parts.json").write_text(json.dumps([[*range(12)], [*range(12, 24)]]))
    for label in "ab":
        (folder / "images" / label).mkdir(parents=True)
        for number in range(6):
            pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / label / f"{number}.png")
    for file, data in DATA.items():
        (folder / words_for(file)[-1]).write_text(RUN % (48 if "images" in file else 3, data))


def words_for(file: str) -> list[str]:
    """The command that trains on a file."""
    return ["fit", "--config", f"run_{re.sub('[./]', '_', file)}.yaml"]


def misspelt(rng: random.Random, word: str) -> str:
    """The word with a letter twice, missing, or in the place of its neighbour."""
    k = rng.randrange(max(len(word) - 1, 1))
    swapped = word[:k] + word[k + 1 : k + 2] + word[k] + word[k + 2 :]
    found = rng.choice([word[:k] + word[k] + word[k:], word[:k] + word[k + 1 :], swapped])
    return found if found not in ("", word) else f"{word}x"


# configs


def pairs(node: yaml.Node | None, path: str = "") -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield path, key and value of every key in a config."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = f"{path}.{key.value}".lstrip(".")
            yield here, key, value
            yield from pairs(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from pairs(child, path)


def replaced(text: str, node: yaml.Node, new: str) -> str:
    """The text with other words in the place of a node."""
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def config_cases(rng: random.Random, number: int) -> Iterator[Case]:
    """Break shipped configs of runs and of studies, alone or beside the one that they are added to."""
    names = [name for name, path in shipped_configs().items() if "studies/fed" not in name and "l2gd" not in name]
    texts = {name: shipped_configs()[name].read_text(encoding="utf-8") for name in names}
    ways: dict[str, Callable[[str, str], tuple[str, int] | None]] = {
        "key": lambda text, name: _other_key(rng, text),
        "word for a number": lambda text, name: _other_value(rng, text, is_number=True),
        "class": lambda text, name: _other_value(rng, text, is_number=False),
        "unclosed": lambda text, name: _other_line(rng, text, lambda line: f"{line.partition(':')[0]}: [3"),
        "tab": lambda text, name: _other_line(rng, text, lambda line: "\t" + line),
        "no colon": lambda text, name: _other_line(rng, text, lambda line: line.replace(": ", " ").rstrip(":")),
        "section twice": lambda text, name: (f"{text}\n{pairs_of(text)[0][0]}:\n  name: twice\n", 0),
    }
    while number:
        name, way = rng.choice(names), rng.choice([*ways])
        if "studies" in name and way in ("word for a number", "class"):
            continue
        found = ways[way](texts[name], name)
        if found is None:
            continue
        number -= 1
        text, line = found
        base = ["--config", "digits.yaml"] if re.match("algorithms|sharing|privacy", name) else []
        command = "compare" if "studies" in name else "fit"
        place = rf"broken\.yaml.*line {line}\b" if line else r"broken\.yaml.*lines? \d+"
        yield Case(f"{name}: {way}", {"broken.yaml": text.encode()}, [command, *base, "--config", "broken.yaml"], place)


def pairs_of(text: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
    return list(pairs(yaml.compose(text)))


def _other_key(rng: random.Random, text: str) -> tuple[str, int]:
    free = "variants|algorithms|overrides|targets|origins|tuning"  # dictionaries of the user's own names
    _, key, _ = rng.choice([pair for pair in pairs_of(text) if not re.match(free, pair[0]) and len(pair[1].value) > 2])
    return replaced(text, key, misspelt(rng, key.value)), key.start_mark.line + 1


def _other_value(rng: random.Random, text: str, *, is_number: bool) -> tuple[str, int] | None:
    found = [
        (key, value) for _, key, value in pairs_of(text)
        if (value.tag.endswith((":int", ":float")) if is_number else key.value == "class_path")
    ]  # fmt: skip
    if not found:
        return None
    key, value = rng.choice(found)
    return replaced(text, value, "many" if is_number else misspelt(rng, value.value)), key.start_mark.line + 1


def _other_line(rng: random.Random, text: str, change: Callable[[str], str]) -> tuple[str, int]:
    lines = text.splitlines()
    k = rng.choice([k for k, line in enumerate(lines) if re.match(r"\s*[\w.]+:", line)])
    return "\n".join([*lines[:k], change(lines[k]), *lines[k + 1 :], ""]), 0


# a user's module


def module_cases(rng: random.Random, number: int) -> Iterator[Case]:
    """Break one line of a module: its form, a name in it, or what it computes."""
    lines = MODULE.splitlines()
    while number:
        k, way = rng.randrange(len(lines)), rng.choice(["form", "name", "raise", "shape", "dtype", "attribute"])
        line, indent = lines[k], re.match(r" *", lines[k])[0]
        new = {
            "form": line[:-1] if line.endswith((")", ":")) else line + " (",
            "name": re.sub(r"\b(inputs|torch|self\.layer|LightningModule|RATE)\b(?=[.,()]|$)", r"\1x", line, count=1),
            "raise": f'{line}\n{indent}raise RuntimeError("broken")' if indent and not line.endswith(":") else line,
            "shape": line.replace("self.layer(inputs)", "self.layer(inputs[:, :2])"),
            "dtype": line.replace("self.layer(inputs)", "self.layer(inputs.double())"),
            "attribute": line.replace("self.layer(", "self.layers("),
        }[way]
        if new == line or (way == "raise" and re.match(r" *(return|import|from)\b", line)):
            continue
        number -= 1
        text = "\n".join([*lines[:k], new, *lines[k + 1 :], ""])
        yield Case(f"mine.py, line {k + 1}: {way}", {"mine.py": text.encode()}, words_for("table.csv"),
                   r"mine\.py, line \d+")  # fmt: skip


# data, partitions, checkpoints


def file_cases(rng: random.Random, folder: Path, file: str, words: list[str], number: int) -> Iterator[Case]:
    """Break the bytes of a file: cut, emptied, overwritten, or something else altogether."""
    content = (folder / file).read_bytes()
    ways: dict[str, Callable[[], bytes]] = {
        "cut": lambda: content[: rng.randrange(1, max(2, len(content) // 2))],
        "empty": lambda: b"",
        "noise": lambda: rng.randbytes(300),
        "a zip": lambda: b"PK\x03\x04" + rng.randbytes(60),
        "text": lambda: b"see the other file\n",
        "html": lambda: b"<!doctype html><html><body>404</body></html>\n",
        "a pickle": lambda: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07nothing\x94.",
        "overwritten": lambda: bytes(rng.randrange(256) if k % 7 else b for k, b in enumerate(content)),
        "gone": lambda: b"GONE",
    }
    for k in range(number):
        way = [*ways][k % len(ways)]
        yield Case(f"{file}: {way}", {file: ways[way]()}, words, re.escape(Path(file).name))


def cell_cases(rng: random.Random, folder: Path, number: int) -> Iterator[Case]:
    """Break one cell of a table."""
    lines = (folder / "table.csv").read_text().splitlines()
    for _ in range(number):
        row, wrong = rng.randrange(1, len(lines)), rng.choice(["n.a.?", "inf", "", "1;5", "1,7,8"])
        changed = [*lines[:row], re.sub(r"[^,]+", wrong, lines[row], count=1), *lines[row + 1 :], ""]
        place = rf"table\.csv.*(row {row}|line {row + 1}|its header)\b"
        yield Case(f"table.csv, line {row + 1}: {wrong}", {"table.csv": "\n".join(changed).encode()},
                   words_for("table.csv"), place)  # fmt: skip


def part_cases() -> Iterator[Case]:
    """Partitions that can be read and do not fit."""
    for parts in ([[0, 1], [1, 2]], [[-1, 2], [3]], [[0], [24]], [], [[], []], [["a"], ["b"]], [[0.5], [1.5]], [0, 1],
                  3, [[[0]], [[1]]]):  # fmt: skip
        content = {"parts.json": json.dumps(parts).encode()}
        yield Case(f"parts.json: {parts}", content, words_for("parts.json"), r"parts\.json")


def cases(folder: Path, checkpoint: str, seed: int = 0) -> list[Case]:
    """All cases, in an order in which every n-th of them has some of each kind.

    Args:
        folder: Folder with what :func:`write_files` writes and, under the name `checkpoint`, the checkpoint of a run.
        checkpoint: Name of that file.
        seed: Seed of what is broken.
    """
    rng = random.Random(seed)
    found = [
        Case(f"{name}: class", {name: (folder / name).read_bytes().replace(b"DataModule", b"DataModle")},
             ["fit", "--config", name], f"{name}, line 5: data: no class '\\w+DataModle'; did you mean")
        for name in sorted({words_for(file)[-1] for file in DATA})
    ]  # fmt: skip
    found += [*config_cases(rng, 90), *module_cases(rng, 36), *cell_cases(rng, folder, 12), *part_cases()]
    for file in DATA:
        found += file_cases(rng, folder, file, words_for(file), 9)
    resume = [*words_for("table.csv"), "--ckpt_path", checkpoint]
    return [*found, *file_cases(rng, folder, checkpoint, resume, 9)]
