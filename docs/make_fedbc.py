"""Draw the pictures of docs/fedbc.md from the runs of its studies.

fedbc-cli compare --config studies/fedbc_settings.yaml
python docs/make_fedbc.py studies/fedbc_settings/runs/E_=_5 fedbc_settings

fedbc-cli reproduce table6 --base cifar_folder.yaml --only '[C = 1, e = 1.2, FedAvg, FedBC]' --tuning.skip true
python docs/make_fedbc.py studies/fedbc_cifar_untuned/runs/E_=_1_C_=_1_e_=_1.2 fedbc_cifar

The picture of MNIST is made from the study of equal weights in docs/results.md:
python docs/make_fedbc.py studies/mnist_weights/runs/E_=_1_C_=_1_e_=_1.5 fedbc_mnist
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from fedbc_lightning.studies.results import read_file

IMAGES = Path(__file__).parent / "images"
LINES = {
    "fedbc_settings": {"FedBC_1e-1": "dual_lr 0.1", "FedBC_1e-2": "dual_lr 0.01", "FedBC_1e-3": "dual_lr 0.001"},
    "fedbc_cifar": {"FedBC": "FedBC", "FedAvg": "FedAvg"},
    "fedbc_mnist": {"FedBC": "FedBC", "FedAvg": "FedAvg", "FedAvg_uniform": "FedAvg, weighting uniform"},
}
"""Name of each line by the folder of its runs, for each picture."""
PANELS = {
    "dual/max": "largest λ of the round's clients",
    "dual/effective_number": "effective number of clients",
    "accuracy/global": "accuracy of z",
}
WINDOW = 10
"""Rounds over whose mean a thick line runs where a curve swings from round to round."""


def draw(variant: Path, name: str) -> None:
    """Draw λ, the effective number of clients and the accuracy of z over the rounds, for seed 0 of one variant."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.2), layout="constrained")
    for folder, label in LINES[name].items():
        (file,) = (variant / folder / "seed_0").glob("*/metrics.csv")
        table = read_file(file)
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


if __name__ == "__main__":
    draw(Path(sys.argv[1]), sys.argv[2])
