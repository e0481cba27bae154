"""A client's round is worked out again from the messages that a run has kept."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.boring import BoringData, make_model, make_trainer
from helpers.messages_only import MessagesOnly

from fedbc_lightning.algorithms import SCAFFOLD
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.federation.elsewhere import folder_of
from fedbc_lightning.federation.messages import Up, decode, encode, hash_of


class Keeping(MessagesOnly):
    keep_messages = True


def changed(data, by):
    up = decode(data, Up)
    return encode(replace(up, w=up.w + by * up.w.abs().max()))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("run"), backend=Keeping())
    trainer.fit(make_model(), BoringData(), SCAFFOLD())
    return trainer


@pytest.mark.parametrize(
    ("by", "line"),
    [
        (0, r"client \d, round 2: worked out again, the answer is the same bit for bit \(sha256:\w{16}\)"),
        (1e-6, r"is the same to 1e-06 of the largest number \(w\)"),
        (0.1, r"is another one: w differs by 0\.091"),
    ],
)
def test_a_round_is_worked_out_again(run, by, line):
    def told():
        algorithm = make_model(), BoringData(), SCAFFOLD()
        try:
            return make_trainer(run.default_root_dir).verify(*algorithm, last, client, 2)
        except ConfigurationError as error:
            return str(error)

    folder = Path(run.log_dir)
    last, table, place = folder / "checkpoints" / "last.ckpt", folder / "clients.csv", folder_of(folder, 2) / "1.up"
    sent, text = place.read_bytes(), table.read_text()
    client = decode(sent, Up).clients[0]
    try:
        if by:
            place.write_bytes(changed(sent, by))
            assert "are not the messages whose hashes are in clients.csv" in told()
        table.write_text(text.replace(hash_of(sent), hash_of(place.read_bytes())))
        assert re.search(line, told()), told()
    finally:
        place.write_bytes(sent)
        table.write_text(text)


def test_messages_that_were_not_kept_are_said(run):
    last = Path(run.log_dir, "checkpoints", "last.ckpt")
    with pytest.raises(ConfigurationError, match="has no messages of client 4; they are kept if"):
        make_trainer(run.default_root_dir).verify(make_model(), BoringData(), SCAFFOLD(), last, 4, 99)
