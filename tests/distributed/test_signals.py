"""A signal ends a run between two steps, is said, and leaves what can be gone on from."""

import signal

import pytest
import torch
from helpers.boring import read_csv
from helpers.command_line import TINY
from helpers.programs import forked, wait_until

from fedbc_lightning.distributed import interrupts

MODULE = """\
import os
import time

from lightning.pytorch import Callback

from fedbc_lightning.state import checkpoint

if os.environ.get("SLOW_SAVE"):
    save = checkpoint.save_atomically

    def save_slowly(content, path, *check):
        save(content, path, *check)
        if content["fedbc_lightning"]["round"]:
            print("saving", flush=True)
            time.sleep(1.5)
            print("saved", flush=True)

    checkpoint.save_atomically = save_slowly


class Signals(Callback):
    # Sends the process a signal in round 2, at the worst moment.
    def __init__(self, number: int = 15, where: str = "step"):
        self.number, self.where = number, where

    def on_round_start(self, trainer, pl_module):
        print("round", trainer.current_round, flush=True)
        if trainer.current_round == 2:
            if self.where == "del":
                class Dying:
                    def __del__(inner):
                        self.send()
                Dying()
            elif self.where == "fork":
                os.register_at_fork(before=self.send)
                if not os.fork():
                    os._exit(0)
                os.wait()
            else:
                self.send()

    def send(self):
        os.kill(os.getpid(), self.number)
        time.sleep(0.01)
"""


def command(project, *words):
    (project / "signals.py").write_text(MODULE)
    (project / "tiny.yaml").write_text(TINY)
    return ["-m", "fedbc_lightning", "fit", "--config", "tiny.yaml", "--trainer.max_rounds", "500", *words]


def last_round(project):
    path = project / "runs/tiny/FedAvg-0/checkpoints/last.ckpt"
    return torch.load(path, weights_only=True)["fedbc_lightning"]["round"]


def run(project, *words, **changes):
    with forked(command(project, "--trainer.callbacks", "signals.Signals", *words), project, **changes) as program:
        return program.finish()


@pytest.mark.parametrize(
    ("name", "where"), [("SIGINT", "del"), ("SIGTERM", "fork"), ("SIGHUP", "step"), ("SIGUSR1", "step")]
)
def test_a_signal_ends_the_run_wherever_it_comes(project, name, where):
    number = int(getattr(signal, name))
    words = ["--trainer.checkpoint_every_n_rounds", 500, "--trainer.callbacks.number", number]
    done = run(project, *words, "--trainer.callbacks.where", where)
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    said = "Ctrl-C" if name == "SIGINT" else name
    assert done.stderr.count(f"{said}: stopping after this step; the last finished round is kept.") == 1
    assert "interrupted; go on with: fedbc-cli fit" in done.stderr
    assert last_round(project) == 1
    assert read_csv(project / "runs/tiny/FedAvg-0/metrics.csv")[-1]["round"] == "1"


@pytest.fixture
def heard():
    """Ctrl-C is not ignored, as in programs that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_each_signal_breaks_off_a_call_that_may_not_end(monkeypatch, heard):
    monkeypatch.setattr(interrupts, "SECONDS_OF_ONE", 0)
    check = interrupts.check
    with interrupts.Interrupts(), interrupts.raising():
        for _ in range(2):  # the first may come in a __del__, which drops exceptions
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(interrupts, "check", lambda: (check(), signal.raise_signal(signal.SIGINT)))
    with interrupts.Interrupts(), pytest.raises(KeyboardInterrupt), interrupts.raising():
        pytest.fail("the call has begun")


def test_a_third_signal_gives_the_save_up(project):
    words = ["--trainer.checkpoint_every_n_rounds", "1000", "--data.num_clients", "100"]
    words += ["--trainer.callbacks", "signals.Signals", "--trainer.callbacks.number", 0]
    with forked(command(project, *words), project, SLOW_SAVE=1) as program:
        wait_until(lambda: "round 3" in program.printed[0], program)
        program.send_signal(signal.SIGINT)
        wait_until(lambda: "saving" in program.printed[0], program)
        for said in ("still stopping", "ended at once"):
            while said not in program.printed[1] and program.poll() is None:
                program.send_signal(signal.SIGINT)  # those within half a second count as one
        done = program.finish()
    assert done.returncode == 130
    assert "saved" not in done.stdout
    assert "still stopping" in done.stderr
    assert "Traceback" not in done.stderr
