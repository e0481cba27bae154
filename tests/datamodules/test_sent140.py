"""Sentiment140's CSV: tokens, moods, accounts."""

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import Sent140DataModule
from fedbc_lightning.datamodules.sent140 import tokenize
from helpers.data_formats import ready as set_up
from helpers.text_formats import write_sent140

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition import Natural

TWEETS = [
    (0, "zoe", 'is upset, "really" upset'),
    (4, "amy", "caf\xe9 now, yes!"),
    (2, "amy", "a neutral line"),
    (4, "zoe", "don't stop, NOW"),
    (4, "bob", "null"),
    (0, "zoe", ""),
    (0, "amy", "now"),
]


def ready(path, *arguments, **options):
    return set_up(Sent140DataModule(str(path), *arguments, seed=0, **options))


def test_tweets(tmp_path):
    path = write_sent140(tmp_path / "tweets.csv", TWEETS)
    data = ready(path, Natural(), vocabulary_size=30, sequence_length=6)
    assert data.client_names == ["amy", "bob", "zoe"]
    assert (data.num_samples("train") + data.num_samples("test")).tolist() == [2, 1, 3]
    tokens, labels = data.source.pool.tensors
    assert (tokens.dtype, labels.dtype) == (torch.int64, torch.int64)
    assert labels.tolist() == [0, 1, 1, 1, 0, 0]
    read = [" ".join(data.vocabulary[t - 2] for t in row if t > 1) for row in tokens.tolist()]
    assert read == ["is upset , really upset", "caf\xe9 now , yes !", "don't stop , now", "null", "", "now"]
    assert data.vocabulary[:3] == [",", "now", "upset"]
    assert tokens[4].tolist() == [0] * 6
    assert tokens[5].tolist() == [3, 0, 0, 0, 0, 0]


def test_tokens():
    texts = ["b a a", "a b c d", "b", "e e e e e"]
    tokens, words = tokenize(texts, sequence_length=3, vocabulary_size=4)
    assert words == ["b", "a"]  # as frequent as e, but earlier; what is cut off does not count
    assert tokens.tolist() == [[2, 3, 3], [3, 2, 1], [2, 0, 0], [1, 1, 1]]


def test_accounts_with_enough_tweets(tmp_path):
    rng = np.random.default_rng(0)
    tweets = [(int(rng.choice([0, 4])), f"user{k % 40}", f"w{rng.integers(50)}") for k in range(40 * 35)]
    path = write_sent140(tmp_path / "tweets.csv", tweets + [(0, "rare", "x")] * 29)
    data = ready(path)
    assert (data.num_clients, "rare" in data.client_names) == (40, False)
    inputs, targets = next(iter(data.client_train_dataloader(0)))
    assert (inputs.shape[1], set(targets.tolist())) == (25, {0, 1})
    assert int(data.source.pool.tensors[0].max()) == 1 + len(data.vocabulary) < 10_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no positive or negative tweet"),
        ("polarity,id,date,query,user,text\n0,1,d,q,u,t\n", "line 1 is cut off, or has another polarity"),
        ("0,1,d,q,u,t\n3,1,d,q,u,t\n", "line 2 is cut off, or has another polarity"),
        ("0,1,d,q,u,t\n4,1\n", "line 2 is cut off"),
        ('0,1,d,q,u,"t\n4,1,d,q,u', "EOF inside string"),
        ("2,1,d,q,u,t\n", "no positive or negative tweet"),
        (None, "no such file"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    path = tmp_path / "tweets.csv"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=rf"tweets\.csv'.*{message}.*; expected Sentiment140's CSV"):
        ready(path)
