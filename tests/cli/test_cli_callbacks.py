"""Lightning's callbacks and loggers by short name from the command line."""

from pathlib import Path

import pytest

from fedbc_lightning.commands.main import main

RUN = ["fit", "--config", "digits.yaml", "--trainer.max_rounds", "1", "--trainer.enable_progress_bar", "false"]


@pytest.mark.parametrize(
    "more",
    [
        ["--trainer.callbacks+", "Timer", "--trainer.callbacks.duration", "00:01:00:00"],
        ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "csv"],
        ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "train_loss"],
        ["--trainer.callbacks+", "RoundCheckpoint", "--trainer.callbacks.monitor", "loss/global"],
        ["--trainer.callbacks", "ByzantineClients", "--trainer.callbacks.fraction", "0.3"],
    ],
    ids=["Timer", "CSVLogger", "EarlyStopping", "RoundCheckpoint", "ByzantineClients"],
)
def test_short_names_run_and_the_saved_config_runs_again(more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedbc-cli"])
    assert main([*RUN, *more]) == 0
    first, second = (Path("runs/digits", name) for name in ("FedBC-0", "FedBC-0-1"))
    assert main(["fit", "--config", str(first / "config.yaml")]) == 0
    assert (first / "clients.csv").read_bytes() == (second / "clients.csv").read_bytes()


def test_the_list_of_callbacks_has_ours_and_none_that_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.callbacks.help"])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert names[:4] == ["AggregationMoves", "ByzantineClients", "RoundCheckpoint", "RoundProgressBar"]
    assert {"EarlyStopping", "Timer"} <= set(names)
    assert not {"SaveRunConfig", "ModelCheckpoint", "LearningRateMonitor", "Checkpoint"} & set(names)
