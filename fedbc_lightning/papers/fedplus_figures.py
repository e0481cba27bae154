"""Draws Figures 1 to 4 of the Fed+ paper: the effect of the server's model on a client that takes it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from lightning.pytorch import Callback, LightningModule
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbc_lightning import algorithms
from fedbc_lightning.callbacks.aggregation_moves import own_model
from fedbc_lightning.cli.classes import class_name
from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.metric_names import Measured
from fedbc_lightning.evaluation.measurement import ClientModel, Measurement, Models
from fedbc_lightning.module.adapter import step_stage
from fedbc_lightning.studies.drawing import colors_of, draw_band, finish, legend_below, panels_of
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.results import StudyRecord, finished
from fedbc_lightning.studies.study_run import Run
from fedbc_lightning.trainer.trainer import FederatedTrainer

# Positions s in (1 − s) x_i + s z, from a client's own model to the global one, that Figure 3 evaluates.
SHARES = np.linspace(0, 1, 21)
COLUMNS = 4


class LossAlongLine(Callback):
    """Evaluates the models between each client's own model and the global one when a run is tested.

    Args:
        clients: Indices of the clients; each is evaluated on its own data.

    Attributes:
        rows: One row per client and share: ``client``, ``share`` and the values that ``test_step`` logs.
    """

    def __init__(self, clients: Sequence[int]) -> None:
        self._clients = clients
        self.rows: list[dict[str, float]] = []

    def on_test_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Evaluate the models with the trainer's evaluator."""
        z = trainer.federation.models().z.cpu()
        stage = step_stage(pl_module, "test") or "test"
        # One measurement per point of the line; the evaluator then takes each client's own data.
        for share in SHARES:

            def between(client: int, share: float = share) -> ClientModel:
                own = own_model(trainer, client)
                return own._replace(model=own.model.lerp(z, share))

            models = Models(z, trainer.federation.models().counters, between)
            tasks = [("local", client) for client in self._clients]
            found = trainer.evaluator.one_by_one(tasks, Measurement("test", stage, models, trainer.current_round))
            self.rows += [{"client": i, "share": float(share), **values} for (_, i), values in found.items()]


def loss_along_line(folder: Path, clients: Sequence[int]) -> pd.DataFrame:
    """Evaluate the models between a client's own model x_i and the global model z on the client's test data.

    Both come from the last checkpoint: x_i is the last model that the client trained, z that of the last round.

    Args:
        folder: Folder of the run, e.g. ``.../FedAvg-0``.
        clients: Indices of the clients.

    Returns:
        A table with a row per client and share s of :data:`SHARES`, for the model (1 − s) x_i + s z: ``client``,
        ``share``, and the values that ``test_step`` logs. Floating-point buffers are mixed in the same way.

    Raises:
        ConfigurationError: There is no checkpoint, or the clients' models were not kept.

    References:
        Kundu et al., Fed+, Figure 3.
    """
    line = LossAlongLine(clients)
    alone = ["accelerator=cpu", "devices=1", "logger=false", "enable_progress_bar=false"]
    words = ["test", "--ckpt_path", str(folder), *(f"--trainer.{word}" for word in alone)]
    with contextlib.redirect_stdout(io.StringIO()):  # hides the table that the command prints
        FederatedCLI(args=words, parser_kwargs={"prog": PROG}, trainer_defaults={"callbacks": [line]})
    return pd.DataFrame(line.rows).sort_values(["client", "share"], ignore_index=True)


def figure_1(record: StudyRecord) -> Figure:
    """Draw how far models move when clients take the server's and in local training: mean, deviation over clients.

    The runs are of the first variant and seed. A client's first round, before which it has no own model, is left out.
    """

    def draw(panel: Axes, method: Method, run: Run) -> None:
        clients = run.record.clients.rename(columns={"round": "rounds"})
        # Rows are in the order of rounds: duplicated() leaves out the first row of each client.
        clients = clients[clients["client"].duplicated()]
        for name, label, color in (("training", "local training", "C0"), ("server", "taking the server's model", "C3")):
            draw_band(panel, clients, "rounds", f"train_moved_by_{name}", label, color)

    return _figure_of_methods(record, draw, "rounds", "distance of parameters", bottom=0)


def figure_2(record: StudyRecord) -> Figure:
    """Draw accuracy by round before and after clients take the server's model, mean over clients on their test data.

    "Before" is the client's last own model. "After" is the model with which the client continues: z, or for methods
    whose clients keep their own (Fed+ and local training) the same model. The runs are of the first variant and seed.
    """

    def draw(panel: Axes, method: Method, run: Run) -> None:
        panel.plot(_over_clients(run, "local"), color="C0", label="before: its own model")
        panel.plot(_served(run, method), color="C3", label="after: with which it goes on", linestyle="--")

    return _figure_of_methods(record, draw, "rounds", "accuracy, mean over clients")


def figure_3(record: StudyRecord) -> Figure:
    """Draw the test loss on the line from own model (0) to global model (1) for three clients of the last round.

    They are the clients with the least, the median and the most data. A dashed line is the global model of the
    evaluated round before. The paper shows a portfolio's gain, which should be large; this loss should be small. The
    runs are of the first variant and seed.
    """

    def draw(panel: Axes, method: Method, run: Run) -> None:
        clients = run.record.clients
        clients = clients[clients["status"] == "ok"]
        last = clients[clients["round"] == clients["round"].max()].sort_values(["num_samples", "client"])
        chosen = last.iloc[[0, len(last) // 2, -1]].set_index("client")["num_samples"]
        lines = loss_along_line(run.record.folder, chosen.index.tolist()).set_index("client")
        rounds = run.record.evaluation
        before = rounds[rounds["round"] < rounds["round"].max()].groupby("client")[Measured("loss").name].last()
        for place, (client, size) in enumerate(chosen.items()):
            line = lines.loc[client]
            panel.plot(line["share"], line["loss"], color=f"C{place}", label=f"client {client}: {size} samples")
            panel.axhline(before.get(client, np.nan), color=f"C{place}", linestyle="--", linewidth=0.9)
        panel.set_yscale("symlog", linthresh=1.0)  # linear up to 1: separable data give losses of 0

    x, y = "from own (0) to global model (1)", "loss on the client's test data"
    return _figure_of_methods(record, draw, x, y, bottom=0)


def figure_4(record: StudyRecord) -> Figure:
    """Draw accuracy by round of the models with which clients continue, mean over clients on their own test data.

    A method's model is z, or the client's own if it has one. A panel shows a variant: mean, deviation over seeds.
    """
    figure, panels = _panels(len(record.study.variants))
    colors = colors_of(record.study)
    for panel, variant in zip(panels, record.study.variants, strict=True):
        for method in record.study.methods:
            curves = [_served(run, method) for run in finished(record.states, method.name, variant)]
            if curves:
                rows = pd.concat(curves).rename_axis("rounds").reset_index(name="accuracy")
                draw_band(panel, rows, "rounds", "accuracy", method.name, colors[method.name])
        finish(panel, "rounds", "accuracy, mean over clients", variant)
    legend_below(figure, panels, COLUMNS)
    return figure


def _over_clients(run: Run, which: str) -> pd.Series:
    """Return by round the accuracy of the ``global`` or the ``local`` models, mean over the evaluated clients."""
    return run.record.evaluation.groupby("round")[Measured("accuracy", which).name].mean()


def _served(run: Run, method: Method) -> pd.Series:
    """Return by round the accuracy of the models with which clients continue."""
    keeps_own = getattr(algorithms, class_name(method.algorithm)).has_local_model
    return _over_clients(run, "local" if keeps_own else "global")


def _figure_of_methods(
    record: StudyRecord, draw: Callable[[Axes, Method, Run], None], x: str, y: str, bottom: float | None = None
) -> Figure:
    """Draw a panel for each algorithm that has a finished run of the first variant, from the first such run."""
    first = next(iter(record.study.variants))
    found = [(m, runs[0]) for m in record.study.methods if (runs := finished(record.states, m.name, first))]
    figure, panels = _panels(len(found))
    for panel, (method, run) in zip(panels, found, strict=True):
        draw(panel, method, run)
        finish(panel, x, y, method.name)
    for panel in panels:
        panel.set_ylim(bottom=bottom)  # last: the panels share y, and set_ylim ends their autoscaling
    legend_below(figure, panels, COLUMNS)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Create panels that share y; a single one is wide enough for the legend below it."""
    return panels_of(count, 6.0 if count == 1 else 3.6, 3.2, columns=COLUMNS, sharey=True)
