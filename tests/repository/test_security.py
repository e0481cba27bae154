"""SECURITY.md: a table of promises, each with the test that shows it."""

from repository.size import ROOT


def test_every_promise_has_a_test():
    lines = (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    for _, promise, test in rows[2:]:
        file, _, name = test.strip(" `").partition("::")
        is_there = bool(name) and f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")
        assert is_there != promise.strip().startswith("Nothing:"), promise
    assert len(rows) > 10
