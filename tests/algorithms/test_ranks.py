"""Several processes and devices give the numbers of one (ALGORITHMS 4.4), for the whole registry."""

from pathlib import Path

import pytest
import torch
from helpers.boring import assert_equal_trees
from helpers.messages_only import MessagesOnly
from helpers.programs import TESTS, run_python, run_ranks

from algorithms.registry import BY_NAME
from algorithms.two_processes import EACH_KIND, VECTORIZED, run_all


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
    # The second one is a new Python, whose sets have another order than those of a fork.
    done = run_python(["-m", "algorithms.two_processes", tmp_path, 2], TESTS, FRESH_STARTS=1)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_equal(tmp_path, 2, one_cpu)


def test_messages_alone_equal_one_process_bit_for_bit(tmp_path, one_cpu):
    """Workers know nothing of the server but messages; each method, engine, codec, and modules that write more."""
    by_messages = run_all(tmp_path, 1, backend=MessagesOnly())
    assert_equal_trees(by_messages, one_cpu)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.8 has no barrier between devices of another maker")
@pytest.mark.distributed
def test_pretended_gpus_equal_a_cpu(tmp_path, one_cpu, pretended_gpu):
    """Two processes with one GPU each, whose collectives take what NCCL's do."""
    run_ranks(["-m", "devices.ranks", tmp_path, 2, pretended_gpu], TESTS)
    left_out = BY_NAME.keys() - EACH_KIND
    assert_equal(tmp_path, 2, {case: state for case, state in one_cpu.items() if case.split(" ")[0] not in left_out})


@pytest.mark.distributed
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(1, marks=pytest.mark.nightly(reason="every method: minutes, of which tests/devices has the core")),
        pytest.param(2, marks=pytest.mark.gpu),
    ],
)
def test_gpus_equal_a_cpu(tmp_path, one_cpu, devices):
    """Real ones, which in float32 add in another order."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"there are {torch.cuda.device_count()} CUDA GPUs, not {devices}")
    done = run_python(["-m", "devices.ranks", tmp_path, devices], TESTS)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_equal(tmp_path, devices, one_cpu, single=1e-4)
