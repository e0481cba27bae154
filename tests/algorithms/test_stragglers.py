"""Clients that do less than asked, or vanish: whose work counts, with which weight, and that nothing hangs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.boring import read_csv
from helpers.marks import of_each
from helpers.quadratics import QuadraticData, Recorder, RecordingSampler
from helpers.reference import Local, full_batches

from algorithms.registry import BY_NAME, METHODS
from algorithms.running import fit, start_point
from fedbc_lightning import ConfigurationError
from fedbc_lightning.algorithms import FedAvg, FedProx
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.seeding import numpy_generator
from fedbc_lightning.federation.participation import Stragglers

EPOCHS, ROUNDS = 4, 8


def run(tmp_path: Path, algorithm: Any, stragglers: Stragglers, **options: Any) -> Any:
    """Five clients, all sampled in every round unless said otherwise."""
    recorder, sampler = options.pop("recorder", Recorder()), RecordingSampler()
    settings = {"max_rounds": ROUNDS, "local_epochs": EPOCHS, "sampler": sampler, "stragglers": stragglers} | options
    trainer, _ = fit(tmp_path, algorithm, QuadraticData(), recorder, **settings)
    return trainer, sampler, recorder


def rows(trainer: Any) -> list[dict[str, str]]:
    return read_csv(Path(trainer.log_dir) / "clients.csv")


@pytest.mark.parametrize("name", ["fedavg-samples", "fedprox-uniform", "scaffold-auto", "fedbc-fixed", "feddyn"])
def test_absent_clients_are_as_if_never_sampled(tmp_path, name):
    """They keep their state and weigh nothing; the numbers are those of a run that sampled only the others."""
    setting = BY_NAME[name] if name in BY_NAME else next(s for s in METHODS if s.name.startswith(name))
    stragglers = Stragglers(dropout=0.4)
    recorder = Recorder(setting.scalars, setting.vectors, setting.server)
    trainer, sampler, _ = run(tmp_path, setting.build(), stragglers, recorder=recorder)
    present = []
    for number, sampled in sorted(sampler.rounds.items()):
        absent = stragglers.draw(sampled, 0, number)[1]
        assert len(absent) == 2
        present.append([client for client in sampled if client not in absent])
    local = Local(lr=0.1, steps=full_batches(EPOCHS))
    expected = setting.reference(QuadraticData().clients, present, start_point(), local)
    for key, found in recorder.arrays().items():
        if key != "flat_z":
            np.testing.assert_allclose(found, expected[key], rtol=0, atol=1e-9, err_msg=key)
    for row in rows(trainer):
        is_absent = int(row["client"]) not in present[int(row["round"]) - 1]
        assert (row["status"] == "absent") == is_absent
        assert (row["bytes_up"] == "0") == is_absent
        assert int(row["bytes_down"]) > 0
        if is_absent:
            assert float(row["weight"]) == 0


def test_partial_work_counts_where_the_method_uses_it(tmp_path):
    """FedProx: two of five clients do 1 to E - 1 epochs, drawn by (seed, round, client), and keep their weight."""
    stragglers = Stragglers(fraction=0.4)
    recorder = Recorder()
    trainer, sampler, _ = run(tmp_path, FedProx(0.3), stragglers, recorder=recorder)
    late = {number: stragglers.draw(sampled, 0, number)[0] for number, sampled in sampler.rounds.items()}

    def steps(round: int, client: int) -> list[list[None]]:
        if client not in late[round]:
            return [[None]] * EPOCHS
        return [[None]] * int(numpy_generator(0, "partial work", round, client).integers(1, EPOCHS))

    rounds = [sampler.rounds[number] for number in sorted(sampler.rounds)]
    expected = BY_NAME["fedprox-samples"].reference(
        QuadraticData().clients, rounds, start_point(), replace(Local(lr=0.1), steps=steps)
    )
    np.testing.assert_allclose(recorder.arrays()["z"], expected["z"], rtol=0, atol=1e-9)
    found = rows(trainer)
    assert {row["status"] for row in found} == {"ok"}
    for row in found:
        is_late = int(row["client"]) in late[int(row["round"])]
        assert (int(row["num_steps"]) < EPOCHS) == is_late
        assert float(row["weight"]) > 0


def test_fedavg_drops_partial_work_unless_told_otherwise(tmp_path):
    """As in the FedProx paper; partial_work overrules the method."""
    dropped, _, _ = run(tmp_path / "a", FedAvg(), Stragglers(fraction=0.4))
    assert sum(row["status"] == "straggler" for row in rows(dropped)) == 2 * ROUNDS
    used, _, recorder = run(tmp_path / "b", FedAvg(), Stragglers(fraction=0.4, partial_work="used"))
    assert {row["status"] for row in rows(used)} == {"ok"}
    _, _, other = run(tmp_path / "c", FedProx(0.0), Stragglers(fraction=0.4))
    np.testing.assert_array_equal(recorder.arrays()["z"], other.arrays()["z"])
    assert float(dropped.callback_metrics["num_clients/straggler"]) == 2


@of_each(METHODS)
def test_every_method_copes_with_stragglers_and_absence_or_refuses_them(tmp_path, setting):
    """With half of the clients late and a quarter gone: finite numbers, weights that sum to 1, a resumable run."""
    options = {"clients_per_round": 4, "max_rounds": 3} | dict(setting.options)
    build = setting.build
    if build().partial_work == "refused":
        with pytest.raises(ConfigurationError, match="stragglers"):
            run(tmp_path, build(), Stragglers(fraction=0.5, dropout=0.25), **options)
        return
    trainer, _, _ = run(tmp_path, build(), Stragglers(fraction=0.5, dropout=0.25), **options)
    assert torch.isfinite(trainer.server.z).all()
    for number in (1, 2, 3):
        found = [row for row in rows(trainer) if int(row["round"]) == number]
        assert sum(row["status"] == "absent" for row in found) == 1
        weights = [float(row["weight"]) for row in found]
        assert sum(weights) == pytest.approx(1)


def test_a_straggler_of_one_epoch_or_of_steps_does_fewer_steps():
    rng = np.random.default_rng(0)
    assert {LocalTraining(epochs=1).shortened(6, rng).steps for _ in range(100)} == {1, 2, 3, 4, 5}
    assert {LocalTraining(epochs=None, steps=4).shortened(6, rng).steps for _ in range(100)} == {1, 2, 3}
    assert {LocalTraining(epochs=3).shortened(6, rng).epochs for _ in range(100)} == {1, 2}
    assert LocalTraining(epochs=1).shortened(1, rng).steps == 1
