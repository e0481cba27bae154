"""On a GPU everything works, and gives a CPU's numbers: on a pretended one, and on a real one where there is one."""

import shutil

import pytest
import torch
from helpers.folders import only_run
from helpers.programs import run_python
from helpers.scripts import ROOT

from devices.scenarios import DRAWING, ONLY_REAL, SCENARIOS, Results


@pytest.fixture(scope="module", params=["pretended", pytest.param("real", marks=pytest.mark.gpu)])
def on_gpu(request, tmp_path_factory):
    """A folder, what each scenario gave there, how often rounds waited for the device, and the memory they took."""
    folder = tmp_path_factory.mktemp("gpu")
    if request.param == "pretended":
        words = [request.getfixturevalue("pretended_gpu")]
    elif torch.cuda.is_available():
        words = []
    else:
        pytest.skip("there is no CUDA GPU")
    done = run_python(["-m", "devices.scenarios", folder, *words], ROOT / "tests")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, *torch.load(folder / "results.pt", weights_only=True)


def assert_close(found: Results, expected: Results, is_real: bool, is_mixed: bool = False) -> None:
    """A real GPU adds in another order: models are compared, not how many samples they get right."""
    assert found.keys() == expected.keys()
    rtol, atol = (1e-3, 1e-4) if is_real else (1e-4, 1e-6)
    if is_mixed:  # bfloat16 has 8 bits
        rtol, atol = 3e-2, 3e-3
    for name, value in expected.items():
        if not (is_real and " after " in name):
            close = torch.isclose(found[name], value, rtol=rtol, atol=atol, equal_nan=True)
            assert close.all(), f"{name}: {found[name]}, not {value}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_numbers_of_a_cpu(tmp_path, on_gpu, name):
    _, results, waits, _ = on_gpu
    if waits and name in ONLY_REAL:
        pytest.skip("the pretended GPU has no autocast")
    if not waits and name in DRAWING:
        pytest.skip("a GPU's dropout draws other masks than a CPU's; that it runs was shown")
    assert_close(results[name], SCENARIOS[name](tmp_path), is_real=not waits, is_mixed=name == "bf16-mixed")


def test_a_checkpoint_of_a_gpu_is_read_and_goes_on_without_one(tmp_path, on_gpu):
    """Night on the GPU, morning on the laptop: its rounds 3 and 4 are here done on a CPU."""
    folder, results, waits, _ = on_gpu
    shutil.copytree(folder / "resumed" / "half", tmp_path / "run")
    checkpoint = torch.load(only_run(tmp_path / "run") / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 2
    assert_close(SCENARIOS["resumed"](tmp_path), results["resumed"], is_real=not waits)


def test_the_cpu_does_not_wait_for_steps(on_gpu):
    """It waits once a round for the norms, the rows and the finiteness of all, and for losses and logged values.

    And once for what a hook of the round may have written, for the counter is one. The vectorized engine also waits
    once for the comparison of a mapped step with the step as written.
    """
    if not on_gpu[2]:
        pytest.skip("only the pretended GPU counts")
    for engine, of_epochs in on_gpu[2].items():
        assert of_epochs == [[5 if engine == "sequential" else 7] * 2] * 2, engine


def test_the_memory_of_a_client_is_freed(on_gpu):
    """Eight clients in a round need no more than two, and nothing is left when a run is over."""
    used = on_gpu[3]
    if not used:
        pytest.skip("the pretended GPU does not count its memory")
    assert used["peak with eight clients"] < used["peak with two clients"] + used["model"] // 2
    assert used["after all"] <= used["before two clients"], used
