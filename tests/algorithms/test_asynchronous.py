"""FedBuff and FedAsync on the event queue: z against independent loops, resumed runs, and what is refused."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, make_model, make_trainer
from helpers.marks import each_engine
from helpers.quadratics import QuadraticData, Recorder, sample_quadratics
from helpers.reference import Local
from helpers.reference_asynchronous import asynchronous

from algorithms.running import fit, shuffled_steps, start_point
from algorithms.test_resume_equality import assert_resumes, last, run
from algorithms.test_system import ends, of_round, table
from fedbc_lightning import ClientSampler, ConfigurationError, PoissonSampler
from fedbc_lightning.algorithms import ComposedAlgorithm, FedAsync, FedAvg, FedBuff
from fedbc_lightning.core.seeding import derive, numpy_generator
from fedbc_lightning.federation.participation import Stragglers
from fedbc_lightning.federation.system import Diurnal, Lognormal, System
from fedbc_lightning.planning.totals import draw_rounds
from fedbc_lightning.server import BufferedUpdates, Staleness

SYSTEM = System(Lognormal(0.3, 1.0), bandwidth_up=Lognormal(40.0, 0.5), bandwidth_down=80.0)
SEED, STEPS, ROUNDS = 7, 3, 14


def needed() -> np.ndarray:
    """Seconds of each of the five clients under :data:`SYSTEM`, for 32 bytes either way."""
    step = 0.3 * np.exp(1.0 * numpy_generator(SEED, "compute").standard_normal(5))
    return (
        32 / 80.0 + STEPS * step + 32 / (40.0 * np.exp(0.5 * numpy_generator(SEED, "bandwidth_up").standard_normal(5)))
    )


def choose(version: int, draws: int, idle: list[int], number: int) -> list[int]:
    """Uniformly; the first draw of a round is that of a round of any method."""
    seed = derive(SEED, "sampling", version + 1, step=draws) if draws else SEED
    drawn = numpy_generator(seed, "sampling", version + 1).choice(len(idle), number, replace=False)
    return [idle[place] for place in drawn]


def buffered(server_lr: float, a: float) -> Any:
    """The step of FedBuff's Algorithm 1 with the weights (1 + τ)^-a."""
    return lambda z, found: z + server_lr * sum((w - start) * (1 + tau) ** -a for w, start, tau in found) / len(found)


def mixed(z: np.ndarray, found: list[tuple[np.ndarray, np.ndarray, int]]) -> np.ndarray:
    """The step of FedAsync's Algorithm 1 with α = 0.6 and a hinge of a = 2, b = 1."""
    ((w, _, tau),) = found
    alpha = 0.6 * (1.0 if tau <= 1 else 1 / (2 * (tau - 1) + 1))
    return (1 - alpha) * z + alpha * w


CASES = {
    "fedbuff": (partial(FedBuff, 2), 3, buffered(1.0, 0.5), 0.0),
    "fedbuff, everybody": (partial(FedBuff, 3, 0.7, "constant"), 5, buffered(0.7, 0.0), 0.0),
    "fedasync": (partial(FedAsync, 0.6, 0.2, "hinge", 2.0, 1.0), 4, mixed, 0.2),
}


@each_engine
@pytest.mark.parametrize("name", CASES)
def test_z_time_and_staleness_equal_an_independent_loop(tmp_path, name, engine):
    build, places, step, rho = CASES[name]
    recorder, data = Recorder(), QuadraticData(batch_size=2)
    options = {"max_rounds": ROUNDS, "clients_per_round": places, "local_steps": STEPS, "seed": SEED}
    trainer, _ = fit(tmp_path, build(), data, recorder, sampler=None, system=SYSTEM, engine=engine, **options)
    local = Local(lr=0.1, steps=shuffled_steps(data, 2, seed=SEED, num_steps=STEPS))
    size = build().buffer_size
    log = asynchronous(data.clients, ROUNDS, start_point(), local, needed(), places, size, choose, step, rho)
    np.testing.assert_allclose(recorder.arrays()["z"], np.stack(log["z"]), rtol=0, atol=1e-9)
    np.testing.assert_allclose(ends(trainer), log["time"], rtol=1e-12)
    assert max(max(late.values()) for late in log["staleness"]) > 1
    for number, late in enumerate(log["staleness"], start=1):
        rows = of_round(trainer, number)
        assert {client: int(row["staleness"]) for client, row in rows.items() if row["staleness"]} == late
        assert sum(int(row["bytes_up"]) for row in rows.values()) == size * 32
        assert all((row["bytes_down"] == "0") == (row["status"] == "arrived") for row in rows.values())
    drawn = draw_rounds(trainer._run.federation, ROUNDS)
    assert (drawn.simulated_seconds, drawn.bytes_up) == (ends(trainer)[-1], ROUNDS * size * 32)
    metrics = table(trainer, "metrics.csv")[-1]
    assert float(metrics["staleness/max"]) == max(log["staleness"][-1].values())


def test_a_round_in_which_nobody_starts(tmp_path):
    """Four equal clients arrive together, two for each round: only in every other round does anybody start."""
    recorder, options = Recorder(), {"max_rounds": 4, "clients_per_round": 4, "local_steps": 2, "sampler": None}
    trainer, _ = fit(tmp_path, FedBuff(2), QuadraticData(), recorder, **options)
    assert [len(sampled) for sampled in recorder.rounds()] == [4, 0, 4, 0]
    assert ends(trainer) == [2.0, 2.0, 4.0, 4.0]
    second = of_round(trainer, 2).values()
    assert [(row["status"], row["staleness"], row["num_steps"]) for row in second] == [("arrived", "1", "0")] * 2
    assert [float(row["weight"]) for row in second] == pytest.approx([2**-0.5 / 2] * 2)
    z = recorder.arrays()["z"]
    assert np.abs(z[1] - z[0]).max() > 1e-3


def test_a_client_that_arrives_twice_in_a_round_has_the_staleness_of_its_older_update(tmp_path):
    """After round 1, at 2 s, only client 2 is there: it arrives at 3 s from z^0, and again at 6 s from z^1."""
    speeds, there = tmp_path / "speeds.csv", tmp_path / "there.csv"
    speeds.write_text("client,compute\n0,1\n1,2\n2,3\n3,1\n4,1\n")
    there.write_text("client,start,end\n0,0,1\n1,0,1\n2,0,99\n")
    options = {"max_rounds": 2, "clients_per_round": 3, "local_steps": 1, "sampler": None}
    system = System(str(speeds), availability=str(there))
    trainer, _ = fit(tmp_path, FedBuff(2), QuadraticData(), Recorder(), system=system, **options)
    assert ends(trainer) == [2.0, 6.0]
    (row,) = of_round(trainer, 2).values()
    assert (row["client"], row["status"], row["staleness"], row["bytes_up"]) == ("2", "ok", "1", "64")
    assert float(table(trainer, "metrics.csv")[-1]["staleness/mean"]) == 0.5


def test_a_client_that_diverged_arrives_with_nothing(tmp_path):
    clients = sample_quadratics()
    clients[1] = clients[1][0], clients[1][1] * np.nan
    recorder, options = Recorder(), {"max_rounds": 12, "clients_per_round": 3, "sampler": None, "system": SYSTEM}
    trainer, _ = fit(tmp_path, FedBuff(1), QuadraticData(clients), recorder, **options)
    assert np.isfinite(recorder.arrays()["z"]).all()
    mine = [row for row in table(trainer, "clients.csv") if row["client"] == "1"]
    assert "nonfinite" in {row["status"] for row in mine}
    assert any(row["staleness"] for row in mine)
    assert {float(row["weight"]) for row in mine} == {0.0}


@pytest.mark.filterwarnings("ignore:trainer.* when the run began")
@pytest.mark.parametrize("build", [partial(FedBuff, 2), FedAsync])
def test_resumed_run_equals_unbroken_run_with_updates_in_flight(tmp_path, build):
    options = {"system": System(Lognormal(0.3, 1.0), availability=Diurnal(0.6, 5.0, 0.5)), "clients_per_round": 3}
    whole, path = assert_resumes(tmp_path, build, 4, 9, **options)
    rows = table(whole, "clients.csv")
    assert any(row["round"] == "5" and int(row["staleness"] or 0) > 0 for row in rows)  # was in flight at the stop
    with pytest.raises(ConfigurationError, match=r"^trainer\.system: before round 10, other clients took part"):
        run(tmp_path / "parts", build, 12, ckpt_path=path, clients_per_round=3)


def test_updates_on_their_way_lie_in_a_file_if_memory_is_short(tmp_path, monkeypatch):
    """A client may arrive and start again in one round: the older row is read while the newer one is staged."""
    options = {"system": System(Lognormal(0.3, 1.0)), "clients_per_round": 5}
    memory = run(tmp_path / "memory", partial(FedBuff, 3), 8, **options)
    rows = [row for row in table(memory, "clients.csv") if row["status"] == "ok"]
    assert any(int(row["staleness"] or 0) > 0 for row in rows)
    monkeypatch.setattr("fedbc_lightning.state.client_rows.IN_MEMORY_BELOW", 0)
    first = run(tmp_path / "file", partial(FedBuff, 3), 4, **options)
    file = run(tmp_path / "file", partial(FedBuff, 3), 8, ckpt_path=str(last(first)), **options)
    assert file.clients.file_rows is not None
    assert torch.equal(memory.server.z, file.server.z)


class LastOrFirst(ClientSampler):
    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last

    def __call__(self, num_clients: int, num_sampled: int, seed: int, round: int) -> list[int]:
        return [num_clients - 1 - k if self.is_last else k for k in range(num_sampled)]


@pytest.mark.parametrize("build", [partial(FedBuff, 2), FedAvg])
def test_a_run_whose_rounds_were_others_does_not_go_on(tmp_path, build):
    options = {"system": System(Lognormal(0.3, 1.0)), "clients_per_round": 3}
    first = run(tmp_path, build, 3, sampler=LastOrFirst(False), **options)
    with pytest.raises(ConfigurationError, match=r"^trainer\.system: before round 4, other clients took part"):
        run(tmp_path, build, 5, ckpt_path=str(last(first)), sampler=LastOrFirst(True), **options)


@pytest.mark.parametrize("policy", ["average", "local"])
def test_variances_of_batch_norm_stay_between_those_of_the_clients(tmp_path, policy):
    data = BoringData()
    data.arrays = [(inputs / 10, targets) for inputs, targets in data.arrays]  # far below the initial variance of 1
    options = {"system": System(Lognormal(1.0, 1.0)), "clients_per_round": 6, "local_epochs": 3, "buffers": policy}
    trainer, model = make_trainer(tmp_path, max_rounds=8, **options), make_model()
    trainer.fit(model, data, FedBuff(2))
    variances = model.state_dict()["net.1.running_var"]
    assert (variances > 0).all()
    assert (variances < 1).all()
    assert all(np.isfinite(float(row["loss/global"])) for row in table(trainer, "metrics.csv"))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (partial(FedBuff, 6), {}, r"algorithm\.buffer_size: round 1 waits for 6 updates"),
        (FedAsync, {"system": System(deadline=9.0)}, r"trainer\.system\.deadline: FedAsync keeps a number"),
        (FedAsync, {"stragglers": Stragglers(0.5)}, r"trainer\.stragglers: FedAsync allows neither partial work"),
        (FedAsync, {"sampler": PoissonSampler()}, r"trainer\.sampler: FedAsync keeps a number of clients"),
        (partial(FedAsync, 1.5), {}, r"algorithm\.mixing: got 1\.5"),
    ],
)
def test_refused(tmp_path, build, options, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, build(), QuadraticData(), Recorder(), **{"sampler": None} | options)


def test_a_part_for_arrivals_is_refused_where_rounds_wait_for_their_clients(tmp_path):
    build = partial(ComposedAlgorithm, server_callbacks=[BufferedUpdates(1.0, Staleness())])
    with pytest.raises(ConfigurationError, match=r"BufferedUpdates takes updates that arrive .* take FedBuff"):
        fit(tmp_path, build(), QuadraticData(), Recorder(), sampler=None)
