"""The benchmark scripts show what they say, on problems of seconds."""

import csv
import importlib.util
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import dump_svmlight_file

PATH = Path(__file__).parents[1] / "benchmarks" / "l2gd_a1a.py"


def load_script():
    spec = importlib.util.spec_from_file_location("benchmarks_l2gd_a1a", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
TINY = SCRIPT.Study(3, 0.02, factors=(0.5, 3.0), splits=("heterogeneous",), swept=("heterogeneous",), depth=1e-5)


def sample_rows(num_rows: int = 25) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((num_rows, 6))
    return features, np.where(features[:, 0] + rng.standard_normal(num_rows) > 0, 1.0, -1.0)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """What the command leaves behind: the rows of both tables."""
    folder = tmp_path_factory.mktemp("l2gd")
    dump_svmlight_file(*sample_rows(), str(folder / "rows"))
    logger, threads = logging.getLogger("lightning.pytorch"), torch.get_num_threads()
    level = logger.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SCRIPT, "QUICK", (TINY,))
        SCRIPT.main(["--data", str(folder / "rows"), "--out", str(folder / "out"), "--quick"])
    logger.setLevel(level)
    torch.set_num_threads(threads)
    tables = {}
    for name in ("runs", "curves"):
        with (folder / "out" / f"{name}.csv").open(newline="") as file:
            tables[name] = list(csv.DictReader(file))
    return folder / "out", tables["runs"], tables["curves"]


def curve(study, run: int) -> np.ndarray:
    return np.array([float(row["suboptimality"]) for row in study[2] if row["run"] == str(run)])


def test_l2sgd_plus_converges_linearly(study):
    """Hanzely & Richtarik 2020, Figure 3: a line in the logarithm."""
    row, values = study[1][0], curve(study, 0)
    assert (row["method"], row["study"]) == ("L2SGD+", "methods")
    assert int(row["communications_to_goal"]) == len(values) - 1
    assert values[-1] <= 1e-5 < values[:-1].min()
    steps = np.arange(len(values))
    assert np.corrcoef(steps, np.log(values))[0, 1] < -0.97


def test_the_others_idle_where_theory_says(study):
    """Section 3 of the formulas: both stall; L2GD at a neighbourhood that is proportional to alpha."""
    floors = []
    for index, method in enumerate(["L2SGD2", "L2SGD", "L2GD", "L2GD"], start=1):
        row = study[1][index]
        assert (row["method"], row["communications_to_goal"]) == (method, "")
        floors.append(float(row["floor"]))
        assert curve(study, index)[10:].min() > 2e-5
        assert floors[-1] == pytest.approx(float(row["floor_of_theory"]), rel=1.0)
        assert floors[-1] > float(row["floor_of_theory"]) / 3
    assert floors[3] < 0.5 * floors[2]


def test_communications_against_probability(study):
    """Figure 2: hardly fewer below p*, proportionally more above; the local steps go the other way."""
    at_best, low, high = (study[1][k] for k in (0, 5, 6))
    assert float(low["probability"]) < float(at_best["probability"]) < float(high["probability"])
    needed = [int(row["communications_to_goal"]) for row in (low, at_best, high)]
    assert needed[2] > 1.5 * needed[1]
    assert needed[0] > 0.6 * needed[1]
    assert int(low["local_steps"]) > 1.3 * int(at_best["local_steps"])


def test_figure_and_tables(study):
    folder, runs, curves = study
    assert {path.name for path in folder.iterdir()} == {"figure.png", "figure.svg", "runs.csv", "curves.csv"}
    assert len(runs) == 7
    assert sum(int(row["communications"]) + 1 for row in runs) == len(curves)


@pytest.mark.parametrize("split", ["homogeneous", "heterogeneous"])
def test_the_minimiser_is_that_of_another_solver(split):
    problem = SCRIPT.Problem.from_rows(*sample_rows(), TINY, split)
    shape = problem.num_clients, problem.inputs.shape[2]

    def value_and_gradient(flat):
        x = flat.reshape(shape)
        gradient = (problem.gradients(x).mean(axis=1) + problem.pull(x)) / shape[0]
        return problem.value(x), gradient.ravel()

    start = np.random.default_rng(1).standard_normal(shape).ravel()
    found = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-10})
    assert found.fun == pytest.approx(problem.least, abs=1e-13)
    np.testing.assert_allclose(found.x.reshape(shape), problem.minimiser, rtol=0, atol=1e-6)
    direction = np.random.default_rng(2).standard_normal(start.size) * 1e-6
    slope = value_and_gradient(start + direction)[0] - value_and_gradient(start - direction)[0]
    assert slope == pytest.approx(2 * value_and_gradient(start)[1] @ direction, rel=1e-5)


def test_a1a(data_root):
    """DATA.md: 1,605 rows, 395 of them positive; every f_ij is 1-smooth; p* is that of the paper's Figure 2."""
    path = data_root / "libsvm" / "a1a"
    if not path.is_file():
        pytest.skip(f"no {path}")
    features, labels = SCRIPT.load(path)
    assert (features.shape, int((labels > 0).sum())) == ((1605, 119), 395)
    for study, num_samples in zip(SCRIPT.FULL, (321, 16), strict=True):
        mixed, ordered = (SCRIPT.Problem.from_rows(features, labels, study, split) for split in study.splits)
        for problem in (mixed, ordered):
            assert problem.labels.shape == (study.num_clients, num_samples)
            smoothness = (problem.inputs**2).sum(axis=2) / 4 + problem.mu
            np.testing.assert_allclose(smoothness, 1.0, rtol=1e-12)
        assert np.sort(mixed.labels, axis=None).tolist() == np.sort(ordered.labels, axis=None).tolist()
        assert [len(set(row)) for row in ordered.labels.tolist()].count(2) <= 1
        assert mixed.probability("L2SGD+") == pytest.approx(0.09, abs=0.006)
