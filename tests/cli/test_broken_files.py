"""Whatever is wrong in a file of the user's: one line says what, and in which file and line, or for which client."""

import re
import shutil
import sys
import traceback
from pathlib import Path

import pytest
from helpers.broken_files import WRONG_STEP, Case, cases, words_for, write_files
from helpers.command_line import run_cli
from helpers.folders import only_run

from fedbc_lightning.core.errors import notes_of

CHECKPOINT = "last.ckpt"
EVERY = 8
"""One in so many cases is tried in every run of the tests, all of them nightly."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of a user, and the checkpoint of a run with them."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", list(sys.path))
        assert run_cli(*words_for("table.csv"), "--trainer.enable_checkpointing", "true") == 0
    shutil.copy(only_run(folder / "runs" / "broken") / "checkpoints" / CHECKPOINT, folder / CHECKPOINT)
    shutil.rmtree(folder / "runs")
    sys.modules.pop("mine")
    return folder


def outcome(case: Case, folder: Path, capsys, monkeypatch) -> str | None:
    """Return what is wrong with what a user is told, or None."""
    shutil.copytree(folder, "here")
    monkeypatch.chdir("here")
    for name, content in case.files.items():
        if content == b"GONE":
            Path(name).unlink()
        else:
            Path(name).write_bytes(content)
    sys.modules.pop("mine", None)
    capsys.readouterr()
    try:
        status = run_cli(*case.words)
    except Exception as error:  # of the user's own code: the program shows these lines of it, and the place in the run
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith("mine.py")]
        told = "; ".join([*(f"mine.py, line {frame.lineno}" for frame in frames), *notes_of(error)])
        is_in_step = any(frame.name.endswith("_step") for frame in frames)
        place = WRONG_STEP if is_in_step else case.place
        return None if frames and re.search(place, told) else f"{type(error).__name__}: {error} ({told})"
    err = capsys.readouterr().err
    said = [line for line in err.splitlines() if "error: " in line]
    is_clear = status in (1, 2) and len(said) == 1 and "Traceback" not in err
    return None if is_clear and re.search(case.place, said[0]) else f"status {status}: {err}"


def check(files, some, capsys, monkeypatch, tmp_path):
    wrong = {}
    for number, case in enumerate(some):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        with monkeypatch.context() as patched:
            patched.setattr(sys, "path", list(sys.path))
            found = outcome(case, files, capsys, patched)
        if found is not None:
            wrong[case.name] = f"{case.place}\n    {found}"
    assert not wrong, f"{len(wrong)} of {len(some)}:\n" + "\n".join(f"{k}: {v}" for k, v in wrong.items())


def test_some_broken_files(files, capsys, monkeypatch, tmp_path):
    check(files, cases(files, CHECKPOINT)[::EVERY], capsys, monkeypatch, tmp_path)


@pytest.mark.nightly
def test_all_broken_files(files, capsys, monkeypatch, tmp_path):
    """Nightly, as they take a minute; the generator is the same."""
    found = cases(files, CHECKPOINT)
    assert len(found) >= 200
    check(files, [case for k, case in enumerate(found) if k % EVERY], capsys, monkeypatch, tmp_path)
