"""The registry of ``fedbc-cli reproduce``: tables and figures of the papers by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.papers import fedbc_figures as fedbc
from fedbc_lightning.papers import fedplus_figures as fedplus
from fedbc_lightning.papers import l2gd_figures as l2gd
from fedbc_lightning.papers.partition_tables import table_4, table_5
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.schedule import State
from fedbc_lightning.studies.study import Study

Draw = Callable[[Study, Sequence[State], Path], list[Path]]


@dataclass(frozen=True)
class Reproduction:
    """A table or figure of a paper that can be reproduced.

    Attributes:
        what: Description in one line.
        study: Shipped study whose runs it needs; None: it needs no training.
        papers: Names of the study's ``papers`` that are shown with it. A table with a single one needs only the levels
            and algorithms of that one.
        only: Algorithms and levels of the study that it needs; empty: all.
        draw: Function that draws it from the study's runs into a folder, and returns the files.
        compute: Function that returns caption and rows of a table that needs no training.
    """

    what: str
    study: str | None = None
    papers: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    draw: Draw | None = None
    compute: Callable[[], tuple[str, Rows]] | None = None

    def narrow(self, study: Study) -> None:
        """Reduce the study to the algorithms, levels and papers that this needs.

        Raises:
            ConfigurationError: The study's own ``only`` leaves nothing of it, or its ``papers`` lack a table.
        """
        study.narrow(self.only)
        for name in self.papers:
            if name not in study.papers:
                raise ConfigurationError(
                    f"papers: '{name}' is not among them, and it is what is reproduced; for a study without it give "
                    "compare --config with the study's file"
                )
        study.papers = {name: study.papers[name] for name in self.papers}
        if self.draw is None and len(self.papers) == 1:
            (paper,) = study.papers.values()
            study.narrow([*paper.only, *paper.algorithms])


FEDPLUS = "studies/fedplus_figures.yaml"
METHODS, PROBABILITY = "studies/l2gd_methods.yaml", "studies/l2gd_probability.yaml"
FIVE = ("FedAvg", "q-FedAvg", "FedProx", "SCAFFOLD", "FedBC")
CIFAR, MNIST, FIGURES = "studies/fedbc_cifar.yaml", "studies/fedbc_mnist.yaml", "studies/fedbc_figures.yaml"


def _table(what: str, study: str, *papers: str) -> Reproduction:
    return Reproduction(what, study, papers)


def _figure(what: str, study: str, draw: Draw, *only: str, papers: tuple[str, ...] = ()) -> Reproduction:
    return Reproduction(what, study, papers, only, draw)


REPRODUCTIONS = {
    "table1": _table("FedBC: synthetic data, global accuracy", "studies/fedbc_table1.yaml", "table1"),
    "table2": _table("FedBC: CIFAR-10, E = 5, global accuracy", CIFAR, "table2"),
    "table3": _table("FedBC: CIFAR-10, E = 5, accuracy of the local models", CIFAR, "table3"),
    "table4": Reproduction("FedBC: classes of the clients (at once)", compute=table_4),
    "table5": Reproduction("FedBC: samples of the clients (at once)", compute=table_5),
    "table6": _table("FedBC: CIFAR-10, E = 1, global accuracy", CIFAR, "table6"),
    "table7": _table("FedBC: MNIST, E = 1, global accuracy", MNIST, "table7"),
    "table8": _table("FedBC: MNIST, E = 5, global accuracy", MNIST, "table8"),
    "table9": _table("FedBC: Shakespeare, global accuracy", "studies/fedbc_shakespeare.yaml", "table9"),
    "figure2": _figure(
        "FedBC: accuracy against a fixed γ", "studies/fedbc_figure2.yaml", fedbc.figure_2, papers=("figure2",)
    ),
    "figure3": _figure(
        "FedBC: loss, coefficients and λ for E = 5, variance of accuracy",
        FIGURES,
        fedbc.figure_3,
        papers=("loss", "variance"),
    ),
    "figure4": _figure(
        "FedBC: z on the smallest and largest client, E = 5", FIGURES, fedbc.figure_4, "E = 5", papers=("least_data",)
    ),
    "figure7": _figure("FedBC: loss for E = 1, 10, 25, 50; λ by round", FIGURES, fedbc.figure_7, papers=("loss",)),
    "figure7f": _figure(
        "FedBC: accuracy against the number of clients",
        "studies/fedbc_clients.yaml",
        fedbc.figure_7f,
        papers=("figure7f",),
    ),
    "figure8": _figure(
        "FedBC: coefficients for E = 1, 10, 25, 50",
        FIGURES,
        fedbc.figure_8,
        "FedBC",
        "E = 1",
        "E = 10",
        "E = 25",
        "E = 50",
    ),
    "figure9": _figure("FedBC: as Figure 4, E = 1", FIGURES, fedbc.figure_9, "E = 1", papers=("least_data",)),
    "figure10": _figure("FedBC: as Figure 4, E = 10", FIGURES, fedbc.figure_10, "E = 10", papers=("least_data",)),
    "figure11": _figure("FedBC: as Figure 4, E = 25", FIGURES, fedbc.figure_11, "E = 25", papers=("least_data",)),
    "figure12": _figure("FedBC: as Figure 4, E = 50", FIGURES, fedbc.figure_12, "E = 50", papers=("least_data",)),
    "figure13": _figure(
        "FedBC: CIFAR-10, coefficients for C = 1, 2, 3", CIFAR, fedbc.figure_13, "FedBC", "E = 5", "e = 1.2"
    ),
    "figure14": _figure(
        "FedBC: CIFAR-10, variance of accuracy, E = 1", CIFAR, fedbc.figure_14, *FIVE, "E = 1", papers=("figure14",)
    ),
    "figure15": _figure(
        "FedBC: CIFAR-10, variance of accuracy, E = 5", CIFAR, fedbc.figure_15, *FIVE, "E = 5", papers=("figure15",)
    ),
    "fedplus-table2-mnist": _table(
        "Fed+: personalised MNIST", "studies/fedplus_table2_mnist.yaml", "table2", "table2_global"
    ),
    "fedplus-table2-regression": _table(
        "Fed+: synthetic regression", "studies/fedplus_table2_regression.yaml", "table2", "table2_global"
    ),
    "fedplus-figure1": _figure("Fed+: how far models move at aggregation", FEDPLUS, fedplus.figure_1, "no stragglers"),
    "fedplus-figure2": _figure("Fed+: accuracy before and after it", FEDPLUS, fedplus.figure_2, "no stragglers"),
    "fedplus-figure3": _figure("Fed+: loss from own to global model", FEDPLUS, fedplus.figure_3, "no stragglers"),
    "fedplus-figure4": _figure("Fed+: accuracy by round", FEDPLUS, fedplus.figure_4),
    "fedplus-figure4-sent140": _figure(
        "Fed+: the same on Sent140", "studies/fedplus_figure4_sent140.yaml", fedplus.figure_4
    ),
    "fedli-table1": _table("FedLi: accuracy on four data sets", "studies/fedli_tables.yaml", "fedli-table1"),
    "fedli-table2": _table("FedLi: training loss on them", "studies/fedli_tables.yaml", "fedli-table2"),
    "l2gd-figure1": _figure("L2GD: x(λ) between local and global solution", METHODS, l2gd.figure_1, "L2SGD+"),
    "l2gd-figure2": _figure("L2GD: communications against p, with p*", PROBABILITY, l2gd.figure_2),
    "l2gd-figure3": _figure(
        "L2GD: L2SGD+, L2SGD2 and L2SGD at one step size", METHODS, l2gd.figure_3, "heterogeneous", papers=("methods",)
    ),
    "l2gd-figure4": _figure("L2GD: the same on both splits", METHODS, l2gd.figure_4, papers=("methods",)),
    "l2gd-figure5": _figure("L2GD: effect of p on L2SGD+", PROBABILITY, l2gd.figure_5),
}
"""All reproductions by name; the names of FedBC's tables and figures are the paper's."""
