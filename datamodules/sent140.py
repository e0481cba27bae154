"""Sentiment140, tweets by account that are positive or negative."""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.checks import Count, at_least
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.data.datasets import natural_clients
from fedbc_lightning.partition import Natural, Partitioner

from .own_rows import readable

COLUMNS = ["polarity", "id", "date", "query", "user", "text"]
LAYOUT = (
    'expected Sentiment140\'s CSV (training.1600000.processed.noemoticon.csv): no header, "polarity","id","date",'
    '"query","user","text", polarity 0, 2 or 4'
)
WORD = re.compile(r"\w+(?:'\w+)*|[.,!?;]")
PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2


class Sent140DataModule(IndexedDataModule):
    """Classification of tweets as positive (1) or negative (0), where a client is an account.

    Inputs are int64 ``(B, sequence_length)``, targets int64 ``(B,)``. A tweet is converted to lower case and cut into
    words and punctuation marks, of which the first ``sequence_length`` are kept. Token 0 is padding after the words, 1
    an unknown word, 2 the most frequent word of all tweets, and so on. Neutral tweets (polarity 2) are dropped.

    FedProx and Fed+ have 772 accounts from LEAF's ``-s niid --sf 0.3 -k 30``, a random draw of accounts with at least
    30 tweets; here this is ``Natural(num_clients=772, min_samples=30)``.

    Args:
        path: Path of Sentiment140's CSV file, which has no header, is encoded in latin-1, and has the columns polarity,
            id, date, query, user, text.
        partitioner: Partitioner that assigns tweets to clients; None is ``Natural(min_samples=30)``, the accounts with
            at least 30 tweets.
        sequence_length: Number of tokens of a tweet, at least 1.
        vocabulary_size: Number of tokens, with padding and the unknown word, at least 3; give the model the same
            ``vocabulary_size``.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        vocabulary: Words of tokens 2, 3, ...; available after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or the file is missing, damaged or not of this form.
    """

    def __init__(
        self,
        path: str | Path,
        partitioner: Partitioner | None = None,
        *,
        sequence_length: Count = 25,
        vocabulary_size: Annotated[int, at_least(3)] = 10_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(partitioner or Natural(min_samples=30), **kwargs)
        self.path = Path(path).expanduser()
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        self.vocabulary: list[str] = []

    def load(self) -> LoadedData:
        """Return all tweets that are not neutral, in the order of the file."""
        table = _read_csv(self.path)
        neutral = int((table["polarity"] == 2).sum())
        if neutral:
            rank_zero_info(f"'{self.path}': {neutral:,} neutral tweets (polarity 2) are dropped.")
            table = table[table["polarity"] != 2]
        if not len(table):
            raise ConfigurationError(f"data.path='{self.path}': it holds no positive or negative tweet; {LAYOUT}")
        tokens, self.vocabulary = tokenize(table["text"].tolist(), self.sequence_length, self.vocabulary_size)
        labels = (table["polarity"].to_numpy() == 4).astype(np.int64)
        clients, names = natural_clients(table["user"].to_numpy(dtype=object))
        return LoadedData(ArrayDataset((torch.from_numpy(tokens), torch.from_numpy(labels))), labels, clients, names)


def tokenize(texts: list[str], sequence_length: int, vocabulary_size: int) -> tuple[np.ndarray, list[str]]:
    """Convert texts to tokens.

    Token 0 is padding, 1 an unknown word, and from 2 on tokens are the most frequent words, of equally frequent ones
    the earlier first.

    Args:
        texts: The M texts.
        sequence_length: Number of tokens per text L; longer texts are cut off.
        vocabulary_size: Number of tokens, with padding and the unknown word.

    Returns:
        The tokens, int64 ``(M, L)``, and the words of tokens 2, 3, ....

    Example:
        >>> tokens, words = tokenize(["So, so good", "good day"], sequence_length=4, vocabulary_size=4)
        >>> tokens.tolist(), words
        ([[2, 1, 2, 3], [3, 1, 0, 0]], ['so', 'good'])
    """
    numbers: dict[str, int] = {}
    # Arrays of 4 bytes a word: 1.6 million tweets of 25 words are 160 MB here, and gigabytes in lists
    found, lengths = array("i"), array("i")
    for text in texts:
        words = WORD.findall(text.lower())[:sequence_length]
        found.extend([numbers.setdefault(word, len(numbers)) for word in words])
        lengths.append(len(words))
    flat, sizes = np.array(found, dtype=np.int64), np.array(lengths, dtype=np.int64)
    order = np.argsort(-np.bincount(flat, minlength=len(numbers)), kind="stable")[: vocabulary_size - FIRST_WORD]
    token_of = np.full(len(numbers), UNKNOWN, dtype=np.int64)
    token_of[order] = np.arange(FIRST_WORD, FIRST_WORD + len(order))
    tokens = np.full((len(texts), sequence_length), PADDING, dtype=np.int64)
    tokens[np.arange(sequence_length) < sizes[:, None]] = token_of[flat]
    names = list(numbers)
    return tokens, [names[number] for number in order]


def _read_csv(path: Path) -> Any:
    """Read polarity, user and text of the tweets."""
    import pandas as pd  # takes half a second to import

    with readable(path, "path", LAYOUT):
        # The file is not UTF-8. As texts and without missing values, because accounts may be called 007, nan or null
        table = pd.read_csv(path, header=None, names=COLUMNS, encoding="latin-1", dtype=str, keep_default_na=False)
        # A line with fewer fields has an empty text in place of the user: the file is cut off there
        wrong = ~table["polarity"].isin(["0", "2", "4"]).to_numpy() | (table["user"] == "").to_numpy()
        if wrong.any():
            raise ValueError(f"line {wrong.argmax() + 1} is cut off, or has another polarity")
    return table[["polarity", "user", "text"]].astype({"polarity": "int64"})
