"""L2GD's figures: the minimiser and the theory that they stand on, and figures of real runs on a small problem."""

import numpy as np
import pytest
from fedbc_lightning.datamodules import LibSVMDataModule
from scipy.optimize import minimize

from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.papers import l2gd_figures
from fedbc_lightning.papers.l2gd_figures import cost_of, errors_of, read_problem
from fedbc_lightning.papers.l2gd_problem import ERROR, TO_GLOBAL, TO_LOCAL, MixtureProblem
from fedbc_lightning.partition import IID
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.compare import Comparison
from fedbc_lightning.studies.results import StudyRecord
from fedbc_lightning.studies.study import Study

pytestmark = pytest.mark.usefixtures("forked_workers")
OVERRIDES = {
    "trainer.max_rounds": 70, "trainer.accelerator": "cpu", "trainer.eval_every_n_rounds": 1000000,
    "trainer.precision": "64-true", "trainer.callbacks": "fedbc_lightning.papers.l2gd_problem.MixtureError",
    "trainer.logger": False, "data.path": "rows", "data.num_features": 6, "data.test_fraction": None,
    "data.batch_size": 1, "data.row_norm": 1.897, "model.num_features": 6, "model.weight_decay": 0.1,
    "algorithm.penalty": 0.1,
}  # fmt: skip
SPLITS = {
    "homogeneous": {"data.partitioner": "IID", "data.partitioner.num_clients": 3},
    "heterogeneous": {"data.partitioner.num_clients": 3},
}


def sample_rows(num_rows=24):
    rng = np.random.default_rng(0)
    features = rng.standard_normal((num_rows, 6))
    return features, (features[:, 0] + rng.standard_normal(num_rows) > 0).astype(int)


def problem_of(penalty=0.1, mu=0.1, num_clients=3):
    features, labels = sample_rows()
    features *= 1.897 / np.linalg.norm(features, axis=1, keepdims=True)
    shape = num_clients, len(labels) // num_clients
    return MixtureProblem(features.reshape(*shape, -1), (2.0 * labels - 1).reshape(shape), mu, penalty)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a LibSVM file of 24 rows."""
    folder = tmp_path_factory.mktemp("l2gd")
    features, labels = sample_rows()
    lines = (
        f"{2 * label - 1} {' '.join(f'{k}:{value:.6f}' for k, value in enumerate(row, 1))}"
        for row, label in zip(features, labels, strict=True)
    )
    (folder / "rows").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def here(place, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(place)


def test_the_minimiser_is_that_of_another_solver():
    problem = problem_of()
    shape = problem.minimiser.shape

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


def test_between_local_and_global():
    """Theorem 1: psi(x(lambda)) does not grow with lambda, f(x(lambda)) does not shrink; Figure 1's two ends."""
    problem = problem_of()
    points = [problem.with_penalty(penalty).minimiser for penalty in (0.0, 0.01, 0.1, 1.0, 10.0, 1e5)]
    spreads = [((x - x.mean(axis=0)) ** 2).sum() for x in points]
    losses = [problem.with_penalty(0.0).value(x) for x in points]
    assert np.all(np.diff(spreads) < 0)
    assert np.all(np.diff(losses) > 0)
    to_local, to_global = zip(*map(problem.distances, points), strict=True)
    assert to_local[0] < 1e-6
    assert to_global[-1] < 1e-3
    assert np.all(np.diff(to_local) > 0)
    assert np.all(np.diff(to_global) < 0)


def test_the_shipped_step_sizes_are_the_theorems(data_root):
    """On a1a: 1,605 rows, 395 of them positive; every f_ij is 1-smooth; p* is about that of the paper's Figure 2."""
    path = data_root / "libsvm" / "a1a"
    if not path.is_file():
        pytest.skip(f"no {path}")
    for name, num_probabilities in (("methods", 1), ("probability", 7)):
        study = read_study("compare", ["--config", f"studies/l2gd_{name}.yaml"])
        runs = [study.run(variant, study.methods[0], 0) for variant in study.variants]
        settings = runs[0].settings
        row_norm, mu, penalty = (settings[key] for key in ("data.row_norm", "model.weight_decay", "algorithm.penalty"))
        data = LibSVMDataModule(str(path), IID(5), row_norm=row_norm, test_fraction=None)
        data.prepare_data()
        data.setup("fit")
        problem = MixtureProblem.of_clients(data, mu, penalty)
        assert problem.labels.shape == (5, 321)
        assert (problem.labels > 0).sum() == 395
        np.testing.assert_allclose((problem.inputs**2).sum(axis=2) / 4 + problem.mu, 1.0, rtol=1e-6)
        assert problem.best_probability == pytest.approx(0.09, abs=0.006)
        assert len({run.settings["algorithm.probability"] for run in runs}) == num_probabilities
        for run in runs:
            probability, lr = (run.settings[f"algorithm.{key}"] for key in ("probability", "lr"))
            assert lr == pytest.approx(problem.step_size(probability), rel=1e-3)


def study_of(name, algorithms, **options):
    study = Study("a1a.yaml", algorithms, seeds=1, workers=1, metrics=[ERROR], name=name, **options)
    comparison = Comparison(study)
    assert comparison.run()
    return StudyRecord(study, None, comparison.states)


def test_figures_of_methods(here):
    """L2SGD+ is a line in the logarithm, the others idle about where theory says; its models end at x(lambda)."""
    best = problem_of()
    p = best.best_probability
    overrides = {**OVERRIDES, "algorithm.probability": p, "algorithm.lr": best.step_size(p)}
    algorithms = {"L2SGD+": {"algorithm": "L2SGDPlus"}, "L2SGD2": {}, "L2SGD": {}}
    record = study_of("methods", algorithms, overrides=overrides, variants=SPLITS)
    drawn = [draw(record) for draw in (l2gd_figures.figure_1, l2gd_figures.figure_3, l2gd_figures.figure_4)]
    plus, *others = [state.run for state in record.states if state.run.variant == "heterogeneous"]
    problem, errors = read_problem(plus), errors_of(plus)
    assert problem.labels.shape == (3, 8)
    assert cost_of(plus)["communications"] == np.argmax(errors <= 1e-5) > 10
    line = np.log(errors[errors > 1e-12])
    assert np.corrcoef(np.arange(len(line)), line)[0, 1] < -0.95
    last = RunRecord.newest(plus.folder).metrics.iloc[-1]
    assert [last[TO_LOCAL], last[TO_GLOBAL]] == pytest.approx(problem.distances(problem.minimiser), rel=0.02)
    for run in others:
        floor = problem.floor(run.method, p, overrides["algorithm.lr"])
        assert floor / 3 < errors_of(run)[30:].mean() < 3 * floor
        assert cost_of(run) == {}
    lines = drawn[0].axes[0].lines
    assert np.all(np.diff(lines[0].get_ydata()) > 0)
    assert [panel.get_title() for panel in drawn[1].axes] == ["homogeneous"] * 2 + ["heterogeneous"] * 2
    assert [panel.get_title() for panel in drawn[2].axes] == ["homogeneous", "heterogeneous"]


def test_figures_of_probabilities(here):
    """Hardly fewer communications below p*, more above, where each client takes fewer steps; a goal ends a run."""
    best = problem_of()
    levels = {}
    for factor in (0.5, 1, 3):
        p = factor * best.best_probability
        levels[f"p = {factor} p*"] = {"algorithm.probability": p, "algorithm.lr": best.step_size(p)}
    overrides = {**OVERRIDES, "trainer.max_rounds": 2000, "trainer.callbacks.goal": 1e-5}
    factors = [{"heterogeneous": SPLITS["heterogeneous"]}, levels]
    record = study_of("probabilities", {"L2SGD+": {"algorithm": "L2SGDPlus"}}, overrides=overrides, factors=factors)
    drawn = [draw(record) for draw in (l2gd_figures.figure_2, l2gd_figures.figure_5)]
    low, at_best, high = (cost_of(state.run) for state in record.states)
    assert all(errors_of(state.run)[-1] <= 1e-5 < errors_of(state.run)[-2] for state in record.states)
    assert high["communications"] > 1.5 * at_best["communications"]
    assert low["communications"] > 0.6 * at_best["communications"]
    assert low["local steps"] > 1.3 * at_best["local steps"]
    (points,) = drawn[0].axes[0].containers
    assert list(points[0].get_ydata()) == [cost["communications"] for cost in (low, at_best, high)]
    marked = [line for line in drawn[1].axes[0].lines if line.get_marker() == "^"]
    assert [len(line.get_ydata()) for line in marked] == [at_best["communications"] + 1]
