"""``fedbc-cli reproduce``: the tables that need no training, and what it is told."""

import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from helpers.command_line import run_cli

from fedbc_lightning import reproduce
from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.papers.partition_tables import EXPONENTS, table_5
from fedbc_lightning.papers.reproductions import REPRODUCTIONS
from fedbc_lightning.studies.parsed_runs import checked_config

pytestmark = pytest.mark.usefixtures("forked_workers")


def test_table_5_is_the_papers():
    _, (header, *rows) = table_5()
    assert header[1:] == [f"e = {exponent}" for exponent in EXPONENTS]
    cells = [cell for row in rows for cell in row[1:]]
    assert len(cells) == 10
    assert all(cell.endswith(" = paper") for cell in cells)
    assert rows[1][3] == "94-14032 = paper"


def test_the_command(project, capfd):
    assert run_cli("reproduce", "table5", "table4") == 0
    said = capfd.readouterr().out
    assert "1222-7486 = paper" in said
    assert len(re.findall(r"^ +paper ", said, re.MULTILINE)) == 6
    assert reproduce("table5") == []
    assert run_cli("reproduce", "--help") == 0
    assert "table1" in capfd.readouterr().out


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_name_has_what_it_needs(name, project):
    known = REPRODUCTIONS[name]
    assert (known.study is None) == (known.compute is not None)
    if known.study is not None:
        study = read_study("reproduce", ["--config", known.study])
        levels_of_all = list(study.levels.values())
        known.narrow(study)
        assert known.draw is not None or study.papers
        assert set(study.papers) == set(known.papers)
        assert all(set(levels) & set(known.only) for levels in study.levels.values()) or not any(
            set(levels) & set(known.only) for levels in levels_of_all
        )


DOCS = Path(__file__).parents[2] / "docs"
OVERRIDES = sorted({
    found for page in DOCS.rglob("*.md") for found in re.findall(r"--overrides '(\{[^']*\})'", page.read_text("utf-8"))
})  # fmt: skip


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_overrides_that_the_docs_name_are_taken(overrides):
    """Those of a partitioner on images, all others on synthetic data."""
    study = "studies/fedbc_mnist.yaml" if "partitioner" in overrides else "studies/fedbc_table1.yaml"
    words = ["--config", study, "--overrides", overrides, "--tuning.skip", "true"]
    study = read_study("reproduce", [*words, "--only", "[FedBC]" if "FedBC" in overrides else "[FedAvg]"])
    config = checked_config(study.run(next(iter(study.variants)), study.methods[0], 0))
    for key, value in yaml.safe_load(overrides).items():
        found = config
        for name in key.replace("FedBC.", "algorithm.").split("."):
            found = found[name] if name in found else found["init_args"][name]
        assert found == value


def test_a_table_needs_its_own_levels_and_algorithms_alone():
    study = read_study("reproduce", ["--config", "studies/fedbc_cifar.yaml", "--only", "[C = 1, e = 1.2]"])
    REPRODUCTIONS["table3"].narrow(study)
    assert list(study.variants) == ["E = 5, C = 1, e = 1.2"]
    assert [method.name for method in study.methods] == ["Per-FedAvg", "pFedMe", "FedBC", "FedBC-FineTune", "Per-FedBC"]
    assert study.papers["table3"].mean("Per-FedBC", study.levels["E = 5, C = 1, e = 1.2"]) == 0.8542


def test_a_figure_from_the_command_line(project, capfd):
    overrides = "{trainer.max_rounds: 2, trainer.clients_per_round: 2}"
    options = ["--overrides", overrides, "--only", "[E = 10]", "--seeds", "1", "--workers", "1"]
    assert run_cli("reproduce", "figure8", *options) == 0
    said = capfd.readouterr().out
    assert "figure8:  studies/fedbc_figures/figure8/figures/figure8.png" in said
    results = pd.read_csv("studies/fedbc_figures/figure8/results.csv")
    assert list(zip(results["variant"], results["algorithm"], strict=True)) == [("E = 10", "FedBC")]
    config = yaml.safe_load((Path(results["folder"][0]) / "config.yaml").read_text())
    assert config["trainer"]["max_rounds"] == 2
    assert config["data"]["init_args"]["split_order"] == "ordered"  # the study's own overrides stay


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table2", "--only", "[C = 4]"], "only: the study has no 'C = 4'; did you mean 'C = "),
        (["figure4", "--only", "[E = 1]"], "only: E = 1: leaves nothing of figure4, which needs E = 5."),
        (["table4", "--scale", "1"], "table4: computed without a study, so there is nothing for --scale to change"),
        (["figure3", "--report", "best_on_validation"], "there are no validation data; set data.val_fraction"),
        ([], "what? fedbc-cli reproduce table1"),
        (["tabel1"], "nothing to reproduce is called 'tabel1'; did you mean 'table1'?"),
        (["table1", "--sclae", "0.1"], "did you mean --scale?"),
    ],
)
def test_mistakes(project, capfd, words, message):
    assert run_cli("reproduce", *words) in (1, 2)
    said = capfd.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_missing_files_are_named_before_any_run(project, capfd):
    assert run_cli("reproduce", "table9") == 1
    said = capfd.readouterr().err
    assert said.startswith("fedbc-cli: error: data.path='data/shakespeare.txt': no such file; expected plain text")
    assert said.endswith("; docs/data.md says where to get it. No run was begun.\n")
    assert len(said.splitlines()) == 1
    assert not Path("runs").exists()
    assert not Path("studies").exists()


def test_a_printed_study_is_the_one_that_is_run(project, capsys):
    """Overrides are merged with those of the study's file, and it has the part that the table needs, and no more."""
    overrides = "{data.style: own, data.seed: null, data.alpha: .inf}"
    words = ["--overrides", overrides, "--only", "[E = 5]", "--scale", "0.1"]
    with pytest.raises(SystemExit):
        read_study("reproduce", ["--config", "studies/fedbc_table1.yaml", *words, "--print_config"], part="table1")
    printed = project / "printed.yaml"
    printed.write_text(capsys.readouterr().out, encoding="utf-8")
    study = read_study("reproduce", ["--config", "studies/fedbc_table1.yaml", *words], part="table1")
    again = read_study("compare", ["--config", str(printed)])
    assert study.overrides["trainer.clients_per_round"] == again.overrides["trainer.clients_per_round"] == 10
    assert list(study.variants) == list(again.variants) == ["E = 5"]
    assert study.origins == again.origins
    assert again.origins["data.style"].endswith(" (not checked)")
    for method in study.methods:
        runs = [each.run("E = 5", method, 0, method.first()).words() for each in (study, again)]
        assert runs[0] == runs[1]


def test_a_reference_that_is_left_out_is_refused(project, capfd):
    words = ["reproduce", "table1", "--only", "[E = 1, FedAvg, q-FedAvg]", "--reference", "FedBC"]
    assert run_cli(*words) == 1
    assert "reference: 'FedBC' is left out; there is: FedAvg, q-FedAvg." in capfd.readouterr().err
    with pytest.raises(SystemExit):  # the study's own is replaced
        read_study("reproduce", ["--config", "studies/fedbc_table1.yaml", "--only", "[E = 1, FedBC]", "--print_config"])
