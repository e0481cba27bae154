"""Several processes and devices give the numbers of one (DESIGN 7, 11.2, ALGORITHMS 4.4), for the whole registry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from algorithms.two_processes import VECTORIZED, run_all

ROOT = Path(__file__).parents[2]


def launch(folder: Path, *command: str) -> None:
    """Run a module of the tests, which starts processes of its own, with none left behind."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("LOCAL_RANK", "MASTER_", "NODE_RANK"))
    }
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "tests")])
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=150)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the processes hang:\n{log.read_text()[-4000:]}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert process.returncode == 0, log.read_text()[-4000:]


@pytest.fixture(scope="module")
def one_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    return run_all(tmp_path_factory.mktemp("one"), 1)


def assert_equal(folder: Path, devices: int, expected: dict[str, dict[str, torch.Tensor]], single=1e-6) -> None:
    """z to 1e-12 in float64 and 1e-6 in float32, relative, after one round; state alike on all ranks, bit for bit."""
    ranks = [torch.load(folder / f"results-{devices}-rank{rank}.pt", weights_only=True) for rank in range(devices)]
    assert all(rank.keys() == expected.keys() for rank in ranks)
    for case, state in expected.items():
        for name, value in state.items():
            one, *others = (rank[case][name] for rank in ranks)
            alike = case.endswith("metrics") or all(torch.equal(one, other) for other in others)
            assert alike, f"{case}: {name} differs between the ranks"
            # rounds amplify; the promise is about one round
            bound = 1e-12 if value.dtype == torch.float64 else single
            bound = single if case.endswith("metrics") else bound * (1000 if case.endswith("after 4") else 1)
            scale = float(value.abs().max()) if value.numel() else 0.0
            error = float((one - value).abs().max()) if value.numel() else 0.0
            assert error <= bound * max(scale, 1e-3), f"{case}: {name} is off by {error}"
    for name in VECTORIZED:
        for rank in ranks:
            whole, resumed = rank[f"{name} vectorized after 4"], rank[f"{name} resumed after 4"]
            assert all(torch.equal(value, resumed[key]) for key, value in whole.items()), name


@pytest.mark.distributed
def test_two_processes_equal_one(tmp_path, one_cpu):
    launch(tmp_path, "algorithms.two_processes", str(tmp_path), "2")
    assert_equal(tmp_path, 2, one_cpu)


@pytest.mark.distributed
def test_pretended_gpus_equal_a_cpu(tmp_path, one_cpu, pretended_gpu):
    """Two processes with one GPU each, whose collectives take what NCCL's do."""
    launch(tmp_path, "devices.ranks", str(tmp_path), "2", str(pretended_gpu))
    assert_equal(tmp_path, 2, one_cpu)


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.parametrize("devices", [1, 2])
def test_gpus_equal_a_cpu(tmp_path, one_cpu, devices):
    """Real ones, which in float32 add in another order."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"there are {torch.cuda.device_count()} CUDA GPUs, not {devices}")
    launch(tmp_path, "devices.ranks", str(tmp_path), str(devices))
    assert_equal(tmp_path, devices, one_cpu, single=1e-4)
