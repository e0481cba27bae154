"""The short form of the command that injects faults into runs, and into the package itself."""

import re

from helpers.programs import TESTS, run_fresh


def test_the_short_form_loses_nothing_and_finds_the_mutants_of_single_runs(tmp_path):
    """In a new Python: below a process of the fork server the workers of a data loader did not answer."""
    done = run_fresh([TESTS / "faults" / "run.py", "--short"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^all: tried (\d+), survived \1, lost 0$", done.stdout, re.M)
    assert "mutants: 5, missed: []" in done.stdout
