"""However processes are started, `fit` returns, and with the same numbers as one process."""

import json

import pytest
from helpers.boring import BoringData, Linear, make_trainer
from helpers.launched import summary, train
from helpers.messages_only import MessagesOnly
from helpers.programs import TESTS, run_python, run_ranks

from fedbc_lightning import ConfigurationError, FedAvg
from fedbc_lightning.distributed.fabric import make_fabric

pytestmark = pytest.mark.distributed

PROGRAM = f"""\
import json
import sys
from pathlib import Path

sys.path.insert(0, {str(TESTS)!r})

import torch
from helpers.launched import summary, train

if __name__ == "__main__":
"""
ONE = """\
    torch.set_num_threads(2)
    torch.ones(2**20).sin()  # on two threads, of which a fork has one
    print("the end:", json.dumps(summary(*train(Path(), devices=2, strategy={strategy!r}))))
"""
THREE = """\
    one, two, three = (summary(*train(Path(), logger=True, devices=n)) for n in (1, 2, 1))
    assert one == two == three
    print("the end", flush=True)
"""


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_a_megabyte_comes_back_from_processes_that_were_started(tmp_path, strategy):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + ONE.format(strategy=strategy))
    done = run_python([script], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("the end:")]
    assert json.loads(line.removeprefix("the end:")) == summary(*train(tmp_path / "one"))


def test_runs_of_one_process_may_stand_before_and_after_one_of_two_in_a_script(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + THREE)
    done = run_python([script], tmp_path)  # the second process runs the whole script
    assert (done.returncode, done.stdout.count("the end")) == (0, 2), done.stderr


SLOW = """\
    import os
    import time

    from helpers.launched import Wide

    rank, taken = int(os.environ["RANK"]), []

    def training_step(self, batch, batch_idx):
        time.sleep(0.03 * rank)
        taken.append(batch_idx)
        return super(Wide, self).training_step(batch, batch_idx)

    Wide.training_step = training_step
    trainer, model = train(Path(), share_by="seconds", clients_per_round=6, max_rounds=6, devices="auto")
    Path(f"rank {rank}.json").write_text(json.dumps([len(taken), summary(trainer, model)]))
"""


def test_a_slower_process_trains_fewer_clients_and_the_numbers_are_those_of_one(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + SLOW)
    run_ranks([script], tmp_path)
    (fast, ended), (slow, _) = (json.loads((tmp_path / f"rank {rank}.json").read_text()) for rank in (0, 1))
    assert slow < fast / 2
    assert ended == summary(*train(tmp_path / "one", clients_per_round=6, max_rounds=6))


def test_shares_by_the_clock_are_refused_where_numbers_depend_on_who_is_trained_together(tmp_path):
    for options in ({"engine": "vectorized"}, {"backend": MessagesOnly()}):
        with pytest.raises(ConfigurationError, match=r"trainer\.share_by: .*seconds"):
            make_trainer(tmp_path, share_by="seconds", **options).fit(Linear(), BoringData(), FedAvg())


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
BATCH = {"SLURM_NTASKS": 6, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 3} | dict.fromkeys(
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), 0
)
STEP = BATCH | {"SLURM_STEP_NUM_TASKS": 6, "SLURM_STEP_NUM_NODES": 3}


@pytest.mark.parametrize(
    ("who", "environment", "found"), [("torchrun", TORCHRUN, (2, 2)), ("SLURM", STEP, (2, 3)), (None, BATCH, (1, 1))]
)
def test_devices_and_nodes_are_those_of_the_launcher(tmp_path, monkeypatch, who, environment, found):
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    strategy = make_fabric("cpu", "auto", "auto", "auto", "32-true").strategy
    assert (getattr(strategy, "num_processes", 1), getattr(strategy, "num_nodes", 1)) == found
    make_fabric("cpu", "auto", 1, 1, "32-true")  # a run that each process makes for itself
    make_trainer(tmp_path, backend=MessagesOnly(), devices=1)
    if who is not None:
        with pytest.raises(ConfigurationError, match=rf"trainer\.backend: {who} has started several processes"):
            make_trainer(tmp_path, backend=MessagesOnly())
        with pytest.raises(ConfigurationError, match=f"4 on each of 2 machines, but {who} has started 2 on each of"):
            make_fabric("cpu", "auto", 4, 2, "32-true")
