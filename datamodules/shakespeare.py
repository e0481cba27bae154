"""Next-character prediction by speaking role: LEAF's Shakespeare, or any plays in one text file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.checks import check_at_least, check_choice
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.partition import Natural, Partition, Partitioner
from fedbc_lightning.splits import SplitOrder, split_partition

from .leaf import LeafUser, find_leaf_files, load_leaf
from .text import ALPHABET, PLAY_LAYOUT, count_windows, encode_text, read_speeches

DEFAULT_TEST_FRACTION = 0.2


class ShakespeareDataModule(IndexedDataModule):
    """Sequences of characters and what follows them; a client is a speaking role.

    Inputs are int64 ``(B, sequence_length)`` (held as uint8), numbers 0..79 of LEAF's alphabet in LEAF's order; a
    character that is not in it becomes the last one, as in LEAF. Targets are int64 ``(B,)``, the next character, or
    int64 ``(B, sequence_length)``, the next character at every position.

    From a text, a role's speeches are joined by line ends and cut into windows; what is left at the end is dropped.
    The last windows of a role are its test data. Windows that overlap (``stride`` below ``sequence_length``) would
    show the model the characters that it is tested on, so those between the training and the test part are left out,
    as LEAF does. ``split_order="shuffled"`` draws the test windows at random instead, as LEAF's older files do, which
    the FedBC paper used (niid_1_keep_20, 90 / 10): with overlapping windows its accuracy is too high. A validation part
    (``val_fraction``) is always drawn at random.

    Args:
        path: A text in which a line ``ROLE:`` at the start or after an empty line opens a speech; or LEAF's JSON
            (a folder with ``train/*.json`` and ``test/*.json``, a folder of ``*.json`` files, one file ``*.json``).
        partitioner: Which client has which sequences; None: ``Natural(min_samples=10)``, the roles with at least 10.
            The FedBC paper's 138 roles: ``Natural(num_clients=138, min_samples=20)``.
        targets: ``"all"``, every position's next character, or ``"last"``, that of the whole sequence; None: ``"all"``
            of a text, ``"last"`` of LEAF's files.
        sequence_length: Characters of a sequence, at least 1; that of LEAF's files is 80.
        stride: Characters from one window of a text to the next, at least 1; None: ``sequence_length`` for ``"all"``, 1
            for ``"last"``, as LEAF.
        test_fraction: Of each client's sequences that are its test data, in (0, 1); None: those of LEAF's
            ``test/*.json``, else 0.2.
        split_order: ``"ordered"``, by time, or ``"shuffled"``.
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        num_unknown: Characters that are not in the alphabet; there after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or a file is missing, damaged or not of this form.
    """

    def __init__(
        self,
        path: str,
        partitioner: Partitioner | None = None,
        *,
        targets: Literal["all", "last"] | None = None,
        sequence_length: int = 80,
        stride: int | None = None,
        test_fraction: float | None = None,
        split_order: SplitOrder = "ordered",
        **kwargs: Any,
    ) -> None:
        partitioner = partitioner or Natural(min_samples=10)
        super().__init__(partitioner, test_fraction=test_fraction, split_order=split_order, **kwargs)
        check_choice("data.targets", targets or "all", ("all", "last"))
        check_at_least("data.sequence_length", sequence_length, 1, whole=True)
        if stride is not None:
            check_at_least("data.stride", stride, 1, whole=True)
        self.path = Path(path).expanduser()
        self.targets = targets
        self.sequence_length = sequence_length
        self.stride = stride
        self.num_unknown = 0

    def prepare_data(self) -> None:
        """Check that the text or the JSON files are there."""
        if self._is_leaf():
            find_leaf_files(self.path)
        elif not self.path.is_file():
            raise ConfigurationError(f"data.path='{self.path}': no such file; {PLAY_LAYOUT}")

    def load(self) -> LoadedData:
        """All roles' sequences, in the order of the file."""
        self.num_unknown = 0
        data = self._load_leaf() if self._is_leaf() else self._load_text()
        if self.num_unknown:
            rank_zero_info(
                f"'{self.path}': characters outside LEAF's alphabet of {len(ALPHABET)}: {self.num_unknown:,}; they "
                f"stand as '{ALPHABET[-1]}'."
            )
        return data

    def _is_leaf(self) -> bool:
        return self.path.is_dir() or self.path.suffix == ".json"

    def _load_leaf(self) -> LoadedData:
        if self.stride is not None:
            raise ConfigurationError(f"data.stride={self.stride}: LEAF's files hold their sequences; leave it null")
        data = load_leaf(self.path, self._encode, as_tokens, classes=False)
        if data.is_test is None and data.shared_test is None and self.test_fraction is None:
            self.test_fraction = DEFAULT_TEST_FRACTION
        return data

    def _encode(self, user: LeafUser) -> tuple[np.ndarray, np.ndarray]:
        """One user's sequences, uint8 ``(n, L)``, and targets, int64 ``(n,)`` or ``(n, L)``."""
        length = self.sequence_length
        for texts, size in ((user.inputs, length), (user.targets, 1)):
            wrong = next((text for text in texts if not isinstance(text, str) or len(text) != size), None)
            if wrong is not None:
                raise user.refuse(
                    f"found {str(wrong)[:20]!r}; x must hold texts of {length} characters (data.sequence_length) and y "
                    "the character after each"
                )
        rows, unknown = encode_text("".join(user.inputs))
        following, more = encode_text("".join(user.targets))
        self.num_unknown += unknown + more
        inputs = rows.reshape(-1, length)
        if self.targets != "all":
            return inputs, following.astype(np.int64)
        return inputs, np.column_stack([inputs[:, 1:], following]).astype(np.int64)

    def _load_text(self) -> LoadedData:
        if self.test_fraction is None:
            self.test_fraction = DEFAULT_TEST_FRACTION
        length, targets = self.sequence_length, self.targets or "all"
        stride = self.stride or (length if targets == "all" else 1)
        speeches = read_speeches(self.path)
        texts = ["\n".join(spoken) for spoken in speeches.values()]
        codes, self.num_unknown = encode_text("".join(texts))
        sizes = np.array([len(text) for text in texts])
        roles, rank = self._choose_windows(count_windows(sizes, length, stride), -(-length // stride) - 1)
        if not len(roles):
            raise ConfigurationError(
                f"data.sequence_length={length}: no role speaks {length + 1} characters in '{self.path}'; lower it"
            )
        starts = torch.from_numpy((np.cumsum(sizes) - sizes)[roles] + stride * rank)
        text = torch.from_numpy(codes)
        windows = text[:-1].unfold(0, length, 1)  # a view: overlapping windows take no memory
        wide = text.to(torch.int64)
        following = wide[1:].unfold(0, length, 1) if targets == "all" else wide[length:]
        if stride < length:
            dataset = ArrayDataset((windows, following), starts, as_tokens)
        else:
            dataset = ArrayDataset((windows[starts], following[starts]), transform=as_tokens)
        return LoadedData(dataset, clients=roles, client_names=list(speeches))

    def _choose_windows(self, counts: np.ndarray, gap: int) -> tuple[np.ndarray, np.ndarray]:
        """Role of each window and its rank there, both int64 ``(M,)``; without ``gap`` windows before the test part.

        So many windows share characters with the last training window. They are left out such that the cut of
        :func:`~fedbc_lightning.splits.split_partition` falls where they were.
        """
        numbers = np.arange(len(counts))
        roles = np.repeat(numbers, counts)
        rank = np.arange(len(roles)) - np.repeat(np.cumsum(counts) - counts, counts)
        if not gap:
            return roles, rank
        if self.split_order == "shuffled":
            rank_zero_info(
                "data.split_order=shuffled: the windows overlap, so test characters are seen in training; use ordered "
                "to keep them apart."
            )
            return roles, rank
        assert self.test_fraction is not None
        kept = np.maximum(counts - gap, np.minimum(counts, 1))
        left = Partition.from_owners(np.repeat(numbers, kept), len(counts))
        train, _ = split_partition(left, None, self.test_fraction, "ordered", np.random.default_rng(0))
        num_train = train.sizes[roles]
        chosen = (rank < num_train) | (rank >= num_train + gap)
        return roles[chosen], rank[chosen]


def as_tokens(inputs: Tensor) -> Tensor:
    """Numbers of characters held in bytes -> int64."""
    return inputs.to(torch.int64)
