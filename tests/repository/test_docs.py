"""The pages of methods are what docstrings and curves say, and these say all that a reader needs."""

import re

import pandas as pd
import pytest
from helpers.scripts import imported_script

from fedbc_lightning.algorithms import ComposedAlgorithm
from fedbc_lightning.cli.classes import choices, class_name
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.server import ServerCallback, WeightedAverage

TEMPLATE = ["Problem", "Update", "State", "Communication", "Partial work", "Local model", "Degenerate cases",
            "Departures", "References"]  # fmt: skip


with imported_script("docs/make_algorithms.py") as SCRIPT:
    ALGORITHMS = SCRIPT.exported()
    read_docstring, read_parameters = SCRIPT.read_docstring, SCRIPT.read_parameters


def test_the_pages_and_curves_are_up_to_date():
    with imported_script("docs/make_curves.py") as script:
        files = SCRIPT.make_pages() | script.pictures()
    assert {*SCRIPT.METHODS.iterdir()} - {SCRIPT.TABLE} <= {*files}
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, "run docs/make_algorithms.py and docs/make_curves.py --draw"


def test_few_sentences_are_long():
    with imported_script("docs/count_sentences.py") as script:
        assert script.share() <= 0.04, "run: python docs/count_sentences.py"


@pytest.mark.parametrize("cls", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_a_docstring_follows_the_template_and_a_terminal_and_the_command_line_can_use_it(cls):
    assert "__doc__" in vars(cls)
    sections = read_docstring(cls).sections
    assert [title for title in sections if title in TEMPLATE] == TEMPLATE
    for title in TEMPLATE:
        assert any(line.strip() for block in sections[title] for line in block.lines), title
    assert set(sections) <= {*TEMPLATE, "Args", "Raises"}
    assert not re.search(r":math:|\.\. \w+::|\\[a-z]+", cls.__doc__), "markup"
    assert [parameter.name for parameter in read_parameters(cls) if not parameter.meaning] == []
    assert class_name(read_docstring(cls).name) == cls.__name__


def test_the_page_of_settings_is_up_to_date_and_explains_every_key():
    with imported_script("docs/make_settings.py") as script:
        page, of_trainer = script.make_page(), script.make_trainer_page()
    assert script.PAGE.read_text(encoding="utf-8") == page, "run: python docs/make_settings.py"
    assert script.TRAINER_PAGE.read_text(encoding="utf-8") == of_trainer, "run: python docs/make_settings.py"
    keys = re.findall(r"^\| `([\w.]+)` \| .* \|(.*)\|$", page, re.M)
    assert len(keys) > 300
    assert [key for key, meaning in keys if not meaning.strip()] == []


@pytest.mark.parametrize(
    "cls", [cls for cls in choices(ServerCallback) if is_ours(cls) and not cls.forms_z], ids=lambda cls: cls.__name__
)
def test_a_server_part_that_is_not_marked_is_taken_by_composed(cls):
    known = {"dual_lr": 0.1, "gradient_mean": True, "epsilon": 0.1, "style": "paper"}
    part = cls(**{p.name: known[p.name] for p in read_parameters(cls) if p.default is None})
    parts = [part, WeightedAverage()] if not part.follows_aggregation else [WeightedAverage(), part]
    assert ComposedAlgorithm(parts).parts == parts


def test_the_leaderboard_is_made_from_its_table_and_has_every_method():
    with imported_script("docs/make_leaderboard.py") as script:
        page, groups, rows = script.make_page(), script.methods(), pd.read_csv(script.TABLE).groupby("group")
    assert script.PAGE.read_text(encoding="utf-8") == page, "run: python docs/make_leaderboard.py"
    exported = {read_docstring(cls).name for cls in SCRIPT.exported().values()} - {"Composed"}
    named = {name for names in groups.values() for name in names}
    assert {name.partition(" (")[0] for name in named} == exported
    assert rows["algorithm"].unique().map(set).to_dict() == {group: {*names} for group, names in groups.items()}
