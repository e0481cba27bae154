"""Next-character prediction with speaking roles as clients: LEAF's Shakespeare, or any plays in one text file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import Dataset

from fedbc_lightning.core.checks import Count
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.data.splits import SplitOrder, split_partition
from fedbc_lightning.partition import Natural, Partition, Partitioner

from .leaf import LeafUser, load_leaf
from .own_rows import readable

# LEAF's 80 characters in LEAF's order; the number of character c is ALPHABET.index(c)
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

# Number of characters outside the alphabet; it is the last character's, because LEAF looks them up at index -1
UNKNOWN = len(ALPHABET) - 1

# Number of each ASCII character; 255 if it is not in the alphabet, as 127, which stands for all other characters
_NUMBERS = np.full(128, 255, dtype=np.uint8)
_NUMBERS[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))

EMPTY_LINE = re.compile(r"\n[ \t]*\n")
PLAY_LAYOUT = (
    "expected plain text (UTF-8) in which a line 'ROLE:' at the start or after an empty line opens a speech, or LEAF's "
    "<path>/{train,test}/*.json"
)


def encode_text(text: str) -> tuple[np.ndarray, int]:
    """Return the numbers 0..79 of the characters, uint8 ``(len(text),)``, and how many are not in the alphabet.

    Example:
        >>> codes, unknown = encode_text("To be$")
        >>> codes.tolist(), unknown
        ([44, 67, 1, 54, 57, 79], 1)
    """
    # Four bytes for every character: a single lookup in an array then encodes the whole text.
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes = _NUMBERS[np.minimum(points, len(_NUMBERS) - 1)]
    unknown = codes == 255
    return np.where(unknown, np.uint8(UNKNOWN), codes), int(unknown.sum())


def read_speeches(path: Path) -> dict[str, list[str]]:
    """Read the speeches of every role, with roles and speeches in the order of the play.

    A line that ends in a colon, at the start of the text or after an empty line, opens a speech; the speech ends before
    the empty line in front of the next one. Empty speeches are left out.

    Raises:
        ConfigurationError: The file cannot be read as text, or no line opens a speech.
    """
    with readable(path, "path", PLAY_LAYOUT):
        # A byte order mark, with which texts of Project Gutenberg begin, would be part of the first role's name.
        text = path.read_text(encoding="utf-8-sig")
    speeches: dict[str, list[str]] = {}
    spoken = None
    for paragraph in EMPTY_LINE.split(text.strip("\n")):
        role, _, speech = paragraph.lstrip("\n").partition("\n")
        if role.endswith(":") and role != ":":
            spoken = speeches.setdefault(role[:-1], [])
            spoken.append(speech)
        elif spoken is None:
            break
        else:
            spoken[-1] = f"{spoken[-1]}\n\n{paragraph}" if spoken[-1] else paragraph
    found = {role: [speech for speech in spoken if speech] for role, spoken in speeches.items()}
    if not any(found.values()):
        raise ConfigurationError(f"data.path='{path}': it does not begin with a speech; {PLAY_LAYOUT}")
    return {role: spoken for role, spoken in found.items() if spoken}


MANY = 10_000  # windows of LEAF's files that are examined to find out whether windows overlap


class ShakespeareDataModule(IndexedDataModule):
    """Prediction of the next character from a sequence of characters, where a client is a speaking role.

    Inputs are int64 ``(B, sequence_length)`` (held as uint8), numbers 0..79 of LEAF's alphabet in LEAF's order; a
    character outside the alphabet becomes its last one, as in LEAF. Targets are int64 ``(B,)``, the next character, or
    int64 ``(B, sequence_length)``, the next character at every position.

    From a text, a role's speeches are joined by line ends and cut into windows; characters left at the end are dropped.
    The last windows of a role are its test data. Overlapping windows (``stride`` below ``sequence_length``, or LEAF's)
    would show the model characters that it is tested on. A role's windows are then cut by time into training,
    validation (``val_fraction``) and test data, and windows that lie across a cut are left out, as LEAF does; if there
    are test files, LEAF's own cut stays. This needs whole roles as clients (``Natural``), and other partitioners are
    refused. Without overlap any partitioner may be used, and the validation data are drawn at random.
    ``split_order="shuffled"`` draws test and validation windows at random instead, as in LEAF's older files, which the
    FedBC paper used (niid_1_keep_20, 90 / 10); with overlapping windows the accuracy is then too high.

    Args:
        path: Path of a text in which a line ``ROLE:`` at the start or after an empty line opens a speech, or of LEAF's
            JSON (a folder with ``train/*.json`` and ``test/*.json``, a folder of ``*.json`` files, or one such file).
        partitioner: Partitioner that assigns sequences to clients; None is ``Natural(min_samples=10)``, the roles with
            at least 10. The FedBC paper's 138 roles are ``Natural(num_clients=138, min_samples=20)``.
        targets: Characters to predict: ``"all"``, the next one at every position, or ``"last"``, the one after the
            sequence. None is ``"all"`` for a text and ``"last"`` for LEAF's files.
        sequence_length: Number of characters of a sequence, at least 1; it is 80 in LEAF's files.
        stride: Number of characters from the start of one window of a text to the next, at least 1. None is
            ``sequence_length`` for ``"all"``, and 1 for ``"last"``, as in LEAF.
        test_fraction: Fraction of each client's sequences that are its test data, in (0, 1); None uses LEAF's
            ``test/*.json``, or 0.2 if there are no such files.
        split_order: How test data are chosen: ``"ordered"``, by time, or ``"shuffled"``.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        num_unknown: Number of characters outside the alphabet; available after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, a file is missing, damaged or not of this form, or overlapping
            windows of one role belong to several clients.
    """

    default_test_fraction: ClassVar[float | None] = 0.2

    def __init__(
        self,
        path: str | Path,
        partitioner: Partitioner | None = None,
        *,
        targets: Literal["all", "last"] | None = None,
        sequence_length: Count = 80,
        stride: Count | None = None,
        test_fraction: float | None = None,
        split_order: SplitOrder = "ordered",
        **kwargs: Any,
    ) -> None:
        partitioner = partitioner or Natural(min_samples=10)
        super().__init__(partitioner, test_fraction=test_fraction, split_order=split_order, **kwargs)
        self.path = Path(path).expanduser()
        self.targets, self.sequence_length, self.stride = targets, sequence_length, stride
        self.num_unknown = 0
        self._gap = 0  # number of windows left out at each cut

    def load(self) -> LoadedData:
        """Return all roles' sequences, in the order of the file."""
        self.num_unknown = 0
        is_leaf = self.path.is_dir() or self.path.suffix == ".json"
        data = self._load_leaf() if is_leaf else self._load_text()
        if self.num_unknown:
            rank_zero_info(
                f"'{self.path}': characters outside LEAF's alphabet of {len(ALPHABET)}: {self.num_unknown:,}; they "
                f"are replaced by '{ALPHABET[-1]}'."
            )
        return data

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Cut off the validation data by time, too, if windows overlap."""
        if self._gap:
            assert data.clients is not None
            _check_whole(data.clients, partition, self.sequence_length)
            held = partition.keep(~np.isin(partition.indices, self.splits["test"].indices))
            if self.val_fraction:
                self.splits["train"], self.splits["val"] = _cut(held, self.val_fraction)
        return data.dataset

    def _load_leaf(self) -> LoadedData:
        if self.stride is not None:
            raise ConfigurationError(f"data.stride={self.stride}: LEAF's files hold their sequences; leave it null")
        data = load_leaf(self.path, self._encode, as_tokens, classes=False)
        assert isinstance(data.dataset, ArrayDataset)
        assert data.clients is not None
        is_test = np.zeros(len(data.clients), dtype=bool) if data.is_test is None else data.is_test
        train = np.flatnonzero(~is_test)
        is_cut = not data.has_test or bool(self.val_fraction)
        if is_cut and _follow_each_other(data.dataset.subset(train[:MANY])):
            fraction = self._test_fraction_of(data)
            train = train[self._leave_out(data.clients[train], self.sequence_length - 1, fraction)]
            kept = np.sort(np.concatenate([train, np.flatnonzero(is_test)]))
            data.dataset, data.clients = data.dataset.subset(kept), data.clients[kept]
            data.is_test = None if data.is_test is None else is_test[kept]
        return data

    def _encode(self, user: LeafUser) -> tuple[np.ndarray, np.ndarray]:
        """Convert one user's samples to sequences, uint8 ``(n, L)``, and targets, int64 ``(n,)`` or ``(n, L)``."""
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
        # LEAF's file gives the character after the window alone; those before it stand in the window, moved by one.
        return inputs, np.column_stack([inputs[:, 1:], following]).astype(np.int64)

    def _load_text(self) -> LoadedData:
        length, targets = self.sequence_length, self.targets or "all"
        stride = self.stride or (length if targets == "all" else 1)
        speeches = read_speeches(self.path)
        texts = ["\n".join(spoken) for spoken in speeches.values()]
        codes, self.num_unknown = encode_text("".join(texts))
        sizes = np.array([len(text) for text in texts])
        # A window begins every ``stride`` characters and needs ``length`` of them, and the one that follows.
        counts = np.maximum((sizes - length - 1) // stride + 1, 0)
        roles = np.repeat(np.arange(len(counts)), counts)
        if not len(roles):
            raise ConfigurationError(
                f"data.sequence_length={length}: no role speaks {length + 1} characters in '{self.path}'; lower it"
            )
        rank = np.arange(len(roles)) - np.repeat(np.cumsum(counts) - counts, counts)
        fraction = self.default_test_fraction if self.test_fraction is None else self.test_fraction
        kept = self._leave_out(roles, -(-length // stride) - 1, fraction)
        roles, rank = roles[kept], rank[kept]
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

    def _leave_out(self, roles: np.ndarray, gap: int, test_fraction: float | None) -> np.ndarray:
        """Return the positions of the windows that stay when ``gap`` windows are left out at each cut, ascending.

        The first ``gap`` windows after a cut share characters with the last window before it. They are left out such
        that :func:`~fedbc_lightning.data.splits.split_partition` cuts the remaining ones at the same places.

        Args:
            roles: Role of each window, in the order of time, ``(M,)``.
            gap: Number of windows to leave out at each cut.
            test_fraction: Fraction of each role's windows that are its test data; None if the data say which are.
        """
        if gap and self.split_order == "shuffled":
            rank_zero_info(
                "data.split_order=shuffled: the windows overlap, so characters of the test and validation data are "
                "seen in training; use ordered to keep them apart."
            )
        if not gap or self.split_order == "shuffled":
            return np.arange(len(roles))
        self._gap = gap
        fractions = [fraction for fraction in (test_fraction, self.val_fraction) if fraction]
        everything = Partition.from_owners(roles, int(roles.max()) + 1)
        kept = np.maximum(everything.sizes - gap * len(fractions), np.minimum(everything.sizes, 1))
        parts = [Partition.from_sizes(np.arange(kept.sum()), kept)]
        for fraction in fractions:
            parts[:1] = _cut(parts[0], fraction)
        owner = everything.client_of_each()
        rank = np.arange(len(owner)) - everything.offsets[owner]
        stays = np.zeros(len(owner), dtype=bool)
        start = np.zeros(len(everything), dtype=np.int64)
        for part in parts:
            stays |= (rank >= start[owner]) & (rank < (start + part.sizes)[owner])
            start += part.sizes + gap
        return np.sort(everything.indices[stays])


def _cut(partition: Partition, fraction: float) -> tuple[Partition, Partition]:
    """Cut each client's samples by time, such that the second part is the last ``fraction`` of them."""
    return split_partition(partition, None, fraction, "ordered", np.random.default_rng(0))


def _check_whole(roles: np.ndarray, partition: Partition, length: int) -> None:
    """Check that each client has all windows of one role, in the order of time.

    Args:
        roles: Role of each window ``(M,)``.
        partition: Partition of the windows.
        length: Length of a window, for the message.

    Raises:
        ConfigurationError: A client has windows of several roles, or not all windows of its role in order.
    """
    whole = {part.tobytes() for part in Partition.from_owners(roles, int(roles.max()) + 1)}
    if not all(part.tobytes() in whole for part in partition):
        raise ConfigurationError(
            "data.partitioner: the windows overlap, and those of one role at several clients would show the model what "
            f"it is tested on; use Natural, or windows apart (data.stride={length}, of a text)"
        )


def _follow_each_other(dataset: ArrayDataset) -> bool:
    """Return whether a window is the one before it, moved by one character."""
    windows = dataset.batch(torch.arange(len(dataset)))[0]
    return bool((windows[1:, :-1] == windows[:-1, 1:]).all(dim=1).any())


def as_tokens(inputs: Tensor) -> Tensor:
    """Convert the numbers of characters from uint8 to int64."""
    return inputs.to(torch.int64)
