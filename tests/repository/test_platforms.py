"""The package runs on Linux, macOS and Windows; the last two run in the workflow ci.yml alone."""

import os
import subprocess
import sys

from helpers.boring import read_csv, without_times
from helpers.scripts import ROOT

from fedbc_lightning.commands.main import main

TRAIN = "fit --config greek.yaml --trainer.max_rounds 1"
GO_ON = "fit --ckpt_path last --trainer.name digits --trainer.max_rounds 2"
AS_ON_WINDOWS = f"""
import sys
from helpers import windows
windows.take_away()
from fedbc_lightning.commands.main import main
for words in ("{TRAIN}", "{GO_ON}"):
    sys.argv[1:] = words.split()
    assert main() == 0
"""
NOT_UTF8 = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"}


def test_it_trains_and_goes_on_without_what_windows_lacks(tmp_path, monkeypatch):
    """``mypy --platform win32``, also in ci.yml, finds the same in lines that do not run here."""
    text = f"# ρ and λ\n{(ROOT / 'configs' / 'digits.yaml').read_text(encoding='utf-8')}"
    for folder in ("windows", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "greek.yaml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", AS_ON_WINDOWS],
        cwd=tmp_path / "windows",
        env={**os.environ, **NOT_UTF8, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode("cp1252")
    monkeypatch.chdir(tmp_path / "here")
    assert [main(words.split()) for words in (TRAIN, GO_ON)] == [0, 0]
    for name in ("metrics.csv", "clients.csv", "evaluation.csv"):
        there, here = (
            read_csv(tmp_path / folder / "runs" / "digits" / "FedBC-0" / name) for folder in ("windows", "here")
        )
        assert without_times(there) == without_times(here)
        assert there[-1]["round"] == "2"
