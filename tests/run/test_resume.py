"""Stop and resume, bit for bit, what is refused by name, and what is warned of."""

import re
from pathlib import Path

import pytest
import torch
from helpers.boring import BoringData, BoringModel, make_model, make_trainer

from fedbc_lightning import SCAFFOLD, ConfigurationError, FedAvg
from fedbc_lightning.algorithms import ComposedAlgorithm
from fedbc_lightning.server import CoordinateMedian, ServerSGD, TrimmedMean, WeightedAverage


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
    """A finished run."""
    trainer = make_trainer(tmp_path_factory.mktemp("finished"))
    trainer.fit(make_model(), BoringData(), FedAvg())
    return trainer


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
