"""Draw the curve of each method on digits beside FedAvg's, for its page: python docs/make_curves.py.

Each method is trained once by its config, in seven minutes on one core; docs/methods/curves.csv keeps the numbers.
``python docs/make_curves.py --draw`` draws the pictures anew from that file alone.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from class_docs import read_docstring
from make_algorithms import CONFIGS, METHODS, TABLE, exported, overlays, slug

from fedbc_lightning import Comparison, Study
from fedbc_lightning.studies.results import StudyRecord

REFERENCE = "FedAvg"
ROUNDS, EVERY = 40, 2
PANELS = {"accuracy/global": "global model", "accuracy/local": "clients' own models"}
"""Title of each panel by the metric that it shows."""
WIDTH, HEIGHT, LEFT, TOP, GAP = 270, 150, 45, 45, 70
"""Size of a panel, its place in the picture, and the space between two, in pixels."""
COLORS = {REFERENCE: "#888888"}


def settings(config: str) -> dict[str, Any]:
    """What a study must set to train a method by its config, with the options that the config's command needs."""
    text = (CONFIGS / config).read_text(encoding="utf-8")
    algorithm, trainer = (yaml.safe_load(text).get(key, {}) for key in ("algorithm", "trainer"))
    words = shlex.split(text.splitlines()[1].lstrip("# "))
    options = {word[2:]: yaml.safe_load(value) for word, value in pairwise(words) if word.startswith("--trainer.")}
    layers = {f"trainer.{key}": value for key, value in trainer.items()}
    return {"algorithm": algorithm["class_path"], **algorithm.get("init_args", {}), **layers, **options}


def configs_by_method() -> dict[str, str]:
    """The usual name of each method to the config that its page shows."""
    files = overlays()
    return {read_docstring(cls).name: files[name][0][0] for name, cls in exported().items()}


def read_table() -> pd.DataFrame:
    """Read what was measured.

    Raises:
        ValueError: If the file does not name its commit, or is not of all methods, configs and rounds of today.
    """
    head = TABLE.read_text(encoding="utf-8").partition("\n")[0]
    table = pd.read_csv(TABLE, comment="#")
    configs = dict(zip(table["method"], table["config"], strict=True))
    is_whole = {*table.groupby("method").size()} == {ROUNDS // EVERY + 1}
    if not re.search(r" at commit [0-9a-f]{40}: ", head) or configs != configs_by_method() or not is_whole:
        raise ValueError(f"{TABLE} is of other methods, configs or rounds: run python docs/make_curves.py")
    return table


def train(folder: str) -> pd.DataFrame:
    """Train all methods; return a row for each and each round that is evaluated."""
    configs = configs_by_method()
    study = Study(
        base="digits.yaml",
        algorithms={name: settings(config) for name, config in configs.items()},
        overrides={"trainer.max_rounds": ROUNDS, "trainer.eval_every_n_rounds": EVERY},
        metrics=[*PANELS],
        reference=REFERENCE,
        seeds=1,
        workers=1,
        out=folder,
    )
    comparison = Comparison(study)
    comparison.run()
    curves = StudyRecord(study, None, comparison.states).curves
    table = curves.assign(config=curves["algorithm"].map(configs), method=curves["algorithm"])
    table = table.assign(megabytes=table["bytes"]).dropna(subset=[*PANELS], how="all")
    return table[["method", "config", "rounds", *PANELS, "megabytes"]].round(4)


def picture(table: pd.DataFrame, method: str) -> str:
    """Two panels with the curves of a method and of the reference, as SVG."""
    body = []
    for place, (metric, title) in enumerate(PANELS.items()):
        left = LEFT + place * (WIDTH + GAP)
        body.append(f'<text x="{left}" y="{TOP - 26}" font-weight="bold">Accuracy of the {title}</text>')
        for share in (0, 25, 50, 75, 100):
            y = TOP + HEIGHT * (1 - share / 100)
            body.append(f'<path d="M{left} {y:g}h{WIDTH}" stroke="#ddd"/>')
            body.append(f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{share} %</text>')
        for number in range(0, ROUNDS + 1, 10):
            x = left + WIDTH * number / ROUNDS
            body.append(f'<text x="{x:g}" y="{TOP + HEIGHT + 17}" text-anchor="middle">{number}</text>')
        body.append(f'<text x="{left + WIDTH / 2:g}" y="{TOP + HEIGHT + 34}" text-anchor="middle">round</text>')
        for line, name in enumerate(dict.fromkeys([REFERENCE, method])):
            rows, color = table[table["method"] == name], COLORS.get(name, "#1f6fb5")
            points = " ".join(
                f"{left + WIDTH * number / ROUNDS:.1f},{TOP + HEIGHT * (1 - value):.1f}"
                for number, value in zip(rows["rounds"], rows[metric], strict=True)
                if value == value
            )
            body.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
            body.append(f'<text x="{left + 90 * line}" y="{TOP - 10}" fill="{color}">{name}</text>')
    width, height = LEFT + 2 * WIDTH + GAP + 15, TOP + HEIGHT + 42
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#333">'
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([f"{head} {style}", ground, *body, "</svg>", ""])


def pictures() -> dict[Path, str]:
    """The text of each picture by its path, drawn from the table."""
    table = read_table()
    return {METHODS / f"{slug(cls)}.svg": picture(table, read_docstring(cls).name) for cls in exported().values()}


def main() -> None:
    """Train, unless only the pictures are asked for, and draw."""
    if "--draw" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            table = train(folder)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        head = f"# python docs/make_curves.py at commit {commit}: digits.yaml, {ROUNDS} rounds, seed 0\n"
        TABLE.write_text(head + table.to_csv(index=False), encoding="utf-8")
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
    print(METHODS)


if __name__ == "__main__":
    main()
