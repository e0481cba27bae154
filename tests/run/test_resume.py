"""Stop and resume, bit for bit, what is refused by name, and what is warned of."""

import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers.boring import (
    BoringData,
    BoringModel,
    assert_equal_trees,
    make_model,
    make_trainer,
    read_csv,
    without_times,
)
from helpers.programs import forked, run_fresh, run_python, wait_until
from lightning.pytorch.callbacks import EarlyStopping
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedbc_lightning import SCAFFOLD, ConfigurationError, FedAvg
from fedbc_lightning.algorithms import ComposedAlgorithm
from fedbc_lightning.server import CoordinateMedian, ServerSGD, TrimmedMean, WeightedAverage

NUM_KILLS = 2
COMMAND = [
    "-m", "fedbc_lightning", "fit", "--config", "digits.yaml", "--trainer.max_rounds", "20",
    "--trainer.name", "run", "--algorithm", "FedBC", "--algorithm.dual_lr", "0.01", "--algorithm.dual_momentum", "0.5",
    "--trainer.default_root_dir",
]  # fmt: skip


def same_run(left: Path, right: Path) -> None:
    """Two finished runs: every tensor of last.ckpt, every table, of metrics.csv but for its clock columns."""
    saved = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (left, right)]
    assert_equal_trees(*saved)
    for name in ("clients.csv", "evaluation.csv"):
        assert (left / name).read_bytes() == (right / name).read_bytes()
    assert without_times(read_csv(left / "metrics.csv")) == without_times(read_csv(right / "metrics.csv"))


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of one curve, sorted: files of one second may have names in another order."""
    events = EventAccumulator(str(run))
    events.Reload()
    return sorted((event.step, event.value) for event in events.Scalars(tag))


def test_sigkill_at_random_moments_changes_nothing(tmp_path):
    whole = tmp_path / "whole"
    run_fresh([*COMMAND, whole], tmp_path).check_returncode()
    broken, rng, kills = tmp_path / "broken", random.Random(0), 0
    resume = [*COMMAND, broken, "--ckpt_path", "last"]
    for _ in range(NUM_KILLS):
        enough = _rounds(broken) + rng.randint(1, 6)
        with forked(resume, tmp_path) as program:
            wait_until(lambda enough=enough: _rounds(broken) >= enough, program)
            time.sleep(rng.uniform(0, 0.2))
            program.kill()
            kills += program.finish().returncode == -signal.SIGKILL
    run_python(resume, tmp_path).check_returncode()
    assert kills == NUM_KILLS
    assert [p.name for p in (broken / "run").iterdir()] == ["FedBC-0"]
    same_run(whole / "run" / "FedBC-0", broken / "run" / "FedBC-0")
    for tag in ("train/loss", "accuracy/global"):
        expected = scalars(whole / "run" / "FedBC-0", tag)
        assert scalars(broken / "run" / "FedBC-0", tag) == expected
    assert len(expected) == 21


def _rounds(root: Path) -> int:
    path = root / "run" / "FedBC-0" / "metrics.csv"
    return path.read_text().count("\n") if path.is_file() else 0


def test_early_stopping_resumes_its_patience(tmp_path):
    def fit(root, rounds, ckpt_path=None):
        stop = EarlyStopping("loss/global", patience=3, min_delta=10.0)
        trainer = make_trainer(root, max_rounds=rounds, callbacks=stop)
        trainer.fit(make_model(), BoringData(), FedAvg(), ckpt_path=ckpt_path)
        return trainer.current_round

    assert fit(tmp_path / "a", 20) == 3
    assert fit(tmp_path / "b", 2) == 2
    assert fit(tmp_path / "b", 20, "last") == 3


def test_a_misspelt_name_is_warned_of_where_last_starts_anew(tmp_path, caplog):
    def warnings_of(name):
        caplog.clear()
        make_trainer(tmp_path, name=name, max_rounds=1).fit(make_model(), BoringData(), FedAvg(), ckpt_path="last")
        return [message for message in caplog.messages if message.startswith("WARNING")]

    said = "WARNING: there is no last.ckpt to resume in '{}': the run starts at round 0."
    assert warnings_of("mnist") == [said.format(tmp_path / "mnist")]
    assert warnings_of("mnist") == []
    assert warnings_of("mnits") == [said.format(tmp_path / "mnits") + " did you mean 'mnist'?"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, which a second fit finds with nothing to train."""
    root = tmp_path_factory.mktemp("finished")
    make_trainer(root).fit(make_model(), BoringData(), FedAvg())
    again = make_trainer(root)
    again.fit(make_model(), BoringData(), FedAvg(), ckpt_path="last")
    assert again.current_round == 3
    assert len(read_csv(f"{again.log_dir}/metrics.csv")) == 4
    return again


class OtherModel(BoringModel):
    """One layer is wider."""

    def __init__(self):
        super().__init__()
        self.net[3] = torch.nn.Linear(8, 4)


class OtherData(BoringData):
    """Client 0 has other samples."""

    def __init__(self):
        super().__init__()
        self.arrays[0] = self.arrays[1]


@pytest.mark.parametrize(
    ("model", "data", "algorithm", "message"),
    [
        (OtherModel, BoringData, FedAvg, r"model 'net.3.bias' is \(3,\) float32 there, \(4,\) float32 here"),
        (BoringModel, OtherData, FedAvg, "partition 'train samples' is 456 there, 480 here"),
        (BoringModel, BoringData, SCAFFOLD, "algorithm is FedAvg there, SCAFFOLD here"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_by_name(finished, model, data, algorithm, message):
    root, before = Path(finished.default_root_dir), {p: p.read_bytes() for p in Path(finished.log_dir).rglob("*.csv")}
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(root).fit(make_model(model), data(), algorithm(), finished.result.checkpoint)
    assert [p.name for p in (root / "default").iterdir()] == ["FedAvg-1"]
    assert {path: path.read_bytes() for path in Path(finished.log_dir).rglob("*.csv")} == before


def test_other_parts_of_a_method_warn_by_name(tmp_path):
    """A robust rule or a server part is a hyper-parameter too, by its class and by what it was given."""

    def composed(rule, lr):
        return ComposedAlgorithm([WeightedAverage("uniform", rule), ServerSGD(lr)])

    before = make_trainer(tmp_path, max_rounds=1).fit(make_model(), BoringData(), composed(CoordinateMedian(), 0.5))
    resumed = composed(TrimmedMean(0.3), 0.7)
    with pytest.warns(UserWarning, match="the run goes on as it is now") as caught:
        make_trainer(tmp_path, max_rounds=2).fit(make_model(), BoringData(), resumed, before.checkpoint)
    said = " ".join(str(warning.message) for warning in caught)
    assert "algorithm.parts.0.rule was CoordinateMedian when" in said
    assert "is TrimmedMean now" in said
    assert re.search(r"algorithm\.parts\.1\.lr was 0\.5 .* and is 0\.7 now", said)
