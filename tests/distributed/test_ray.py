"""Ray: a run has the bits of one process, whoever trains whom and whichever actor is lost; it leaves no process."""

import os
import signal
import sys
from threading import Event
from unittest.mock import Mock

import psutil
import pytest
import torch
from helpers.boring import (
    BoringData,
    BoringModel,
    Linear,
    assert_equal_trees,
    make_model,
    make_trainer,
    read_csv,
    without_times,
)
from helpers.command_line import TINY
from helpers.programs import fresh, run_python, wait_until
from lightning.pytorch import Callback
from torch import nn

from fedbc_lightning import FedAvg, FedBC
from fedbc_lightning.algorithms import SCAFFOLD
from fedbc_lightning.core.errors import ConfigurationError, notes_of
from fedbc_lightning.distributed.heartbeat import LostProcessError
from fedbc_lightning.distributed.ray_backend import Ray

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.distributed


class Kept(Ray):
    """Its actors serve one run after another: to start one takes three seconds."""

    def open(self, make_worker):
        if not hasattr(self, "_ray"):
            super().open(make_worker)
            return
        actors, self._maker = self._actors, ray.put(ray.cloudpickle.dumps(make_worker))
        self._free = []
        self._running = {actor.begin.remote([self._maker], sys.path): (actor, None) for actor in actors}
        while len(self._actors) < 2:
            self._add()
        ray.wait([*self._running], num_returns=2)

    def close(self):
        pass


@pytest.fixture(scope="module")
def two():
    """Two actors on this machine."""
    backend = Kept(num_actors=2)
    yield backend
    Ray.close(backend)


class Dropping(BoringModel):
    """Draws random numbers while it trains, and has buffers; its optimizer has momentum."""

    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.net = nn.Sequential(self.net, nn.Dropout(0.3), nn.Linear(3, 3))


class Acts(Callback):
    """Notes which process trains; the first one is slow, one is killed, or a client raises."""

    def __init__(self, folder, slow=False, kills=None, always=False, raises=None):
        self.folder, self.slow, self.kills, self.always, self.raises = folder, slow, kills, always, raises

    def on_client_start(self, trainer, pl_module, client):
        first, me = self.folder / "first", str(os.getpid())
        with (self.folder / "processes").open("a") as file:
            file.write(f"{me}\n")
        if not first.exists():
            first.write_text(me)
        if self.slow and first.read_text() == me:
            Event().wait(0.1)
        killed = self.folder / "killed"
        if client == self.kills and trainer.current_round == 2 and (self.always or not killed.exists()):
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if client == self.raises:
            raise UnwieldyError("data", "broken")


class UnwieldyError(KeyError):
    """pickle cannot read back what it writes of it."""

    def __init__(self, what, how):
        super().__init__(f"{what} are {how}")


def fit(root, backend, algorithm, ckpt_path=None, model=Dropping, **options):
    trainer = make_trainer(root, **{"backend": backend, "clients_per_round": 5, **options})
    trainer.fit(make_model(model), BoringData(), algorithm, ckpt_path)
    return trainer


def state(trainer):
    store, folder = trainer.clients, trainer.log_dir
    rows = {name: [store.vector(name, k) for k in range(6)] for name in store.vector_names}
    tables = {name: without_times(read_csv(f"{folder}/{name}.csv")) for name in ("metrics", "evaluation")}
    return {"server": trainer.server.values, "rows": rows, "tables": tables} | {
        name: store.scalar(name) for name in store.scalar_names
    }


def test_cohorts_that_two_actors_share_are_those_of_one_process(tmp_path, two):
    options = {"engine": "vectorized", "model": Linear}
    here, there = (fit(tmp_path / str(k), k, FedBC(dual_lr=0.1), **options) for k in (None, two))
    torch.testing.assert_close(there.server.z, here.server.z, rtol=1e-5, atol=1e-6)  # their cohorts have other sizes


def test_an_actor_that_is_killed_costs_nothing(tmp_path, two, caplog):
    """Client 5 kills the actor that trains it in round 2; then a run without Ray goes on, and one with it again."""
    here = fit(tmp_path / "here", None, SCAFFOLD(), max_rounds=4, clients_per_round=6)
    folder = tmp_path / "there"
    fit(folder, two, SCAFFOLD(), max_rounds=2, clients_per_round=6, callbacks=Acts(tmp_path, kills=5))
    (line,) = [line for line in caplog.messages if "was lost" in line]
    assert line == (
        "An actor with client 5 was lost (The actor is dead because its worker process has died); another one takes "
        "its place."
    )
    for backend, rounds in ((None, 3), (two, 4)):
        there = fit(folder, backend, SCAFFOLD(), "last", max_rounds=rounds, clients_per_round=6)
    assert_equal_trees(state(there), state(here))


@pytest.mark.nightly(reason="three actors start for it, for seconds")
def test_a_client_that_kills_every_actor_ends_the_run(tmp_path, two):
    with pytest.raises(LostProcessError, match="3 actors were lost one after another with client 5: The actor is dead"):
        fit(tmp_path, two, FedAvg(), clients_per_round=6, callbacks=Acts(tmp_path, kills=5, always=True))


def test_the_actor_that_is_free_takes_the_next_client(tmp_path, two):
    fit(tmp_path, two, FedAvg(), clients_per_round=6, callbacks=Acts(tmp_path, slow=True))
    slow, others = (tmp_path / "first").read_text(), (tmp_path / "processes").read_text().split()
    assert len(others) == 18
    assert 3 <= others.count(slow) < 9


def test_an_error_of_a_client_is_that_of_fit(tmp_path, two):
    found = []
    for backend in (None, two):
        with pytest.raises((UnwieldyError, RuntimeError), match="data are broken") as error:
            fit(tmp_path / str(backend), backend, FedAvg(), clients_per_round=6, callbacks=Acts(tmp_path, raises=4))
        found.append(error.value)
    assert notes_of(found[1]) == notes_of(found[0]) != []
    assert "raise UnwieldyError" in str(found[1].__cause__)


SLOW = """\
import os
from threading import Event
from unittest.mock import Mock
from lightning.pytorch import Callback


class Slow(Callback):
    def on_client_start(self, trainer, pl_module, client):
        if trainer.current_round == 3:
            with open("processes", "a") as file:
                print(os.getpid(), file=file)
            Event().wait(600)
"""


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.nightly(reason="a cluster of its own starts for each, for twenty seconds of CPU time")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_run_and_leaves_no_process(project, number):
    """In round 3 all actors are busy for ten minutes; Ctrl-C of a terminal reaches all processes of the session."""
    (project / "slow.py").write_text(SLOW)
    (project / "tiny.yaml").write_text(TINY)
    words = ["--trainer.backend", "Ray", "--trainer.backend.num_actors", "2", "--trainer.callbacks", "slow.Slow"]
    command = ["-m", "fedbc_lightning", "fit", "--config", "tiny.yaml", "--trainer.max_rounds", "9", *words]
    with fresh(command, project) as program:
        wait_until(lambda: len(read(project)) == 2, program)
        started = psutil.Process(program.pid).children(recursive=True)
        assert len(started) > 5
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        else:
            os.kill(program.pid, number)
        done = program.finish(60)
    wait_until(lambda: not any(is_alive(process) for process in started))
    assert done.returncode == (-9 if number == signal.SIGKILL else 128 + number), done.stderr
    assert "Traceback" not in done.stderr
    if number != signal.SIGKILL:
        last = torch.load(project / "runs/tiny/FedAvg-0/checkpoints/last.ckpt", weights_only=True)
        assert last["fedbc_lightning"]["round"] == 2


def read(project):
    path = project / "processes"
    return path.read_text().split() if path.exists() else []


def test_processes_beside_the_actors_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"trainer\.devices: got 2; with trainer\.backend the run"):
        make_trainer(tmp_path, backend="ray", devices=2)


def test_actors_that_wait_for_processors_are_said(tmp_path, two, monkeypatch, caplog):
    fit(tmp_path, two, FedAvg(), max_rounds=1)  # its two actors hold both processors
    monkeypatch.setattr("fedbc_lightning.distributed.ray_backend.check", Mock(side_effect=LostProcessError("enough")))
    with pytest.raises(LostProcessError, match="enough"):
        fit(tmp_path, Ray(num_actors=1), FedAvg())
    assert "trainer.backend: 0 of 1 actors start now, the others when processors are free" in caplog.text


def test_an_address_where_nothing_answers_is_one_line(project):
    words = ["--trainer.backend", "Ray", "--trainer.backend.address", "127.0.0.1:9"]
    # Another process: the cluster of the tests above is joined without a look at the address.
    done = run_python(["-m", "fedbc_lightning", "fit", "--config", "tiny.yaml", *words], project)
    line = "fedbc-cli: error: trainer.backend: ray: address 127.0.0.1:9: [Errno 111] Connection refused"
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, line)
