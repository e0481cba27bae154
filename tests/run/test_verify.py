"""A client's round is worked out again from the messages that a run has kept."""

import math
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.boring import BoringData, make_model, make_trainer
from helpers.messages_only import MessagesOnly

from fedbc_lightning.algorithms import SCAFFOLD
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.federation.elsewhere import folder_of
from fedbc_lightning.federation.messages import Down, Up, decode, encode, hash_of


class Keeping(MessagesOnly):
    keep_messages = True


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("run"), backend=Keeping())
    trainer.fit(make_model(), BoringData(), SCAFFOLD())
    return trainer


def told(run, client, round=2, lr=0.1):
    last, model = Path(run.log_dir, "checkpoints", "last.ckpt"), make_model(lr=lr)
    try:
        return make_trainer(run.default_root_dir).verify(model, BoringData(), SCAFFOLD(), last, client, round)
    except ConfigurationError as error:
        return str(error)


@contextmanager
def another(path, make):
    """Change a file inside this context; None takes it away."""
    kept = path.read_bytes()
    content = make(kept)
    path.unlink() if content is None else path.write_bytes(content)
    try:
        yield kept
    finally:
        path.write_bytes(kept)


LACKS = "lacks the messages whose hashes clients.csv has for"
SAME, OTHER = "worked out again, the answer is the same", "worked out again, the answer is another one: "
ANSWERS = {
    f"{SAME} bit for bit": lambda up: {},
    f"{SAME} to 1e-06 of the largest number (w)": lambda up: {"w": up.w + 1e-6 * up.w.abs().max()},
    f"{OTHER}w differs by 0.091 of": lambda up: {"w": up.w + 0.1 * up.w.abs().max()},
    f"{OTHER}w differs in more": lambda up: {"w": up.w * math.nan},
    f"{OTHER}records.0.train_loss": lambda up: {"records": [{**up.records[0], "train_loss": 0.0}]},
    f"{OTHER}messages.evil": lambda up: {"messages": {**up.messages, "evil": up.w}},
}


def test_another_config_is_told_as_such(run):
    client = decode((folder_of(run.log_dir, 2) / "1.down").read_bytes(), Down).clients[0]
    said = told(run, client, lr=0.5)
    assert re.fullmatch(r".* cannot be worked out here: its form cannot be .* give all the same config\.", said), said


@pytest.mark.parametrize("line", ANSWERS)
def test_a_round_is_worked_out_again(run, line):
    def changed(data):
        up = decode(data, Up)
        fields = ANSWERS[line](up)
        return encode(replace(up, **fields)) if fields else data

    place, table = folder_of(run.log_dir, 2) / "1.up", Path(run.log_dir, "clients.csv")
    client = decode(place.with_suffix(".down").read_bytes(), Down).clients[0]
    with another(place, changed) as sent:
        if place.read_bytes() != sent:
            assert LACKS in told(run, client)
        hashes = hash_of(sent).encode(), hash_of(place.read_bytes()).encode()
        with another(table, lambda data: data.replace(*hashes)):
            assert told(run, client).startswith(f"client {client}, round 2: {line}")


def test_files_that_are_missing_or_broken_are_said_by_name(run):
    folder = folder_of(run.log_dir, 2)
    downs = {decode(path.read_bytes(), Down).clients[0]: path for path in folder.glob("*.down")}
    (first, *_, last), (absent, *_) = sorted(downs, key=downs.get), {*range(6)}.difference(downs)
    assert LACKS in told(run, absent)
    assert "000099' cannot be read (No such file or directory): there was no such round, or" in told(run, last, 99)
    with another(folder / "start", lambda data: None):
        assert "start' cannot be read (No such file" in told(run, last)
    with another(downs[first], lambda data: data[:50]):
        assert SAME in told(run, last)
        assert LACKS in told(run, first)
    with another(downs[last].with_suffix(".up"), lambda data: None):
        assert LACKS in told(run, last)
    table, of_client = Path(run.log_dir, "clients.csv"), rf"\n2,{last},[^\n]*"
    with another(table, lambda data: re.sub(of_client.encode(), b"", data)):
        assert LACKS in told(run, last)
    with another(table, lambda data: re.sub(rb"\n2,[^\n]*", b"", data)):
        assert told(run, last) == "round: round 2 was broken off: clients.csv has no row of it."
