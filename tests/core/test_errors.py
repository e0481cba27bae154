"""Places of exceptions in a run, and tracebacks in which the user's own code stands out."""

import sys

import pytest
import torch

from fedbc_lightning.core.errors import NotVectorizableError, locate, notes_of, one_line, report


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


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_the_code_of_the_user_and_the_place_are_shown(monkeypatch, version):
    error = raised(lambda: torch.nn.Linear(3, 2)(torch.zeros(1, 4)))
    monkeypatch.setattr(sys, "version_info", version)
    locate(error, "client 3, round 1")
    said = report(error)
    assert "raised(lambda: torch.nn.Linear(3, 2)(torch.zeros(1, 4)))" in said
    assert "nn/modules/linear.py" in said
    assert "return F.linear" not in said, "code of torch"
    assert said.splitlines()[-2].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert said.splitlines()[-1].endswith("client 3, round 1")
