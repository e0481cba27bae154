"""The registry of ``fedbc-cli reproduce``: tables and figures of the papers by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from fedbc_lightning.papers import fedbc_figures as fedbc
from fedbc_lightning.papers import fedplus_figures as fedplus
from fedbc_lightning.papers import l2gd_figures as l2gd
from fedbc_lightning.papers.partition_tables import table_4, table_5
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.results import StudyRecord
from fedbc_lightning.studies.study import Study, check_known

Draw = Callable[[StudyRecord], Figure]


@dataclass(frozen=True)
class Reproduction:
    """A table or figure of a paper that can be reproduced.

    Attributes:
        what: Description in one line.
        study: Shipped study whose runs it needs; None: it needs no training.
        papers: Names of the study's ``papers`` that are shown with it. A table with a single one needs only the levels
            and algorithms of that one.
        only: Algorithms and levels of the study that it needs; empty: all.
        draw: Function that draws it from the study's runs.
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
        # A figure of FedBC alone should not train its four competitors.
        study.narrow(self.only)
        check_known("papers", self.papers, study.papers)
        study.papers = {name: study.papers[name] for name in self.papers}
        if self.draw is None and len(self.papers) == 1:
            # A paper may have fewer algorithms and levels than the shipped study compares.
            (paper,) = study.papers.values()
            study.narrow([*paper.only, *paper.algorithms])


def _table(what: str, study: str, *papers: str) -> Reproduction:
    return Reproduction(what, f"studies/{study}.yaml", papers)


def _figure(what: str, study: str, draw: Draw, *only: str, papers: tuple[str, ...] = ()) -> Reproduction:
    return Reproduction(what, f"studies/{study}.yaml", papers, only, draw)


def _by_data(epochs: int) -> Reproduction:
    what = f"FedBC: z on smallest and largest client, E = {epochs}"
    return _figure(what, FIGURES, fedbc.accuracy_by_data, f"E = {epochs}", papers=("least_data",))


def _variance(epochs: int, paper: str) -> Reproduction:
    what, only = f"FedBC: CIFAR-10, variance, E = {epochs}", (*FIVE, f"E = {epochs}")
    return _figure(what, CIFAR, fedbc.variance_by_exponent, *only, papers=(paper,))


CIFAR, MNIST, FIGURES, FEDPLUS = "fedbc_cifar", "fedbc_mnist", "fedbc_figures", "fedplus_figures"
FIVE = ("FedAvg", "q-FedAvg", "FedProx", "SCAFFOLD", "FedBC")

# All reproductions by name; the names of FedBC's tables and figures are the paper's.
REPRODUCTIONS = {
    "table1": _table("FedBC: synthetic data, global accuracy", "fedbc_table1", "table1"),
    "table2": _table("FedBC: CIFAR-10, E = 5, global accuracy", CIFAR, "table2"),
    "table3": _table("FedBC: CIFAR-10, E = 5, accuracy of the local models", CIFAR, "table3"),
    "table4": Reproduction("FedBC: classes of the clients (at once)", compute=table_4),
    "table5": Reproduction("FedBC: samples of the clients (at once)", compute=table_5),
    "table6": _table("FedBC: CIFAR-10, E = 1, global accuracy", CIFAR, "table6"),
    "table7": _table("FedBC: MNIST, E = 1, global accuracy", MNIST, "table7"),
    "table8": _table("FedBC: MNIST, E = 5, global accuracy", MNIST, "table8"),
    "table9": _table("FedBC: Shakespeare, global accuracy", "fedbc_shakespeare", "table9"),
    "figure2": _figure("FedBC: accuracy against a fixed γ", "fedbc_figure2", fedbc.figure_2, papers=("figure2",)),
    "figure3": _figure("FedBC: loss, coefficients, λ, variance", FIGURES, fedbc.figure_3, papers=("loss", "variance")),
    "figure4": _by_data(5),
    "figure7": _figure("FedBC: loss for E = 1, 10, 25, 50; λ by round", FIGURES, fedbc.figure_7, papers=("loss",)),
    "figure7f": _figure("FedBC: accuracy against N", "fedbc_clients", fedbc.figure_7f, papers=("figure7f",)),
    "figure8": _figure("FedBC: coefficients by E", FIGURES, fedbc.coefficients, "FedBC", *fedbc.OTHER_EPOCHS),
    "figure9": _by_data(1),
    "figure10": _by_data(10),
    "figure11": _by_data(25),
    "figure12": _by_data(50),
    "figure13": _figure("FedBC: CIFAR-10, coefficients by C", CIFAR, fedbc.coefficients, "FedBC", "E = 5", "e = 1.2"),
    "figure14": _variance(1, "figure14"),
    "figure15": _variance(5, "figure15"),
    "fedplus-table2-mnist": _table("Fed+: personalised MNIST", "fedplus_table2_mnist", "table2", "table2_global"),
    "fedplus-table2-regression": _table("Fed+: regression", "fedplus_table2_regression", "table2", "table2_global"),
    "fedplus-figure1": _figure("Fed+: how far models move at aggregation", FEDPLUS, fedplus.figure_1, "no stragglers"),
    "fedplus-figure2": _figure("Fed+: accuracy before and after it", FEDPLUS, fedplus.figure_2, "no stragglers"),
    "fedplus-figure3": _figure("Fed+: loss from own to global model", FEDPLUS, fedplus.figure_3, "no stragglers"),
    "fedplus-figure4": _figure("Fed+: accuracy by round", FEDPLUS, fedplus.figure_4),
    "fedplus-figure4-sent140": _figure("Fed+: the same on Sent140", "fedplus_figure4_sent140", fedplus.figure_4),
    "fedli-table1": _table("FedLi: accuracy on four data sets", "fedli_tables", "fedli-table1"),
    "fedli-table2": _table("FedLi: training loss on them", "fedli_tables", "fedli-table2"),
    "l2gd-figure1": _figure("L2GD: x(λ) from local to global solution", "l2gd_methods", l2gd.figure_1, "L2SGD+"),
    "l2gd-figure2": _figure("L2GD: communications against p, with p*", "l2gd_probability", l2gd.figure_2),
    "l2gd-figure3": _figure("L2GD: three methods", "l2gd_methods", l2gd.figure_3, "heterogeneous", papers=("methods",)),
    "l2gd-figure4": _figure("L2GD: the same on both splits", "l2gd_methods", l2gd.figure_4, papers=("methods",)),
    "l2gd-figure5": _figure("L2GD: effect of p on L2SGD+", "l2gd_probability", l2gd.figure_5),
}
