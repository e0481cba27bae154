"""Draw the pictures of docs/fedbc.md, and print the numbers that it takes from single rounds, from its studies' runs.

fedbc-cli compare --config studies/fedbc_settings.yaml
python docs/make_fedbc.py studies/fedbc_settings/runs/E_=_5 fedbc_settings

fedbc-cli reproduce table6 --base cifar_folder.yaml --only '[C = 1, e = 1.2, FedAvg, FedBC]' --tuning.skip true
python docs/make_fedbc.py studies/fedbc_cifar_untuned/runs/E_=_1_C_=_1_e_=_1.2 fedbc_cifar

The pictures of Synthetic and MNIST are made from the studies of equal weights in docs/results.md:
python docs/make_fedbc.py studies/weights/runs/E_=_5 fedbc_synthetic
python docs/make_fedbc.py studies/mnist_weights/runs/E_=_1_C_=_1_e_=_1.5 fedbc_mnist

Without the name of a picture, numbers are printed alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.run.run_record import read_table
from fedbc_lightning.studies.study_run import has_ended

IMAGES = Path(__file__).parent / "images"
LINES = {
    "fedbc_settings": {"FedBC_1e-1": "dual_lr 0.1", "FedBC_1e-2": "dual_lr 0.01", "FedBC_1e-3": "dual_lr 0.001"},
    "fedbc_cifar": {"FedBC": "FedBC", "FedAvg": "FedAvg"},
    "fedbc_synthetic": {"FedBC": "FedBC", "FedAvg": "FedAvg", "FedAvg_uniform": "FedAvg, weighting uniform"},
    "fedbc_mnist": {"FedBC": "FedBC", "FedAvg": "FedAvg", "FedAvg_uniform": "FedAvg, weighting uniform"},
}
"""Name of each line by the folder of its runs, for each picture."""
PANELS = {
    "dual/max": "largest λ of the round's clients",
    "dual/effective_number": "effective number of clients",
    "accuracy/global": "accuracy of z",
}
ROUND = 50
"""Round whose accuracy is printed beside the best and the last."""
WINDOW = 10
"""Rounds over whose mean a thick line runs where a curve swings from round to round."""


def draw(variant: Path, name: str) -> None:
    """Draw λ, the effective number of clients and the accuracy of z over the rounds, for seed 0 of one variant."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.2), layout="constrained")
    for folder, label in LINES[name].items():
        (file,) = (variant / folder / "seed_0").glob("*/metrics.csv")
        table = read_table(file)
        for axis, column in zip(axes, PANELS, strict=True):
            if column not in table:  # FedAvg has no λ
                continue
            (line,) = axis.plot(table["round"], table[column], label=label, linewidth=1.2)
            if name != "fedbc_settings" and column == "accuracy/global":
                line.set(linewidth=0.6, alpha=0.5, label=None)
                mean = table[column].rolling(WINDOW, center=True).mean()
                axis.plot(table["round"], mean, label=label, color=line.get_color(), linewidth=2.0)
    for axis, title in zip(axes, PANELS.values(), strict=True):
        axis.set(xlabel="round", title=title)
        axis.grid(alpha=0.3)
    if name == "fedbc_settings":
        axes[0].set_yscale("symlog", linthresh=0.01)
    axes[2].legend(loc="lower right")
    figure.savefig(IMAGES / f"{name}.png", dpi=110)


def show(variant: Path) -> None:
    """Print numbers of every run of one variant, and how FedBC's z compares with those of other methods of its seed.

    Raises:
        ConfigurationError: There are no runs in the folder, or one has not finished.
    """
    files = {(file.parents[2].name, file.parents[1].name): file for file in sorted(variant.glob("*/*/*/metrics.csv"))}
    if not files:
        raise ConfigurationError(f"{variant}: there are no runs; give STUDY/runs/VARIANT.")
    for file in files.values():
        if not has_ended(file.parents[1]):
            raise ConfigurationError(f"{file.parents[1]}: this run has not finished.")
    runs = {key: read_table(file) for key, file in files.items()}
    rows = [
        {"algorithm": name, "seed": seed, **of_run(table), **of_clients(files[name, seed].with_name("clients.csv"))}
        for (name, seed), table in runs.items()
    ]
    print(pd.DataFrame(rows))
    for (name, seed), table in runs.items():
        if name != "FedBC" and ("FedBC", seed) in runs:
            ahead = (runs["FedBC", seed]["accuracy/global"] - table["accuracy/global"]).iloc[1:]
            windows = ahead.groupby((ahead.index - 1) // WINDOW).mean()
            print(
                f"FedBC - {name}, {seed}: {100 * ahead.mean():+.1f} points over all rounds; above it in "
                f"{(windows > 0).sum()} of {len(windows)} means of {WINDOW} rounds"
            )


def of_run(table: pd.DataFrame) -> dict[str, float]:
    """Return numbers about the rounds of one run; accuracies in %."""
    accuracy = 100 * table["accuracy/global"]
    last_quarter = accuracy.iloc[-(len(table) // 4) :]
    found = {"best": accuracy.max(), "last": accuracy.iloc[-1], "deviation of last quarter": last_quarter.std()}
    found |= {f"at round {ROUND}": accuracy[table["round"] == ROUND].mean()}
    found |= {"deviation over clients": 100 * table["accuracy/std"].iloc[-1]}
    if "dual/max" in table:
        trained = table.iloc[1:]
        at_zero = trained.index[trained["dual/max"] == 0]
        few = trained[trained["dual/effective_number"].between(0, 2, inclusive="neither")]
        found |= {"largest dual": trained["dual/max"].max(), "first at 0": at_zero[0] if len(at_zero) else float("nan")}
        found |= {"rounds below 2": len(few), "accuracy there": accuracy[few.index].mean()}
    return found


def of_clients(file: Path) -> dict[str, float]:
    """Return how many clients the weights of a round count as, when λ of a client is largest, and what is left of it.

    Weights count as (Σw)² / Σw² clients. A client's λ is largest after some of its own rounds; what is left of it in
    its last round is a fraction of the largest value.
    """
    table = read_table(file)
    weights = table.groupby("round")["weight"]
    numbers = weights.sum() ** 2 / weights.agg(lambda of_round: (of_round**2).sum())
    found = {"effective number": numbers.mean(), "least effective number": numbers.min()}
    if "dual" not in table:
        return found
    duals = [of_client.reset_index(drop=True) for _, of_client in table.groupby("client")["dual"]]
    duals = [dual for dual in duals if dual.max() > 0]
    peaks = pd.Series([dual.idxmax() + 1 for dual in duals])
    left = pd.Series([dual.iloc[-1] / dual.max() for dual in duals])
    return found | {
        "rounds of a client": sum(len(dual) for dual in duals) / len(duals),
        "earliest peak": peaks.min(),
        "latest peak": peaks.max(),
        "least left": left.min(),
        "most left": left.max(),
    }


if __name__ == "__main__":
    pd.set_option("display.width", 200, "display.max_columns", None, "display.precision", 2)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("variant", type=Path, help="folder with the runs of one variant")
    parser.add_argument("picture", nargs="?", choices=LINES, help="picture to draw; none: print numbers alone")
    given = parser.parse_args()
    try:
        show(given.variant)
    except ConfigurationError as error:
        parser.error(str(error))
    if given.picture:
        draw(given.variant, given.picture)
