"""Draw the picture of docs/fedbc.md from the runs of its study.

fedbc-cli compare --config studies/fedbc_settings.yaml
python docs/make_fedbc.py studies/fedbc_settings
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from fedbc_lightning.studies.results import read_file

PICTURE = Path(__file__).parent / "images/fedbc_settings.png"
STEP_SIZES = {"FedBC_1e-1": "0.1", "FedBC_1e-2": "0.01", "FedBC_1e-3": "0.001"}
PANELS = {
    "dual/max": "largest λ of the round's clients",
    "dual/effective_number": "effective number of clients",
    "accuracy/global": "accuracy of z",
}


def draw(study: Path) -> None:
    """Draw λ, the effective number of clients and the accuracy of z over the rounds, for seed 0 at E = 5."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.2), layout="constrained")
    for folder, name in STEP_SIZES.items():
        (file,) = (study / "runs/E_=_5" / folder / "seed_0").glob("*/metrics.csv")
        table = read_file(file)
        for axis, column in zip(axes, PANELS, strict=True):
            axis.plot(table["round"], table[column], label=f"dual_lr {name}", linewidth=1.2)
    for axis, title in zip(axes, PANELS.values(), strict=True):
        axis.set(xlabel="round", title=title)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("symlog", linthresh=0.01)
    axes[2].legend(loc="lower right")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
