"""Data sets of Hugging Face by the names of their columns: files, saved folders, tokenizers, clients, and mistakes."""

import math

import pytest
import torch
from fedbc_lightning.datamodules import HuggingFaceDataModule
from helpers.boring import make_trainer
from helpers.data_formats import ready as set_up
from lightning.pytorch import LightningModule, seed_everything

from fedbc_lightning import ConfigurationError, FedBC
from fedbc_lightning.partition import Dirichlet

datasets = pytest.importorskip("datasets", reason="neither the extra llm nor flower is installed")

# The library's reader of CSV files leaves them to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*plays.csv:pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)

SPEECHES = {"ROMEO": ["the sun", "is the east", "the moon"], "JULIET": ["o romeo", "o romeo romeo"], "NURSE": ["the"]}
ROWS = [
    {"role": role, "line": line, "size": len(line), "kind": line[0]} for role in SPEECHES for line in SPEECHES[role]
]


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "plays.csv"
    datasets.Dataset.from_list(ROWS * 4).to_csv(str(path))
    return str(path)


@pytest.fixture
def saved(tmp_path):
    whole = datasets.Dataset.from_list(ROWS * 4)
    parts = datasets.DatasetDict({"train": whole, "held": datasets.Dataset.from_list(ROWS)})
    parts.save_to_disk(str(tmp_path / "plays"))
    return str(tmp_path / "plays")


@pytest.fixture
def tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra llm is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for row in ROWS for word in row["line"].split()})
    found = Tokenizer(models.WordLevel({word: k for k, word in enumerate(["<end>", "<?>", *words])}, unk_token="<?>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>", unk_token="<?>")
    whole.save_pretrained(str(tmp_path / "tokenizer"))
    return str(tmp_path / "tokenizer")


def ready(path, **options):
    return set_up(HuggingFaceDataModule(path, **options))


def test_columns_of_a_file_become_a_dict_of_tensors(csv):
    data = ready(csv, columns=["size"], label="kind", client="role", batch_size=4, test_fraction=0.25)
    assert data.client_names == ["JULIET", "NURSE", "ROMEO"]
    assert data.classes == ["i", "o", "t"]
    assert data.num_samples("train").tolist() == [6, 3, 9]
    batch = next(iter(data.client_train_dataloader(0)))
    assert set(batch) == {"size", "labels"}
    assert batch["labels"].tolist() == [1] * 4  # all lines of Juliet begin with o
    assert set(batch["size"].tolist()) <= {len(line) for line in SPEECHES["JULIET"]}
    assert data.label_histogram().tolist() == [[0, 8, 0], [0, 0, 4], [4, 0, 8]]
    dealt = ready(csv, columns=["size"], label="kind", partitioner=Dirichlet(num_clients=2, alpha=10.0))
    assert dealt.label_histogram().sum(0).tolist() == [4, 8, 12]


def test_a_number_to_predict_is_float32_and_no_class(saved):
    rows = [{"x": [k / 2, 1.0], "y": k / 4} for k in range(20)]
    datasets.Dataset.from_list(rows).save_to_disk(saved + "_numbers")
    data = ready(saved + "_numbers", columns=["x"], label="y", batch_size=20, test_fraction=None)
    batch = next(iter(data.pooled_dataloader("train")))
    assert batch["x"].dtype == batch["labels"].dtype == torch.float32
    assert torch.equal(batch["x"][:, 0] / 2, batch["labels"])
    assert data.label_histogram() is None


def test_a_test_split_belongs_to_the_clients_if_it_names_them(saved):
    of_clients = ready(saved, columns=["size"], client="role", test_split="held")
    assert of_clients.num_samples("test").tolist() == [2, 1, 3]
    assert of_clients.num_samples("train").tolist() == [8, 4, 12]
    shared = ready(saved, columns=["size"], test_split="held")
    assert shared.num_samples("test").sum() == 0
    assert len(shared.pooled_dataset("test")) == len(ROWS)


def test_texts_are_tokens_filled_up_to_the_longest_of_the_batch(saved, tokenizer, tmp_path):
    before = sorted(path.name for path in (tmp_path / "plays" / "train").iterdir())
    data = ready(saved, text="line", tokenizer=tokenizer, client="role", max_length=2, test_split="held", batch_size=8)
    batch = next(iter(data.client_eval_dataloader(0, "test")))
    words = [tuple(line.split()[:2]) for line in SPEECHES["JULIET"]]
    assert [tuple(data._loaded_tokenizer.decode(row).split()) for row in batch["input_ids"]] == words
    assert batch["labels"].tolist() == batch["input_ids"].tolist()
    batch = next(iter(data.pooled_dataloader("test")))
    short = batch["attention_mask"] == 0
    assert short.sum() == 1  # the nurse's line has one word
    assert (batch["labels"] == -100).equal(short)
    assert sorted(path.name for path in (tmp_path / "plays" / "train").iterdir()) == before


class Speaker(LightningModule):
    """A tiny GPT-2 that takes a batch as it is."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="the extra llm is not installed")
        config = transformers.GPT2Config(vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        self.network = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.network(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


def test_a_language_model_learns_from_a_saved_folder(saved, tokenizer, tmp_path):
    seed_everything(0)
    trainer = make_trainer(tmp_path / "run", max_rounds=6, clients_per_round=3)
    data = HuggingFaceDataModule(saved, "line", tokenizer, client="role", test_split="held", batch_size=4)
    trainer.fit(Speaker(), data, FedBC(dual_lr=0.1))
    assert float(trainer.callback_metrics["loss/global"]) < math.log(12) - 0.5  # a model that knows nothing has log 12


MISTAKES = {
    "nothing in a batch": ({}, "data.columns: a batch would be empty"),
    "text without tokenizer": ({"text": "line"}, "data.columns: .* text with tokenizer"),
    "unknown column": ({"columns": ["sise"]}, "data.columns: no column 'sise' .*; did you mean 'size'"),
    "unknown split": ({"columns": ["size"], "split": "trian"}, "no split 'trian'"),
    "words as inputs": ({"columns": ["line"], "label": "kind"}, "data.columns: 'line' holds .*, which is no number"),
    "no length": ({"columns": ["size"], "max_length": 0}, "data.max_length"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(csv, name):
    options, message = MISTAKES[name]
    with pytest.raises(ConfigurationError, match=message):
        next(iter(ready(csv, **options).client_train_dataloader(0)))


@pytest.mark.parametrize(
    "values", [[1.0, None], [[1.0, 2.0], [3.0, None]], [["a"], ["b"]], [[], ["b"]], [{"a": 1}, {"a": 2}]]
)
def test_a_column_holds_numbers_alone(tmp_path, values):
    datasets.Dataset.from_dict({"x": values * 10}).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(ConfigurationError, match=r"data\.columns: 'x' holds .*, which is no number"):
        ready(str(tmp_path / "rows"), columns=["x"])


def test_lists_of_unequal_length_beside_tokens_are_refused(tmp_path, tokenizer):
    rows = [{"line": "the sun", "x": [1.0] * (1 + k % 2)} for k in range(20)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))
    data = ready(str(tmp_path / "rows"), text="line", tokenizer=tokenizer, columns=["x"], batch_size=20)
    with pytest.raises(ConfigurationError, match=r"data: samples cannot be stacked .* give data\.collate_fn"):
        next(iter(data.pooled_dataloader("train")))


def test_what_is_not_there_or_of_unequal_length_is_one_line(tmp_path, monkeypatch):
    datasets.Dataset.from_list([{"x": [1.0] * (1 + k % 3)} for k in range(40)]).save_to_disk(str(tmp_path / "odd"))
    with pytest.raises(ConfigurationError, match=r"samples cannot be stacked into a batch .*give data\.collate_fn"):
        next(iter(ready(str(tmp_path / "odd"), columns=["x"], batch_size=4).client_train_dataloader(0)))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "table.xlsx").touch()
    for name in ("nothing", "table.xlsx"):
        with pytest.raises(ConfigurationError, match=rf"data\.path='.*{name}': no split 'train' of a file .\.csv, .*"):
            ready(str(tmp_path / name), columns=["x"])
