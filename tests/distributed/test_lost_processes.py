"""A process that dies, fails or never comes ends the run of all, with one message and a checkpoint to go on from."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.boring import assert_equal_trees
from helpers.command_line import TINY, write_project
from helpers.programs import Forked, forked, free_port, run_ranks, wait_until
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.distributed import heartbeat
from fedbc_lightning.run.processes import Restarts
from fedbc_lightning.run.run import Request
from fedbc_lightning.run.settings import RunSettings

pytestmark = pytest.mark.distributed

MODULE = """\
import os, time
from pathlib import Path
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional

from fedbc_lightning.distributed import fabric

if os.environ.get("LOCAL_RANK") == os.environ.get("ABSENT_RANK", "none"):
    os._exit(3)
fabric.SECONDS_TO_MEET = float(os.environ.get("SECONDS_TO_MEET", 600))


class Module(LightningModule):
    def __init__(self, failing_rank: int = -1, returns_loss: bool = True):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
        self.failing_rank, self.returns_loss = failing_rank, returns_loss

    def training_step(self, batch, batch_idx):
        path = Path(f"rank{self.trainer.global_rank}.pid")
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").replace(path)  # whole at once: somebody may be reading it
        held = Path(f"held_{self.trainer.global_rank}_in_{self.trainer.current_round}")
        while held.exists():
            time.sleep(0.01)
        if self.trainer.global_rank == self.failing_rank and self.trainer.current_round == 3:
            raise ValueError("a mistake of the user's")
        return functional.cross_entropy(self.net(batch[0]), batch[1]) if self.returns_loss else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
"""


def command(folder: Path, *words: object, launcher: tuple[str, ...] = ()) -> list[object]:
    """``fedbc-cli fit`` of :data:`MODULE` on two processes."""
    (folder / "user_module.py").write_text(MODULE)
    head, _, _ = TINY.partition("model:")
    config = f"{head}model:\n  class_path: user_module.Module\ndata:\n  class_path: tiny_data.TinyData\n"
    (folder / "two.yaml").write_text(config)
    return [*launcher, "-m", "fedbc_lightning", "fit", "--config", "two.yaml", "--trainer.devices", 2,
            "--trainer.clients_per_round", 4, "--trainer.max_rounds", 12,
            "--trainer.checkpoint_every_n_rounds", 1, *words]  # fmt: skip


def fit(folder: Path, *words: object, **changes: object) -> tuple[int, str]:
    """Exit status and words of such a run."""
    with forked(command(folder, *words), folder, **changes) as program:
        return ended(program)


def ended(program: Forked) -> tuple[int, str]:
    done = program.finish()
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def has_done(folder: Path, round: int) -> bool:
    metrics = folder / "runs/tiny/FedAvg-0/metrics.csv"
    return metrics.exists() and len(metrics.read_text().splitlines()) >= round + 2


def last(folder: Path) -> dict:
    saved = torch.load(folder / "runs/tiny/FedAvg-0/checkpoints/last.ckpt", weights_only=True)
    saved["fedbc_lightning"].pop("settings")
    return {key: saved[key] for key in ("state_dict", "fedbc_lightning", "callbacks")}


def kill(folder: Path, *words: object, after: dict[int, int], **given: Any) -> tuple[int, str]:
    """Exit status and words of a run; ``after`` round r, process ``after[r]`` is killed, which waits in its step."""
    held = [folder / f"held_{rank}_in_{round + 1}" for round, rank in after.items()]
    for path in held:
        path.touch()
    with forked(command(folder, *words, **given), folder) as program:
        for path, (round, rank) in zip(held, after.items(), strict=True):
            pid = folder / f"rank{rank}.pid"
            pid.unlink(missing_ok=True)
            wait_until(lambda: has_done(folder, round) and pid.exists(), program)  # noqa: B023
            path.unlink()
            os.kill(int(pid.read_text()), signal.SIGKILL)
        return ended(program)


def named(folder: Path, rank: int, *words: object, after: int, **given: Any) -> tuple[int, str]:
    """The same, where a process that is left names the one that was killed."""
    status, said = kill(folder, *words, after={after: rank}, **given)
    assert said.count(f"process {rank} of 2 (counted from 0) was killed") == 1, said
    assert "Go on by the same command with ckpt_path: " in said
    assert "runs/tiny/FedAvg-0/checkpoints/last.ckpt" in said
    assert "gloo/" not in said
    return status, said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The checkpoint of a run that loses no process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_project(folder)
    run_ranks(command(folder), folder)
    return last(folder)


def test_who_was_killed_is_named_and_how_to_go_on(project):
    status, said = named(project, 1, after=3)
    assert status == 1
    assert "Traceback" not in said
    assert 2 <= last(project)["fedbc_lightning"]["round"] <= 3
    status, said = named(project, 0, "--ckpt_path", "last", after=6)
    assert status == -signal.SIGKILL
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("auto", marks=pytest.mark.nightly(reason="six new Pythons; test_launchers.py starts two")),
        "ddp_fork",
    ],
)
def test_a_run_is_started_again_by_itself(project, undisturbed, strategy):
    words = ["--trainer.strategy", strategy, "--trainer.max_restarts", 2]
    status, said = kill(project, *words, after={3: 0, 6: 1, 8: 0})
    assert status == 1
    starts = re.findall(
        r"process (\d) of 2 \S+ from 0\) was killed, [^;]*; starts again from round (\d+) (\S+ of 2\))", said
    )
    assert [(rank, number) for rank, _, number in starts] == [("0", "(1 of 2)"), ("1", "(2 of 2)")]
    assert int(starts[0][1]) in (2, 3)
    assert int(starts[1][1]) in (5, 6)
    assert "process 0 of 2 (counted from 0) was killed, perhaps because memory ran out, or does not answer. All" in said
    run_ranks(command(project, "--ckpt_path", "last"), project)
    assert_equal_trees(last(project), undisturbed)


def test_a_run_without_progress_is_not_started_again(tmp_path):
    request: Any = Request(TrainerFn.FITTING, None, None, None, None, None)
    restarts = Restarts(RunSettings(max_restarts=5, default_root_dir=tmp_path), request, "job")
    for error in (ValueError(), heartbeat.LostProcessError()):
        with pytest.raises(type(error)):
            [Restarts.take(restarts, error) for _ in range(2)]


def test_a_process_of_the_run_cannot_start_it_again(project):
    said = fit(project, "--trainer.strategy", "ddp", "--trainer.max_restarts", 1)[1]
    assert "trainer.max_restarts: only processes of one machine that strategy auto, ddp_spawn or ddp_fork" in said


def test_torchrun_starts_a_run_again(project):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    status, said = kill(project, after={2: 1}, launcher=torchrun)
    assert status == 0, said
    assert said.count("This job was started again; the checkpoint of its run is 'runs/tiny/FedAvg-0/checkpoints/") == 1
    assert last(project)["fedbc_lightning"]["round"] == 12


@pytest.mark.nightly(reason="a minute, of which machines wait for each other for half")
def test_a_run_goes_on_with_the_machines_that_are_left_and_with_those_that_come_back(project, undisturbed):
    place = f"127.0.0.1:{free_port()}"
    options = {"nnodes": "1:2", "max-restarts": 1, "rdzv-backend": "c10d", "rdzv-endpoint": place, "rdzv-id": "x",
               "rdzv-conf": "last_call_timeout=12,keep_alive_interval=1,keep_alive_max_attempt=5"}  # fmt: skip
    torchrun = ("-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items()))
    words = command(project, "--trainer.devices", "auto", launcher=torchrun)
    share = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}  # with torch's default no machine can join a run under way
    held = [project / f"held_{rank}_in_{round}" for rank, round in [(0, 3), (1, 3), (0, 6)]]
    for path in held:
        path.touch()
    with forked(words, project, **share) as left:
        wait_until(lambda: psutil.Process(left.pid).net_connections(), left)  # those who meet do so at this one
        with forked(words, project, **share) as lost:
            wait_until(lambda: has_done(project, 2) and (project / "rank1.pid").exists(), left)
            for process in (*psutil.Process(lost.pid).children(recursive=True), lost):
                process.kill()
        for path in held[:2]:
            path.unlink()
        wait_until(lambda: has_done(project, 5), left)
        with forked(words, project, **share):
            wait_until(lambda: "SIGTERM: stopping" in left.printed[1], left)
            held[2].unlink()
            status, said = ended(left)
    assert status == 0, said
    assert said.count("process 1 of 2 (counted from 0) was killed") == 1
    assert said.count("This job was started again; the checkpoint of its run is") == 2
    assert "Traceback" not in said
    assert_equal_trees(last(project), undisturbed)


@pytest.mark.parametrize("strategy", ["auto", "ddp_fork"])
def test_a_mistake_on_one_rank_is_told_once(project, strategy):
    restarts = ["--trainer.max_restarts", 2 if strategy == "ddp_fork" else 0]
    status, said = fit(project, "--trainer.strategy", strategy, "--model.failing_rank", 1, *restarts)
    assert status == 1
    assert said.count("ValueError: a mistake of the user's") == 1, said
    assert said.count("process 1 of 2 (counted from 0) failed") == (strategy == "auto"), said
    assert last(project)["fedbc_lightning"]["round"] == 2


def test_a_mistake_on_all_ranks_is_told_once(project):
    status, said = fit(project, "--model.returns_loss", "false")
    assert status == 1
    assert said.count("training_step returned no loss") == 1, said
    assert "Traceback" not in said


def test_a_process_that_never_comes_ends_the_start(project):
    status, said = fit(project, ABSENT_RANK=1)
    assert status == 1
    assert said.count("process 1 of 2 (counted from 0) ended with status 3 before the run began") == 1, said


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_says_in_one_line_who_does_not_come(project, rank):
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "NODE_RANK": rank, "SECONDS_TO_MEET": 0.5}
    status, said = fit(project, "--trainer.devices", 1, "--trainer.num_nodes", 2, **place)
    assert status == 1
    waiting, said = said.split("NODE_RANK=... ")
    assert waiting.startswith(f"this is node {rank}, waiting at localhost:")
    assert said.startswith(f"fedbc-cli: error: trainer.devices: process {1 - rank} of 2 (counted from 0) did not come")
    assert said.endswith("in 0.5 s. Start all of them again.")


def test_a_wait_for_a_stopped_process_answers_signals(project):
    with forked(command(project, "--trainer.max_rounds", 1000), project) as program:
        wait_until(lambda: has_done(project, 2), program)
        os.kill(int((project / "rank1.pid").read_text()), signal.SIGSTOP)
        places = [found.laddr.ip for found in psutil.Process(program.pid).net_connections() if found.status == "LISTEN"]
        assert set(places) == {"127.0.0.1"}
        time.sleep(2.5)
        program.send_signal(signal.SIGTERM)
        start = time.monotonic()
        status, said = ended(program)  # the other one was killed, too
    assert status == 143
    assert time.monotonic() - start < heartbeat.SECONDS_TO_NAME
    assert "SIGTERM: stopping after this step" in said
    assert last(project)["fedbc_lightning"]["round"] >= 2
