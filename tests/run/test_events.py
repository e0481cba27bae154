"""What TensorBoard shows of a run beside its curves, read back from its event files."""

from pathlib import Path

import pytest
from helpers.boring import BoringData, make_model, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from fedbc_lightning.algorithms import FedBC

HISTOGRAM = "values_by_client/dual"


def fit(folder: Path, rounds: int, ckpt_path: str | None = None, dual_lr: float = 0.1, **options):
    trainer = make_trainer(folder, max_rounds=rounds, logger=True, **options)
    trainer.fit(make_model(), BoringData(), FedBC(dual_lr), ckpt_path)
    events = EventAccumulator(trainer.log_dir, size_guidance={"histograms": 0, "tensors": 0})
    events.Reload()
    return trainer, events


def rounds_of(events: EventAccumulator, tag: str = HISTOGRAM) -> list[int]:
    # Sorted, since the names of two files of one second need not be in the order in which they were written.
    return sorted(event.step for event in events.Histograms(tag))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"histogram_every_n_rounds": 3, "eval_every_n_rounds": 2}, [0, 4, 6, 7]),  # the first evaluated one from 3 on
        ({}, [0, 7]),
        ({"histogram_every_n_rounds": 0}, []),
    ],
)
def test_rounds_with_histograms(tmp_path, options, expected):
    _, events = fit(tmp_path, 7, **options)
    if not expected:
        assert events.Tags()["histograms"] == []
        return
    assert rounds_of(events) == expected == rounds_of(events, "values_by_client/accuracy/global")
    groups = {tag.partition("/")[0] for tag in events.Tags()["scalars"]}
    assert max(groups) < "values_by_client"  # TensorBoard sorts groups by name: they stand behind the curves


def test_values_beyond_the_last_bin_have_no_histogram(tmp_path):
    _, events = fit(tmp_path, 1, dual_lr=1e30, clients_per_round=1.0)
    assert rounds_of(events) == [0]  # every client's dual is above TensorBoard's 1e20 after the round
    assert rounds_of(events, "values_by_client/accuracy/global") == [0, 1]


def test_settings_are_shown_once_also_after_a_resume(tmp_path):
    fit(tmp_path, 3, histogram_every_n_rounds=1)
    trainer, events = fit(tmp_path, 5, "last", histogram_every_n_rounds=1)
    assert trainer.current_round == 5
    assert rounds_of(events) == [*range(6)]
    (text,) = events.Tensors("config/text_summary")
    said = text.tensor_proto.string_val[0].decode()
    assert "algorithm: FedBC\n" in said
    assert "model.lr: 0.1\n" in said
    tags = [
        value.tag
        for path in sorted(Path(trainer.log_dir).glob("events*"))
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert tags.count("_hparams_/session_start_info") == 1
    assert "_hparams_/experiment" not in tags  # TensorBoard would read that of one run for all runs that it shows
