"""One of many parts of the walk over Lightning's protocol."""

import warnings

from walkers.protocol import main


def test_a_part_of_the_walk_has_the_documented_differences_alone(capsys):
    with warnings.catch_warnings():
        status = main(["--part", "7/250"])
    assert status == 0, capsys.readouterr().out
