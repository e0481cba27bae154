"""What every test finds and leaves: one thread, no process group, the environment as it was.

Torch and what imports it are imported where they are used: `pytest -n` loads this file once more, in the process that
hands out the tests, and starts the others five seconds later if that imports them, too.
"""

import gc
import getpass
import os
import subprocess
import sys
import tempfile

os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"fedbc-{getpass.getuser()}")  # the key of configs
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads of small tests only wait for each other
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI 2.6 calls jsonargparse in its old ways

from pathlib import Path

import pytest
from filelock import FileLock

gc.disable()  # until all is imported and collected, which stays: it would be searched again and again

ALLOWED_VARIABLES = {
    "PL_GLOBAL_SEED",  # seed_everything
    "PL_SEED_WORKERS",  # seed_everything(workers=True)
    "MASTER_ADDR",  # Fabric's launchers
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "KINETO_LOG_LEVEL",  # torch.profiler
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile of torch 2.8
    "TF_CPP_MIN_LOG_LEVEL",  # tensorboard
    "TF2_BEHAVIOR",
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn's OpenMP
    "KMP_INIT_AT_FORK",
    "MPLCONFIGDIR",
    "CUBLAS_WORKSPACE_CONFIG",  # torch.use_deterministic_algorithms through Lightning
    "HF_HUB_DISABLE_TELEMETRY",
    "PYDEVD_USE_FRAME_EVAL",  # ipykernel's debugger
    "RDBASE",  # rdkit
    "GDAL_CURL_CA_BUNDLE",  # rasterio
    "PROJ_CURL_CA_BUNDLE",
    "PYTEST_CURRENT_TEST",
}
"""What Lightning, torch and their kind set in the environment; anything else that a test leaves there is a mistake."""


@pytest.fixture(scope="session", autouse=True)
def settled():
    """What is done once for all tests, or otherwise than for users."""
    from helpers.programs import settle, wait_for_no_disk

    settle()
    wait_for_no_disk()


QUICK_FOLDERS = {"core", "state", "server", "local", "partition"}
QUICK_TESTS = {
    "repository/test_layers.py::test_each_folder_imports_only_what_stands_below_it",
    "algorithms/test_conformance.py::test_closed_form_with_partial_participation",
    "algorithms/test_vectorized.py::test_the_sequential_engines_numbers",
}
"""Quick tests. The last two run for the settings in REPRESENTATIVES alone: every method once in each engine."""


if sys.platform == "win32":  # other folders test signals, terminals and processes of POSIX
    here = {*QUICK_FOLDERS, "algorithms", "conftest.py"}
    collect_ignore = [path.name for path in Path(__file__).parent.iterdir() if path.name not in here]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``pytest -m quick`` runs: doctests, the parts below the engines, and one case of every method."""
    from algorithms.registry import REPRESENTATIVES

    for item in items:
        folder = item.path.parent.name
        test = f"{folder}/{item.path.name}::{getattr(item, 'originalname', None)}"
        setting = getattr(item, "callspec", None) and item.callspec.params.get("setting")
        is_case = test in QUICK_TESTS and (setting is None or setting in REPRESENTATIVES)
        has_processes = item.get_closest_marker("distributed") is not None
        if isinstance(item, pytest.DoctestItem) or (folder in QUICK_FOLDERS and not has_processes) or is_case:
            item.add_marker("quick")
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data; tests that need it are skipped without it."""
    root = Path(os.environ.get("FEDBC_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not root.is_dir():
        pytest.skip(f"no real data: FEDBC_TEST_DATA (default ../shared/data) names no folder, looked at {root}")
    return root


@pytest.fixture(scope="session")
def pretended_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of :mod:`devices.pretended`, compiled once for all workers of a test run."""
    import torch
    from devices import pretended

    folder = tmp_path_factory.getbasetemp()
    file = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "pretended_gpu.so"
    with FileLock(file.with_suffix(".lock")):
        try:
            if not file.exists():
                pretended.build(file)
        except FileNotFoundError:
            pytest.skip("there is no g++ to compile the pretended GPU with")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"the pretended GPU does not compile with torch {torch.__version__}: {error.stderr[:200]}")
    return file


@pytest.fixture(autouse=True)
def restore_environment():
    """Put back all environment variables; fail on one that a test left behind."""
    os.environ.pop("PL_SEED_WORKERS", None)  # of a fixture for a whole file, by which Lightning would seed workers
    before = dict(os.environ)
    yield
    leaked = set(os.environ) - set(before) - ALLOWED_VARIABLES
    os.environ.clear()
    os.environ.update(before)
    assert not leaked, f"the test left environment variables behind: {sorted(leaked)}"


@pytest.fixture(autouse=True)
def restore_torch():
    """Put back the settings of torch that hold for the whole process."""
    import torch

    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@pytest.fixture(autouse=True)
def leave_process_group():
    """End a process group that a test left, and be rank 0 again."""
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    rank_zero_only.rank = 0


@pytest.fixture
def forks(monkeypatch):
    """``subprocess.run`` of a Python command forks, which is the same seconds sooner."""
    from helpers.programs import run_forked

    monkeypatch.setattr(subprocess, "run", run_forked)


@pytest.fixture
def forked_workers(monkeypatch):
    """The workers of studies in this process are forks of one that has imported torch, which is the same sooner."""
    from helpers.programs import FORKED_WORKERS

    monkeypatch.setattr("fedbc_lightning.studies.workers.multiprocessing", FORKED_WORKERS)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a config and a data module of its own."""
    from helpers.command_line import write_project

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("tiny_data", None)
    write_project(tmp_path)
    yield tmp_path
    sys.modules.pop("tiny_data", None)
