"""Places of exceptions in a run, and tracebacks without the frames of frameworks."""

import sys
from pathlib import Path
from traceback import extract_tb, format_exception

import pytest
import torch

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.core.errors import ConfigurationError, NotVectorizableError
from fedbc_lightning.core.tracebacks import (
    SHOWS_ALL,
    folded,
    is_users,
    locate,
    notes_of,
    one_line,
    report,
    short,
    users_frame,
)
from fedbc_lightning.module.mistakes import explained


@pytest.fixture(autouse=True)
def _short_tracebacks(monkeypatch):
    monkeypatch.delenv(SHOWS_ALL)


def raised(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (any)
        function()
    return caught.value


def test_the_closest_place_is_kept():
    error = ValueError("boom")
    locate(error, "client 3, round 1, batch 0")
    locate(error, "clients 3, 4, round 1")
    assert notes_of(error) == ["client 3, round 1, batch 0"]
    assert one_line(error) == "boom (client 3, round 1, batch 0)"


def test_what_an_engine_cannot_do_has_no_place():
    error = NotVectorizableError("cannot train with dropout")
    locate(error, "client 3, round 1")
    assert notes_of(error) == []


def test_python_310_keeps_notes_and_the_command_line_prints_them(monkeypatch):
    error = raised(lambda: int("x"))
    monkeypatch.setattr(sys, "version_info", (3, 10))
    locate(error, "client 3, round 1")
    assert error.__notes__ == ["client 3, round 1"]
    assert report(error).count("client 3, round 1") >= 1


def test_frames_of_torch_are_left_out_and_the_users_are_kept(monkeypatch):
    error = raised(lambda: torch.nn.Linear(3, 2)(torch.zeros(1, 4)))
    said = report(error)
    assert "test_tracebacks.py" in said
    assert "torch/nn" not in said
    assert said.splitlines()[-1].endswith(f"{SHOWS_ALL}=full shows them)")
    assert users_frame(error).file == __file__
    monkeypatch.setenv(SHOWS_ALL, "full")
    assert "torch/nn" in report(error)


def wrong_shape(error):
    try:
        torch.nn.Linear(3, 2)(torch.zeros(1, 4))
    except RuntimeError as cause:
        raise error from cause


def test_an_exception_and_its_cause_lose_the_frames_of_torch(monkeypatch):
    error = raised(lambda: wrong_shape(KeyError("boom")))
    monkeypatch.setenv(SHOWS_ALL, "full")
    assert "torch/nn" in "".join(format_exception(short(error)))
    monkeypatch.delenv(SHOWS_ALL)
    said = "".join(format_exception(short(error)))
    assert "torch/nn" not in said
    counts = [said.count(each) for each in ("in wrong_shape", "Linear(3, 2)", "RuntimeError: mat1", "KeyError: 'boom'")]
    assert counts == [2, 1, 1, 1]


def test_what_the_caller_was_handling_stays_as_it_was():
    error = raised(lambda: wrong_shape(KeyError("boom")))
    cause = error.__cause__
    assert any("torch" in frame.filename for frame in extract_tb(short(error, handled=cause).__cause__.__traceback__))


def test_a_traceback_in_a_message_is_folded_and_tells_that_the_user_has_a_part():
    code = {}
    exec(compile("def call(error):\n    raise error\n", torch.__file__, "exec"), code)
    sent = f'Traceback:\n  File "{torch.__file__}", line 2, in h\n  File "/home/me/mine.py", line 7, in get\nOSError: 1'
    error = raised(lambda: code["call"](OSError(sent)))
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    assert [frame.name for frame in extract_tb(error.__traceback__)] == ["call"]
    assert short(error).__traceback__ is None
    assert "mine.py" in str(error)
    assert torch.__file__ not in str(error)


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<ipython-input-1-0>", "<python-input-0>", "<doctest x[0]>"])
def test_what_is_typed_is_the_users(file):
    assert is_users(file)
    assert not is_users("<eval_with_key>.3")


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict", "export", "plan"])
def test_every_verb_of_the_trainer_shows_one_frame_of_the_package(verb):
    trainer = FederatedTrainer(logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError) as caught:
        getattr(trainer, verb)(None)
    frames = [Path(frame.filename).name for frame in extract_tb(caught.value.__traceback__)]
    assert frames == ["test_tracebacks.py", "tracebacks.py"]


def test_an_exception_without_code_of_the_users_keeps_its_frames():
    code = {}
    exec(compile("def divide():\n    1 / 0\ndef call():\n    divide()\n", torch.__file__, "exec"), code)
    error = raised(code["call"])
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this file
    assert [frame.name for frame in extract_tb(short(error).__traceback__)] == ["call", "divide"]


def test_a_traceback_without_code_of_the_users_stays_whole():
    text = f'Traceback (most recent call last):\n  File "{torch.__file__}", line 1, in f\n    g()\nKeyError: 1\n'
    assert folded(text) == text


def test_the_traceback_inside_the_message_of_a_worker_is_folded():
    text = (
        f'Traceback (most recent call last):\n  File "{torch.__file__}", line 1, in f\n    g()\n    ^^^\n'
        'RuntimeError: Caught it in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n'
        f'  File "{torch.__file__}", line 2, in h\n    i()\n  File "/home/me/mine.py", line 7, in __getitem__\n'
        "    boom()\nOSError: no picture\n"
    )  # fmt: skip
    assert folded(text).splitlines() == [
        "Traceback (most recent call last):",
        "RuntimeError: Caught it in DataLoader worker process 0.",
        "Original Traceback (most recent call last):",
        '  File "/home/me/mine.py", line 7, in __getitem__',
        "    boom()",
        "OSError: no picture",
        f"(frames of fedbc_lightning, torch, Lightning and Python are left out; {SHOWS_ALL}=full shows them)",
    ]


def test_an_error_of_the_users_own_is_not_explained():
    assert explained(raised(lambda: [][3]), [torch.zeros(2)]) is None
    assert explained(ValueError("size mismatch"), None) is None
