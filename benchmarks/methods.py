"""Every method on Synthetic(0.5, 0.5), tuned alike; and what robust rules keep when clients attack.

    python benchmarks/methods.py [--table methods|attacks] [--out FOLDER] [--quick] [--only NAME ...]

Data, model and trainer are those of configs/synthetic.yaml, with one seed: the same partition, initial model and
sampled clients for all. A method's own values are tried at the config's learning rate, then other learning rates with
the best of them, on a validation part cut from the training data; the test data stay unseen until then. Finished runs
lie in <out>/methods.jsonl or attacks.jsonl and are not run again. --quick: two rounds a run.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, seed_everything
from rich.console import Console
from rich.table import Table

from fedbc_lightning import FederatedTrainer, algorithms
from fedbc_lightning.algorithms import FedAvg, FedCoMedPlus, FederatedAlgorithm, FedGeoMedPlus, FedPlus
from fedbc_lightning.callbacks import ByzantineClients
from fedbc_lightning.cli.classes import import_object
from fedbc_lightning.core import seeding
from fedbc_lightning.local import Layerwise, Norm, SquaredNorm
from fedbc_lightning.server import robust

CONFIG = Path(__file__).parents[1] / "configs" / "synthetic.yaml"
ROUNDS = 100
TUNING_ROUNDS = 25
TUNING_ROUNDS_OF_BASELINES = 40
VAL_FRACTION = 0.1
ACCURACIES = ("global_final", "global_best", "local_final", "local_best")
COSTS = {"kilobytes": 0, "seconds": 2}
"""With their decimals."""
LAST = 5
"""Rounds whose mean validation accuracy decides."""

Point = dict[str, Any]
"""Values that are tried: arguments of the algorithm, or with a dot (``model.lr``) of a section of the config."""


def grid(**values: Iterable[Any]) -> list[Point]:
    """The product of lists of values, by argument.

    Example:
        >>> grid(a=[1, 2], b=[3])
        [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


@dataclass
class Method:
    """How a method is tuned and run.

    Attributes:
        own: Values of its own that are tried, at the config's learning rate.
        lrs: Learning rates of the clients' optimizer that are tried after that, with the best of them.
        settings: Fixed values of sections of the config, e.g. ``trainer.clients_per_round``.
        personal: Tuned by the clients' own models (mean over clients), not by the global one (pooled data).
        note: What the reader of its row must know.
        build: Makes the algorithm; None: the class of that name.
        tuning_rounds: Rounds of a run that tunes.
    """

    own: list[Point] = field(default_factory=lambda: [{}])
    lrs: tuple[float, ...] = (0.03,)
    settings: Point = field(default_factory=dict)
    personal: bool = False
    note: str = ""
    build: Callable[..., FederatedAlgorithm] | None = None
    tuning_rounds: int = TUNING_ROUNDS


def _layerwise(sigma: float) -> FedPlus:
    return FedPlus(sigma, Layerwise({"*bias": SquaredNorm(0.001)}, default=Norm(0.1)))


def _loopless(p: float, alpha: float, note: str, **options: Any) -> Method:
    own = [{"penalty": penalty, "probability": p, "lr": alpha, **options} for penalty in (0.1, 1.0)]
    everyone = {"trainer.clients_per_round": 1.0}
    said = f"all clients; a round is one communication after {1 / p:.0f} local steps on average: {note}"
    return Method(own, lrs=(), settings=everyone, personal=True, note=said)


PLAIN = {"model.momentum": 0.0}
"""For methods that take plain steps; their step sizes are given the factor 1 / (1 - momentum) of the others' steps."""

BIAS_STAYS = {"trainer.local_parameters": ["*.bias"]}
"""For methods that need a head, which a logistic model does not have."""

METHODS: dict[str, Method] = {
    # one model
    "Centralized": Method(
        lrs=(0.003, 0.03, 0.1),
        settings={"trainer.local_epochs": None, "trainer.local_steps": 895},
        note="895 steps per round, as many as FedAvg's 10 clients take on average",
        tuning_rounds=TUNING_ROUNDS_OF_BASELINES,
    ),
    "FedAvg": Method(lrs=(0.003, 0.03, 0.1), tuning_rounds=TUNING_ROUNDS_OF_BASELINES),
    "FedProx": Method(grid(mu=[0.01, 0.1, 1.0]), tuning_rounds=TUNING_ROUNDS_OF_BASELINES),
    "MOON": Method(
        grid(features=["network.1"], mu=[0.1, 1.0]), tuning_rounds=TUNING_ROUNDS_OF_BASELINES,
        note="the features are the logits of the linear model",
    ),
    "FedNova": Method(lrs=(0.003, 0.03, 0.1), tuning_rounds=TUNING_ROUNDS_OF_BASELINES),
    "FedBuff": Method(grid(buffer_size=[5, 10]), note="a round is an update of z by K clients, all of one speed"),
    "FedAsync": Method(grid(mixing=[0.3, 0.6, 0.9]), note="a round is an update of z by one client, all of one speed"),
    "SCAFFOLD": Method(lrs=(0.003, 0.03), tuning_rounds=TUNING_ROUNDS_OF_BASELINES),
    "FedAvgM": Method(grid(server_lr=[0.1, 0.316, 1.0]), lrs=()),
    "FedAdagrad": Method(grid(server_lr=[0.1, 0.316, 1.0]), lrs=()),
    "FedAdam": Method(grid(server_lr=[0.01, 0.0316, 0.1]), lrs=()),
    "FedYogi": Method(grid(server_lr=[0.01, 0.0316, 0.1]), lrs=()),
    "QFedAvg": Method(
        grid(q=[0.001]) + grid(q=[0.1, 1.0], lipschitz=[1.0]), lrs=(),
        note="1/L of about the E epochs' steps together: with L = 1 / client lr z hardly moves unless q is tiny",
    ),
    "FedDyn": Method(grid(alpha=[0.001, 0.01, 0.1])),
    "FedADMM": Method(grid(rho=[0.01, 0.1, 1.0]), lrs=()),
    "FedPD": Method(
        grid(rho=[0.1, 1.0]), lrs=(), settings={"trainer.clients_per_round": 1.0},
        note="all clients: 3 times the work a round",
    ),
    "FedExP": Method(grid(epsilon=[1e-3, 1e-1]), lrs=(0.003,)),
    "FedLiLS": Method(grid(server_step=["max", "convex"]), lrs=(), note="no learning rate to tune"),
    "FedLiLU": Method(grid(server_lr=[0.01, 0.1, 1.0]), lrs=()),
    "RFA": Method(lrs=(0.003,)),
    "FedBC": Method(grid(dual_lr=[1e-4, 1e-3, 1e-2])),
    # a model for each client
    "FedBCFineTune": Method(grid(dual_lr=[1e-4, 1e-2], finetune_lr=[0.1]), lrs=(), personal=True),
    "PerFedBC": Method(grid(dual_lr=[1e-4, 1e-2], inner_lr=[0.1], outer_lr=[0.02]), lrs=(), personal=True),
    "PerFedAvg": Method(grid(inner_lr=[0.01, 0.1], outer_lr=[0.02]), lrs=(), personal=True),
    "Local": Method(lrs=(0.03, 0.1), personal=True),
    "PFedMe": Method(
        grid(penalty=[15.0], personal_lr=[0.01]), settings={**PLAIN, "model.lr": 0.01}, personal=True,
        note="5 gradients per step",
    ),
    "FedRep": Method(lrs=(0.03, 0.1), settings=BIAS_STAYS, personal=True, note="the biases are the head"),
    "FedBABU": Method(grid(finetune_lr=[0.01, 0.1]), lrs=(), settings=BIAS_STAYS, personal=True, note="as FedRep"),
    "Ditto": Method(grid(penalty=[0.1, 1.0]), lrs=(0.03, 0.1), personal=True),
    "APFL": Method(
        grid(mixture=[0.5, 0.9], adaptive=[False]) + grid(mixture=[0.5], adaptive=[True]), lrs=(0.06, 0.2),
        settings={**PLAIN, "model.lr": 0.02}, personal=True,
    ),
    "FedAvgPlus": Method(grid(sigma=[0.1, 1.0, 10.0]), lrs=(0.03, 0.1), personal=True),
    "FedGeoMedPlus": Method(grid(sigma=[0.1, 1.0, 10.0]), lrs=(0.03, 0.1), personal=True),
    "FedCoMedPlus": Method(grid(sigma=[0.1, 1.0, 10.0]), lrs=(0.03, 0.1), personal=True),
    "FedPlus": Method(
        grid(sigma=[0.1, 1.0]), lrs=(0.03, 0.1), personal=True, build=_layerwise,
        note="weights by Norm(0.1), biases by SquaredNorm(0.001)",
    ),
    "L2GD": _loopless(1 / 30, 0.9, "full gradients"),
    "L2SGD": _loopless(1 / 30, 0.9, "as many batches as FedAvg's 10 clients"),
    "L2SGD2": _loopless(1 / 30, 0.9, "as L2SGD"),
    "L2SGDPlus": _loopless(1 / 30, 0.9, "as L2SGD"),
    "L2SGDPlusPlus": _loopless(1 / 90, 0.3, "10 clients a step, as many batches as L2SGD", num_sampled=10),
}  # fmt: skip
METHODS["L2GD"].settings["data.batch_size"] = 4096  # the same full gradients, summed in fewer pieces

ATTACKERS = 6
"""Of 30 clients; no round can have more."""
CLIPPED = 0.5
"""About the median norm of what honest clients send: 0.4 in the first rounds, 0.3 after 25."""
RULES: dict[str, Callable[[], FederatedAlgorithm]] = {
    "mean": lambda: FedAvg("uniform"),
    "coordinate median": lambda: FedAvg("uniform", robust.CoordinateMedian()),
    "trimmed mean": lambda: FedAvg("uniform", robust.TrimmedMean(0.4)),
    "Krum": lambda: FedAvg("uniform", robust.Krum(ATTACKERS)),
    "Multi-Krum": lambda: FedAvg("uniform", robust.MultiKrum(ATTACKERS)),
    "RFA (geometric median)": lambda: FedAvg("uniform", robust.GeometricMedian()),
    "centred clipping": lambda: FedAvg("uniform", robust.CenteredClipping(radius=CLIPPED)),
    "norm bound": lambda: FedAvg("uniform", robust.NormBound(bound=CLIPPED)),
    "FedGeoMedPlus": lambda: FedGeoMedPlus(sigma=1.0, mixing=1.0),
    "FedCoMedPlus": lambda: FedCoMedPlus(sigma=1.0, mixing=1.0),
}
ATTACKS: dict[str, Point] = {
    "none": {},
    "sign flip x 1": {"attack": "sign_flip", "scale": 1.0},
    "sign flip x 5": {"attack": "sign_flip", "scale": 5.0},
    "random x 5": {"attack": "random", "scale": 5.0},
}
ATTACK_SETTINGS: Point = {"trainer.clients_per_round": 15, "trainer.local_epochs": 1}
ATTACKED_DATA: dict[str, tuple[int, Point]] = {
    "Synthetic(0.5, 0.5)": (ROUNDS, {}),
    "Digits, Dirichlet(1)": (
        60,
        {
            "data": {
                "class_path": "fedbc_lightning.datamodules.DigitsDataModule",
                "init_args": {
                    "partitioner": {
                        "class_path": "fedbc_lightning.partition.Dirichlet",
                        "init_args": {"num_clients": 30, "alpha": 1.0},
                    },
                    "batch_size": 20,
                },
            },
            "model": {
                "class_path": "fedbc_lightning.models.MLP",
                "init_args": {"num_features": 64, "dropout": 0.0, "lr": 0.1, "momentum": 0.5},
            },
        },
    ),
}
"""Rounds and settings. On the first every client has a task of its own, which no rule can tell from an attack."""


def method_names() -> list[str]:
    """All exported methods, in the order of the tables.

    Raises:
        KeyError: One has no entry in ``METHODS``.
    """
    exported = set(algorithms.__all__) - {"FederatedAlgorithm", "ComposedAlgorithm"}
    missing = sorted(exported - set(METHODS))
    if missing:
        raise KeyError(f"METHODS of {__file__} has no entry for {', '.join(missing)}")
    return [name for name in METHODS if name in exported]


# one run


def train(algorithm: FederatedAlgorithm, rounds: int, settings: Point, callbacks: list[Any] | None = None) -> Point:
    """One run on synthetic.yaml with some of its values replaced; every round's metrics by name, and summaries."""
    config = yaml.safe_load(CONFIG.read_text())
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        if not dot:
            config[section] = value
        else:
            (config[section] if section == "trainer" else config[section]["init_args"])[name] = value
    seed = config.get("seed_everything", 0)
    seed_everything(seed, workers=True, verbose=False)
    data = _build(config["data"])
    cpu = torch.device("cpu")
    with seeding.preserved_globals(cpu):  # as fedbc-cli does, so that its runs start from the same model
        seeding.seed_globals(seeding.derive(seed, "init"), cpu)
        model = _build(config["model"])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    options = {**config["trainer"], **quiet, "devices": 1, "max_rounds": rounds, "callbacks": callbacks}
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(**{**options, "default_root_dir": folder})
        trainer.fit(model, data, algorithm)
        with open(f"{trainer.log_dir}/metrics.csv") as file:
            return _columns(list(csv.DictReader(file)))


class EvaluateLast(Callback):
    """Leaves out the evaluation of all rounds but the last ones, which takes as long as training."""

    def on_train_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Off."""
        trainer.eval_every_n_rounds = 0

    def on_round_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """On."""
        if trainer.current_round > trainer.max_rounds - LAST:
            trainer.eval_every_n_rounds = 1


class HonestAccuracy(Callback):
    """Accuracy of the global model on the test data of the clients that would never attack, pooled, by round."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_round_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Take it from the evaluation of each client."""
        attackers = ByzantineClients(0.2).clients(trainer.datamodule.num_clients, trainer.seed)
        found = trainer.evaluation.clients["accuracy/global"]
        honest = [client for client in found if client not in attackers]
        sizes = trainer.datamodule.num_samples("test")[honest]
        self.values.append(float(np.average([found[client] for client in honest], weights=sizes)))


def _build(section: Point) -> Any:
    nested = {name: _build(value) for name, value in section["init_args"].items() if isinstance(value, dict)}
    return import_object(section["class_path"])(**section["init_args"] | nested)


def _columns(rows: list[dict[str, str]]) -> dict[str, list[float]]:
    """The metrics of rounds 1, 2, ...; NaN where a round has none."""
    return {name: [float(row[name] or "nan") for row in rows[1:]] for name in rows[0]}


def summary(metrics: dict[str, list[float]]) -> Point:
    """What is kept of a final run."""
    kept: Point = {}
    for which in ("global", "local"):
        values = metrics.get(f"accuracy/{which}")
        if values is not None:
            kept |= {f"{which}_final": values[-1], f"{which}_best": max(values)}
    kept["kilobytes"] = mean(a + b for a, b in zip(metrics["comm/bytes_up"], metrics["comm/bytes_down"], strict=True))
    kept["kilobytes"] /= 1000
    kept["seconds"] = median(metrics["time/round_seconds"])
    return kept


class Finished:
    """The runs that are done, in a file with one line each.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.is_file() else ""
        whole = text[: text.rfind("\n") + 1]  # a line without an end was cut off
        if whole != text:
            path.write_text(whole)
        records = map(json.loads, whole.splitlines())
        self._found = {self._key(record["run"]): record["result"] for record in records}

    def run(self, key: Point, compute: Callable[[], Point]) -> Point:
        """The result for a key: from the file, or computed and written there."""
        if self._key(key) not in self._found:
            started = time.perf_counter()
            try:
                result = compute()
            except ValueError as error:  # no client came out finite
                result = {"failed": str(error)}
            result["wall_seconds"] = round(time.perf_counter() - started, 2)
            self._found[self._key(key)] = result
            with self.path.open("a") as file:
                file.write(json.dumps({"run": key, "result": result}) + "\n")
            print(time.strftime("%H:%M:%S"), json.dumps(key), json.dumps(result), flush=True)
        return self._found[self._key(key)]

    @staticmethod
    def _key(key: Point) -> str:
        return json.dumps(key, sort_keys=True)


# the tables


def make(name: str, point: Point) -> tuple[FederatedAlgorithm, Point]:
    """A method with values of its grid, and the settings of its run."""
    method = METHODS[name]
    own = {key: value for key, value in point.items() if "." not in key}
    settings = {key: value for key, value in point.items() if "." in key}
    return (method.build or getattr(algorithms, name))(**own), {**method.settings, **settings}


def score(name: str, point: Point, rounds: int) -> Point:
    """The mean validation accuracy of the last rounds; of a run that lost its numbers 0."""
    algorithm, settings = make(name, point)
    metrics = train(algorithm, rounds, {**settings, "data.val_fraction": VAL_FRACTION}, [EvaluateLast()])
    which = "local" if METHODS[name].personal else "global"
    return {"val_accuracy": mean(metrics[f"accuracy/val_{which}"][-LAST:])}


def tune(name: str, finished: Finished, rounds: int) -> Point:
    """The best point of a method's grid; of equal ones the first."""

    def best(points: list[Point]) -> Point:
        def value(point: Point) -> float:
            key = {"method": name, "point": point, "rounds": rounds, "stage": "tune"}
            found = finished.run(key, lambda: score(name, point, rounds)).get("val_accuracy", 0.0)
            return 0.0 if math.isnan(found) else found

        return max(points, key=value)

    method = METHODS[name]
    own = best(method.own) if len(method.own) > 1 or method.lrs else method.own[0]
    return best([own, *({**own, "model.lr": lr} for lr in method.lrs)]) if method.lrs else own


def methods_table(names: list[str], finished: Finished, quick: bool) -> Iterator[list[str]]:
    """Header, then a row per method."""
    yield ["method", "chosen", "global final", "best", "local final", "best", "kB/round", "s/round", "note"]
    rounds = 2 if quick else ROUNDS
    for name in names:
        point = tune(name, finished, 2 if quick else METHODS[name].tuning_rounds)
        key = {"method": name, "point": point, "rounds": rounds, "stage": "final"}
        algorithm, settings = make(name, point)
        result = finished.run(key, lambda a=algorithm, s=settings: summary(train(a, rounds, s)))
        note = "; ".join(filter(None, [METHODS[name].note, result.get("failed")]))
        numbers = [_percent(result.get(column)) for column in ACCURACIES]
        cost = [f"{result[key]:.{digits}f}" if key in result else "" for key, digits in COSTS.items()]
        yield [name, _values(point), *numbers, *cost, note]


def attack(rule: str, attack: str, rounds: int, settings: Point) -> Point:
    """A rule under an attack: what honest clients have of the global model."""
    honest, options = HonestAccuracy(), ATTACKS[attack]
    callbacks = [honest, *([ByzantineClients(0.2, **options)] if options else [])]
    kept = summary(train(RULES[rule](), rounds, settings, callbacks))
    return {**kept, "honest_final": honest.values[-1], "honest_best": max(honest.values)}


def attacks_table(names: list[str], finished: Finished, quick: bool) -> Iterator[list[str]]:
    """Header, then a row per data and rule: final (best) accuracy of the global model under each attack."""
    yield ["data", "rule", *ATTACKS]
    for data, (rounds, of_data) in ATTACKED_DATA.items():
        rounds, settings = 2 if quick else rounds, {**ATTACK_SETTINGS, **of_data}
        for name in names:
            row = [data, name]
            for kind in ATTACKS:
                key = {"rule": name, "attack": kind, "rounds": rounds, "settings": settings}
                result = finished.run(key, lambda run=(name, kind, rounds, settings): attack(*run))
                row.append(f"{_percent(result.get('honest_final'))} ({_percent(result.get('honest_best'))})")
            yield row


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _values(point: Point) -> str:
    shown = {key.replace("model.lr", "client lr"): value for key, value in point.items()}
    return ", ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())


def show(title: str, rows: list[list[str]], path: Path) -> None:
    """Print a table and write it as Markdown."""
    header, *body = rows
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name in ("method", "chosen", "note", "data", "rule") else "right")
    for row in body:
        table.add_row(*row)
    Console(width=200).print(table)
    lines = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(row) for row in body)]
    path.write_text(f"{title}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Run what is not yet done, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=["methods", "attacks"], help="only this one")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--quick", action="store_true", help="two rounds a run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these methods or rules")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    tables = {
        "methods": ("Synthetic(0.5, 0.5), test accuracy in %", methods_table, method_names()),
        "attacks": (
            "6 of 30 clients attack: accuracy in % of the global model on the honest clients' test data, final (best)",
            attacks_table,
            list(RULES),
        ),
    }
    known = [name for _, _, names in tables.values() for name in names]
    if unknown := set(options.only or []) - set(known):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; there is: {', '.join(known)}")
    for key, (title, rows, names) in tables.items():
        chosen = [name for name in names if not options.only or name in options.only]
        if chosen and options.table in (None, key):
            finished = Finished(options.out / f"{key}.jsonl")
            show(title, list(rows(chosen, finished, options.quick)), options.out / f"{key}.md")


if __name__ == "__main__":
    main()
