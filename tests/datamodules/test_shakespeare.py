"""Next-character data: from plays, from LEAF's files, and what is kept apart for the test."""

from itertools import pairwise

import pytest
import torch
from fedbc_lightning.datamodules import ShakespeareDataModule
from fedbc_lightning.datamodules.shakespeare import ALPHABET, encode_text, read_speeches
from helpers.data_formats import ready as set_up
from helpers.text_formats import write_leaf

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition import IID, Natural

PLAY = """First Citizen:
Before we proceed any further, hear me speak.
He said to all:
speak.

All:
Speak, speak.

TITUS:

First Citizen:
You are all resolved rather to die than to famish?

And more.

All:
Resolved. resolved.
"""


@pytest.fixture
def play(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(PLAY)
    return path


def ready(path, *arguments, **options):
    return set_up(ShakespeareDataModule(str(path), *arguments, seed=0, **options))


def words(start, count):
    """Text in which each position can be told: 4 characters a number."""
    return "".join(f"{number:04d}" for number in range(start, start + count))


def write_roles(path, **texts):
    path.write_text("\n\n".join(f"{role}:\n{text}" for role, text in texts.items()))
    return path


def test_speeches(play, tmp_path):
    first = "Before we proceed any further, hear me speak.\nHe said to all:\nspeak."
    second = "You are all resolved rather to die than to famish?\n\nAnd more."
    expected = {"First Citizen": [first, second], "All": ["Speak, speak.", "Resolved. resolved."]}
    assert read_speeches(play) == expected
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbf" + PLAY.replace("\n", "\r\n").encode())
    assert read_speeches(tmp_path / "windows.txt") == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it does not begin with a speech"),
        (b"Once upon a time.\n\nALL:\nYes.", "it does not begin with a speech"),
        (b"TITUS:\n\n", "it does not begin with a speech"),
        (b"A:\n\xff\xfe\x00", "cannot be read"),
        (None, "no such file"),
    ],
)
def test_what_is_no_play(tmp_path, content, message):
    path = tmp_path / "book.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"data\.path='.*book\.txt': {message}.*; expected plain text"):
        ready(path)


def decode_text(codes):
    return "".join(map(ALPHABET.__getitem__, codes.tolist()))


def test_alphabet():
    assert (len(ALPHABET), len(set(ALPHABET)), ALPHABET[:3], ALPHABET[-1]) == (80, 80, "\n !", "}")
    codes, unknown = encode_text(ALPHABET)
    assert (codes.tolist(), unknown) == (list(range(80)), 0)
    codes, unknown = encode_text("a$\u00e9\x7f\U0001f600z")
    assert (decode_text(codes), unknown) == ("a}}}}z", 4)


def test_all_targets_do_not_overlap(tmp_path):
    path = write_roles(tmp_path / "play.txt", A=words(0, 50), B=words(500, 6), C="short")
    data = ready(path, Natural(), sequence_length=20)
    assert data.client_names == ["A", "B"]
    assert (data.num_samples("train") + data.num_samples("test")).tolist() == [9, 1]
    inputs, targets = (torch.cat(parts) for parts in zip(*data.client_eval_dataloader(0, "train"), strict=True))
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert decode_text(inputs.flatten()) == words(0, 50)[: 7 * 20]
    assert decode_text(targets.flatten()) == words(0, 50)[1 : 7 * 20 + 1]
    inputs, _ = (torch.cat(parts) for parts in zip(*data.client_eval_dataloader(0, "test"), strict=True))
    assert decode_text(inputs.flatten()) == words(0, 50)[7 * 20 : 9 * 20]
    only = next(iter(data.client_eval_dataloader(1, "train")))
    assert decode_text(only[0][0]) == words(500, 6)[:20]


def positions(data, text, split, client=0):
    """Where each window of a client's part starts in the text."""
    loader = data.client_eval_dataloader(client, split)
    return [text.index(decode_text(x)) for inputs, _ in loader for x in inputs]


@pytest.mark.parametrize("stride", [1, 7, 20])
def test_overlapping_windows_are_kept_apart(tmp_path, stride):
    """No test or validation window shares a character with one before the cut, but the one that follows it."""
    texts = {"A": words(0, 90), "B": words(500, 90), "C": words(0, 6)}
    path = write_roles(tmp_path / "play.txt", **texts)
    splits = ("train", "test") if stride == 20 else ("train", "val", "test")
    options = {"val_fraction": 0.25 * (len(splits) - 2), "sequence_length": 20, "stride": stride}
    data = ready(path, Natural(), targets="last", **options)
    for client, text in enumerate((texts["A"], texts["B"])):
        parts = [positions(data, text, split, client) for split in splits]
        starts = list(range(0, len(text) - 20, stride))
        for part in parts:
            assert part == starts[starts.index(part[0]) :][: len(part)]
        for before, after in pairwise(parts):
            assert 0 <= after[0] - (before[-1] + 20) < stride
        assert (parts[0][0], parts[-1][-1]) == (0, starts[-1])
        assert len(parts[-1]) == pytest.approx(sum(map(len, parts)) / 5, abs=1)
        if len(parts) > 2:
            assert len(parts[1]) == pytest.approx((len(parts[0]) + len(parts[1])) / 4, abs=1)
        inputs, targets = next(iter(data.client_eval_dataloader(client, "test")))
        assert decode_text(targets) == "".join(text[text.index(decode_text(x)) + 20] for x in inputs)
    assert positions(data, texts["C"], "train", 2) == [0]
    assert data.client_eval_dataloader(2, "test") is None


def test_overlapping_windows_of_a_role_stay_at_one_client(tmp_path):
    path = write_roles(tmp_path / "play.txt", A=words(0, 90), B=words(500, 90))
    with pytest.raises(ConfigurationError, match=r"data\.partitioner: the windows overlap.*\(data\.stride=20"):
        ready(path, IID(3), targets="last", sequence_length=20)
    everything = ready(path, Natural(), targets="last", sequence_length=20, split_order="shuffled")
    assert (everything.num_samples("train").tolist(), everything.num_samples("test").tolist()) == ([272] * 2, [68] * 2)
    for options in ({"stride": 20}, {"split_order": "shuffled"}):
        assert ready(path, IID(3), targets="last", sequence_length=20, **options).num_clients == 3


def test_overlapping_windows_take_no_memory(tmp_path):
    path = write_roles(tmp_path / "play.txt", A=words(0, 2000))
    inputs, targets = ready(path, targets="last").source.pool.tensors
    assert inputs.untyped_storage().nbytes() == 8000
    assert inputs.dtype == torch.uint8
    assert targets.dtype == torch.int64


def test_a_sequence_that_nobody_has(play):
    with pytest.raises(ConfigurationError, match=r"data\.sequence_length=200: no role speaks 201 characters"):
        ready(play, sequence_length=200)


# LEAF


def leaf_user(text, length=80):
    starts = range(len(text) - length)
    return [text[start : start + length] for start in starts], [text[start + length] for start in starts]


def test_leaf_files(tmp_path):
    text = words(0, 30)
    x, y = leaf_user(text)
    write_leaf(tmp_path / "train" / "a.json", {"PLAY_ROMEO": (x[:30], y[:30])})
    write_leaf(tmp_path / "test" / "a.json", {"PLAY_ROMEO": (x[30:], y[30:])})
    data = ready(tmp_path)
    assert data.client_names == ["PLAY_ROMEO"]
    inputs, targets = next(iter(data.client_eval_dataloader(0, "test")))
    assert (inputs.shape, inputs.dtype, targets.shape, targets.dtype) == ((10, 80), torch.int64, (10,), torch.int64)
    assert [decode_text(row) for row in inputs] == x[30:]
    assert decode_text(targets) == "".join(y[30:])
    _, everywhere = next(iter(ready(tmp_path, targets="all").client_eval_dataloader(0, "test")))
    assert [decode_text(row) for row in everywhere] == [text[k + 1 : k + 81] for k in range(30, 40)]


def test_overlapping_leaf_windows_are_kept_apart(tmp_path):
    text = words(0, 90)
    x, y = leaf_user(text)
    alone = write_leaf(tmp_path / "alone.json", {"ROMEO": (x, y)})
    train, test = (positions(ready(alone), text, split) for split in ("train", "test"))
    assert (train, test) == (list(range(len(train))), list(range(280 - len(test), 280)))
    assert test[0] - train[-1] == 80
    # with test files, theirs is the cut, and nothing but a validation part opens another
    write_leaf(tmp_path / "both" / "train" / "a.json", {"ROMEO": (x[:150], y[:150])})
    write_leaf(tmp_path / "both" / "test" / "a.json", {"ROMEO": (x[230:], y[230:])})
    data = ready(tmp_path / "both")
    assert [positions(data, text, split) for split in ("train", "test")] == [list(range(150)), list(range(230, 280))]
    data = ready(tmp_path / "both", val_fraction=0.2)
    train, val, test = (positions(data, text, split) for split in ("train", "val", "test"))
    assert (train[0], val[0] - train[-1], val[-1], test) == (0, 80, 149, list(range(230, 280)))
    # sequences that do not overlap lose nothing
    apart = write_leaf(tmp_path / "apart.json", {"ROMEO": (x[::80], y[::80])})
    assert sum(ready(apart, Natural(min_samples=1)).num_samples(split).sum() for split in ("train", "test")) == 4


def test_leaf_files_say_what_is_wrong(tmp_path):
    x, y = leaf_user(words(0, 60))
    path = write_leaf(tmp_path / "a.json", {"ROMEO": (x, y)})
    assert ready(path).num_samples("test").tolist() == [17]
    with pytest.raises(ConfigurationError, match=r"a\.json', user 'ROMEO': .*texts of 40 characters"):
        ready(path, sequence_length=40)
    with pytest.raises(ConfigurationError, match=r"data\.stride=80: LEAF"):
        ready(path, stride=80)
    write_leaf(tmp_path / "a.json", {"ROMEO": (x, ["ab", *y[1:]])})
    with pytest.raises(ConfigurationError, match="user 'ROMEO': found 'ab'"):
        ready(path)


# the real text


def test_tinyshakespeare(data_root):
    path = data_root / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip(f"no tinyshakespeare.txt in {data_root}")
    speeches = read_speeches(path)
    data = ready(path)
    assert (len(speeches), data.num_clients, data.num_unknown) == (299, 156, 1)  # 309 roles, of which 10 say nothing
    assert (data.num_samples("train").sum(), data.num_samples("test").sum()) == (9775, 2518)
    assert (data.num_samples("train").min() >= 8, data.num_samples("test").min() >= 2) == (True, True)
    # every speech stands in the text behind its role, in order: nothing is lost
    text = path.read_text()
    left = {role: iter(spoken) for role, spoken in speeches.items()}
    rebuilt = []
    for paragraph in text.split("\n\n"):
        role, _, speech = paragraph.lstrip("\n").partition("\n")
        rebuilt.append(f"{role}\n{next(left[role[:-1]])}" if speech.strip() else role)
    assert all(next(rest, None) is None for rest in left.values())
    assert "".join("\n\n".join(rebuilt).split()) == "".join(text.split())
    as_leaf = ready(path, Natural(num_clients=138, min_samples=20), targets="last")  # the FedBC paper's roles
    train, test = as_leaf.num_samples("train"), as_leaf.num_samples("test")
    assert (len(train), test.min() >= 1) == (138, True)
    assert test.sum() / (train + test).sum() == pytest.approx(0.2, abs=0.01)
