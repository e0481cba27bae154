"""Run the leaderboard of methods, and write docs/results/methods.md: python docs/make_leaderboard.py [WORKLOAD ...].

Each workload is two studies of `fedbc-cli compare`, which skip what has been run; what came out goes into
docs/results/methods.csv, from which the page is written. Without a workload the page alone is made anew. Digits take
three quarters of an hour on one core, Synthetic two hours, MNIST three, and Shakespeare four.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from make_algorithms import FAMILIES, PERSONAL

from fedbc_lightning.cli.classes import fold
from fedbc_lightning.studies.methods import short
from fedbc_lightning.studies.numbers import difference_and_interval, number

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "configs" / "studies" / "methods.yaml"
TABLE = ROOT / "docs" / "results" / "methods.csv"
PAGE = TABLE.with_suffix(".md")

WORKLOADS: dict[str, tuple[str, list[str]]] = {
    "digits": ("Digits, 20 clients of two to four digits and very unequal sizes, of which four never train", []),
    "synthetic": (
        "Synthetic(0.5, 0.5), 30 clients of very unequal sizes with a task of their own, of which six never train",
        ["docs/results/workloads/synthetic.yaml"],
    ),
    "mnist": (
        "MNIST, 20 clients of two to five digits and very unequal sizes, of which four never train",
        ["docs/results/workloads/mnist.yaml"],
    ),
    "shakespeare": (
        "Shakespeare's next character, 20 speaking roles of very unequal sizes, of which four never train",
        ["docs/results/workloads/shakespeare.yaml"],
    ),
}
"""Title of each workload, and the configs that are layered over methods.yaml for it."""

GROUPS = {"one": "accuracy/global", "own": "accuracy/local"}
"""The metric by which the methods of a group are tuned, compared and sorted."""

SHOWN = {
    "accuracy/global": "all test data",
    "accuracy/local": "own models",
    "accuracy/worst10": "worst tenth",
    "accuracy/heldout": "unseen clients",
    "accuracy/heldout_finetuned": "after 10 steps",
}
"""Metrics and the heads of their columns."""

TITLES = {"one": "One model for all clients", "own": "A model for each client"}

HEAD = """\
# All methods, tuned alike

<!-- Made by `python docs/make_leaderboard.py` from docs/results/methods.csv. Do not edit. -->

Each method of the package on the same clients, with the same initial models and, where the method allows it, the same
sampled clients in every round.

- **Tuned alike**: each method was tried with four step sizes of the clients, or with values of its own step size where
  it has one, and with at most three values of a setting of its own. These are 12 combinations at most, and four for
  methods that have nothing of their own to choose. They were tried on validation data cut from the clients' training
  data, with one seed on the digits and two elsewhere. All combinations ran for a fifth of the rounds. The best third
  of them ran for all rounds, and the best of these was chosen. The file
  [methods.yaml](../../configs/studies/methods.yaml) has the values, and what was fixed by hand, such as no momentum;
  [synthetic.yaml](workloads/synthetic.yaml), [mnist.yaml](workloads/mnist.yaml) and
  [shakespeare.yaml](workloads/shakespeare.yaml) have what is different there, such as ten local steps in place of two
  epochs on MNIST and Shakespeare, and step sizes thirty times as large on Shakespeare. The column *chosen* says what
  came out, and of how many combinations.
- **Reported** is the last round, as the mean over five seeds with new data splits and initial models. Nothing was
  chosen on test data. A seed in which all clients' weights became NaN or infinite is left out, and the pairs that are
  left are counted beside the difference.
- **Better and worse** than FedAvg, in bold or said, survive Holm's correction for all comparisons of their table. The
  interval in brackets is that of the paired difference (Student's, 95 %), each for itself. One or two seeds tune and
  five report, so only large differences are told apart: −22 points with an interval of ±11 stay open.
- **One model** or **own models**: the first table of a workload has the methods that make one model for all. They are
  tuned and sorted by its accuracy on all test data. The second has those that make a model for each client, tuned and
  sorted by the mean accuracy of the own models. FedBC and FedAvg are in both; FedAvg's own models are its clients'
  models after local training.
- **Worst tenth** is the mean accuracy of the global model on the tenth of the clients that it serves worst; of FedRep
  and FedBABU, which have no model for all, it is that of the own models. **Unseen clients** never train: the global
  model as it is, and after ten steps on a client's own data with the chosen step size.
- **MB and steps** are what a run sent in both directions, and the steps of all clients on the model that they send.
  Methods that train a second model or a head beside it (Ditto, APFL, FedRep), or take several gradients in a step
  (pFedMe, Per-FedAvg, Per-FedBC), compute more. A round of FedAsync is the update by one client, so it has a fraction
  of the steps; FedPD, and L2GD and its kin, need all clients in every round.

Robust rules are not here: [attacks.yaml](../../configs/studies/attacks.yaml) compares them where clients attack.

## Run it again, or add a method of your own

```bash
python docs/make_leaderboard.py digits             # from a clone; three quarters of an hour on one core
fedbc-cli compare --config studies/methods.yaml --config mine.yaml --only '[FedAvg, Mine]'
```

A file of your own adds a method to all of them:

```yaml
# mine.yaml
algorithms:
  Mine:
    algorithm: my_module.MyMethod
    strength: {grid: [0.1, 1.0, 10.0]}
```

`--only` leaves out the others; FedAvg is run again for the same seeds, so that the differences are paired.
Holm's correction is then for the methods of that run alone, so *better* is said more easily than on this page.
For another workload, its file goes between the two, such as `--config docs/results/workloads/mnist.yaml`.
"""


def study() -> dict[str, Any]:
    """Return what methods.yaml says."""
    return dict(yaml.safe_load(STUDY.read_text(encoding="utf-8")))


def methods() -> dict[str, list[str]]:
    """Return the names of the methods of each group, as in the study; FedAvg and FedBC are in both."""
    entries = study()["algorithms"]
    personal = {"local", *(fold(name) for family in PERSONAL for name in FAMILIES[family])}
    own = [name for name, entry in entries.items() if fold((entry or {}).get("algorithm", name)) in personal]
    return {
        "one": [name for name in entries if name not in own or name == "FedBC"],
        "own": [name for name in entries if name in own or name == "FedAvg"],
    }


def command(workload: str, group: str) -> list[str]:
    """Return the command that runs a group of methods on a workload."""
    metrics = [GROUPS[group], *(name for name in SHOWN if name != GROUPS[group])]
    layers = [word for name in WORKLOADS[workload][1] for word in ("--config", name)]
    return [
        "fedbc-cli", "compare", "--config", "studies/methods.yaml", *layers, "--name", folder(workload, group).name,
        "--metrics", f"[{', '.join(metrics)}]", "--only", f"[{', '.join(methods()[group])}]",
    ]  # fmt: skip


def folder(workload: str, group: str) -> Path:
    """Return the folder of a study."""
    return Path("studies") / (f"methods_{workload}" + "_own" * (group == "own"))


def read(workload: str, group: str) -> pd.DataFrame:
    """Return a row per method of a finished study, from its files."""
    place = folder(workload, group)
    runs, differences = pd.read_csv(place / "results.csv"), pd.read_csv(place / "differences.csv")
    tuned = pd.read_csv(place / "tuning.csv")
    if not runs["status"].isin(["finished", "failed"]).all() or {*runs.groupby("algorithm").size()} != {
        study()["seeds"]
    }:
        raise SystemExit(f"{place}: not all runs of each method have ended; see results.csv.")
    runs = runs[runs["status"] == "finished"].copy()  # of a method that diverged, the pairs that are left are said
    runs["megabytes"] = (runs["bytes_up"] + runs["bytes_down"]) / 1e6
    runs["steps"] = [pd.read_csv(Path(run) / "clients.csv")["num_steps"].sum() for run in runs["folder"]]
    by_method = runs.groupby("algorithm", sort=False)
    found = by_method[[*(name for name in SHOWN if name in runs), "megabytes", "steps"]].mean()
    found["deviation"] = by_method[GROUPS[group]].std()
    against = differences[differences["metric"] == GROUPS[group]].set_index("algorithm")
    found = found.join(against[["num_pairs", "difference", "low", "high", "p_holm"]])
    settings = [name for name in tuned if "." in name]
    found["tried"] = tuned.drop_duplicates(["algorithm", *settings]).groupby("algorithm").size()
    best = tuned[tuned["chosen"]].drop_duplicates("algorithm", keep="last").set_index("algorithm")[settings]
    found["chosen"] = [_said(best.loc[name]) if name in best.index else "" for name in found.index]
    return found.reset_index().assign(workload=workload, group=group)


def _said(values: pd.Series) -> str:
    """Return the chosen values in words, e.g. ``lr 0.1, mu 1``."""
    return ", ".join(f"{key.rpartition('.')[2]} {short(value)}" for key, value in values.dropna().items())


def table(rows: pd.DataFrame, group: str) -> str:
    """Return the table of a group on a workload, the best first."""
    metric = GROUPS[group]
    shown = list(dict.fromkeys(name for name in (metric, *SHOWN) if name in rows))
    others = *(SHOWN[name] for name in shown[1:]), "MB", "steps", "chosen"
    heads = ["method", SHOWN[metric], "− FedAvg", *others]
    lines = [heads, ["---"] * len(heads)]
    for _, row in rows.sort_values(metric, ascending=False).iterrows():
        verdict = ("better" if row["difference"] > 0 else "worse") if row["p_holm"] <= 0.05 else ""
        name = f"**{row['algorithm']}**" if verdict == "better" else row["algorithm"]
        difference = difference_and_interval(row, metric, study()["seeds"]) if row["num_pairs"] else ""
        numbers = ["" if pd.isna(row[of]) else number(row[of], of) for of in shown]
        numbers[0] += f" ± {number(row['deviation'], metric)}"
        costs = f"{row['megabytes']:.1f}", f"{row['steps']:,.0f}", f"{row['chosen']} (of {row['tried']:.0f})"
        lines.append([name, numbers[0], f"{difference} {verdict}".strip(), *numbers[1:], *costs])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def make_page() -> str:
    """Return the page: its head, then a chapter per workload with a table per group."""
    found = pd.read_csv(TABLE)
    parts = [HEAD.rstrip()]
    for workload, of_workload in found.groupby("workload", sort=False):
        parts += [f"## {WORKLOADS[str(workload)][0]}"]
        for group, rows in of_workload.groupby("group", sort=False):
            parts += [
                f"### {TITLES[group]}: {workload}",
                table(rows.fillna({"chosen": "", "tried": 0, "num_pairs": 0}).astype({"num_pairs": int}), group),
            ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the studies of the named workloads, and write table and page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    for workload in parser.parse_args().workloads:
        rows = []
        for group in GROUPS:
            subprocess.run(command(workload, group), check=False)  # status 1: methods that sample other clients
            rows.append(read(workload, group))
        before = pd.read_csv(TABLE) if TABLE.is_file() else pd.DataFrame(columns=["workload"])
        kept = before[before["workload"] != workload]
        pd.concat([kept, *rows]).to_csv(TABLE, index=False, float_format="%.6g")
    PAGE.write_text(make_page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
