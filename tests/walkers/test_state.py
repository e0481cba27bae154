"""One of many parts of the walk over what a module can hold."""

import warnings

from walkers.state import main


def test_a_part_of_the_walk_finds_no_difference(capsys):
    with warnings.catch_warnings():
        status = main(["--part", "7/250"])
    assert status == 0, capsys.readouterr().out
