"""The simulated clock: how long rounds take, who is there and in time, resumed runs, and what is refused."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.boring import read_csv
from helpers.marks import each_engine
from helpers.quadratics import QuadraticData, QuadraticModule

from algorithms.running import QUIET
from algorithms.test_resume_equality import assert_resumes, run
from fedbc_lightning import ConfigurationError, FederatedTrainer, Privacy
from fedbc_lightning.algorithms import L2GD, Centralized, FedAvg, FedProx
from fedbc_lightning.cli.printed_tables import print_plan
from fedbc_lightning.core.seeding import numpy_generator
from fedbc_lightning.federation.participation import Stragglers
from fedbc_lightning.federation.system import Availability, DeviceFile, Diurnal, Lognormal, System
from fedbc_lightning.pages.page import render
from fedbc_lightning.pages.pages import run_page

SPEEDS = "client,compute,bandwidth_up\n0,1.0,100\n1,2.0,100\n2,4.0,50\n3,0.5,100\n4,1.5,200\n"
L2 = partial(L2GD, penalty=1.0, probability=0.5, lr=0.1)
DOWN = UP = 32
"""Bytes of a model of four float64; with weights by samples, n_i is 4 bytes more up."""


def fit(folder: Path, system: System | None, algorithm: Any = None, **options: Any) -> Any:
    """Four local steps of each of five clients, in three rounds unless said otherwise."""
    settings = QUIET | {"max_rounds": 3, "local_steps": 4, "seed": 1, "system": system} | options
    trainer = FederatedTrainer(**settings, default_root_dir=folder)
    trainer.fit(QuadraticModule(), QuadraticData(), algorithm or FedAvg("uniform"))
    return trainer


def table(trainer: Any, name: str) -> list[dict[str, str]]:
    return read_csv(Path(trainer.log_dir) / name)


def ends(trainer: Any) -> list[float]:
    """The simulated seconds after each round."""
    return [float(row["time/simulated_seconds"]) for row in table(trainer, "metrics.csv")[1:]]


def of_round(trainer: Any, number: int) -> dict[int, dict[str, str]]:
    return {int(row["client"]): row for row in table(trainer, "clients.csv") if row["round"] == str(number)}


@each_engine
def test_a_round_takes_as_long_as_its_slowest_client(tmp_path, engine):
    """Speeds are median * exp(sigma * xi) with one draw for each client, the same in every round and engine."""
    system = System(Lognormal(0.2, 0.7), bandwidth_up=Lognormal(1000.0, 0.5), bandwidth_down=400.0)
    trainer = fit(tmp_path, system, FedAvg(), clients_per_round=3, engine=engine)
    step = 0.2 * np.exp(0.7 * numpy_generator(1, "compute").standard_normal(5))
    up = 1000.0 * np.exp(0.5 * numpy_generator(1, "bandwidth_up").standard_normal(5))
    needed, now = DOWN / 400.0 + 4 * step + (UP + 4) / up, 0.0
    for number, end in enumerate(ends(trainer), start=1):
        clients = of_round(trainer, number)
        assert len(clients) == 3
        for client, row in clients.items():
            assert float(row["seconds"]) == pytest.approx(needed[client], rel=1e-12)
        now += max(needed[client] for client in clients)
        assert end == pytest.approx(now, rel=1e-12)


@pytest.mark.parametrize("late", ["dropped", "partial"])
def test_deadline(tmp_path, late):
    """Client 2 needs 4 * 4 + 32/50 seconds, of which 10 leave two steps; client 1 is just in time."""
    file = tmp_path / "speeds.csv"
    file.write_text(SPEEDS)
    system = System(str(file), bandwidth_up=str(file), deadline=10.0, late=late)
    trainer = fit(tmp_path, system, max_rounds=2)
    slow = of_round(trainer, 2)[2]
    if late == "dropped":
        assert (slow["status"], slow["num_steps"], slow["bytes_up"], slow["weight"]) == ("straggler", "0", "0", "0.0")
        assert float(slow["seconds"]) == 16.64
        assert ends(trainer) == [10.0, 20.0]
    else:
        assert (slow["status"], slow["num_steps"], slow["weight"]) == ("ok", "2", "0.2")
        assert ends(trainer) == pytest.approx([8.64, 17.28])
    rest = [row for client, row in of_round(trainer, 2).items() if client != 2]
    assert [(row["status"], row["num_steps"]) for row in rest] == [("ok", "4")] * 4


@pytest.mark.parametrize("late", ["dropped", "partial"])
def test_who_needs_the_whole_deadline_is_in_time(tmp_path, late):
    """In floats 3 * 0.1 > 0.3 and 7 * 0.1 > 0.7, while 3 * 1.0 is 3.0."""
    steps = {"dropped": (0.3, 3), "partial": (0.7, 7)}[late]
    for number, (second, (deadline, fitting)) in enumerate(((0.1, steps), (1.0, (3.0, 3)))):
        asked = fitting if late == "dropped" else 9
        system = System(second, deadline=deadline, late=late)
        trainer = fit(tmp_path / str(number), system, max_rounds=1, local_steps=asked)
        rows = of_round(trainer, 1).values()
        assert [(row["status"], row["num_steps"]) for row in rows] == [("ok", str(fitting))] * 5
        assert ends(trainer) == pytest.approx([deadline])
    trainer = fit(tmp_path, System(0.1000001, deadline=0.3, late=late), max_rounds=1, local_steps=3)
    expected = ("straggler", "0") if late == "dropped" else ("ok", "2")
    assert [(row["status"], row["num_steps"]) for row in of_round(trainer, 1).values()] == [expected] * 5


@pytest.mark.parametrize(
    ("setting", "number", "missing"),
    [("availability", 3, 2), ("deadline", 5, 1), (None, 5, 0)],
    ids=["away", "late", "all"],
)
def test_rounds_that_get_fewer_clients_than_they_ask_for(tmp_path, caplog, capsys, setting, number, missing):
    """Client 3 alone is there, or client 2 of all five is too late."""
    (tmp_path / "there.csv").write_text("client,start,end\n3,0,1000\n")
    (tmp_path / "speeds.csv").write_text(SPEEDS)
    options = {"availability": str(tmp_path / "there.csv"), "deadline": 10.0, None: None}[setting]
    system = System(str(tmp_path / "speeds.csv"), **({setting: options} if setting else {}))
    with caplog.at_level(logging.INFO):
        trainer = fit(tmp_path, system, clients_per_round=number)
    begun = [text for text in caplog.messages if f"{number - missing} of the {number} clients that it asks" in text]
    ended = [text for text in caplog.messages if "In 3 of 3 rounds fewer clients had a part" in text]
    assert len(begun) == len(ended) == (missing > 0)
    if missing:
        assert ended[0].endswith(f"on average {missing} fewer.")
        assert ended[0] in render(run_page(Path(trainer.log_dir)))
    print_plan(trainer.plan(QuadraticModule(), QuadraticData(), FedAvg("uniform")))
    assert (f"({number} are asked for)" in capsys.readouterr().out) == (missing > 0)


def test_nobody_waits_for_work_that_is_dropped(tmp_path):
    """FedAvg drops stragglers: without a deadline a round ends with the slowest of the others."""
    stragglers = Stragglers(fraction=0.6)
    trainer = fit(tmp_path, System(Lognormal(1.0, 2.0)), stragglers=stragglers, max_rounds=6)
    now, dropped_were_slower = 0.0, 0
    for number, end in enumerate(ends(trainer), start=1):
        seconds: dict[str, list[float]] = {"ok": [], "straggler": []}
        for row in of_round(trainer, number).values():
            seconds[row["status"]].append(float(row["seconds"]))
        now += max(seconds["ok"])
        assert end == pytest.approx(now, rel=1e-12)
        dropped_were_slower += max(seconds["straggler"]) > max(seconds["ok"])
    assert dropped_were_slower


def test_a_deadline_and_stragglers_go_together(tmp_path):
    """Who vanishes is waited for until the deadline; a straggler's fewer steps may be in time."""
    stragglers = Stragglers(fraction=0.4, dropout=0.2)
    trainer = fit(tmp_path, System(1.0, deadline=3.5), FedProx(), stragglers=stragglers, max_rounds=1)
    late, absent = stragglers.draw(list(range(5)), 1, 1)
    for client, row in of_round(trainer, 1).items():
        expected = "absent" if client in absent else "ok" if client in late else "straggler"
        assert row["status"] == expected
        assert (row["seconds"] == "") == (client in absent)
    assert ends(trainer) == [3.5]


def test_availability(tmp_path):
    """Rounds of 4 s: nobody is there until 3 s, then client 1, then 0 and 1, and all again after a period of 12 s."""
    file = tmp_path / "there.csv"
    file.write_text("client,start,end\n1,3,9\n0,6,8\n4,11,12\n")
    trainer = fit(tmp_path, System(availability=str(file)), max_rounds=5, clients_per_round=2)
    # From 3 to 7 client 1, then 0 and 1 until 11, then 4 until 15 = 12 + 3, then 1 until 19, then 0 and 1 until 23.
    assert ends(trainer) == [7.0, 11.0, 15.0, 19.0, 23.0]
    assert [sorted(of_round(trainer, t)) for t in range(1, 6)] == [[1], [0, 1], [4], [1], [0, 1]]


def test_a_client_is_there_at_the_time_that_its_start_names():
    """Periods and starts that no float holds exactly: time never stands still, and a share of it is available."""
    starts, period = np.array([0.1, 0.7, 2.3]) / 3, 2.4 / 3
    some = Availability(np.arange(3), starts % period, starts % period + 0.3 * period, period, 3)
    time = 0.0
    for _ in range(400):
        later = some.next_start(time, np.array([1]))
        assert later > time
        assert some.at(later)[1]
        time = later
    assert time == pytest.approx(399 * period + starts[1] % period, rel=1e-9)
    seen = np.mean([some.at(t) for t in np.linspace(0, 100 * period, 20_000)], axis=0)
    np.testing.assert_allclose(seen, 0.3, atol=1e-3)


def test_devices_in_fedscales_form_are_dealt_to_clients(tmp_path):
    """Milliseconds of inference per sample and kbps; a step is three passes over a batch of 21 samples."""
    file = tmp_path / "devices.csv"
    file.write_text("computation, communication, brand\n100, 8, a\n200, 16, b\n")
    path = str(file)
    trainer = fit(tmp_path, System(path, bandwidth_up=path, bandwidth_down=path), max_rounds=1)
    devices = [(4 * 3 * 21 * ms / 1000 + (DOWN + UP) * 8 / (kbps * 1000)) for ms, kbps in ((100, 8), (200, 16))]
    found = [float(row["seconds"]) for row in of_round(trainer, 1).values()]
    for seconds in found:
        assert min(abs(seconds - known) for known in devices) < 1e-12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,speed\n0,1\n", r"no column compute or computation, but client, speed\."),
        ("client,compute\n0,-1\n", r"line 2: compute is '-1'; give a number > 0\."),
        ("client,compute\n7,1\n", r"there is no client '7'; give names, or numbers from 0 to 4\."),
        ("client,compute\n0,1\n0,2\n", r"line 3: client 0 is there twice\."),
        ("client,compute\n0,1\n1,1\n", r"has no row of client 2 \(of 3 clients in all\)"),
        ("clients,compute\n0,1\n", r"has an unknown column 'clients'; did you mean 'client'\?"),
        ("client,compute\n0,0,5\n", r"has no rows, or one with more cells than there are columns\."),
        (None, r"cannot be read as a CSV file \(No such file or directory\)"),
    ],
)
def test_mistakes_in_a_file_of_speeds(tmp_path, text, message):
    path = tmp_path / "speeds.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"^trainer\.system\.compute: '.*{message}"):
        fit(tmp_path, System(str(path)))


def test_mistakes_in_a_file_of_intervals(tmp_path):
    path = tmp_path / "there.csv"
    for text, message in (
        ("client,start\n0,1\n", r"no column end"),
        ("client,start,end,compute\n0,1,2,1\n", r"unknown column 'compute'; there may be client, start, end"),
        ("client,start,end\n0,3,3\n", r"line 2: the end is not after the start"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            DeviceFile("trainer.system.availability", str(path), 5, None).intervals()


@pytest.mark.filterwarnings("ignore:trainer.* when the run began")
def test_resumed_run_equals_unbroken_run_and_another_system_is_refused(tmp_path):
    """Time and availability of later rounds are worked out from round 1 again."""
    speeds, there = Lognormal(0.5, 1.0), Diurnal(0.4, period=7.0, spread=0.5)
    options = {"system": System(speeds, 100.0, 200.0, there, deadline=4.0, late="partial"), "clients_per_round": 3}
    whole, path = assert_resumes(tmp_path, FedAvg, 3, 8, **options)
    with pytest.raises(ConfigurationError, match=r"^trainer\.system: before round 9, other clients took part"):
        run(tmp_path / "parts", FedAvg, 9, ckpt_path=path, **options | {"system": System(deadline=9.0)})
    assert {row["status"] for row in table(whole, "clients.csv")} >= {"ok"}
    assert len({row["num_steps"] for row in table(whole, "clients.csv")}) > 2  # some were shortened


@pytest.mark.parametrize(
    ("build", "system", "message"),
    [
        (Centralized, System(), r"trainer\.system: Centralized trains without clients"),
        (L2, System(deadline=9.0), r"trainer\.system\.deadline: L2GD waits for all clients"),
        (
            partial(L2GD, 1.0, 0.5, 0.1),
            System(availability=Diurnal()),
            r"trainer\.system\.availability: L2GD waits for all clients",
        ),
    ],
)
def test_methods_that_cannot_do_without_clients_refuse(tmp_path, build, system, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, system, build())


def test_settings_that_cannot_be(tmp_path):
    for build, message in (
        (lambda: System(Lognormal(1.0, -1.0)), r"trainer\.system\.compute\.sigma: got -1\.0"),
        (lambda: System(Lognormal(1.0, 1000.0)), r"trainer\.system\.compute\.sigma: got 1000\.0; .* in \[0, 10\]"),
        (lambda: fit(tmp_path, {"compute": 1}), r"trainer\.system: got \{'compute': 1\}; give an object of System"),
        (
            lambda: fit(tmp_path, System(availability=Diurnal()), privacy=Privacy(1.0, 1.0, 1e-3)),
            r"trainer\.system\.availability: ε of trainer\.privacy",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            build()
