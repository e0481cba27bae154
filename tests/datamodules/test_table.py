"""One's own table: columns, clients, test files, and what is refused by name."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fedbc_lightning.datamodules import TableDataModule
from helpers.data_formats import ready as set_up
from helpers.refusals import refused

FRAME = pd.DataFrame(
    {
        "hospital": ["north", "south", "north", "east"] * 6,
        "age": np.arange(24) + 20,
        "pressure": np.linspace(1, 2, 24),
        "smoker": [True, False] * 12,
        "blood": ["A", "0", "B"] * 8,
        "ill": ["no", "yes"] * 12,
    }
)


def save(frame, path):
    if path.suffix in (".parquet", ".pq"):
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")
    return str(path)


def ready(path, target="ill", *arguments, **options):
    return set_up(TableDataModule(str(path), target, *arguments, seed=0, **options))


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet", "t.csv.gz", "t.tsv.zip", "T.CSV"])
def test_clients_classes_and_features(tmp_path, name):
    data = ready(save(FRAME, tmp_path / name), "ill", "hospital", categorical=["blood"])
    assert (data.client_names, data.classes) == (["east", "north", "south"], ["no", "yes"])
    assert data.feature_names == ["age", "pressure", "smoker", "blood=0", "blood=A", "blood=B"]
    assert (data.num_samples("train") + data.num_samples("test")).tolist() == [6, 12, 6]
    inputs, targets = data.source.pool.tensors
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    expected = np.column_stack(
        [FRAME["age"], FRAME["pressure"], FRAME["smoker"], *(FRAME["blood"] == value for value in "0AB")]
    )
    assert inputs.numpy() == pytest.approx(expected.astype(float))
    assert targets.tolist() == [0, 1] * 12


@pytest.mark.parametrize(
    ("target", "task", "expected"),
    [
        ("pressure", "auto", None),
        ("age", "regression", None),
        ("age", "auto", [str(age) for age in range(20, 44)]),
        ("smoker", "auto", ["False", "True"]),
        ("blood", "auto", ["0", "A", "B"]),
        ("ill", "classification", ["no", "yes"]),
    ],
)
def test_tasks(tmp_path, target, task, expected):
    left = [name for name in ("blood", "ill") if name != target]
    data = ready(save(FRAME, tmp_path / "t.csv"), target, "hospital", categorical=left, task=task)
    targets = data.source.pool.tensors[1]
    assert data.classes == expected
    if expected is None:
        assert (targets.dtype, targets.shape, data.labels) == (torch.float32, (24,), None)
        assert targets.numpy() == pytest.approx(FRAME[target].to_numpy())
    else:
        assert [expected[k] for k in targets] == FRAME[target].astype(str).tolist()
    with refused(r"'ill' of '.*a regression needs finite numbers only"):
        ready(save(FRAME, tmp_path / "t.csv"), "ill", "hospital", features=["age"], task="regression")


def test_what_was_found_is_told(tmp_path, caplog):
    frame = pd.DataFrame({"x": np.arange(40) % 5, "age": np.arange(40) + 18, "ill": np.arange(40) % 2.0})
    path = save(frame, tmp_path / "t.csv")
    with caplog.at_level("INFO"):
        ready(path, "ill", standardize=True)
        assert "t.csv': 40 rows, 2 features, 'ill' is a number (data.task).\n" in caplog.text
        data = ready(path, "ill", task="classification")
    assert "'ill' is 2 classes (data.task). Far from unit scale are 'age': data.standardize: true may" in caplog.text
    assert (data.classes, data.labels.tolist()) == (["0", "1"], [0, 1] * 20)
    test = save(frame.assign(ill=frame["ill"].astype(int)), tmp_path / "test.csv")
    shared = ready(path, "ill", features=["x"], task="classification", test_path=test)
    assert [int(label) for _, label in shared.pooled_dataset("test")] == [0, 1] * 20


def test_a_category_of_the_test_file_alone_is_told(tmp_path, caplog):
    test = save(FRAME.iloc[:8].assign(blood=["A", "x", "y", "A", "z", "w", "w", "B"]), tmp_path / "test.csv")
    with caplog.at_level("INFO"):
        ready(save(FRAME, tmp_path / "t.csv"), "ill", "hospital", categorical=["blood"], test_path=test)
    assert caplog.text.count("all features of the column") == 1
    assert f"'{test}': 'blood' is w, x, y and 1 more in 5 of 8 rows, but in no row of data.path; " in caplog.text


def test_a_cell_that_is_no_number_is_named(tmp_path):
    bad = FRAME.assign(age=[{6: "?", 8: "high"}.get(row, age) for row, age in enumerate(FRAME["age"])])
    path, good = save(bad, tmp_path / "t.csv"), save(FRAME, tmp_path / "good.csv")
    for options in ({}, {"test_path": path}):
        with refused(r"data\.features: 'age' of '.*t\.csv' holds '.' in row 7"):
            ready(good if options else path, "ill", "hospital", categorical=["blood"], **options)
    path = save(FRAME.assign(age=FRAME["age"].astype(str)), tmp_path / "t.parquet")
    with refused(r"'age' of '.*' holds '20' in row 1, which is no finite number"):
        ready(path, "ill", "hospital", categorical=["blood"])


def test_standardize(tmp_path):
    frame = FRAME.assign(same=0.1, age=1_700_000_000 + np.arange(24))  # float32 knows such numbers to 128 only
    test = frame.iloc[:4].drop(columns="hospital")
    options = {"categorical": ["blood"], "standardize": True, "test_path": save(test, tmp_path / "test.csv")}
    data = ready(save(frame, tmp_path / "t.csv"), "ill", "hospital", **options)
    inputs = data.source.pool.tensors[0]
    for column, name in enumerate(["age", "pressure"]):
        values = frame[name].to_numpy()
        expected = (values - values.mean()) / values.std()
        assert inputs[:24, column].numpy() == pytest.approx(expected, abs=1e-5)
        shared = torch.stack([x for x, _ in data.pooled_dataset("test")])
        assert shared[:, column].numpy() == pytest.approx(expected[:4], abs=1e-5)
    assert inputs[:, 3].abs().max() < 1e-6
    assert set(inputs[:, 4:].unique().tolist()) == {0.0, 1.0}


def test_held_out_clients_have_no_part_in_the_statistics(tmp_path):
    """The columns are scaled by the rows of the clients that train, and others' rows by the same numbers."""
    enormous = FRAME.assign(age=FRAME["age"] + 1e6 * (FRAME["hospital"] == FRAME["hospital"].iloc[0]))
    path = save(enormous, tmp_path / "t.csv")
    options = {"features": ["age"], "standardize": True, "heldout_clients": [FRAME["hospital"].iloc[0]]}
    data = ready(path, "ill", "hospital", **options)
    assert [data.client_names[client] for client in data.heldout] == [FRAME["hospital"].iloc[0]]
    loaders = [data.client_eval_dataloader(client, "train") for client in data.training_clients.tolist()]
    train = torch.cat([x for loader in loaders for x, _ in loader])
    assert train.mean().abs() < 1e-5
    assert train.std(unbiased=False) == pytest.approx(1, rel=1e-5)
    held = torch.cat([x for x, _ in data.client_eval_dataloader(int(data.heldout[0]), "train")])
    assert held.min() > 1e3
    assert len(data.pooled_dataset("train")) == len(train)


def test_test_files(tmp_path):
    path = save(FRAME, tmp_path / "t.csv")
    test = FRAME.iloc[:8].assign(blood=["A", "new"] * 4)
    options = {"categorical": ["blood"], "test_path": save(test, tmp_path / "test.csv")}
    own = ready(path, "ill", "hospital", **options)
    assert (own.num_samples("train").tolist(), own.num_samples("test").tolist()) == ([6, 12, 6], [2, 4, 2])
    inputs, targets = next(iter(own.client_eval_dataloader(2, "test")))
    assert inputs[:, 3:].abs().sum() == 0
    assert targets.tolist() == [1, 1]
    save(test.drop(columns="hospital"), tmp_path / "test.csv")
    shared = ready(path, "ill", "hospital", **options)
    assert (len(shared.pooled_dataset("test")), shared.num_samples("test").sum()) == (8, 0)
    assert len(ready(path, "ill", features=["age"], test_path=str(tmp_path / "test.csv")).pooled_dataset("test")) == 8
    with refused(r"data\.test_fraction=0\.5"):
        ready(path, "ill", "hospital", test_fraction=0.5, **options)
    for change, message in (
        ({"ill": "maybe"}, r"'ill' of '.*test\.csv': the class 'maybe' does not"),
        ({"ill": 1}, r"'ill' of '.*test\.csv': found '1', a value of another kind"),
        ({"hospital": "west"}, r"client 3 .'west'. .*has no training samples"),
        ({"age": "old"}, r"data\.features: 'age' of '.*test\.csv' holds 'old' in row 1"),
    ):
        save(test.assign(**change), tmp_path / "test.csv")
        with refused(message):
            ready(path, "ill", "hospital", **options)
    save(test.drop(columns="pressure"), tmp_path / "test.csv")
    with refused(r"data\.features: no column 'pressure' in '.*test\.csv'"):
        ready(path, "ill", "hospital", **options)


def test_names_are_taken_as_they_are_written(tmp_path):
    names = ["007", "7", "NA", "null", "None", "1.0"] * 4
    path = save(FRAME.assign(hospital=names, blood=names), tmp_path / "t.csv")
    data = ready(path, "ill", "hospital", features=["age", "blood"], categorical=["blood"])
    assert data.client_names == sorted(set(names), key=lambda name: (not name.isdecimal(), name.isdecimal(), name))
    assert data.feature_names == ["age", *(f"blood={name}" for name in sorted(set(names)))]
    assert set((data.num_samples("train") + data.num_samples("test")).tolist()) == {4}
    save(FRAME.assign(hospital=[10, 9, 10, 100] * 6), tmp_path / "t.csv")
    assert ready(path, "ill", "hospital", features=["age"]).client_names == ["9", "10", "100"]


@pytest.mark.parametrize("kinds", [(int, float), (float, str), (int, "Int64")])
def test_a_client_is_one_whatever_its_type(tmp_path, kinds):
    numbers = np.array([1, 2, 10] * 8)
    paths = []
    for kind, name in zip(kinds, ("t.parquet", "test.parquet"), strict=True):
        column = pd.Series([str(number) for number in numbers]) if kind is str else pd.Series(numbers).astype(kind)
        paths.append(save(FRAME.assign(hospital=column), tmp_path / name))
    data = ready(paths[0], "ill", "hospital", features=["age"], test_path=paths[1])
    assert (data.client_names, data.num_samples("test").tolist()) == (["1", "2", "10"], [8, 8, 8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "il"}, r"data\.target: no column 'il' in '.*t\.csv'; did you mean 'ill'"),
        ({"client": "hopsital"}, r"data\.client: .*'hopsital' in .*; did you mean 'hospital'"),
        ({"features": ["age", "zzz"]}, r"data\.features: .*'zzz' in .*; there are hospital, age"),
        ({"categorical": ["hospital"]}, r"data\.categorical: no column 'hospital' in the features of '.*t\.csv'"),
        ({"features": ["age", "ill"], "categorical": []}, r"data\.features: got age, ill; .* without data\.target"),
        ({"categorical": None}, r"data\.features: 'blood' of .* holds 'A' in row 1, .*data\.categorical"),
        ({"exclude": ["bloood"]}, "data.exclude: no column 'bloood' in .*; did you mean 'blood'"),
        ({"exclude": ["age"], "features": ["pressure"]}, "data.exclude: data.features names all inputs already"),
        ({"features": ["age", "hospital"], "categorical": []}, r"data\.features: got age, hospital; .*data.client"),
    ],
)
def test_columns_are_refused_by_name(tmp_path, arguments, message):
    options = {"target": "ill", "client": "hospital", "categorical": ["blood"], **arguments}
    with refused(message):
        ready(save(FRAME, tmp_path / "t.csv"), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": [1.0, None] * 12}, r"no value in column 'age', row 2, and 12 of 24 rows miss one"),
        ({"blood": ["A", "0", None] * 8}, r"no value in column 'blood', row 3, .*drop_rows.*data.exclude"),
        ({"hospital": [None, *["a"] * 23]}, r"no value in column 'hospital', row 1, and 1 of 24"),
        ({"pressure": [1.0, 1e39] * 12}, r"'pressure' of '.*t\.csv' holds '1e\+39' in row 2"),
        ({"ill": "no"}, r"data\.target: 'ill' of '.*t\.csv' holds one value only, no"),
    ],
)
def test_values_are_refused_by_name(tmp_path, change, message):
    path = save(FRAME.assign(**change), tmp_path / "t.csv")
    with refused(message):
        ready(path, "ill", "hospital", categorical=["blood"])


def test_a_saved_index_is_no_feature(tmp_path):
    FRAME.to_csv(tmp_path / "t.csv")
    FRAME.set_index("hospital").to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        data = ready(tmp_path / name, "ill", "hospital", categorical=["blood"])
        assert data.feature_names[:2] == ["age", "pressure"]


def test_damaged_files(tmp_path):
    parquet, csv = (save(FRAME, tmp_path / name) for name in ("t.parquet", "t.csv"))
    text = Path(csv).read_text().splitlines(keepends=True)
    cases = {
        "wide.csv": ("".join([*text[:3], "north,1,1,True,A,no,9,9\n", *text[3:]]).encode(), "line 4"),
        "long.csv": (b"ill,age\na,1,1\nb,1,1\n", "more fields than its header"),
        "empty.csv": (b"", "cannot be read"),
        "bytes.csv": (b"\xff\xfe\x00a", "cannot be read"),
        "header.csv": (text[0].encode(), "no row below the header"),
        "cut.csv.gz": (gzip.compress("".join(text).encode() * 50)[:-30], "cannot be read"),
        "cut.parquet": (Path(parquet).read_bytes()[:-40], "cannot be read"),
        "t.xlsx": (b"", "unknown kind of file; expected a .csv"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with refused(message) as error:
            ready(tmp_path / name)
        assert name in str(error.value)
    with refused(r"no such file; expected a \.csv"):
        ready(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_excluded_columns_are_no_features(tmp_path, name):
    frame = FRAME.assign(patient_id=[f"p{number}" for number in range(24)])
    options = {"categorical": ["blood"], "exclude": ["patient_id", "smoker"]}
    data = ready(save(frame, tmp_path / name), "ill", "hospital", **options)
    assert data.feature_names == ["age", "pressure", "blood=0", "blood=A", "blood=B"]


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_rows_with_gaps_are_left_out_and_counted(tmp_path, caplog, name):
    frame = FRAME.assign(ill=[0, 1] * 12).astype({"age": float, "ill": float})
    frame.loc[[2, 5], "age"] = np.nan
    frame.loc[[5, 7], "hospital"] = None
    frame.loc[8, "ill"] = np.nan
    if name.endswith("csv"):
        frame["ill"] = frame["ill"].astype("Int64")
    options = {"categorical": ["blood"], "missing": "drop_rows"}
    with caplog.at_level("INFO"):
        data = ready(save(frame, tmp_path / name), "ill", "hospital", **options)
    assert "4 of 24 rows miss a value and are left out (data.missing: drop_rows)." in caplog.text
    assert data.source.pool.tensors[0][:, 0].tolist() == [20 + row for row in range(24) if row not in (2, 5, 7, 8)]
    assert data.classes == ["0", "1"]  # whole numbers, although a gap makes a column one of floats
