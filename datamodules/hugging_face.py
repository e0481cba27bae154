"""Data module for data sets of Hugging Face: columns by name, texts through a tokenizer, batches as dicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.core.checks import Count
from fedbc_lightning.core.errors import ConfigurationError, in_one_line
from fedbc_lightning.data import IndexedDataModule, LoadedData
from fedbc_lightning.data.datasets import natural_clients
from fedbc_lightning.data.loading import stack
from fedbc_lightning.partition import IID, Natural, Partitioner

from .own_rows import check_columns

if TYPE_CHECKING:
    from datasets import Dataset as Rows
    from pyarrow import ChunkedArray
    from transformers import PreTrainedTokenizerBase

# What datasets.load_dataset calls the reader of a file's kind
EXTRA = "); it needs pip install 'fedbc-lightning[llm]'"
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
IGNORED = -100  # label of a token without a part in the loss, for torch's cross-entropy and the models of transformers


class HuggingFaceDataModule(IndexedDataModule):
    """Federates a data set of the Hugging Face Hub, one that was saved, or a file, by the names of its columns.

    A batch is a dict of tensors. With ``text`` and ``tokenizer`` it has what the tokenizer gives, ``input_ids`` and
    ``attention_mask``, int64 ``(B, L)``, filled up to the longest text of the batch; with ``columns`` it has these,
    ``(B, ...)``. Its ``labels`` are the classes, int64 ``(B,)``, or numbers, float32 ``(B,)``, of the column ``label``.
    Without ``label`` they are the tokens themselves, int64 ``(B, L)``, and -100 where a text was filled up: a causal
    language model of transformers shifts them by itself. So ``self.network(**batch).loss`` is the loss of most models.

    Args:
        path: Name on the Hub, folder that ``save_to_disk`` wrote, or a ``.csv``, ``.json``, ``.jsonl``, ``.parquet`` or
            ``.txt`` file. What a Hub name needs is downloaded once, or taken from the cache of the library.
        text: Name of the column that is tokenized; needs ``tokenizer``.
        tokenizer: Name on the Hub, or folder, of the tokenizer; a tokenizer without a padding token fills up with its
            last token, which the attention mask hides.
        max_length: Number of tokens to which a text is cut, at least 1.
        columns: Names of further columns of a batch: numbers, or lists of numbers of one length.
        label: Name of the column to predict; whole numbers, booleans and names are classes.
        client: Name of the column with the client of each row; None if there is none, so that a partitioner makes
            clients.
        subset: Name of the configuration of a data set on the Hub that has several.
        split: Name of the split that is used.
        test_split: Name of the split with test data. With a client column its rows are these clients' test data;
            without one they belong to no client and evaluate the global model.
        partitioner: Partitioner that assigns rows to clients; None is ``Natural()`` if there is a client column, else
            ``IID(10)``.
        test_fraction: Fraction of each client's rows that are its test data, in (0, 1); None uses ``test_split``, or
            0.2 if there is none.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`; a ``collate_fn`` replaces the way in
            which batches are made of samples.

    Attributes:
        classes: Names of classes 0, 1, ...; None if ``label`` has no names. Available after ``setup``.

    Raises:
        ConfigurationError: The data or the tokenizer cannot be loaded, a column is unknown, or its values cannot be
            used.
    """

    default_test_fraction: ClassVar[float | None] = 0.2

    def __init__(
        self,
        path: str,
        text: str | None = None,
        tokenizer: str | None = None,
        max_length: Count = 128,
        *,
        columns: list[str] | None = None,
        label: str | None = None,
        client: str | None = None,
        subset: str | None = None,
        split: str = "train",
        test_split: str | None = None,
        partitioner: Partitioner | None = None,
        test_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        partitioner = partitioner or (IID(10) if client is None else Natural())
        super().__init__(partitioner, test_fraction=test_fraction, **kwargs)
        if (text is None) != (tokenizer is None) or (text is None and not columns):
            raise ConfigurationError("data.columns: a batch would be empty; give columns, or text with tokenizer")
        self.path, self.subset, self.split, self.test_split = path, subset, split, test_split
        self.text, self.tokenizer, self.max_length = text, tokenizer, max_length
        self.columns, self.label, self.client = columns or [], label, client
        self.classes: list[str] | None = None
        self._loaded_tokenizer: PreTrainedTokenizerBase | None = None

    def prepare_data(self) -> None:
        """Download what is not there yet, and check the names of columns."""
        self._read(self.split)

    def load(self) -> LoadedData:
        """Return the rows of the split in their order, followed by those of the test split."""
        from datasets import concatenate_datasets

        parts = [self._read(split) for split in (self.split, self.test_split) if split is not None]
        if self.tokenizer is not None:
            self._loaded_tokenizer = _load_tokenizer(self.tokenizer)
            self.loader_options.setdefault("collate_fn", self._collate)  # a collate_fn of the user's stays
        data = self._prepared(concatenate_datasets(parts))
        is_test = np.arange(sum(map(len, parts))) >= len(parts[0])
        if self.client is not None:
            data.clients, data.client_names = natural_clients([name for part in parts for name in part[self.client]])
        owners = "" if data.client_names is None else f", {len(data.client_names):,} values of {self.client!r}"
        rank_zero_info(
            f"'{self.path}': {len(parts[0]):,} rows of '{self.split}', batches of {', '.join(self._keys())}{owners}"
        )
        return data.with_test(is_test, is_shared=self.client is None)

    # parts of load

    def _keys(self) -> list[str]:
        tokens = [] if self._loaded_tokenizer is None else [str(k) for k in self._loaded_tokenizer.model_input_names]
        return [*tokens, *self.columns, *(["labels"] if self.label or tokens else [])]

    def _read(self, split: str) -> Rows:
        """Return the rows of a split, with the columns that are used."""
        rows = _load_rows(self.path, self.subset, split)
        wanted: dict[str, Sequence[str | None]] = {"text": [self.text], "label": [self.label], "client": [self.client]}
        wanted["columns"] = self.columns
        check_columns(wanted, rows.column_names, f"'{self.path}'")
        names = [name for group in wanted.values() for name in group if name is not None]
        return rows.select_columns(list(dict.fromkeys(names)))

    def _prepared(self, rows: Rows) -> LoadedData:
        labels = None if self.label is None else self._find_labels(rows)
        if self.text is not None:
            # In memory where the library would write beside a saved data set.
            rows = rows.map(self._tokenize, batched=True, keep_in_memory=Path(self.path).expanduser().is_dir())
        rows = rows.select_columns([column for column in rows.column_names if column in self._keys()])
        if labels is not None:
            rows = rows.add_column("labels", labels.tolist())
        rows = rows.with_format("torch")  # numbers are int64 and float32, which torch's own collate function stacks
        for name in self.columns if len(rows) else []:
            value = None if _has_none(rows.data.column(name)) else rows[0][name]
            if not isinstance(value, Tensor):
                raise ConfigurationError(f"data.columns: '{name}' holds {value!r}, which is no number")
        is_class = labels is not None and labels.dtype.kind == "i"
        return LoadedData(rows, labels if is_class else None)

    def _tokenize(self, rows: dict[str, list]) -> Any:
        assert self._loaded_tokenizer is not None
        assert self.text is not None
        return self._loaded_tokenizer(rows[self.text], truncation=True, max_length=self.max_length)

    def _find_labels(self, rows: Rows) -> np.ndarray:
        """Return the classes, int64 ``(M,)``, or the numbers to predict, float32 ``(M,)``, and keep classes' names."""
        array = np.asarray(rows[self.label])
        if array.ndim != 1 or array.dtype.kind not in "biufU":  # None makes it an array of objects
            raise ConfigurationError(f"data.label: '{self.label}' holds neither numbers nor names, one for each row")
        if array.dtype.kind == "f":
            return array.astype(np.float32)
        if array.dtype.kind != "U":
            self.classes = getattr(rows.features[self.label], "names", None)
            return array.astype(np.int64)
        self.classes, numbers = np.unique(array).tolist(), np.unique(array, return_inverse=True)[1]
        return numbers.astype(np.int64)

    def _collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Make one batch of samples with tokens, which are filled up to the longest text of the batch."""
        tokenizer = self._loaded_tokenizer
        assert tokenizer is not None
        keys = [key for key in tokenizer.model_input_names if key in samples[0]]
        batch = tokenizer.pad([{key: row[key].tolist() for key in keys} for row in samples], return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        others = [{key: value for key, value in row.items() if key not in keys} for row in samples]
        return {"labels": labels, **batch, **stack(others)}


def _has_none(column: ChunkedArray) -> bool:
    """Return whether a value of a column is missing, or one in its lists, which would become NaN without a word."""
    from pyarrow import compute, types

    is_list = any(is_kind(column.type) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list))
    return bool(column.null_count) or (is_list and _has_none(compute.list_flatten(column)))


def _load_rows(path: str, subset: str | None, split: str) -> Rows:
    """Load one split.

    Raises:
        ConfigurationError: It cannot be loaded.
    """
    place = Path(path).expanduser()
    kinds = f"a file ({', '.join(READERS)}), a saved data set, or a name on the Hub"
    # Errors come from the library, its file readers, and the network.
    with in_one_line(f"data.path='{path}': no split '{split}' of {kinds} can be loaded (", EXTRA):
        import datasets

        if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
            saved = datasets.load_from_disk(str(place))
            found = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        elif place.is_file():
            found = datasets.load_dataset(READERS[place.suffix], data_files=str(place))
        else:
            found = datasets.load_dataset(path, subset)
        return found[split]


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Raises:
        ConfigurationError: It cannot be loaded.
    """
    with in_one_line(f"data.tokenizer='{name}': cannot be loaded (", EXTRA):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # as most causal models do; the attention mask hides it
    return tokenizer
