"""Files of a run or study that somebody else has written, or changed: each value by one of each other type."""

import copy
import json
import shutil
import time

import pytest

from fedbc_lightning.core import files
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.pages.sections import partition_blocks
from fedbc_lightning.run.identity import read
from fedbc_lightning.run.lock import locked
from fedbc_lightning.studies.results import check_pairs
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import State, is_finished, note_beginning
from fedbc_lightning.studies.workers import do_if_free

WRONG = (None, True, 3, "x", [1], ["a"], {}, {"a": 1})


def variants(content):
    """The content of a file with each of its values, and the first of each of these, in turn, replaced."""
    yield from WRONG
    for key, value in content.items():
        for wrong in WRONG:
            yield content | {key: wrong}
            if value and isinstance(value, (list, dict)):
                inner = copy.deepcopy(value)
                inner[next(iter(value)) if isinstance(value, dict) else 0] = wrong
                yield content | {key: inner}


def use_run(run, good):
    if (found := read(run.record.folder)) is not None:
        good.differences(found[0])
        found[0].differences(good)
        good.is_of(found[0])
    check_pairs([run])


def use_note(run, _):
    State(run).look(0.0)
    is_finished(run)
    note_beginning(run, 0.0)


def use_partition(run, _):
    drawn = {key: run.record.partition.get(key) for key in ("sizes", "label_histogram", "client_names")}
    if drawn not in DRAWN:
        DRAWN.append(drawn)
        list(partition_blocks({("", "", 0): run.record}))
    assert run.record.client_name(3)
    assert len(run.record.num_samples) <= 4
    check_pairs([run])


DRAWN = []
FILES = {"FedAvg-0/run.json": use_run, "run.json": use_note, "FedAvg-0/partition.json": use_partition}


def test_a_value_of_another_type_is_refused_in_one_line_or_counts_as_missing(project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    run = Study("tiny.yaml", {"FedAvg": {}}, seeds=1).runs()[0]
    do_if_free(run, 0.0)
    good, _ = read(run.record.folder)
    for name, use in FILES.items():
        path, refused = run.folder / name, []
        text = path.read_text()
        for content in variants(json.loads(text)):
            path.write_text(json.dumps(content))
            vars(run).pop("record", None)
            try:
                use(run, good)
            except ConfigurationError as error:
                refused.append(str(error))
        assert len(refused) > 10
        assert all(str(path.parent) in said and "\n" not in said for said in refused)
        path.write_text(text)
    (run.record.folder / "metrics.csv").unlink()
    do_if_free(run, time.time())
    state = State(run)
    state.look(0.0)
    assert "its metrics.csv is gone; remove" in state.error  # and it is not begun again and again
    shutil.rmtree(run.folder)
    (run.folder / "log.txt").mkdir(parents=True)
    do_if_free(run, time.time())
    state.look(0.0)
    assert "Is a directory" in state.error
    (run.folder / "run.json").unlink()
    (run.folder / "run.json").mkdir()
    told = r"^out: '.*run\.json' cannot be written \(Is a directory"
    with pytest.raises(ConfigurationError, match=told):
        do_if_free(run, time.time())
    with pytest.raises(ConfigurationError, match=told), locked(run.folder):
        files.write(run.folder / "run.json", "")
