"""What it costs to reach a value: the first round that did, over the seeds that did, on any axis."""

from __future__ import annotations

import pandas as pd
import pytest

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.results import sampled_clients
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.tables import target_tables

BASE = {"base": "digits.yaml", "algorithms": {"FedAvg": {}, "FedBC": {}}, "metrics": ["accuracy/global", "loss/global"]}


def curves() -> pd.DataFrame:
    """FedAvg gets to 80 % after 4 and 8 seconds, FedBC with one of two seeds after 3; the loss of both ends at 0.5."""
    rows = []
    for algorithm, seed, accuracies in (
        ("FedAvg", 0, (0.1, 0.5, 0.8, 0.7)),
        ("FedAvg", 1, (0.1, 0.3, 0.5, None, 0.9)),
        ("FedBC", 0, (0.1, 0.9, 0.95)),
        ("FedBC", 1, (0.1, 0.2, 0.3)),
    ):
        step = 2.0 if algorithm == "FedAvg" else 3.0
        rows += [("all", algorithm, seed, k, k * step, a, 1.0 if k < 2 else 0.5) for k, a in enumerate(accuracies)]
    names = ["variant", "algorithm", "seed", "rounds", "simulated_seconds", "accuracy/global", "loss/global"]
    return pd.DataFrame(rows, columns=names)


def test_costs_are_those_of_the_first_round_that_reached_the_value():
    targets = {"accuracy/global": [0.8, 0.99], "loss/global": [0.5]}
    study = Study(**BASE, seeds=2, axis="simulated_seconds", targets=targets)
    (text, accuracy), (_, loss) = target_tables(study, curves())
    assert text.startswith("simulated seconds until accuracy/global first reaches a value; mean ± standard deviation")
    assert accuracy == [
        ["", "≥ 80 %", "≥ 99 %"],
        ["FedAvg", "6 ± 2.83", "never"],
        ["FedBC", "3 (1 of 2 seeds)", "never"],
    ]
    assert loss == [["", "≤ 0.5"], ["FedAvg", "4 ± 0"], ["FedBC", "6 ± 0"]]
    rounds = Study(**BASE, seeds=2, targets={"accuracy/global": [0.8]})
    assert next(iter(target_tables(rounds, curves())))[1][1] == ["FedAvg", "3 ± 1.41"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": "days", "targets": {"accuracy/global": [0.8]}}, "study.axis: got 'days'; give rounds, bytes"),
        ({"axis": "simulated_seconds"}, "axis: simulated_seconds is for targets, and none are given"),
        (
            {"targets": {"accuracy/global": [0.8, 90]}},
            "targets: got 90; give shares, such as 0.9 for 90 %",
        ),
        ({"targets": {"accuracy/globl": [0.8]}}, "targets: the study has no 'accuracy/globl'; did you mean"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Study(**BASE, **options)


def test_sampled_clients_are_not_compared_where_time_decides_them(tmp_path):
    (tmp_path / "clients.csv").write_text("round,client\n1,3\n1,0\n")
    assert sampled_clients(RunRecord(tmp_path)) == ((0, 3),)
    (tmp_path / "config.yaml").write_text("trainer: {system: {availability: {share: 0.5}}}\n")
    assert sampled_clients(RunRecord(tmp_path)) == ()
